"""Published weights: opening checkpoint files, checking them, loading them into a model."""

from keras_vit.weights.checkpoint import load
from keras_vit.weights.positions import resample_positions

__all__ = ["load", "resample_positions"]
