"""Mixes the images of a batch and their targets: MixUp (arXiv 1710.09412), CutMix (1905.04899)."""

from typing import Literal

import tensorflow as tf

from keras_vit.data import draws
from keras_vit.data.rectangles import inside

Mixing = Literal["image", "batch"]

TINY = 1e-30


def mix_batch(
    images: tf.Tensor,
    targets: tf.Tensor,
    *,
    alpha: float,
    seed: tf.Tensor,
    cutmix: float = 0.0,
    per: Mixing = "image",
    shard: tuple[int, int] = draws.WHOLE,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes each image and its target with those of another of the batch.

    MixUp blends the two images. CutMix pastes a rectangle of the other one, at the place where it
    was, cut at the border; the target's share is the area that is left. With both, each image, or
    each batch, gets one or the other, with equal chances.

    Example:
        >>> import tensorflow as tf
        >>> images, targets = mix_batch(tf.ones((2, 8, 8, 3)), tf.eye(2), alpha=0.2, seed=(1, 2))
        >>> float(tf.reduce_sum(targets))
        2.0

    Args:
        images: pixels, float32 of shape (batch, height, width, 3).
        targets: probabilities of the classes, float32 of shape (batch, classes).
        alpha: MixUp's: the share that an image keeps is drawn from Beta(alpha, alpha), or one minus
            that if it is less than half; 0 blends nothing.
        seed: two integers.
        cutmix: CutMix's alpha: the share that an image keeps, before the rectangle is cut at the
            border, is drawn from Beta(cutmix, cutmix); 0 pastes nothing.
        per: "image" draws a share, a rectangle and a partner for each image; "batch" draws one
            share, or rectangle, for all, and mixes each image with the one before it, as big_vision
            does. DeiT's (timm's "batch" mode) is the same on a shuffled batch: there images are
            mixed in pairs, and a share of b for the one is a share of 1 - b for the other.
        shard: (index of this worker, number of workers), see `keras_vit.data.train_batches`. An
            image is mixed with one that the same worker has.

    Returns:
        Images and targets of the same shapes.

    Source: of "batch", google-research/big_vision, big_vision/utils.py, get_mixup.
    """
    if not alpha and not cutmix:
        return images, targets
    count = tf.shape(images)[0]
    keys = tf.random.experimental.stateless_split(tf.convert_to_tensor(seed), 2)
    size = tf.shape(images)[1:3]
    if per == "batch":  # one draw, the same on every worker
        others = tf.roll(tf.range(count), shift=1, axis=0)
        kept, share = _kept(size, 1, alpha=alpha, cutmix=cutmix, seed=keys[0], shard=draws.WHOLE)
    else:
        # Another permutation on each worker; the shares are those of its part of the whole batch.
        order = tf.random.experimental.stateless_fold_in(keys[1], shard[0]) if shard[0] else keys[1]
        others = tf.random.experimental.stateless_shuffle(tf.range(count), seed=order)
        kept, share = _kept(size, count, alpha=alpha, cutmix=cutmix, seed=keys[0], shard=shard)
    images = images * kept + tf.gather(images, others) * (1 - kept)
    share = share[:, None]
    return images, targets * share + tf.gather(targets, others) * (1 - share)


def _kept(
    size: tf.Tensor,
    count: tf.Tensor,
    *,
    alpha: float,
    cutmix: float,
    seed: tf.Tensor,
    shard: tuple[int, int],
) -> tuple[tf.Tensor, tf.Tensor]:
    """How much is kept of each pixel, (count, height or 1, width or 1, 1), and of each target."""
    blended = tf.ones(count)
    if alpha:
        drawn = _gammas(count, alpha=alpha, seed=seed, shard=shard)
        blended = tf.reduce_max(drawn, axis=0) / tf.reduce_sum(drawn, axis=0)
    if not cutmix:
        return blended[:, None, None, None], blended
    keys = tf.random.experimental.stateless_split(seed, 2)
    drawn = draws.uniform(3, count, seed=keys[0], shard=shard)
    gammas = _gammas(count, alpha=cutmix, seed=keys[1], shard=shard)
    pasted = _rectangles(size, share=gammas[0] / tf.reduce_sum(gammas, axis=0), center=drawn[:2])
    cut = 1 - tf.cast(pasted, tf.float32)
    cuts = (drawn[2] < 0.5) if alpha else tf.ones(count, tf.bool)
    kept = tf.where(cuts[:, None, None, None], cut, blended[:, None, None, None])
    return kept, tf.where(cuts, tf.reduce_mean(cut, axis=(1, 2, 3)), blended)


def _rectangles(shape: tf.Tensor, *, share: tf.Tensor, center: tf.Tensor) -> tf.Tensor:
    """Rectangles of the area 1 - share around a centre, cut at the border."""
    size = tf.cast(shape[:, None], tf.float32)
    middle = tf.cast(center * size, tf.int32)
    lengths = tf.cast(tf.sqrt(1 - share) * size, tf.int32)
    starts = tf.maximum(middle - lengths // 2, 0)
    ends = tf.minimum(middle - lengths // 2 + lengths, shape[:, None])
    return inside(starts, ends, shape=shape)


def _gammas(
    count: tf.Tensor, *, alpha: float, seed: tf.Tensor, shard: tuple[int, int]
) -> tf.Tensor:
    """Two numbers for each image, whose share in their sum is Beta(alpha, alpha)."""
    drawn = tf.random.stateless_gamma((2, count * shard[1]), seed, alpha=alpha)
    drawn = drawn[:, count * shard[0] : count * (shard[0] + 1)]
    return tf.maximum(drawn, TINY)  # both may be too small for a float
