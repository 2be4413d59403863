"""How far above the bound of the objective a plan may end, so that samples stay at home."""

from .integers import portion
from .problem import Problem


def loosened(problem: Problem, bound: int) -> int:
    """The bound with the tolerance on top."""
    return bound + portion(bound, problem.config.tolerance)


def almost(problem: Problem, limit: int) -> int:
    """The limit with a tenth of the tolerance on top: what is nearer is not worth more bytes."""
    return limit + portion(limit, problem.config.tolerance) // 10
