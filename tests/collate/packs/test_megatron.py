"""Packs for Megatron-Core, with its real classes."""

import dataclasses
import inspect
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    packed_seq_params = pytest.importorskip("megatron.core.packed_seq_params")

from evenpack.collate import pack_samples
from evenpack.collate.packs import megatron
from evenpack.core import UnsafeModelError
from evenpack.models import adapter_for, dummy_text

TEXT = adapter_for("text")


def pack(*lengths, **settings):
    return pack_samples([{"input_ids": list(range(1, n + 1))} for n in lengths], adapter=TEXT, **settings)


def test_the_real_class_by_keyword():
    params = pack(3, 5, align=4).packed_seq_params()
    assert isinstance(params, packed_seq_params.PackedSeqParams)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 3, 8]
    assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == [0, 4, 12]
    assert (params.max_seqlen_q, params.max_seqlen_kv, type(params.max_seqlen_q)) == (8, 8, int)


def test_padded_boundaries_in_both_places():
    params = pack(3, 5, align=4).packed_seq_params(valid="padded")
    assert params.cu_seqlens_q is params.cu_seqlens_q_padded
    assert params.cu_seqlens_q.tolist() == [0, 4, 12]


def test_identity_says_that_nothing_is_padded():
    params = pack(4, 8, align=4).packed_seq_params()
    assert params.cu_seqlens_q_padded is params.cu_seqlens_q


def test_boundaries_of_a_shard_are_global():
    params = pack(3, 5, align=4).shard(1, 2).packed_seq_params()
    assert params.cu_seqlens_q_padded.tolist() == [0, 4, 12]
    assert params.max_seqlen_q == 8


@dataclasses.dataclass
class Later:
    """Fields of later versions, one that no pack determines among them."""

    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    pad_between_seqs: bool | None = None
    seq_idx: torch.Tensor | None = None
    cp_partition_mode: str = "zigzag"
    cp_group: object = None


@pytest.mark.parametrize(("settings", "between"), [({}, False), ({"align": 4}, True), ({"pack_align": 16}, True)])
def test_fields_of_later_versions_are_filled_where_they_exist(monkeypatch, settings, between):
    """Padding is said outright: detection by identity misses a pack whose only padding is its tail."""
    monkeypatch.setattr(packed_seq_params, "PackedSeqParams", Later)
    batch = pack(3, 5, **settings)
    params = batch.packed_seq_params(cp_group="group", no_such_field=1)
    assert (params.pad_between_seqs, params.cp_partition_mode, params.cp_group) == (between, "zigzag", "group")
    assert params.seq_idx is batch.segment_ids


def test_seq_idx_of_a_shard_is_that_of_the_row():
    batch = pack(4, 8, align=4)
    assert megatron.thd_arguments(batch.shard(0, 2), "real")["seq_idx"] is batch.segment_ids


def test_an_unknown_choice_is_named():
    with pytest.raises(ValueError, match="'both'"):
        pack(3).packed_seq_params(valid="both")


class TestForward:
    """The signature of GPTModel, without building one."""

    @pytest.fixture
    def gpt(self):
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.module import MegatronModule

        class Tiny(MegatronModule):
            pre_process = post_process = True

            def __init__(self):
                torch.nn.Module.__init__(self)
                self.first, self.second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

        Tiny.forward = lambda self, **kwargs: kwargs
        Tiny.forward.__signature__ = inspect.signature(GPTModel.forward)
        return Tiny()

    def test_what_a_whole_model_gets(self, gpt):
        batch = pack(3, 5, align=4)
        kwargs = batch.forward_kwargs(gpt)
        names = {"input_ids", "position_ids", "attention_mask", "labels", "loss_mask", "packed_seq_params"}
        assert set(kwargs) - {"padding_mask"} == names, "labels here are shifted ones"
        assert kwargs["labels"] is batch.labels
        assert kwargs["attention_mask"] is None

    @pytest.mark.parametrize(("first", "last"), [(True, False), (False, False), (False, True)])
    def test_a_stage_knows_itself(self, gpt, first, last):
        gpt.pre_process, gpt.post_process = first, last
        kwargs = pack(3, 5, align=4).forward_kwargs(gpt)
        assert (kwargs["labels"] is not None) == (kwargs["loss_mask"] is not None) == last
        assert kwargs["input_ids"] is not None, "multi-token prediction and positions need ids on every stage"
        assert kwargs["packed_seq_params"].cu_seqlens_q.tolist() == [0, 3, 8]

    def test_a_module_that_takes_no_boundaries_is_refused(self, gpt):
        type(gpt).forward.__signature__ = inspect.signature(lambda input_ids, position_ids: None)
        with pytest.raises(UnsafeModelError, match="takes no packed_seq_params"):
            pack(3, 5).forward_kwargs(gpt)


class TestRouter:
    """Padding must not move the losses of a mixture of experts, and a dummy pack must not break them."""

    def losses(self, batch, masked: bool = True) -> torch.Tensor:
        """Return what Megatron-Core's router computes: both losses, tokens per expert, its gradient."""
        from megatron.core.transformer.moe import moe_utils

        weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        table = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
        logits = table[batch.input_ids[0]] @ weight.T
        mask = batch.padding_mask[0] if masked else None
        chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "softmax", padding_mask=mask)
        counts = chosen.sum(dim=0)
        auxiliary = moe_utils.switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=counts,
            total_num_tokens=counts.sum() / 2,
            topk=2,
            num_experts=4,
            moe_aux_loss_coeff=0.1,
        )
        z_loss = moe_utils.z_loss_func(logits, 0.1, padding_mask=mask)
        (auxiliary + z_loss).backward()
        return torch.cat([auxiliary.detach()[None], z_loss.detach()[None], counts, weight.grad.flatten()])

    def test_l4_padding_moves_nothing(self):
        padded = pack(3, 5, align=8, pack_align=32)
        torch.testing.assert_close(self.losses(pack(3, 5)), self.losses(padded))
        assert not torch.allclose(self.losses(padded), self.losses(padded, masked=False)), "without the mask it would"

    def test_l5_a_dummy_pack_has_finite_gradients(self):
        dummy = pack_samples([dummy_text(TEXT)], adapter=TEXT, align=8, num_dummies=1)
        assert torch.isfinite(self.losses(dummy)).all()
        dummy.padding_mask.fill_(True)
        assert not torch.isfinite(self.losses(dummy)).all(), "a row that is all padding divides 0 by 0"
