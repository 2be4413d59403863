"""Text-only decoders: Llama, Qwen2, Qwen3, ... Any config without a media tower."""

from ...core import FieldSet
from ..adapter import TEXT_FIELDS, ModelAdapter
from ..family import Family

TEXT = Family(
    adapter=ModelAdapter(name="text", fields=FieldSet(TEXT_FIELDS)),
    model_types=(),
    paths={"pad_token_id": "pad_token_id"},
)
