"""Where images come from: sources, splits, decoding, augmentation, batches.

TensorFlow reads and varies the images. On another backend it does so on the host alone, and leaves
the accelerators to that backend.
"""

import contextlib

import keras
import tensorflow as tf

from keras_vit.config import Resizing
from keras_vit.data.augment import Augmentation, mix_batch
from keras_vit.data.datasets import from_dataset, from_keras_cv, load_data, load_digits, load_tfds
from keras_vit.data.folder import (
    PIPE,
    NamedImage,
    load_folder,
    load_test_folder,
    load_unlabelled_folder,
    named_images,
)
from keras_vit.data.images import FORMATS, decode_image, read_image, read_images, resize_image
from keras_vit.data.pipeline import (
    Views,
    evaluation_batches,
    naming_damaged,
    resizing_of,
    train_batches,
)
from keras_vit.data.source import Damage, ImageData, SkippedFile, Split

if keras.backend.backend() != "tensorflow":
    for _kind in ("GPU", "TPU"):
        with contextlib.suppress(RuntimeError):  # where TensorFlow computed already, it has them
            tf.config.set_visible_devices([], _kind)
del contextlib, keras, tf

__all__ = ["FORMATS", "PIPE", "Augmentation", "Damage", "ImageData", "NamedImage", "Resizing",
           "SkippedFile", "Split", "Views", "decode_image", "evaluation_batches", "from_dataset",
           "from_keras_cv", "load_data", "load_digits", "load_folder", "load_test_folder",
           "load_tfds", "load_unlabelled_folder", "mix_batch", "named_images", "naming_damaged",
           "read_image", "read_images", "resize_image", "resizing_of", "train_batches"]  # fmt: skip
