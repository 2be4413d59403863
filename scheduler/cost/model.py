"""Integer costs of samples: what the planner balances."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from ...models import ModelAdapter
from ...models.cost import CostCoefficients, coefficients_from_config

Ints = npt.NDArray[np.int64]
Grids = Sequence[tuple[int, int, int]]
#: Units of the linear work of one decoder token.
UNITS_PER_TOKEN = 1024
#: Quadratic coefficients are integers in units of 2**-SHIFT.
SHIFT = 24
#: Operations of training a decoder of 7 billion parameters per token; see `models.cost` for a model's own.
_DECODER = 3 * 13.1e9
#: Work of Qwen3-VL's tower per patch and per patch squared, relative to a decoder token.
_TOWER, _TOWER_SQUARED = 0.82e9 / 13.1e9, 1.244e5 / 13.1e9


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One measured micro-batch of one rank.

    Attributes:
        tokens: length of every segment.
        grids: (t, h, w) in patches of every media item of the pack.
        seconds: time of its forward and backward.
    """

    tokens: Sequence[int]
    grids: Grids = ()
    seconds: float


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Cost per phase of a sample, in integers, so that every rank gets the same plan.

    Decoder: `linear * l + quadratic * l^2` over its l tokens (attention never crosses samples). Vision tower: the same
    over the h * w patches of each of the t frames of an item. Audio tower: `audio * t` over the t mel frames of a clip, in the
    phase "vision" too. The number of phases is fixed: text costs 0 in "vision".

    Attributes:
        phases: ("decoder",) or ("vision", "decoder").
        linear: per phase, units per token or patch, times 2**SHIFT.
        quadratic: per phase, units per token or patch squared, times 2**SHIFT.
        windowed: units per token squared of sliding-window layers, times 2**SHIFT.
        window: their window in tokens.
        audio: units per mel frame, times 2**SHIFT; None for as much as a patch.
        unit: operations (or seconds, where fitted) that one unit stands for.

    Example:
        >>> model = CostModel.from_coefficients(CostCoefficients(decoder_linear=1e9, decoder_quadratic=1e9 / 65536))
        >>> model.sample_cost(1024, []), model.sample_cost(65536, [])
        ((1064960,), (134217728,))
    """

    phases: tuple[str, ...]
    linear: tuple[int, ...]
    quadratic: tuple[int, ...]
    windowed: int = 0
    window: int = 0
    audio: int | None = None
    unit: float = 1.0

    @classmethod
    def from_config(
        cls,
        hf_config: Any,
        *,
        trained_modalities: Sequence[str] | None = None,
        lora: bool = False,
        tp_size: int = 1,
        cp_size: int = 1,
    ) -> Self:
        """Cost model of a Hugging Face configuration; arguments as in `models.cost.coefficients_from_config`."""
        return cls.from_coefficients(
            coefficients_from_config(
                hf_config, trained_modalities=trained_modalities, lora=lora, tp_size=tp_size, cp_size=cp_size
            )
        )

    @classmethod
    def from_coefficients(cls, coefficients: CostCoefficients) -> Self:
        """Scale to units in which the linear work of a decoder token is `UNITS_PER_TOKEN`."""
        if coefficients.decoder_linear <= 0:
            raise ValueError(f"decoder_linear must be above 0, got {coefficients.decoder_linear}")
        unit = coefficients.decoder_linear / UNITS_PER_TOKEN

        def scaled(value: float) -> int:
            return round(value / unit * (1 << SHIFT))

        vision = coefficients.has_vision
        return cls(
            phases=("vision", "decoder") if vision else ("decoder",),
            linear=(scaled(coefficients.vision_linear),) * vision + (scaled(coefficients.decoder_linear),),
            quadratic=(scaled(coefficients.vision_quadratic),) * vision + (scaled(coefficients.decoder_quadratic),),
            windowed=scaled(coefficients.decoder_windowed),
            window=coefficients.decoder_window,
            audio=scaled(coefficients.audio_linear) if coefficients.audio_linear else None,
            unit=unit,
        )

    def sample_cost(self, tokens: int, grids: Grids = ()) -> tuple[int, ...]:
        """Cost per phase of one sample.

        Args:
            tokens: length of the sample.
            grids: (t, h, w) in patches of all its image and video items, (frames, 1, 1) of its audio clips.

        Returns:
            One integer per phase; any size, since Python's integers do not overflow.

        Raises:
            ValueError: grids, for a model without a vision tower.
        """
        tokens = int(tokens)
        total = self.linear[-1] * tokens + self.quadratic[-1] * tokens**2
        if self.windowed:
            inside = min(tokens, self.window)
            total += self.windowed * (inside * (2 * tokens - inside))
        decoder = total >> SHIFT
        if len(self.phases) == 1:
            if len(grids):
                raise ValueError(f"{len(grids)} media items in a sample, and the model has no vision tower")
            return (decoder,)
        vision = 0
        for t, h, w in grids:
            patches = int(h) * int(w)
            if patches == 1 and self.audio is not None:
                vision += int(t) * self.audio
                continue
            vision += int(t) * (self.linear[0] * patches + self.quadratic[0] * patches**2)
        return (vision >> SHIFT, decoder)

    def sample_costs(self, tokens: npt.ArrayLike, grids: Sequence[Grids] | None = None) -> Ints:
        """`[N, K]` int64 costs of many samples; the same integers as `sample_cost`.

        Args:
            tokens: `[N]` lengths.
            grids: the grids of each sample; None where no sample has media.

        Raises:
            OverflowError: a cost that int64 cannot hold.
        """
        lengths = np.asarray(tokens).astype(np.int64)
        out = np.zeros((len(lengths), len(self.phases)), np.int64)
        # Few lengths differ in practice: each is costed once, exactly.
        values, inverse = np.unique(lengths, return_inverse=True)
        out[:, -1] = np.array([self.sample_cost(int(value))[-1] for value in values], np.int64)[inverse]
        for row, items in enumerate(grids or ()):
            if len(items):
                out[row, 0] = self.sample_cost(1, items)[0]
        return out

    @classmethod
    def fit(cls, observations: Sequence[Observation]) -> "CostFit":
        """Calibrate from measured micro-batches, by least squares with no coefficient below 0.

        Seconds are modelled as a constant per micro-batch plus linear and quadratic work of decoder and tower.

        Raises:
            ValueError: fewer observations than coefficients, or a time that is not positive.
        """
        return fit(observations)


class CostFit(msgspec.Struct, frozen=True, kw_only=True):
    """A calibrated cost model, and how well it explains what was measured.

    Attributes:
        model: costs in units of `model.unit` seconds.
        microbatch_cost: fixed cost of one micro-batch in the same units, for `PlanConfig.microbatch_cost`.
        r_squared: share of the variance of the times that the fit explains, at most 1.
        median_error: median of |predicted / measured - 1|.
        num_observations: micro-batches used.
    """

    model: CostModel
    microbatch_cost: int
    r_squared: float
    median_error: float
    num_observations: int


def fit(observations: Sequence[Observation]) -> CostFit:
    """See `CostModel.fit`."""
    has_vision = any(len(observation.grids) for observation in observations)
    features = np.array([_features(observation)[: 5 if has_vision else 3] for observation in observations], float)
    seconds = np.array([observation.seconds for observation in observations], float)
    if len(observations) < (5 if has_vision else 3):
        raise ValueError(f"{len(observations)} observations cannot fit {5 if has_vision else 3} coefficients")
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError(f"times must be positive and finite, got {seconds.min()}")
    scale = features.max(axis=0)
    scale[scale == 0] = 1.0
    # Relative errors count: a long micro-batch must not drown the short ones.
    solution = nonnegative_least_squares(features / scale / seconds[:, None], np.ones(len(seconds))) / scale
    predicted = features @ solution
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    residual = float(((seconds - predicted) ** 2).sum())
    per_token = max(float(solution[1]), float(predicted.sum() / features[:, 1].sum()) * 1e-3)
    unit = per_token / UNITS_PER_TOKEN

    def scaled(value: float) -> int:
        return round(value / unit * (1 << SHIFT))

    model = CostModel(
        phases=("vision", "decoder") if has_vision else ("decoder",),
        linear=(*((scaled(solution[3]),) if has_vision else ()), scaled(solution[1])),
        quadratic=(*((scaled(solution[4]),) if has_vision else ()), scaled(solution[2])),
        unit=unit,
    )
    return CostFit(
        model=model,
        microbatch_cost=round(solution[0] / unit),
        r_squared=1 - residual / spread if spread else float(residual == 0),
        median_error=float(np.median(np.abs(predicted / seconds - 1))),
        num_observations=len(observations),
    )


def _features(observation: Observation) -> list[int]:
    tokens = [int(length) for length in observation.tokens]
    frames = [(int(t), int(h) * int(w)) for t, h, w in observation.grids]
    return [
        1,
        sum(tokens),
        sum(length**2 for length in tokens),
        sum(t * patches for t, patches in frames),
        sum(t * patches**2 for t, patches in frames),
    ]


def nonnegative_least_squares(matrix: npt.NDArray[Any], target: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Minimise |matrix @ x - target| over x >= 0.

    Some coefficients are above 0 and the others 0; the best are plain least squares over the former. There are at most five
    coefficients, so every set of them is tried.

    Args:
        matrix: `[n, k]`.
        target: `[n]`.

    Returns:
        `[k]` float64.
    """
    best = np.zeros(matrix.shape[1])
    least = total = float((target**2).sum())
    for size in range(1, len(best) + 1):
        for chosen in map(list, combinations(range(len(best)), size)):
            found = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            error = float(((matrix[:, chosen] @ found - target) ** 2).sum())
            # A coefficient that gains nothing but rounding stays 0.
            if least - error > 1e-14 * total and (found >= 0).all():
                best, least = np.zeros(len(best)), error
                best[chosen] = found
    return best


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
    return typical_cost(vision=bool(adapter.media_tokens))
