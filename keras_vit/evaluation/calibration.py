"""Calibration: whether a model that is sure by 80 per cent is right in 80 of 100 cases."""

import dataclasses

import numpy as np

# Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599, Section 5).
BINS = 15


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """How sure a model is, and how often it is right, in bins of equal width.

    Attributes:
        images: (bins,) how many images fall into each.
        confidence: (bins,) mean probability of the likeliest class; NaN in an empty bin.
        accuracy: (bins,) fraction of them that are right; NaN in an empty bin.
    """

    images: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray

    @property
    def error(self) -> float:
        """The expected calibration error: the mean gap of the bins, weighted by their images."""
        gap = np.abs(self.accuracy - self.confidence)
        return float(np.nansum(self.images * gap) / self.images.sum())

    @property
    def largest_gap(self) -> float:
        """The maximum calibration error: the gap of the worst bin."""
        return float(np.nanmax(np.abs(self.accuracy - self.confidence)))


def calibration(probabilities: np.ndarray, targets: np.ndarray, *, bins: int = BINS) -> Calibration:
    """Compares how sure a classifier is with how often it is right.

    Example:
        >>> sure = calibration(np.array([[0.9, 0.1]] * 10), np.array([0] * 7 + [1] * 3))
        >>> round(sure.error, 3)  # sure by 0.9, right in 0.7
        0.2

    Args:
        probabilities: (count, C), each row with sum 1.
        targets: (count,) the right classes.
        bins: how many equal parts of 0..1.

    Raises:
        ValueError: the rows are not probabilities, or the counts differ.
    """
    probabilities = np.asarray(probabilities, np.float64)
    targets = np.asarray(targets)
    if probabilities.ndim != 2 or probabilities.shape[:1] != targets.shape or bins < 1:
        raise ValueError(
            "calibration takes probabilities (count, classes), targets (count,), bins above 0. "
            f"Received: shapes {probabilities.shape} and {targets.shape}, bins={bins!r}."
        )
    if not len(targets) or np.abs(probabilities.sum(axis=1) - 1).max() > 1e-3:
        raise ValueError(
            "Each row must be probabilities with sum 1; apply softmax to logits first, and give at "
            f"least one row. Received: {len(targets)} rows."
        )
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == targets
    # A bin holds its upper edge, as in the paper: ((m - 1) / M, m / M].
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    images = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        return Calibration(
            images,
            np.bincount(place, weights=confidence, minlength=bins) / images,
            np.bincount(place, weights=right, minlength=bins) / images,
        )
