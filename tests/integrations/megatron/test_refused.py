"""Models that `forward_step` does not call: the same that `PackedBatch.forward_kwargs` refuses."""

import msgspec
import pytest
import torch
from torch import nn

from evenpack.core import SpelledMediaTokenError, UnsafeModelError
from evenpack.integrations.megatron import forward_step, to_bridge
from evenpack.models import adapter_for

from .helpers import Samples, on_ranks, own_sample, place, wrap

QWEN = adapter_for("qwen2_vl")
IMAGE = QWEN.media_tokens["image"]
THD = ("tokens", "packed_seq_params")

#: Arguments of the forward pass, attributes, whether text spells a media token, the error and what it says; None: it runs.
MODELS = [
    (THD, {}, True, SpelledMediaTokenError, "media token 1 times.*no media_token_validity_mask or media_feature_index"),
    ((*THD, "media_token_validity_mask"), {}, True, None, ""),
    ((*THD, "media_feature_index"), {}, True, None, ""),
    (THD, {}, False, None, ""),
    (THD, {"packs_internally": True}, False, NotImplementedError, "Tiny packs by itself"),
    ((*THD, "packing_kwargs"), {}, False, NotImplementedError, "Tiny packs by itself"),
    (("tokens",), {}, False, UnsafeModelError, "Tiny takes no packed_seq_params"),
    (("tokens", "**packed_seq_params"), {}, False, UnsafeModelError, "Tiny takes no packed_seq_params"),
]


def tiny(names, attributes):
    """Return a wrapped model whose forward pass takes these arguments, and returns the tokens."""
    scope = {}
    given = [name if name.startswith("**") else f"{name}=None" for name in names]
    exec(f"def forward(self, {', '.join(given)}): return tokens", scope)
    model = type("Tiny", (nn.Module,), {"forward": scope["forward"], **attributes})()
    model.config = None
    return nn.DataParallel(model)


@pytest.mark.parametrize(("names", "attributes", "spells", "error", "text"), MODELS)
def test_models_are_refused_as_by_forward_kwargs(names, attributes, spells, error, text):
    sample = {"input_ids": torch.tensor([1, IMAGE if spells else 2, 3]), "sample_id": "a"}

    def body():
        iterator, _, _, _ = wrap(Samples([sample]), 1, adapter=QWEN)
        model = tiny(names, attributes)
        if error is None:
            assert forward_step(iterator, model)[0][0, :3].tolist() == sample["input_ids"].tolist()  # a dummy image follows
            return True
        with pytest.raises(error, match=text):
            forward_step(iterator, model)
        return True

    assert on_ranks(body, 1) == [True]


def test_bridge_places_features_by_ids_alone():
    sample = {"input_ids": torch.tensor([1, IMAGE, 3]), "sample_id": "a"}

    def body():
        iterator, _, _, _ = wrap(Samples([sample]), 1, adapter=QWEN)
        with pytest.raises(SpelledMediaTokenError, match="media token 1 times, and a model of Megatron-Bridge goes by ids"):
            to_bridge(next(iterator))
        return True

    assert on_ranks(body, 1) == [True]


def test_every_stage_raises():
    """A stage that ran on would wait for the one that did not."""
    sample = {"input_ids": torch.tensor([1, IMAGE, 3]), "sample_id": "a"}

    def body():
        iterator, _, _, _ = wrap(Samples([sample, own_sample(4, 1)]), 2, adapter=QWEN)
        model = tiny(THD, {"pre_process": place().pp == 0})
        with pytest.raises(SpelledMediaTokenError, match="spells"):
            forward_step(iterator, model), forward_step(iterator, model)
        return True

    assert on_ranks(body, 2, pp=2) == [True] * 2


def test_a_family_with_image_blocks_is_refused():
    """Gemma 3's image tokens see each other both ways, about which `PackedSeqParams` says nothing."""
    family = msgspec.structs.replace(QWEN, bidirectional="image")

    def body():
        with pytest.raises(UnsafeModelError, match="see each other both ways"):
            wrap(Samples([{"input_ids": torch.tensor([1, 2]), "sample_id": "a"}]), 1, adapter=family)
        return True

    assert on_ranks(body, 1) == [True]
