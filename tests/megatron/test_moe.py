"""Mixture of experts: padding and dummy packs leave the router's losses and the experts' counts alone."""

from unittest import mock

import pytest
import torch

from evenpack.integrations.megatron import model_arguments, next_batch
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
