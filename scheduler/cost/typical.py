"""What a sample costs where the user does not say."""

from ...models import ModelAdapter
from ...models.cost import CostCoefficients
from .model import CostModel

#: Operations of training a decoder of 7 billion parameters per token; see `models.cost` for a model's own.
_DECODER = 3 * 13.1e9
#: Work of Qwen3-VL's tower per patch and per patch squared, relative to a decoder token.
_TOWER, _TOWER_SQUARED = 0.82e9 / 13.1e9, 1.244e5 / 13.1e9


def typical_cost(*, vision: bool) -> CostModel:
    """Return the cost model of a decoder of 7 billion parameters, `l + l^2 / 65,536`, with Qwen3-VL's tower for `vision`."""
    return CostModel.from_coefficients(
        CostCoefficients(
            decoder_linear=_DECODER,
            decoder_quadratic=_DECODER / 65536,
            vision_linear=_TOWER * _DECODER if vision else 0.0,
            vision_quadratic=_TOWER_SQUARED * _DECODER if vision else 0.0,
            has_vision=vision,
        )
    )


def default_cost(adapter: ModelAdapter) -> CostModel:
    """Return the cost model of a typical model of 7 billion parameters, with a vision tower where the family has one."""
    return typical_cost(vision=bool(adapter.patch_dim))
