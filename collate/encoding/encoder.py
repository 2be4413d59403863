"""`SampleEncoder`: from an example of any dataset to an unpadded sample, and from samples to a pack."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core import OversizeSampleError, Sample, SampleError, UndeclaredFieldError, differences
from ...models.adapter import ModelAdapter
from ..masks import AssistantMaskError, MaskJob, TrainedTurns, assistant_turns, turn_weights
from ..packs.batch import PackedBatch
from ..packs.pack import pack_samples
from ..samples.prepare import prepare_sample
from .checks import chat_format, check_limits, check_media_tokens, media_strings, with_strategy
from .conversation import Conversation, read_example
from .errors import ConversationError, NoMediaReaderError, UnreadableMediaError, naming_example
from .escaper import Shield
from .measure import Measure, Measured
from .media import decoded, open_image, open_video
from .process import Processed, TextProcessor, check_modalities
from .render import ChatRenderer
from .rendered import Written, write
from .sample import sample_of
from .settings import EncoderConfig, settings_record

VERSION = 1


class SampleList(list[dict[str, Any]]):
    """Samples of a loader's batch.

    Attributes:
        num_dropped: examples of the batch that a policy of the encoder left out.
    """

    num_dropped: int = 0

    @classmethod
    def left_out(cls, num_dropped: int) -> "SampleList":
        """Return the empty list of a batch that was left out."""
        samples = cls()
        samples.num_dropped = num_dropped
        return samples


class SampleEncoder:
    """Encodes examples for one model family, the same way for every data source.

    Streaming Hugging Face datasets take it as `dataset.map(encoder.encode)`, tables as `dataset.map(encoder.encode_row)`, a
    loader as `collate_fn=encoder.encode_list`, and Megatron-Energon through `integrations.energon`. A family whose processor
    needs help subclasses it and overrides `process`, `finish`, or both.

    Args:
        processor: a processor of `transformers`, or a tokenizer for text alone.
        adapter: the model family, with any further fields of the user in `adapter.fields`.
        config: settings; pixel limits are required where the family sees images.
        folder: folder that relative paths of media are relative to.

    Attributes:
        adapter: the family, with the field `mask_strategy` declared; give this one to the scheduler.
        config: the settings.
        preset: markers of the chat format, None where it is unknown.
        counts: how often each strategy decided, and what the policies dropped or kept.

    Raises:
        ValueError: pixel limits that are missing, an unknown preset, or a processor whose media tokens are not the adapter's.

    Example:
        >>> from evenpack.models import adapter_for
        >>> encoder = SampleEncoder(tokenizer, adapter_for("text"))                                      # doctest: +SKIP
        >>> sample = encoder.encode({"messages": [{"role": "user", "content": "2 + 2?"},
        ...                                       {"role": "assistant", "content": "4"}]})               # doctest: +SKIP
        >>> tokenizer.decode(sample["labels"][sample["labels"] != -100])                                 # doctest: +SKIP
        '4<|im_end|>'
    """

    def __init__(
        self,
        processor: Any,
        adapter: ModelAdapter,
        config: EncoderConfig | None = None,
        *,
        folder: str | Path | None = None,
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise ValueError(f"give settings in config or by name, not both: {sorted(settings)}")
        self.config = config if config is not None else EncoderConfig(**settings)
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        check_limits(processor, adapter, self.config)
        check_media_tokens(processor, adapter)
        self.adapter = with_strategy(adapter) if self.config.record_strategy else adapter
        self.renderer = ChatRenderer(processor, self.config.template_arguments)
        self.preset = chat_format(self.config.preset, self.renderer.template or "")
        self.counts: Counter[str] = Counter()
        self._folder = None if folder is None else Path(folder)
        self._shield = Shield([*(self.preset.literals if self.preset else ()), *media_strings(processor)])
        self._process = TextProcessor(processor, adapter, self.config, self._shield)
        self._measure = Measure(self, self._shield, self._process, self._folder)
        self._encoded = 0

    @property
    def settings(self) -> dict[str, Any]:
        """What a sample's content depends on, as plain data: limits, template, tokenizer, image processor."""
        return settings_record(self.config, self.processor, self.renderer.template, self.adapter.name)

    def encode(self, example: Mapping[str, Any], index: int | None = None) -> dict[str, Any] | None:
        """Encode one example.

        Args:
            example: `messages` with roles and content (or `text`, a document), optional `tools`, `images`, `videos`,
                `sample_id`, and fields that the adapter declares. See the page on datasets.
            index: its number, for error messages; default: how many were encoded before.

        Returns:
            A sample for `prepare_sample`: `input_ids`, `labels` and `mm_token_type_ids` int64 [L], `loss_weights` float32
            [L], media as the processor returns them (but tiles of padding), `sample_id`, `mask_strategy`. None where a policy
            drops it.

        Raises:
            SampleError: an example that cannot be encoded; the message names it. See `encoding.errors`,
                `AssistantMaskError`, `OversizeSampleError`, `MediaMismatchError`.
        """
        number = self._encoded if index is None else index
        self._encoded += 1
        with naming_example(example, number, counted=index is None) as where:
            try:
                return self._encoded_example(example, where)
            except UnreadableMediaError as error:
                if self.config.on_unreadable == "error" or isinstance(error, NoMediaReaderError):
                    raise
                if not self.counts["unreadable_dropped"]:
                    warnings.warn(f"dropped, as on_unreadable='drop' says (told once): {error}", RuntimeWarning, stacklevel=2)
                self.counts["unreadable_dropped"] += 1
                return None

    def _encoded_example(self, example: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        written = self.write(example, where)
        self.check_fields(written.conversation, where)
        processed = self.process(written, where)
        length = len(processed.ids)
        if self.config.max_length is not None and length > self.config.max_length:
            if self.config.on_oversize == "drop":
                self.counts["oversize_dropped"] += 1
                return None
            raise OversizeSampleError(f"{where}: {length} tokens exceed max_length={self.config.max_length}")
        trained, weights = self.mask(written, processed)
        self.counts[trained.strategy] += 1
        if not weights.any() and not self._keeps_empty(trained, where):
            return None
        sample = sample_of(
            written, processed, weights, self.adapter, strategy=trained.strategy if self.config.record_strategy else None
        )
        return self.finish(sample, written.conversation)

    def encode_row(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """Encode one example for `Dataset.map`, which writes a table: every declared field is there, None where absent.

        A table takes its columns from the first row, so a field that only later rows have would be lost. The row of an
        example that a policy drops has None in every field, for `Dataset.filter`, of a stream too. Streaming datasets and
        loaders write no table, keep tensors as they are, and take `encode` (where no policy drops) or `encode_list`.
        """
        sample = self.encode(example) or {}
        return {field.name: sample.get(field.name) for field in self.adapter.fields}

    def encode_list(self, examples: Iterable[Mapping[str, Any]]) -> "SampleList":
        """Encode several examples, those that a policy drops left out; a `collate_fn` for loaders that feed a scheduler.

        The scheduler counts what was left out, in the statistics of the step.
        """
        encoded = list(map(self.encode, examples))
        samples = SampleList(sample for sample in encoded if sample is not None)
        samples.num_dropped = len(encoded) - len(samples)
        return samples

    def collate(self, samples: Sequence[Mapping[str, Any] | Sample], **settings: Any) -> PackedBatch:
        """Pack samples into one row, in order.

        Args:
            samples: what `encode` returned; examples with `messages` are encoded first.
            **settings: further arguments of `pack_samples`.
        """
        ready: list[Mapping[str, Any] | Sample] = []
        for sample in samples:
            if isinstance(sample, Mapping) and "input_ids" not in sample:
                ready += self.encode_list([sample])
            else:
                ready.append(sample)
        return pack_samples(ready, adapter=self.adapter, **settings)

    def prepare(self, example: Mapping[str, Any], index: int | None = None) -> Sample | None:
        """Encode one example and check the sample against the adapter's declaration."""
        number = self._encoded if index is None else index
        raw = self.encode(example, index)
        return None if raw is None else prepare_sample(raw, adapter=self.adapter, where=f"example {number}")

    def write(self, example: Mapping[str, Any], where: str) -> Written:
        """Read and render an example; media are located, not opened."""
        conversation = read_example(example, self.config.placeholders, where)
        return write(conversation, self.renderer, self._shield, self.preset, self.config.close_last_turn, where)

    def process(self, written: Written, where: str) -> Processed:
        """Open an example's media and run the processor; a family may override what its processor does not cover."""
        media = {name: list(items) for name, items in written.conversation.media.items()}
        check_modalities(media, self.adapter, where)
        media["image"] = [
            decoded(open_image(item, f"{where}, image {at}", self._folder), f"{where}, image {at}")
            for at, item in enumerate(media["image"])
        ]
        media["video"] = [open_video(item, f"{where}, video {at}", self._folder) for at, item in enumerate(media["video"])]
        return self._process(written.text, media, where)

    def measure(self, examples: Sequence[Mapping[str, Any]], first: int = 0) -> list[Measured | SampleError]:
        """Return how long samples would be, and the grids of their media, without decoding them.

        A video's length is asked of the processor itself, with a tensor that has the video's shape and no pixels.

        Args:
            examples: as for `encode`.
            first: number of the first one, for error messages.

        Returns:
            One entry per example, in order: its measure, or the error by which `encode` would refuse it (damaged pixels
            and masks are not looked at).
        """
        return self._measure(examples, first)

    def mask(self, written: Written, processed: Processed) -> tuple[TrainedTurns, np.ndarray]:
        """Return what the assistant says, and the weight of each token, float32 [L]; media tokens weigh 0."""
        if written.conversation.text is not None:
            trained = TrainedTurns(turns=(), strategy="text", reasons={})
            weights = np.ones(len(processed.ids), np.float32)
        else:
            job = MaskJob(
                messages=written.messages,
                text=written.text,
                ids=processed.ids,
                tokenizer=self.tokenizer,
                renderer=written.renderer,
                preset=self.preset,
                tagged=written.tagged,
                extents=processed.extents,
                literal=processed.literal,
                spelled=self._shield.spelled(written.text),
            )
            trained = assistant_turns(job, self.config.strategies)
            own = [message.get("weight", 1.0) for message in written.messages if message["role"] == "assistant"]
            weights = turn_weights(trained.turns, len(processed.ids), own)
        weights[np.isin(processed.ids, list(self.adapter.media_tokens.values()))] = 0.0
        return trained, weights

    def finish(self, sample: dict[str, Any], conversation: Conversation) -> dict[str, Any]:
        """Return the finished sample; a family overrides this to add fields of its own."""
        return sample

    def state_dict(self) -> dict[str, Any]:
        """Return the settings that samples depend on, and the counts."""
        return {"version": VERSION, "settings": self.settings, "counts": dict(self.counts), "encoded": self._encoded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the counts of an earlier run, after checking that it encoded the same way.

        Raises:
            ValueError: another version, or settings that differ; each difference is named with both values.
        """
        if state.get("version") != VERSION:
            raise ValueError(f"the encoder's state has version {state.get('version')}, this is version {VERSION}")
        changed = differences(state["settings"], self.settings)
        if changed:
            raise ValueError(f"samples would be encoded differently than before: {'; '.join(changed)}")
        self.counts, self._encoded = Counter(state["counts"]), state["encoded"]

    def check_fields(self, conversation: Conversation, where: str) -> None:
        """Raise `UndeclaredFieldError` for a column that is neither declared nor ignored."""
        for name in conversation.fields:
            if name not in self.adapter.fields and name not in self.config.ignored:
                raise UndeclaredFieldError(
                    f"{where}: undeclared column {name!r}: rename it to 'sample_id' if it names the example, declare it as a "
                    f"Field of the adapter, or leave it out by SampleEncoder(..., ignored=({name!r},))"
                )

    def _keeps_empty(self, trained: TrainedTurns, where: str) -> bool:
        policy = self.config.on_empty_mask
        if policy == "error":
            reasons = "; ".join(f"{name}: {reason}" for name, reason in trained.reasons.items()) or "no assistant text"
            raise AssistantMaskError(
                f"{where}: no token trains ({reasons}); on_empty_mask='drop' or 'keep' would count it and go on"
            )
        self.counts["empty_dropped" if policy == "drop" else "empty_kept"] += 1
        return policy == "keep"


__all__ = ["ConversationError", "EncoderConfig", "SampleEncoder", "SampleList"]
