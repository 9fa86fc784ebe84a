"""Published weights: finding, fetching, checking and loading checkpoint files, and writing them."""

from keras_vit.weights.catalog import catalog, resolve
from keras_vit.weights.loading import load, resize
from keras_vit.weights.positions import resample_positions
from keras_vit.weights.saving import save_npz

__all__ = ["catalog", "load", "resample_positions", "resize", "resolve", "save_npz"]
