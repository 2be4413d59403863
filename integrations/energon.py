"""Megatron-Energon: the same `SampleEncoder` as a `TaskEncoder`, so that no processing is written twice.

    loader = get_savable_loader(get_train_dataset(
        path, worker_config=worker_config, batch_size=None, shuffle_buffer_size=1000, max_samples_per_sequence=100,
        task_encoder=EnergonTaskEncoder(encoder),
    ))
    scheduler = PackingScheduler(loader, config=config, adapter=encoder.adapter)

Energon decodes images to tensors, and goes on after a sample that fails. Neither is wanted here: parts of a sample are
handed to the encoder as the bytes they are, and the first error ends the run with the sample's name.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.energon import Cooker, SkipSample, TaskEncoder, stateless
from megatron.energon.errors import FatalSampleError

from ..collate import PackedBatch, SampleEncoder
from ..collate.encoding.encoder import SampleList
from ..core import SampleError

#: Endings of parts that hold an image, and of parts that hold a video.
_IMAGE_PARTS = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff")
_VIDEO_PARTS = ("mp4", "webm", "mkv", "avi", "mov")
#: Part that holds the example itself.
_EXAMPLE_PART = "json"
_OWN = ("__key__", "__restore_key__", "__subflavors__", "__sources__")


class EncodedSample(dict[str, Any]):
    """A sample's fields, as the scheduler takes them, with what Energon needs to find it again as attributes.

    Args:
        fields: what `SampleEncoder.encode` returned.
        source: the Energon sample it was made from.
        num_dropped: samples that a policy of the encoder dropped before this one, in the same worker; the scheduler adds
            them up.
    """

    def __init__(self, fields: Mapping[str, Any], source: Any, num_dropped: int = 0) -> None:
        super().__init__(fields)
        self.num_dropped = num_dropped
        for name in _OWN:
            setattr(self, name, own(source, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (dict(self), {name: getattr(self, name) for name in _OWN}, self.num_dropped)


class EnergonTaskEncoder(TaskEncoder):  # type: ignore[misc]
    """Encodes an Energon dataset with a `SampleEncoder`.

    A crude dataset has one part `json` per sample, with what the encoder reads (`messages`, `tools`, ...), and its images
    and videos as further parts (`0.png`, `1.png`, ...), which belong to the media parts of the messages in the order of
    their names. Typed samples of text, captions and questions on an image are read too.

    Args:
        encoder: the encoder; Hugging Face's data go through the same one.
        read: from an Energon sample to an example, for datasets of another form.
        pack: arguments of `SampleEncoder.collate`; every batch is then one pack. None leaves samples as they are, for the
            scheduler to pack.

    Example:
        >>> from megatron.energon import WorkerConfig, get_train_dataset                                    # doctest: +SKIP
        >>> get_train_dataset(path, worker_config=WorkerConfig.default_worker_config(), batch_size=None,    # doctest: +SKIP
        ...                   task_encoder=EnergonTaskEncoder(encoder), shuffle_buffer_size=None,
        ...                   max_samples_per_sequence=None)
    """

    decoder = None  # parts stay bytes: the encoder opens images as it does everywhere else

    def __init__(
        self,
        encoder: SampleEncoder,
        *,
        read: Callable[[Any], Mapping[str, Any]] | None = None,
        pack: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self._read = example_of if read is None else read
        self._pack = pack
        self._dropped = 0  # since the last sample that was encoded
        self.cookers = [Cooker(_keep)]

    @stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: Any) -> EncodedSample:
        """Return an encoded sample.

        Raises:
            SkipSample: a policy of the encoder drops it, and has counted it.
            FatalSampleError: it cannot be encoded; Energon would pass over any other error.
        """
        try:
            fields = self.encoder.encode(self._read(sample))
        except SampleError as error:
            raise FatalSampleError(f"sample {own(sample, '__key__')!r}: {error}") from error
        if fields is None:
            self._dropped += 1
            raise SkipSample
        dropped, self._dropped = self._dropped, 0
        return EncodedSample(fields, sample, dropped)

    @stateless  # type: ignore[untyped-decorator]
    def batch(self, samples: Sequence[EncodedSample]) -> SampleList | PackedBatch:
        """Return the samples of a batch as a list, or as one pack."""
        if self._pack is not None:
            return self.encoder.collate(samples, **self._pack)
        found = SampleList(samples)
        found.num_dropped = sum(sample.num_dropped for sample in samples)
        return found


@stateless  # type: ignore[untyped-decorator]
def _keep(sample: Any) -> Any:
    """Return a crude sample as it is: the encoder reads it."""
    return sample


def example_of(sample: Any) -> dict[str, Any]:
    """Return an Energon sample as an example for `SampleEncoder.encode`, named by its key.

    Raises:
        SampleError: a sample of a form that is not known.
    """
    key = own(sample, "__key__")
    if isinstance(sample, Mapping):
        return crude_example(sample, key)
    if dataclasses.is_dataclass(sample):
        values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        if values.get("text") is not None:
            return {"text": values["text"], "sample_id": key}
        if "caption" in values:
            return question(values["image"], "", values["caption"], key)
        if "context" in values and "answers" in values:
            answers = values["answers"]
            return question(values["image"], values["context"], answers if isinstance(answers, str) else answers[0], key)
    raise SampleError(f"sample {key!r}: no example can be read from {type(sample).__name__}: give `read`")


def crude_example(sample: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a crude sample's example: its JSON part, with the bytes of its media parts."""
    parts = {name: value for name, value in sample.items() if not name.startswith("__")}
    if _EXAMPLE_PART not in parts:
        raise SampleError(f"sample {key!r} has no part {_EXAMPLE_PART!r}; its parts are {sorted(parts)}")
    raw = parts[_EXAMPLE_PART]
    example = dict(raw if isinstance(raw, Mapping) else json.loads(raw))
    example.setdefault("sample_id", key)
    for name, endings in (("images", _IMAGE_PARTS), ("videos", _VIDEO_PARTS)):
        found = sorted((part for part in parts if part.rpartition(".")[2] in endings), key=_by_number)
        if found:
            example[name] = [parts[part] for part in found]
    return example


def question(image: Any, text: str, answer: str, key: str) -> dict[str, Any]:
    """Return an example of one image, a question and an answer."""
    content = [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [image], "sample_id": key}


def _by_number(part: str) -> tuple[int, str]:
    """Order parts `2.png`, `10.png` by their numbers.

    Example:
        >>> sorted(["10.png", "2.png"], key=_by_number)
        ['2.png', '10.png']
    """
    digits = "".join(one for one in part.partition(".")[0] if one.isdigit())
    return int(digits or 0), part


def own(sample: Any, name: str) -> Any:
    """Return one of the fields that Energon gives every sample, of a mapping or a dataclass."""
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)


def _rebuilt(fields: dict[str, Any], names: dict[str, Any], num_dropped: int) -> EncodedSample:
    """Return a sample that another process sent."""
    return EncodedSample(fields, names, num_dropped)
