"""What a sample costs where the user does not say."""

import msgspec

from ..models import ModelAdapter
from ..models.cost import CostCoefficients
from .cost import CostModel

#: Decoder and vision work of a 7-billion-parameter model, relative: see `models.cost` for a model's own.
_TEXT = CostCoefficients(decoder_linear=1.0, decoder_quadratic=1.0 / 65536)
_VISION = msgspec.structs.replace(_TEXT, vision_linear=0.0625, vision_quadratic=9.5e-6, has_vision=True)


def default_cost(adapter: ModelAdapter) -> CostModel:
    """Return the cost model of a typical model of 7 billion parameters, with a vision tower where the family has one."""
    return CostModel.from_coefficients(_VISION if adapter.patch_dim else _TEXT)
