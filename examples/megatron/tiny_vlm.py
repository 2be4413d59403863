"""A Hugging Face vision tower in front of Megatron-Core's GPTModel, and samples to train it on."""

import random
from typing import Any

import msgspec
import torch
from megatron.core.enums import ModelType
from megatron.core.transformer import MegatronModule, TransformerConfig
from tiny_gpt import gpt_model
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from evenpack.models import adapter_for

IMAGE, VIDEO, START, END, VOCABULARY = 60, 61, 58, 59, 64
#: Qwen2-VL with a small vocabulary. The model below takes features by `media_feature_index`, so the rows come cut: "caller".
ADAPTER = msgspec.structs.replace(
    adapter_for("qwen2_vl"),
    media_tokens={"image": IMAGE, "video": VIDEO},
    vision_start=START,
    vision_end=END,
    pad_token_id=0,
    cp_slicing="caller",
)


class VisionGPT(MegatronModule):
    """One pipeline stage of a vision-language model; the first one holds the tower.

    Args:
        config: of the decoder, with `mrope_section`.
        vp_stage: model chunk of a virtual pipeline.
    """

    def __init__(self, config: TransformerConfig, vp_stage: int | None = None) -> None:
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.language_model = gpt_model(config, vocabulary=VOCABULARY, positions="mrope", vp_stage=vp_stage)
        self.pre_process, self.vp_stage = self.language_model.pre_process, vp_stage
        self.share_embeddings_and_output_weights = False
        self.tower = vision_tower(config) if self.pre_process else None

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the hidden states of the stage before."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        tokens: torch.Tensor | None,
        position_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        media_feature_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the stage on a packed row (or on this rank's share of it): losses `[1, T]` on the last, else hidden states."""
        embedded = None
        if self.tower is not None:
            embedded = self.language_model.embedding(input_ids=tokens, position_ids=None)
            if pixel_values is not None:
                embedded = placed(embedded, features_of(self.tower, pixel_values, image_grid_thw), media_feature_index)
        return self.language_model(
            tokens, position_ids, None, decoder_input=embedded, labels=labels, packed_seq_params=packed_seq_params
        )


def placed(embedded: torch.Tensor, features: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return embeddings `[T, 1, H]` with the features `[n, H]` that `index` `[1, T]` names; -1 keeps the embedding."""
    anchors = (index[0] >= 0)[:, None, None]
    return torch.where(anchors, features[index[0].clamp(min=0)][:, None].to(embedded.dtype), embedded)


def features_of(tower: torch.nn.Module, pixels: torch.Tensor, grids: torch.Tensor | None) -> torch.Tensor:
    """Return the merged features of all images, `[n, H]`."""
    found = tower(pixels.to(next(tower.parameters()).dtype), grid_thw=grids)
    return found if isinstance(found, torch.Tensor) else found.pooler_output


def vision_tower(config: TransformerConfig) -> torch.nn.Module:
    """Return a small Qwen2-VL tower, the same on every rank."""
    settings = Qwen2VLVisionConfig(depth=1, embed_dim=16, hidden_size=config.hidden_size, num_heads=2, mlp_ratio=2)
    settings._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return Qwen2VisionTransformerPretrainedModel(settings).to(config.params_dtype)


def samples(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return samples whose text names the brightness of the image before it; one in three has no image."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        text = [rng.randrange(1, 30) for _ in range(rng.randrange(2, 20))]
        if rng.random() < 0.33:
            found.append({"input_ids": torch.tensor(text), "sample_id": number})
            continue
        height, width, shade = 2 * rng.randrange(1, 4), 2 * rng.randrange(1, 4), rng.randrange(8)
        pixels = torch.randn(height * width, ADAPTER.patch_dim, generator=generator) * 0.1 + shade / 4 - 1
        ids = [START, *[IMAGE] * (height * width // 4), END, *text, 40 + shade]
        found.append(
            {
                "input_ids": torch.tensor(ids),
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor([[1, height, width]]),
                "sample_id": number,
            }
        )
    return found
