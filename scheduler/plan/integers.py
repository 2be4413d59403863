"""Exact integer arithmetic: the same on every machine, whatever its floating point unit does."""


def portion(value: int, part: float) -> int:
    """`value * part`, rounded down: exact, since a float is a quotient of two integers.

    Example:
        >>> portion(1000, 0.01), portion(2**60 + 1, 0.5)
        (10, 576460752303423488)
    """
    numerator, denominator = part.as_integer_ratio()
    return value * numerator // denominator
