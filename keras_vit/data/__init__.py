"""Where images come from: sources, splits, decoding, augmentation, batches. TensorFlow only."""

from keras_vit.data.augment import Augmentation
from keras_vit.data.digits import load_digits
from keras_vit.data.folder import load_folder, load_test_folder
from keras_vit.data.images import decode_image, read_image, read_images, resize_image
from keras_vit.data.mix import mix_batch
from keras_vit.data.pipeline import evaluation_batches, train_batches
from keras_vit.data.source import ImageData, Split

__all__ = [
    "Augmentation",
    "ImageData",
    "Split",
    "decode_image",
    "evaluation_batches",
    "load_digits",
    "load_folder",
    "load_test_folder",
    "mix_batch",
    "read_image",
    "read_images",
    "resize_image",
    "train_batches",
]
