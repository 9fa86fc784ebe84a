"""Feeds a model: training batches that depend on (seed, step) alone, evaluation batches, views.

Shapes: images are float32 (batch, height, width, 3) in 0..255, targets int32 (batch,).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.backend.private import layers_of
from keras_vit.config import Resizing, ViTConfig
from keras_vit.data import augment, images, randaugment
from keras_vit.data.source import Choice, Item, Split, untuned

# What a draw is for; folded into the seed, so that no two uses share one stream.
_SHUFFLE, _CROP, _TRANSFORM, _ERASE, _RANDAUGMENT = range(5)
_CENTER = (0.5, 0.5)  # where the crops of test-time augmentation lie
_CORNERS = ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
# What is made at once: single images, and whole batches, which memory must hold.
_PARALLEL = environment.cores()
_BATCHES, _READY = min(_PARALLEL, 8), 2


def steps_per_epoch(split: Split, *, batch_size: int) -> int:
    """Returns the number of full batches in a pass over the split; at least one."""
    return max(len(split) // batch_size, 1)


def train_batches(
    split: Split,
    *,
    resizing: Resizing,
    batch_size: int,
    epochs: int,
    seed: int,
    augmentation: augment.Augmentation,
    start_step: int = 0,
    shard: tuple[int, int] = augment.WHOLE,
) -> tf.data.Dataset:
    """Makes the batches of a whole training run, epoch after epoch.

    Batch number `step` is a pure function of (seed, step): a run can be continued at any step with
    the same bits, and what is skipped is not decoded. Each epoch is shuffled anew; its incomplete
    last batch is dropped.

    The batches of all workers, one after the other, are the batch of a single one to the bit; each
    decodes no more than its own. An image that cannot be decoded is replaced by the next of its
    worker's batch, and `split.damage` keeps its name.

    Example:
        >>> from keras_vit.data import augment, load_digits
        >>> batches = train_batches(
        ...     load_digits().train, resizing=Resizing((16, 16)), batch_size=32, epochs=2, seed=0,
        ...     augmentation=augment.Augmentation(rotation=10))
        >>> images, targets = next(iter(batches))
        >>> images.shape.as_list(), targets.shape.as_list()
        ([32, 16, 16, 3], [32])

    Args:
        split: the images.
        resizing: to which size, and how; for a model, `resizing_of(model)`. What is cropped at
            random is not cropped again.
        batch_size: images in a batch, of all workers together; all of them if the split has fewer.
        epochs: passes over the split.
        seed: any integer of 64 bits.
        augmentation: how images are varied.
        start_step: first step to make.
        shard: (index of this worker, number of workers).

    Returns:
        Pairs of images, float32 0..255 of shape (batch, height, width, 3), and targets, int32 of
        shape (batch,).

    Raises:
        ValueError: there is no such worker, or the workers cannot share a batch equally.
    """
    batch_size = min(batch_size, len(split))
    _check_shard(shard, batch_size)
    plan = _Training(
        split=split,
        resizing=resizing.uncropped if augmentation.is_cropped else resizing,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        augmentation=augmentation,
        start_step=start_step,
        shard=shard,
    )
    is_alone = augmentation.is_cropped or augmentation.randaugment_layers or not split.in_memory
    batches = plan.load_singly() if is_alone else plan.load_together()
    remaining = dataclasses.replace(augmentation, flip=augmentation.flip and not is_alone)

    @tf.autograph.experimental.do_not_convert
    def transform(
        step: tf.Tensor, batch: tf.Tensor, targets: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        transformed = augment.transform_batch(
            batch, augmentation=remaining, seed=plan.key(_TRANSFORM, step), shard=shard
        )
        augmented = augment.erase_rectangles(
            transformed, probability=augmentation.erase, seed=plan.key(_ERASE, step), shard=shard
        )
        return augmented, targets

    return batches.map(transform, num_parallel_calls=_BATCHES).prefetch(_READY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Views:
    """The views of an image in test-time augmentation: crops at several scales, and their mirrors.

    The first view is the whole image, which is what a model sees without test-time augmentation.
    Crops have the aspect of the image, and are resized as the whole is.

    Example:
        >>> views = Views(flip=True)
        >>> views.count
        14
        >>> views.stack(tf.zeros((60, 80, 3), tf.uint8), Resizing((32, 32))).shape.as_list()
        [14, 32, 32, 3]

    Attributes:
        flip: whether each view is seen mirrored, too; right where training mirrored images.
        scales: sides of the crops from the middle, as fractions of those of the image, beside the
            whole.
        shifted: side of the crops from the four corners, as such a fraction; None for none.

    Raises:
        ValueError: a side is not above 0 and below 1.
    """

    flip: bool = False
    scales: tuple[float, ...] = (0.9, 0.8)
    shifted: float | None = 0.9

    def __post_init__(self) -> None:
        sides = (*self.scales, *(() if self.shifted is None else (self.shifted,)))
        if not all(0 < side < 1 for side in sides):
            raise ValueError(
                "The crops of test-time augmentation have sides above 0 and below 1. "
                f"Received: scales={self.scales!r}, shifted={self.shifted!r}."
            )

    @property
    def crops(self) -> tuple[tuple[float, tuple[float, float]], ...]:
        """The side of each crop, and its place, (0, 0) for top left to (1, 1) for bottom right."""
        corners = [(self.shifted, place) for place in _CORNERS] if self.shifted else []
        return ((1.0, _CENTER), *((side, _CENTER) for side in self.scales), *corners)

    @property
    def count(self) -> int:
        """How many views there are of an image."""
        return len(self.crops) * (2 if self.flip else 1)

    def stack(self, image: Any, resizing: Resizing) -> tf.Tensor:
        """Returns the views of one image.

        Args:
            image: pixels of shape (height, width, 3).
            resizing: of each view, see `keras_vit.data.resize_image`.

        Returns:
            The pixels, float32 in 0..255 of shape (count, height, width, 3).
        """
        image = tf.convert_to_tensor(image)
        parts = [_crop(image, side, place) for side, place in self.crops]
        seen = [images.resize_image(part, resizing) for part in parts]
        mirrored = [view[:, ::-1] for view in seen] if self.flip else []
        return tf.ensure_shape(tf.stack([*seen, *mirrored]), (self.count, *resizing.size, 3))

    def to_dict(self) -> dict[str, Any]:
        """Returns what was used as plain values that JSON can carry."""
        return {**dataclasses.asdict(self), "scales": list(self.scales), "views": self.count}


def evaluation_batches(
    split: Split,
    *,
    resizing: Resizing,
    batch_size: int,
    views: Views | None = None,
    shard: tuple[int, int] = augment.WHOLE,
) -> tf.data.Dataset:
    """Makes the batches of one pass over a split, in order, the last one as short as it comes.

    Example:
        >>> from keras_vit.data import load_digits
        >>> test = load_digits().test
        >>> batches = evaluation_batches(test, resizing=Resizing((8, 8)), batch_size=200)
        >>> [len(targets) for images, targets in batches]
        [200, 159]

    Args:
        split: the images.
        resizing: to which size, and how; for a model, `resizing_of(model)`.
        batch_size: images in a batch.
        views: of test-time augmentation, which take the place of the whole image; None for none.
        shard: (index of this worker, number of workers): of so many images in a row it reads one.

    Returns:
        Pairs of images, float32 0..255 of shape (batch, height, width, 3), and targets, int32 of
        shape (batch,). With views there are batch * views images, those of an image together.
    """
    stack = images.resize_image if views is None else views.stack
    prepare = functools.partial(stack, resizing=resizing)
    index, count = shard
    if split.in_memory and views is None:
        pairs = tf.data.Dataset.from_tensor_slices((tf.constant(split.images), split.targets))
        batches = untuned(pairs).shard(count, index).batch(batch_size)
        resized = batches.map(lambda x, y: (prepare(x), y), num_parallel_calls=_BATCHES)
        return resized.prefetch(_READY)

    @tf.autograph.experimental.do_not_convert
    def load(*item: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return prepare(loader.pixels(item, None)), loader.target(item)

    loader = split.loader()
    # Records do not know their number by themselves.
    items = split.items().apply(tf.data.experimental.assert_cardinality(len(split)))
    examples = items.shard(count, index).map(load, num_parallel_calls=_PARALLEL)
    batches = examples.batch(batch_size)
    if views is not None:
        batches = batches.map(lambda x, y: (tf.reshape(x, (-1, *resizing.size, 3)), y))
    return batches.prefetch(_READY)


def resizing_of(model: Any) -> Resizing:
    """Returns to which size images are resized for a model, and how.

    Example:
        >>> import keras
        >>> resizing_of(keras.Sequential([keras.Input((32, 48, 3)), keras.layers.Flatten()]))[:3]
        ((32, 48), True, 'bilinear')

    Args:
        model: a model with a `ViTConfig`, or around one, which decides; for any other the whole
            image is resized, with anti-aliasing.

    Raises:
        ValueError: it takes images of any size, or contains two Vision Transformers that differ.
    """
    shape = getattr(model, "input_shape", None)
    if not isinstance(shape, tuple) or len(shape) != 4 or None in shape[1:3]:
        raise ValueError(
            "Images are resized to the size that the model takes, and this model names none; give "
            "one for images of one size, as keras_vit.resize(model, (height, width, 3)) makes it. "
            f"Received: a model for inputs of shape {shape or 'that are not known'}."
        )
    size = (shape[1], shape[2])
    layers = [model] if isinstance(getattr(model, "config", None), ViTConfig) else layers_of(model)
    # Of a model, of what stands for an exported one, and of layers of a model.
    names = ("config", "model_config")
    configs = [getattr(each, name, None) for each in layers for name in names]
    said = {each.resizing(size) for each in configs if isinstance(each, ViTConfig)}
    if len(said) > 1:
        rows = zip(Resizing._fields, *sorted(said, reverse=True)[:2], strict=True)
        name, one, other = next(row for row in rows if row[1] != row[2])
        raise ValueError(
            f"The model {model.name!r} contains Vision Transformers with {name}={one!r} and with "
            f"{name}={other!r}, so that no image is right for both; rebuild one of them."
        )
    return said.pop() if said else Resizing(size)


@contextlib.contextmanager
def naming_damaged(split: Split, *, trained: Split | None = None) -> Iterator[None]:
    """Names the images that cannot be decoded, where the use of a split's batches ends in an error.

    In training most are replaced; of the images `trained` on, those are named that ended it. The
    training can be resumed once the images are as they were at its start.

    Example:
        >>> import numpy as np
        >>> split = Split(images=np.array([b"no image"], object), targets=np.array([0]))
        >>> with naming_damaged(split):
        ...     next(iter(evaluation_batches(split, resizing=Resizing((8, 8)), batch_size=1)))
        Traceback (most recent call last):
        ValueError: 1 of 1 images cannot be decoded, the first is 'image 0'; repair or remove them.

    Raises:
        ValueError: there are such images.
    """
    try:
        yield
    except images.DECODER_ERRORS:
        if trained is not None and trained.damage.fatal is not None:
            raise ValueError(trained.damage.fatal) from None
        names = _damaged_names(split)
        if not names:
            raise
        advice = "repair or remove them"
        if trained is not None:
            advice = "put them back as they were and resume (--resume), or begin anew (--overwrite)"
        raise ValueError(
            f"{len(names)} of {len(split)} images cannot be decoded, the first is {names[0]!r}; "
            f"{advice}."
        ) from None


def _crop(image: tf.Tensor, side: float, place: tuple[float, float]) -> tf.Tensor:
    if side == 1:
        return image
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    size = tf.maximum(tf.round(side * shape), 1)
    start = tf.cast(tf.round(tf.constant(place) * (shape - size)), tf.int32)
    end = start + tf.cast(size, tf.int32)
    return image[start[0] : end[0], start[1] : end[1]]


def _damaged_names(split: Split) -> list[str]:
    loader = split.loader()

    def look(place: tf.Tensor, item: Item) -> tf.Tensor:
        return images.with_control_dependency(place, loader.pixels(item, None))

    loaded = split.items().enumerate().map(look, num_parallel_calls=_PARALLEL)
    sound = set(loaded.ignore_errors(log_warning=False).as_numpy_iterator())
    names = split.items().map(lambda *item: item[-1]).as_numpy_iterator()
    return [split.name(name) for place, name in enumerate(names) if place not in sound]


def _check_shard(shard: tuple[int, int], batch_size: int) -> None:
    index, workers = shard
    if not 0 <= index < workers:
        raise ValueError(
            f"shard is (index, number of workers), the index from 0. Received: shard={shard!r}."
        )
    if batch_size % workers:
        raise ValueError(
            f"{workers} workers cannot share batches of {batch_size} images equally; choose a "
            "batch size that their number divides, not above the number of training images."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Training:
    split: Split
    resizing: Resizing
    batch_size: int
    epochs: int
    seed: int
    augmentation: augment.Augmentation
    start_step: int
    shard: tuple[int, int]

    @property
    def count(self) -> int:
        return self.batch_size // self.shard[1]

    def key(self, use: int, step: tf.Tensor) -> tf.Tensor:
        return augment.draw_key(self.seed, use, step)

    def items(self) -> tf.data.Dataset:
        steps = steps_per_epoch(self.split, batch_size=self.batch_size)
        first_epoch, first_step = divmod(self.start_step, steps)
        rows = slice(self.count * self.shard[0], self.count * (self.shard[0] + 1))

        def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
            places, seed = tf.range(len(self.split)), self.key(_SHUFFLE, epoch)
            order = tf.random.experimental.stateless_shuffle(places, seed=seed)
            return tf.data.Dataset.from_tensor_slices(order).batch(self.batch_size).take(steps)

        batches = tf.data.Dataset.range(first_epoch, self.epochs).flat_map(epoch_batches)
        positions = batches.skip(first_step).map(
            lambda batch: tf.ensure_shape(batch, (self.batch_size,))[rows]
        )
        numbers = tf.data.Dataset.range(self.start_step, steps * self.epochs)
        return tf.data.Dataset.zip(untuned(numbers), self.split.items_at(positions))

    def load_together(self) -> tf.data.Dataset:
        pixels, targets = tf.constant(self.split.images), tf.constant(self.split.targets)

        def load(step: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            resized = images.resize_image(tf.gather(pixels, indices), self.resizing)
            return step, resized, tf.gather(targets, indices)

        items = self.items().map(lambda step, item: (step, item[0]))
        return items.map(load, num_parallel_calls=_BATCHES)

    def load_singly(self) -> tf.data.Dataset:
        loader, shape = self.split.loader(), (*self.resizing.size, 3)

        @tf.autograph.experimental.do_not_convert
        def load_one(
            item: Item, crop_seed: tf.Tensor, varying: tf.Tensor, mirroring: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor]:
            pixels = loader.pixels(item, self._choice(crop_seed))
            image = tf.ensure_shape(images.resize_image(pixels, self.resizing), shape)
            uniform = images.with_control_dependency(varying, image)
            magnitude = self.augmentation.randaugment_magnitude
            image = randaugment.distort(image, magnitude=magnitude, uniform=uniform)
            if self.augmentation.flip:
                image = augment.mirror(image, uniform=mirroring)
            return image, loader.target(item)

        def load_batch(step: tf.Tensor, *parts: tf.Tensor) -> tf.data.Dataset:
            # As a whole first, which takes a quarter less processor time than image by image with
            # a place for errors; only a batch with a damaged image is loaded once more.
            single = tf.data.Dataset.from_tensor_slices(parts)
            examples = single.map(load_one, num_parallel_calls=_PARALLEL)
            batch = examples.batch(self.count, drop_remainder=True)
            if not self.split.in_memory:
                placed = single.enumerate().map(
                    lambda place, each: (place, *load_one(*each)), num_parallel_calls=_PARALLEL
                )
                sound = placed.ignore_errors(log_warning=False).batch(self.count)
                nothing = (np.zeros(0, np.int64), np.zeros((0, *shape), np.float32))
                none = tf.data.Dataset.from_tensors((*nothing, np.zeros(0, np.int32)))
                replace = functools.partial(_replace_damaged, self.split, parts[0][-1])
                substitute = sound.concatenate(none).take(1).map(replace)
                batch = batch.ignore_errors(log_warning=False).concatenate(substitute).take(1)
            return batch.map(lambda images, targets: (step, images, targets))

        items = self.items().map(self._with_draws)
        return items.interleave(
            load_batch, cycle_length=2, num_parallel_calls=2, deterministic=True
        )

    def _with_draws(self, step: tf.Tensor, item: Item) -> tuple[tf.Tensor, ...]:
        """Gives each item of a batch the seed of its crop and the numbers that vary it."""
        cropping = augment.draw_keys(self.count, seed=self.key(_CROP, step), shard=self.shard)
        varying = augment.draw_uniform(
            randaugment.DRAWS * self.augmentation.randaugment_layers,
            self.count,
            seed=self.key(_RANDAUGMENT, step),
            shard=self.shard,
        )
        key = self.key(_TRANSFORM, step)
        mirroring = augment.draw_transforms(self.count, seed=key, shard=self.shard)[-1]
        return step, item, cropping, tf.transpose(varying), mirroring

    def _choice(self, seed: tf.Tensor) -> Choice | None:
        ratio = self.augmentation.resize_small

        def choose(shape: tf.Tensor) -> tf.Tensor:
            if ratio:
                place = tf.random.stateless_uniform((2,), seed)
                return augment.small_part(shape, size=self.resizing.size, ratio=ratio, place=place)
            return augment.inception_part(shape, smallest_area=self.augmentation.crop, seed=seed)

        return choose if self.augmentation.is_cropped else None


def _replace_damaged(
    split: Split, names: tf.Tensor, places: tf.Tensor, images: tf.Tensor, targets: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes a batch of the sound images, of which `places` (count,) are those in the batch."""
    damage = split.damage

    def record(damaged: np.ndarray, any_sound: np.ndarray) -> None:
        damaged_names = [split.name(one) for one in damaged]
        if damage.strict or not any_sound:
            reason = "be decoded" if damage.strict else "be decoded, which is all of a batch"
            listed = ", ".join(map(repr, damaged_names))
            damage.fatal = f"{listed} cannot {reason}; repair or remove the images."
            raise ValueError(damage.fatal)
        for one in damaged_names:
            damage.add(one)

    def replaced() -> tuple[tf.Tensor, tf.Tensor]:
        batch_places = tf.range(tf.size(names, tf.int64))
        sound = tf.reduce_any(tf.equal(batch_places[:, None], places), axis=1)
        done = tf.numpy_function(record, [tf.boolean_mask(names, ~sound), tf.reduce_any(sound)], [])
        with tf.control_dependencies([] if done is None else [done]):
            # The next sound image stands in for a damaged one.
            following = tf.searchsorted(places, batch_places) % tf.size(places)
        return tf.gather(images, following), tf.gather(targets, following)

    is_whole = tf.equal(tf.size(places), tf.size(names))
    pair = tf.cond(is_whole, lambda: (images, targets), replaced)
    return pair[0], pair[1]
