"""How sure a measured number is, and whether two models differ: intervals and McNemar's test."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

_Z = 1.959963984540054  # of the normal distribution, for 95 %
_DRAWS = 1000


def wilson(right: int, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share (Wilson 1927; Newcombe 1998, method 3).

    Example:
        >>> [round(end, 4) for end in wilson(81, 263)]  # Newcombe's example
        [0.2553, 0.3662]

    Args:
        right: how many of `count` are; `count` is above 0.
        count: of how many.
    """
    share = right / count
    middle = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    low, high = (middle - half) / (1 + _Z**2 / count), (middle + half) / (1 + _Z**2 / count)
    # At the ends rounding leaves 1e-17 of a difference.
    return (0.0 if right == 0 else low, 1.0 if right == count else high)


def bootstrap(values: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % interval of a mean, from 1,000 samples drawn with replacement.

    Example:
        >>> low, high = bootstrap(np.arange(100.0))
        >>> 43 < low < 45, 54 < high < 56
        (True, True)
    """
    draws = np.random.default_rng(seed)
    means = [values[draws.integers(len(values), size=len(values))].mean() for _ in range(_DRAWS)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


@dataclasses.dataclass(frozen=True)
class McNemar:
    """Which of two models is right where one alone is.

    Attributes:
        first: images that the first alone gets right.
        second: images that the second alone gets right.
        p: how probable so uneven a division is, or a more uneven one, if both were equally good;
            exact, two-sided.
    """

    first: int
    second: int
    p: float


def mcnemar(first: np.ndarray, second: np.ndarray) -> McNemar:
    """Compares two models on the same images (McNemar 1947, with exact probabilities).

    Example:
        >>> mcnemar(np.array([1, 1, 1, 1, 1, 1, 0]), np.array([0, 0, 0, 0, 0, 0, 0]))
        McNemar(first=6, second=0, p=0.03125)

    Args:
        first: (count,) whether the first model is right.
        second: the same of the second.
    """
    first, second = np.asarray(first, bool), np.asarray(second, bool)
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    count, few = only_first + only_second, min(only_first, only_second)
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        for k in range(few + 1)
    ]
    tail = sum(math.exp(log - count * math.log(2)) for log in logs)
    return McNemar(only_first, only_second, round(min(1.0, 2 * tail), 12))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Corrects the probabilities of several tests for their number (Holm 1979).

    Example:
        >>> holm([0.01, 0.5, 0.02])
        [0.03, 0.5, 0.04]
    """
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    corrected, largest = [0.0] * len(probabilities), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, probabilities[place] * (len(probabilities) - rank)))
        corrected[place] = largest
    return corrected
