"""Marks one rectangle in each image of a batch."""

import tensorflow as tf


def inside(starts: tf.Tensor, ends: tf.Tensor, *, shape: tf.Tensor) -> tf.Tensor:
    """Returns whether each pixel lies in the rectangle of its image.

    Example:
        >>> import tensorflow as tf
        >>> marked = inside([[0], [1]], [[1], [3]], shape=(2, 3))
        >>> tf.cast(marked[0, ..., 0], tf.int32).numpy().tolist()
        [[0, 1, 1], [0, 0, 0]]

    Args:
        starts: first row and first column of each, int32 of shape (2, batch).
        ends: the row and column after the last, int32 of shape (2, batch).
        shape: (height, width) of the images.

    Returns:
        Shape (batch, height, width, 1).
    """
    starts, ends = tf.convert_to_tensor(starts), tf.convert_to_tensor(ends)
    rows, columns = (
        (tf.range(shape[axis]) >= starts[axis, :, None])
        & (tf.range(shape[axis]) < ends[axis, :, None])
        for axis in (0, 1)
    )
    return (rows[:, :, None] & columns[:, None, :])[..., None]
