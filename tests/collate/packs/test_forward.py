"""What a model is called with, seen through its wrappers, and which models are refused."""

import copy
import functools
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from evenpack.collate import pack_samples
from evenpack.core import Field, SpelledMediaTokenError, UnsafeModelError
from evenpack.models import adapter_for, prepare_model

TEXT, QWEN = adapter_for("text"), adapter_for("qwen2_5_vl")
VARLEN = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "use_cache"}


def takes(*names: str, base: type = nn.Module, **attributes: Any) -> nn.Module:
    """Return a module whose forward pass names these arguments, and a bare `**kwargs`."""
    scope: dict[str, Any] = {}
    exec(f"def forward(self, {', '.join(f'{name}=None' for name in names)}, **kwargs): return kwargs", scope)
    model = type("Tiny", (base,), {"forward": scope["forward"], **attributes})()
    model.inside = nn.Linear(1, 1)
    model.more = nn.Linear(1, 1)
    return model


@pytest.fixture
def text():
    return pack_samples([{"input_ids": [1, 2, 3]}, {"input_ids": [7, 8]}], adapter=TEXT, align=4, pack_align=16)


@functools.cache
def tiny_config():
    transformers = pytest.importorskip("transformers")
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
    return transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 220,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config=vision | {"window_size": 16, "fullatt_block_indexes": [0], "tokens_per_second": 2},
        image_token_id=201,
        video_token_id=202,
        vision_start_token_id=203,
        vision_end_token_id=204,
    )


def tiny_model() -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(copy.deepcopy(tiny_config())).double().eval()


@functools.cache
def prepared_model() -> Any:
    return prepare_model(tiny_model())


def tiny_samples(spelled: bool = False) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    image = {
        "input_ids": [5, 203, *[201] * 4, 204, 6],
        "pixel_values": torch.randn(16, 96, dtype=torch.float64),
        "image_grid_thw": [[1, 4, 4]],
    }
    first = [9, 201, 8] if spelled else [9, 7, 8]
    return [{"input_ids": first, "mm_token_type_ids": [0, 0, 0]}, image, {"input_ids": [4, 3]}]


def tiny_pack(**settings):
    return pack_samples(tiny_samples(), adapter=adapter_for(tiny_config()), **settings)


class TestTransformers:
    def test_names(self):
        kwargs = tiny_pack(align=4, pack_align=32).forward_kwargs(prepared_model())
        media = {"pixel_values", "image_grid_thw", "mm_token_type_ids", "media_token_validity_mask"}
        assert set(kwargs) == {"input_ids", "position_ids", "attention_mask", *media, *VARLEN}
        assert kwargs["attention_mask"] is None
        assert kwargs["use_cache"] is False

    def test_boundaries_are_padded_and_fit_the_row(self):
        batch = tiny_pack(align=4, pack_align=32)
        kwargs = batch.forward_kwargs(prepared_model())
        assert kwargs["cu_seq_lens_q"].tolist() == kwargs["cu_seq_lens_k"].tolist() == [0, 4, 12, 16, 32]
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == 16

    def test_m7_type_ids_are_never_missing_nor_labels_given(self):
        kwargs = tiny_pack().forward_kwargs(prepared_model())
        assert kwargs["mm_token_type_ids"].sum() == 4
        assert not {"labels", "shift_labels", "loss_mask"} & set(kwargs)

    @pytest.mark.parametrize("settings", [{}, {"align": 4, "pack_align": 64}])
    def test_a_pack_computes_what_its_samples_compute_alone(self, settings):
        batch, adapter = tiny_pack(**settings), adapter_for(tiny_config())
        with torch.no_grad():
            packed = batch.unpack(prepared_model()(**batch.forward_kwargs(prepared_model())).logits)
            for raw, logits in zip(tiny_samples(), packed, strict=True):
                one = pack_samples([raw], adapter=adapter)
                alone = prepared_model()(**one.forward_kwargs(prepared_model())).logits[0]
                assert (alone - logits).abs().max() < 1e-12

    def test_a_shard_is_refused(self):
        with pytest.raises(UnsafeModelError, match="shard 0 of 2"):
            tiny_pack(align=4).shard(0, 2).forward_kwargs(prepared_model())

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_attention_that_ignores_boundaries_is_refused(self, implementation):
        model = tiny_model()
        model.set_attn_implementation(implementation)
        with pytest.raises(UnsafeModelError, match=implementation):
            tiny_pack().forward_kwargs(model)

    def test_a_model_that_was_accepted_is_looked_at_again_after_a_change(self):
        model, batch = prepare_model(tiny_model()), tiny_pack()
        batch.forward_kwargs(model)
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsafeModelError, match="sdpa"):
            batch.forward_kwargs(model)

    def test_a_model_with_another_constant_is_refused(self):
        config = tiny_config()
        adapter = msgspec.structs.replace(adapter_for(config), tokens_per_second=25)
        batch = pack_samples(tiny_samples(), adapter=adapter)
        with pytest.raises(ValueError, match=r"tokens_per_second is 25.* 2"):
            batch.forward_kwargs(prepared_model())

    def test_m2_spelled_tokens_need_a_model_that_takes_the_mask(self):
        batch = pack_samples(tiny_samples(spelled=True), adapter=adapter_for(tiny_config()))
        assert batch.media_token_validity_mask[0].tolist() == [False] * 5 + [True] * 4 + [False] * 4
        with torch.no_grad():
            logits = prepared_model()(**batch.forward_kwargs(prepared_model())).logits
        assert torch.isfinite(logits).all()
        from evenpack.models.attention.varlen import register_varlen_attention

        stock = tiny_model()
        stock.set_attn_implementation(register_varlen_attention())
        with pytest.raises(SpelledMediaTokenError, match="spells a media token 1 times"):
            batch.forward_kwargs(stock)

    @pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.DataParallel(nn.DataParallel(model))])
    def test_wrappers_are_looked_through(self, wrap):
        batch = tiny_pack()
        assert set(batch.forward_kwargs(wrap(prepared_model()))) == set(batch.forward_kwargs(prepared_model()))


class TestOtherModels:
    def test_only_named_arguments_are_given(self, text):
        assert set(text.forward_kwargs(takes("input_ids", "position_ids", "padding_mask"))) == {
            "input_ids",
            "position_ids",
            "padding_mask",
        }
        assert set(text.forward_kwargs(takes("input_ids"))) == {"input_ids"}, "a bare **kwargs does not count"

    def test_boundaries_are_given_under_their_own_names(self, text):
        kwargs = text.forward_kwargs(takes("cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q", "seq_idx"))
        assert kwargs["cu_seqlens_q"].tolist() == [0, 3, 5, 5]
        assert kwargs["cu_seqlens_q_padded"].tolist() == [0, 4, 8, 16]
        assert kwargs["max_seqlen_q"] == 8
        assert kwargs["seq_idx"] is text.segment_ids

    def test_labels_only_where_their_name_means_shifted(self, text):
        model = takes("input_ids", "labels", "shift_labels", "loss_mask")
        assert set(text.forward_kwargs(model)) == {"input_ids", "shift_labels", "loss_mask"}
        declared = msgspec.structs.replace(TEXT, model_arguments=("labels",))
        batch = pack_samples([{"input_ids": [1, 2]}], adapter=declared)
        assert batch.forward_kwargs(model)["labels"].tolist() == [[2, -100]]

    def test_declared_names_count_though_no_signature_has_them(self):
        adapter = msgspec.structs.replace(TEXT, model_arguments=("padding_mask",))
        batch = pack_samples([{"input_ids": [1, 2]}], adapter=adapter)
        assert set(batch.forward_kwargs(takes("input_ids"))) == {"input_ids", "padding_mask"}

    def test_user_fields_reach_the_model_if_they_are_declared_for_it(self):
        fields = [
            Field(name="advantages", kind="token", dtype="float32", to_model=True),
            Field(name="rewards", kind="token", dtype="float32"),
        ]
        adapter = msgspec.structs.replace(TEXT, fields=TEXT.fields.extended(fields))
        batch = pack_samples([{"input_ids": [1, 2], "advantages": [0.0, 1.0], "rewards": [0.0, 1.0]}], adapter=adapter)
        assert set(batch.forward_kwargs(takes("input_ids", "advantages", "rewards"))) == {"input_ids", "advantages"}

    @pytest.mark.parametrize("names", [("input_ids", "packing_kwargs"), ("input_ids", "num_image_tiles")])
    def test_models_that_pack_by_themselves_are_refused(self, text, names):
        with pytest.raises(NotImplementedError, match="Tiny packs by itself"):
            text.forward_kwargs(takes(*names))
        with pytest.raises(NotImplementedError, match="Tiny packs by itself"):
            text.forward_kwargs(takes("input_ids", packs_internally=True))

    def test_spelled_tokens_need_the_mask_in_the_signature(self):
        batch = pack_samples([{"input_ids": [1, 151655]}], adapter=QWEN)
        with pytest.raises(SpelledMediaTokenError, match="takes no media_token_validity_mask"):
            batch.forward_kwargs(takes("input_ids"))
        assert "media_token_validity_mask" in batch.forward_kwargs(takes("input_ids", "media_token_validity_mask"))


class TestStages:
    """Grids on every stage, pixels on the first, targets on the last; a named argument that a stage lacks is None."""

    NAMES = ("input_ids", "position_ids", "pixel_values", "image_grid_thw", "shift_labels", "loss_mask", "padding_mask")

    @pytest.mark.parametrize(
        ("stage", "absent"),
        [
            (None, set()),
            ("first", {"shift_labels", "loss_mask"}),
            ("middle", {"pixel_values", "shift_labels", "loss_mask"}),
            ("last", {"pixel_values"}),
        ],
    )
    def test_what_each_stage_gets(self, make, stage, absent):
        batch = pack_samples([make.raw("qwen2_5_vl", [1, ("image", 1, 2, 2), 1])], adapter=QWEN)
        kwargs = batch.forward_kwargs(takes(*self.NAMES), stage)
        assert set(kwargs) == set(self.NAMES)
        assert {name for name, value in kwargs.items() if value is None} == absent

    def test_an_unknown_stage_is_named(self, text):
        with pytest.raises(ValueError, match="'second'"):
            text.forward_kwargs(takes("input_ids"), "second")
