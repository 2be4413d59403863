"""A model family: what a sample holds beside text, and how many tokens anchor a row of it."""

from evenpack.core import Field, FieldSet
from evenpack.models import Family, ModelAdapter, register_family
from evenpack.models.adapter import TEXT_FIELDS, Anchors

#: Tiles of 3 x 8 x 8 pixels, each anchored by four image tokens; nothing else is needed for ordinary positions.
PIXELS = Field(name="pixel_values", kind="media", dtype="float", shape=(3, 8, 8), modality="image", to_model=True)
IMAGE = Anchors(rule="rows", per_row={"pixel_values": 4}, tower=(2, 2))
MEDIA = dict(
    media_tokens={"image": 7}, anchors={"image": IMAGE}, dummy_grids={"image": (1, 1, 1)}, trained_modalities=("image",)
)
ADAPTER = ModelAdapter(name="my_llava", fields=FieldSet((*TEXT_FIELDS, PIXELS)), **MEDIA)


def register() -> None:
    """Let `adapter_for("my_llava")` and `adapter_for(config)` find the family; the config names the image token."""
    register_family(Family(adapter=ADAPTER, model_types=("my_llava",), paths={"media_tokens.image": "image_token_id"}))
