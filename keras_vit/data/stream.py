"""Labelled images that do not fit into memory: they are read again, in order, in each epoch."""

import functools

import numpy as np
import tensorflow as tf

from keras_vit.data.damage import Damage
from keras_vit.data.source import Split

# Encoded images that are shuffled at a time: 0.9 GB of ImageNet.
BUFFER = 8192


class Stream(Split):
    """A split that is read from a dataset of encoded images.

    Example:
        >>> import tensorflow as tf
        >>> image = tf.io.encode_png(tf.zeros((4, 4, 3), tf.uint8))
        >>> dataset = tf.data.Dataset.from_tensors((image, 1, "first")).repeat(3)
        >>> stream = Stream(dataset, count=3)
        >>> len(stream), stream.targets.tolist()
        (3, [1, 1, 1])

    Args:
        dataset: gives the bytes, the class and the name of each image; always in the same order.
        count: how many.
        damage: where training writes the names of images that it could not decode.
    """

    def __init__(
        self, dataset: tf.data.Dataset, *, count: int, damage: Damage | None = None
    ) -> None:
        self.__dict__.update(
            images=np.empty((0,), object), names=None, damage=damage or Damage(), dataset=dataset
        )
        self.__dict__["count"] = count

    def __len__(self) -> int:
        return int(self.__dict__["count"])

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """The class of each image, int32 of shape (count,); the first use reads all images."""
        classes = self.records.map(lambda contents, target, name: target)
        return np.fromiter(classes.as_numpy_iterator(), np.int32, len(self))

    @property
    def records(self) -> tf.data.Dataset:
        """The bytes, the class (int32) and the name of each image."""
        return self.__dict__["dataset"]

    @property
    def in_files(self) -> bool:
        """Whether `images` are paths: they are not."""
        return False

    def name(self, index: bytes) -> str:
        """Returns the name as text."""
        return index.decode(errors="replace")

    def shuffled(self, *, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns the records in an order that the seed decides, without decoding any.

        Blocks of the stream are shuffled, one after the other; where they begin is drawn too, so
        that the blocks of two seeds hold different images.

        Args:
            seed: two integers.
        """
        # Not `Dataset.shuffle`: it also depends on TensorFlow's global seed.
        first = tf.random.stateless_uniform(
            (), seed, maxval=min(BUFFER, len(self)), dtype=tf.int64, minval=0
        )
        records = self.records
        blocks = records.take(first).batch(BUFFER).concatenate(records.skip(first).batch(BUFFER))

        def shuffle(number: tf.Tensor, block: tuple[tf.Tensor, ...]) -> tf.data.Dataset:
            own = tf.random.experimental.stateless_fold_in(seed, number)
            places = tf.range(tf.size(block[1]))
            order = tf.random.experimental.stateless_shuffle(places, seed=own)
            return tf.data.Dataset.from_tensor_slices(tuple(tf.gather(x, order) for x in block))

        return blocks.enumerate().flat_map(lambda number, block: shuffle(number, block))
