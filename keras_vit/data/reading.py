"""Says which image comes when; an image is an item until it is loaded.

An item is a tuple: (place,) in a split whose images are at hand, (bytes, class, name) of a stream.
Its last element is what `Split.name` takes.
"""

import os
from collections.abc import Callable

import tensorflow as tf

from keras_vit.data.source import Split
from keras_vit.data.stream import Stream

Item = tuple[tf.Tensor, ...]


def ordered_items(split: Split) -> tf.data.Dataset:
    """Returns the items of one pass, in the order of the split."""
    if isinstance(split, Stream):
        return split.records
    return tf.data.Dataset.range(len(split)).map(lambda place: (place,))


def fetcher(split: Split) -> Callable[[Item], tuple[tf.Tensor, tf.Tensor]]:
    """Returns what makes of an item the pixels, the bytes or the path of its image, and its class.

    Example:
        >>> import numpy as np
        >>> split = Split(images=np.array(["a.png", "b.png"], object), targets=np.array([4, 5]))
        >>> contents, target = fetcher(split)((1,))
        >>> contents.numpy(), int(target)
        (b'b.png', 5)
    """
    if isinstance(split, Stream):
        return lambda item: (item[0], item[1])
    # Also names that are not UTF-8.
    images = [os.fsencode(path) for path in split.images] if split.in_files else split.images
    contents, targets = tf.constant(images), tf.constant(split.targets)
    return lambda item: (contents[item[0]], targets[item[0]])


def shuffled_items(
    split: Split,
    *,
    batch_size: int,
    epochs: int,
    key: Callable[[tf.Tensor], tf.Tensor],
    start_step: int,
    rows: slice,
) -> tf.data.Dataset:
    """Returns the items of each batch of a run, each epoch in an order of its own.

    Args:
        split: the images.
        batch_size: images in a batch; the incomplete last one of an epoch is dropped.
        epochs: passes over the split.
        key: makes the seed of an epoch.
        start_step: first batch to make.
        rows: the part of each batch that is wanted.
    """
    steps = len(split) // batch_size
    first_epoch, skipped = divmod(start_step, steps)

    def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
        if isinstance(split, Stream):
            items = split.shuffled(seed=key(epoch))
            return items.batch(batch_size, drop_remainder=True).take(steps)
        order = tf.random.experimental.stateless_shuffle(tf.range(len(split)), seed=key(epoch))
        order = tf.reshape(order[: steps * batch_size], (steps, batch_size))
        return tf.data.Dataset.from_tensor_slices((order,))

    whole = tf.data.Dataset.range(first_epoch, epochs).flat_map(epoch_batches).skip(skipped)
    return whole.map(lambda *item: tuple(part[rows] for part in item))
