"""Mixture of experts: padding and dummy packs leave the router's losses and the experts' counts alone."""

from unittest import mock

import numpy as np
import pytest
import torch

from evenpack.integrations.megatron import forward_step, model_arguments, next_batch
from evenpack.scheduler import SchedulerConfig

from .helpers import Samples, on_ranks, own_sample, place, wrap

EXPERTS = dict(
    num_layers=2,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.1,
    moe_z_loss_coeff=0.1,
    moe_token_dispatcher_type="allgather",  # the other dispatchers make a CUDA stream
    variable_seq_lengths=False,
)


def router_figures(lengths, **plan):
    """Return loss and targets of a pack, the tokens of each expert that its routers' losses counted, and their gradients."""

    def body():
        from megatron.core.transformer.moe import router as module
        from on_cpu import megatron_on_cpu
        from tiny_gpt import gpt_config, gpt_model

        with megatron_on_cpu():
            model = gpt_model(gpt_config(**EXPERTS))
            items = Samples([own_sample(n, n) for n in lengths])
            config = SchedulerConfig(max_tokens=128, samples_per_step=1, **plan)
            iterator, _, _, _ = wrap(items, 3, settings=config)
            batch = next_batch(iterator)
            counts, balance = [], module.switch_load_balancing_loss_func

            def counted(*args, **kwargs):
                counts.append(kwargs["tokens_per_expert"].tolist())
                return balance(*args, **kwargs)

            with mock.patch.object(module, "switch_load_balancing_loss_func", counted):
                losses = model(**model_arguments(batch, model))
            total, count, _ = batch.loss(losses)
            total.backward()
        routers = [one for one in model.modules() if isinstance(one, module.TopKRouter)]
        return float(total), int(count), counts, [router.weight.grad.tolist() for router in routers]

    return body


def test_padding_moves_neither_router_losses_nor_expert_counts():
    ((loss, targets, counts, gradients),) = on_ranks(router_figures([9, 5, 13]), 1)
    ((padded_loss, padded_targets, padded_counts, padded),) = on_ranks(router_figures([9, 5, 13], align=8, pack_align=64), 1)
    assert (padded_targets, padded_counts) == (targets, counts)
    assert padded_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(torch.tensor(padded), torch.tensor(gradients), rtol=1e-4, atol=1e-6)


def test_a_dummy_pack_has_finite_gradients_and_no_loss():
    """One sample, two ranks: the rank without one still runs a pack, which is not all padding."""
    results = on_ranks(lambda: router_figures([9] if place().dp == 0 else [], align=8)(), 2)
    assert sorted(targets for _, targets, _, _ in results) == [0, 8]
    for loss, targets, _, gradients in results:
        assert (loss == 0.0) == (targets == 0)
        assert torch.tensor(gradients).isfinite().all()


@pytest.mark.parametrize(
    "sizes", [{"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}], ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items())
)
def test_padding_moves_nothing_on_any_pipeline_stage_under_sequence_parallelism(sizes):
    """Every stage's routers see the mask of the hidden states that they hold, cut as those are."""

    def body(**plan):
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.moe import router as module
        from on_cpu import megatron_on_cpu
        from tiny_gpt import gpt_config, gpt_model

        with megatron_on_cpu():
            more = EXPERTS | {"num_layers": 4, "sequence_parallel": "tp" in sizes, "moe_token_dispatcher_type": "alltoall"}
            config = gpt_config(**more | {"variable_seq_lengths": True})
            model = gpt_model(config)
            items = Samples([own_sample(n, n) for n in (10, 6, 14)])
            settings = SchedulerConfig(max_tokens=128, samples_per_step=1, **plan)
            iterator, count, _, _ = wrap(items, 3, config, settings=settings)
            counts, balance = [], module.switch_load_balancing_loss_func

            def counted(*args, **kwargs):
                counts.append((kwargs["tokens_per_expert"].tolist(), float(kwargs["total_num_tokens"])))
                return balance(*args, **kwargs)

            with mock.patch.object(module, "switch_load_balancing_loss_func", counted):
                reports = get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=iterator,
                    model=model,
                    num_microbatches=count,
                    seq_length=128,
                    micro_batch_size=1,
                    forward_only=True,
                )
        return counts, [report["lm loss"].tolist() for report in reports]

    size = sizes.get("pp", 1) * sizes.get("tp", 1)
    plain = on_ranks(body, size, **sizes)
    padded = on_ranks(lambda: body(align=8, pack_align=64), size, **sizes)
    for (counts, losses), (padded_counts, padded_losses) in zip(plain, padded, strict=True):
        assert counts and sum(counts[0][0]) == 2 * 30
        assert padded_counts == counts
        assert np.allclose(padded_losses, losses, rtol=1e-5)
