"""Feeds a model: training batches that depend on (seed, step) alone, evaluation batches."""

import os

import tensorflow as tf

from keras_vit.data import augment, images, source

# What a draw is for; folded into the seed, so that no two uses share one stream.
_SHUFFLE, _CROP, _TRANSFORM, _ERASE = range(4)


def steps_per_epoch(split: source.Split, *, batch_size: int) -> int:
    """Returns the number of full batches in a pass over the split; at least one."""
    return max(len(split) // batch_size, 1)


def train_batches(
    split: source.Split,
    *,
    image_size: tuple[int, int],
    batch_size: int,
    epochs: int,
    seed: int,
    augmentation: augment.Augmentation,
    start_step: int = 0,
) -> tf.data.Dataset:
    """Makes the batches of a whole training run, epoch after epoch.

    Batch number `step` is a pure function of (seed, step): a run can be continued at any step with
    the same bits, and what is skipped is not decoded. Each epoch is shuffled anew; its incomplete
    last batch is dropped.

    Example:
        >>> from keras_vit.data import augment, digits
        >>> batches = train_batches(
        ...     digits.load_digits().train, image_size=(16, 16), batch_size=32, epochs=2, seed=0,
        ...     augmentation=augment.Augmentation(rotation=10))
        >>> images, targets = next(iter(batches))
        >>> images.shape.as_list(), targets.shape.as_list()
        ([32, 16, 16, 3], [32])

    Args:
        split: the images.
        image_size: (height, width) in pixels.
        batch_size: images in a batch; all of them if the split has fewer.
        epochs: passes over the split.
        seed: any integer of 64 bits.
        augmentation: how images are varied.
        start_step: first step to make.

    Returns:
        Pairs of images, float32 0..255 of shape (batch, height, width, 3), and targets, int32 of
        shape (batch,).
    """
    batch_size = min(batch_size, len(split))
    steps = steps_per_epoch(split, batch_size=batch_size)
    order = _shuffled_batches(
        len(split), batch_size=batch_size, epochs=epochs, seed=seed, start_step=start_step
    )
    numbered = tf.data.Dataset.zip(tf.data.Dataset.range(start_step, steps * epochs), order)

    def crops(step: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        boxes = augment.crop_boxes(
            batch_size, augmentation=augmentation, seed=_key(seed, _CROP, step)
        )
        return step, indices, boxes

    def transform(
        step: tf.Tensor, batch: tf.Tensor, targets: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        moved = augment.transform_batch(
            batch, augmentation=augmentation, seed=_key(seed, _TRANSFORM, step)
        )
        erased = augment.erase_squares(
            moved, augmentation=augmentation, seed=_key(seed, _ERASE, step)
        )
        return erased, targets

    load = _load_pixels if split.in_memory else _load_files
    loaded = load(
        numbered.map(crops),
        split,
        image_size=image_size,
        batch_size=batch_size,
        cropped=augmentation.crop < 1,
    )
    return loaded.map(transform, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def evaluation_batches(
    split: source.Split, *, image_size: tuple[int, int], batch_size: int
) -> tf.data.Dataset:
    """Makes the batches of one pass over a split, in order, the last one as short as it comes.

    Example:
        >>> from keras_vit.data import digits
        >>> test = digits.load_digits().test
        >>> batches = evaluation_batches(test, image_size=(8, 8), batch_size=200)
        >>> [len(targets) for images, targets in batches]
        [200, 159]

    Args:
        split: the images.
        image_size: (height, width) in pixels.
        batch_size: images in a batch.

    Returns:
        Pairs of images, float32 0..255 of shape (batch, height, width, 3), and targets, int32 of
        shape (batch,).
    """
    pairs = tf.data.Dataset.from_tensor_slices((_tensor(split), split.targets))
    if split.in_memory:
        batches = pairs.batch(batch_size).map(
            lambda x, y: (images.resize_image(x, size=image_size), y)
        )
    else:

        def load(path: tf.Tensor, target: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            image = images.decode_image(tf.io.read_file(path))
            return images.resize_image(image, size=image_size), target

        batches = pairs.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size)
    return batches.prefetch(tf.data.AUTOTUNE)


def _shuffled_batches(
    count: int, *, batch_size: int, epochs: int, seed: int, start_step: int
) -> tf.data.Dataset:
    """Positions of the images of each batch, from `start_step` on."""
    steps = count // batch_size

    def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(count), seed=_key(seed, _SHUFFLE, epoch)
        )
        return tf.data.Dataset.from_tensor_slices(
            tf.reshape(order[: steps * batch_size], (steps, batch_size))
        )

    first_epoch, skipped = divmod(start_step, steps)
    return tf.data.Dataset.range(first_epoch, epochs).flat_map(epoch_batches).skip(skipped)


def _load_pixels(
    numbered: tf.data.Dataset,
    split: source.Split,
    *,
    image_size: tuple[int, int],
    batch_size: int,
    cropped: bool,
) -> tf.data.Dataset:
    pixels, targets = _tensor(split), tf.constant(split.targets)

    def load(
        step: tf.Tensor, indices: tf.Tensor, boxes: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        batch = tf.gather(pixels, indices)
        if cropped:
            batch = tf.image.crop_and_resize(batch, boxes, tf.range(batch_size), image_size)
        else:
            batch = images.resize_image(batch, size=image_size)
        return step, batch, tf.gather(targets, indices)

    return numbered.map(load, num_parallel_calls=tf.data.AUTOTUNE)


def _load_files(
    numbered: tf.data.Dataset,
    split: source.Split,
    *,
    image_size: tuple[int, int],
    batch_size: int,
    cropped: bool,
) -> tf.data.Dataset:
    paths, targets = _tensor(split), tf.constant(split.targets)

    def load(
        step: tf.Tensor, index: tf.Tensor, box: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        image = images.decode_image(tf.io.read_file(paths[index]))
        if cropped:
            image = tf.image.crop_and_resize(image[None], box[None], [0], image_size)[0]
        else:
            image = images.resize_image(image, size=image_size)
        return step, image, targets[index]

    single = numbered.map(
        lambda step, indices, boxes: (tf.fill((batch_size,), step), indices, boxes)
    ).unbatch()
    loaded = single.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(
        batch_size, drop_remainder=True
    )
    return loaded.map(lambda steps, batch, classes: (steps[0], batch, classes))


def _tensor(split: source.Split) -> tf.Tensor:
    if split.in_memory:
        return tf.constant(split.images)
    return tf.constant(
        [os.fsencode(path) for path in split.images]
    )  # also names that are not UTF-8


def _key(seed: int, use: int, step: tf.Tensor) -> tf.Tensor:
    return tf.random.experimental.stateless_fold_in(tf.constant((seed, use), tf.int64), step)
