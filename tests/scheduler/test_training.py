"""Packed training equals unpacked training: losses and gradients, images included, on several ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from evenpack.core import UnsafeModelError
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler.testing import run_ranks

from .helpers import END, IMAGE, START, VIDEO, VISION, VOCABULARY, mixed_source, open_scheduler, text_sample


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """Import the model's code before ranks are forked, not once in each of them."""
    import transformers

    assert transformers.Qwen2_5_VLForConditionalGeneration


def tiny_qwen(dtype, seed=0):
    """Return a random Qwen2.5-VL of two decoder layers, with the token ids and pace of the released checkpoint."""
    import transformers

    config = transformers.Qwen2_5_VLConfig(
        text_config=dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        ),
        vision_config=dict(
            hidden_size=16, out_hidden_size=32, intermediate_size=24, depth=2, num_heads=2, fullatt_block_indexes=[1],
            window_size=56, tokens_per_second=2,
        ),
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        vision_end_token_id=END, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).to(dtype)
    return prepare_model(model).train()


def cast(sample, dtype):
    """Return a sample with its pixels in a dtype."""
    return {name: value.to(dtype) if name == "pixel_values" else value for name, value in sample.items()}


def gradients(model):
    """Return all gradients as one vector, missing ones as zeros."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def packed_step(model, source, **settings):
    """Run one step through DDP; return the group's loss and the reduced gradients."""
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    with open_scheduler(source, adapter=VISION, prefetch=0, **settings) as scheduler:
        step = next(scheduler)
        total = torch.zeros((), dtype=torch.float64)
        for batch in step:
            with step.sync_on_last(wrapped, batch):
                loss = step.loss(wrapped(**batch.forward_kwargs(wrapped)).logits, batch)
                loss.backward()
            total += loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size(), gradients(model), step


def unpacked_step(model, samples, average="token"):
    """Run every sample alone, as a row of its own, without evenpack; return the loss and the gradients."""
    model.zero_grad()
    losses, weight = [], 0.0
    for sample in samples:
        ids, pixels = sample["input_ids"][None], sample.get("pixel_values")
        types = (ids == IMAGE).long()
        kwargs = {} if pixels is None else {"pixel_values": pixels, "image_grid_thw": sample["image_grid_thw"]}
        logits = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **kwargs).logits[0]
        labels = sample.get("labels", sample["input_ids"].masked_fill(types[0] != 0, -100))[1:]
        weights = sample.get("loss_weights", torch.ones(len(labels) + 1))[1:].to(torch.float64) * (labels != -100)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        each = F.cross_entropy(wide[:-1], labels, ignore_index=-100, reduction="none").double() * weights
        if weights.count_nonzero():
            losses.append(each.sum() / (weights.sum() if average == "sample" else 1))
            weight += 1 if average == "sample" else weights.sum().item()
    loss = sum(losses) / weight
    loss.backward()
    return loss.item(), gradients(model)


def relative(a, b):
    """Return the difference of two vectors, relative to the second."""
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(
    ("dtype", "settings", "tolerance"),
    [
        (torch.float32, {}, 1e-5),
        (torch.float64, {}, 1e-12),
        (torch.float64, {"loss_average": "sample"}, 1e-7),  # the scaled weights are float32
        (torch.float64, {"align": 4, "pack_align": 16}, 1e-12),
    ],
)
def test_packed_step_equals_every_sample_alone(dtype, settings, tolerance):
    def fn(rank, num_ranks):
        model = tiny_qwen(dtype)
        loss, grads, step = packed_step(
            model, [cast(sample, dtype) for sample in mixed_source(rank, 6)], samples_per_step=6, max_tokens=96, **settings
        )
        assert step.num_microbatches > 1 and step.plan.moved_bytes > 0
        everyone = [cast(sample, dtype) for r in range(num_ranks) for sample in mixed_source(r, 6)]
        return loss, grads, *unpacked_step(model, everyone, settings.get("loss_average", "token"))

    for loss, grads, expected_loss, expected_grads in run_ranks(fn, 2, backend="gloo"):
        assert abs(loss / expected_loss - 1) < tolerance
        assert relative(grads, expected_grads) < max(tolerance, 1e-10 if dtype == torch.float64 else 0)


def test_fsdp2_with_uneven_modalities():
    """FSDP gathers a tower's weights in every micro-batch (P9): all ranks run it there, or none does."""

    def fn(rank, num_ranks):
        from torch.distributed.fsdp import fully_shard

        model = tiny_qwen(torch.float64)
        fully_shard(model.model.visual)
        fully_shard(model)
        source = [cast(sample, torch.float64) for sample in mixed_source(rank, 8)]
        with open_scheduler(source, adapter=VISION, samples_per_step=8, max_tokens=64, sync="microbatch") as scheduler:
            step = next(scheduler)
            total = torch.zeros((), dtype=torch.float64)
            for batch in step:
                with step.sync_on_last(model, batch):
                    loss = step.loss(model(**batch.forward_kwargs(model)).logits, batch)
                    loss.backward()
                total += loss.detach() / num_ranks
        dist.all_reduce(total)
        grads = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        everyone = [cast(sample, torch.float64) for r in range(num_ranks) for sample in mixed_source(r, 8)]
        return total.item(), grads, *unpacked_step(tiny_qwen(torch.float64), everyone)

    for loss, grads, expected_loss, expected_grads in run_ranks(fn, 2, backend="gloo"):
        assert abs(loss / expected_loss - 1) < 1e-12
        assert relative(grads, expected_grads) < 1e-10


def test_ddp_is_refused_where_it_would_leave_a_tower_unreduced():
    """At sync="microbatch" a last micro-batch may lack images: DDP would then keep local gradients without a word."""

    def fn(rank, num_ranks):
        with pytest.raises(UnsafeModelError, match="sync='step'"):
            packed_step(tiny_qwen(torch.float32), mixed_source(rank, 4), sync="microbatch")

    run_ranks(fn, 2, backend="gloo")


@pytest.mark.parametrize("adapter", [VISION, adapter_for("text")])
@pytest.mark.parametrize("whole", [True, False])
def test_fsdp_is_refused_where_a_tower_runs_on_some_ranks_alone(adapter, whole):
    """Planned for sync="step", rank 0 runs the decoder while rank 1 waits in its tower: the collectives would not match."""

    def fn(rank, num_ranks):
        from torch.distributed.fsdp import fully_shard

        model = tiny_qwen(torch.float32)
        fully_shard(model.model.visual)
        if whole:
            fully_shard(model)
        source = mixed_source(rank, 4) if adapter is VISION else [text_sample(5, index) for index in range(4)]
        with open_scheduler(source, adapter=adapter, sync="step") as scheduler:
            step = next(scheduler)
            if adapter is VISION:
                with pytest.raises(UnsafeModelError, match=r"FSDP .* \['image', 'video'\] .* set sync='microbatch'"):
                    step.sync_on_last(model, step[0])
            else:  # equally many micro-batches on every rank, and each runs every layer
                with step.sync_on_last(model, step[0]):
                    pass

    run_ranks(fn, 2, backend="gloo")


def test_fractional_weights_and_packs_without_a_target():
    """The divisor is the sum of the weights over the group (L6); a pack without any target gives 0, never NaN (L7)."""

    def source(rank):
        samples = [text_sample(length, f"{rank}-{length}") for length in (5, 9, 17)]
        for sample in samples:
            sample["loss_weights"] = torch.linspace(0, 1, len(sample["input_ids"])) * (rank == 0)
        return samples

    def fn(rank, num_ranks):
        model = tiny_qwen(torch.float64)
        loss, grads, step = packed_step(
            model, source(rank), samples_per_step=3, max_tokens=24, movement="minimal", tolerance=1.0
        )
        assert step.loss_divisor == sum(float(s["loss_weights"][1:].sum(dtype=torch.float64)) for s in source(0))
        return loss, grads, *unpacked_step(model, source(0) + source(1))

    for loss, grads, expected_loss, expected_grads in run_ranks(fn, 2, backend="gloo"):
        assert abs(loss / expected_loss - 1) < 1e-6 and torch.isfinite(grads).all()
        assert relative(grads, expected_grads) < 1e-6


def test_step_without_any_target_has_loss_zero():
    def fn(rank, num_ranks):
        samples = [text_sample(7, "x", labels=torch.full((7,), -100))]
        loss, grads, step = packed_step(tiny_qwen(torch.float32), samples, samples_per_step=1)
        assert step.loss_divisor == 0 and step.global_loss_tokens == 0
        return loss, grads.abs().max().item()

    assert run_ranks(fn, 2, backend="gloo") == [(0.0, 0.0)] * 2


def test_trained_tower_runs_on_every_rank_although_only_one_has_images():
    """DDP fails where a rank's last backward leaves a trained tower out (P19), and in a step of text alone."""

    def fn(rank, num_ranks):
        model = tiny_qwen(torch.float32)
        source = mixed_source(rank, 4) if rank else [text_sample(9, f"t{i}") for i in range(4)]
        packed_step(model, source, samples_per_step=4, max_tokens=256)
        packed_step(tiny_qwen(torch.float32), [text_sample(6, "only")], samples_per_step=1)

    run_ranks(fn, 2, backend="gloo")


def test_gradients_are_reduced_in_the_last_microbatch_only():
    class Wrapper:
        def __init__(self):
            self.log = []

        @contextlib.contextmanager
        def no_sync(self):
            self.log.append("held back")
            yield

    class Sharded:
        def __init__(self):
            self.log = []

        def set_requires_gradient_sync(self, value):
            self.log.append(value)

    with open_scheduler([text_sample(5, i) for i in range(6)], samples_per_step=6, max_tokens=10) as scheduler:
        step = next(scheduler)
        assert len(step) == 3
        wrapper, sharded = Wrapper(), Sharded()
        for batch in step:
            for model in (wrapper, sharded, object()):
                with step.sync_on_last(model, batch.to("cpu")):
                    pass
    assert wrapper.log == ["held back"] * 2
    assert sharded.log == [False, False, True]
