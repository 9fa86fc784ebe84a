"""Feeds a model: training batches that depend on (seed, step) alone, evaluation batches."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.data import augment, decoding, images, randaugment
from keras_vit.data.images import replace_damaged
from keras_vit.data.source import Choice, Item, Loader, Passes, Split, untuned
from keras_vit.data.views import Views

# What a draw is for; folded into the seed, so that no two uses share one stream.
_SHUFFLE, _CROP, _TRANSFORM, _ERASE, _RANDAUGMENT = range(5)
# What is made at once: single images, and whole batches, which memory must hold.
_PARALLEL = environment.cores()
_BATCHES, _READY = min(_PARALLEL, 8), 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """The arguments of `train_batches`; `count` images of each batch are this worker's."""

    image_size: tuple[int, int]
    batch_size: int
    steps: int
    epochs: int
    seed: int
    augmentation: augment.Augmentation
    antialias: bool
    start_step: int
    shard: tuple[int, int]

    def resize(self, image: tf.Tensor) -> tf.Tensor:
        return images.resize_image(image, size=self.image_size, antialias=self.antialias)

    @property
    def count(self) -> int:
        return self.batch_size // self.shard[1]

    @property
    def rows(self) -> slice:
        return slice(self.count * self.shard[0], self.count * (self.shard[0] + 1))

    def key(self, use: int, step: tf.Tensor) -> tf.Tensor:
        return augment.draw_key(self.seed, use, step)


def steps_per_epoch(split: Split, *, batch_size: int) -> int:
    """Returns the number of full batches in a pass over the split; at least one."""
    return max(len(split) // batch_size, 1)


def train_batches(
    split: Split,
    *,
    image_size: tuple[int, int],
    batch_size: int,
    epochs: int,
    seed: int,
    augmentation: augment.Augmentation,
    antialias: bool = True,
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
        ...     load_digits().train, image_size=(16, 16), batch_size=32, epochs=2, seed=0,
        ...     augmentation=augment.Augmentation(rotation=10))
        >>> images, targets = next(iter(batches))
        >>> images.shape.as_list(), targets.shape.as_list()
        ([32, 16, 16, 3], [32])

    Args:
        split: the images.
        image_size: (height, width) in pixels.
        batch_size: images in a batch, of all workers together; all of them if the split has fewer.
        epochs: passes over the split.
        seed: any integer of 64 bits.
        augmentation: how images are varied.
        antialias: whether shrinking smooths; for a model, `antialias_of(model)`.
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
    plan = _Plan(
        image_size=image_size,
        batch_size=batch_size,
        steps=steps_per_epoch(split, batch_size=batch_size),
        epochs=epochs,
        seed=seed,
        augmentation=augmentation,
        antialias=antialias,
        start_step=start_step,
        shard=shard,
    )
    alone = augmentation.is_cropped or augmentation.randaugment_layers or not split.in_memory
    batches = _load_singly(split, plan) if alone else _load_together(split, plan)
    remaining = dataclasses.replace(augmentation, flip=augmentation.flip and not alone)

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


def evaluation_batches(
    split: Split,
    *,
    image_size: tuple[int, int],
    batch_size: int,
    resize_small: float = 0.0,
    antialias: bool = True,
    views: Views | None = None,
    shard: tuple[int, int] = augment.WHOLE,
) -> tf.data.Dataset:
    """Makes the batches of one pass over a split, in order, the last one as short as it comes.

    Example:
        >>> from keras_vit.data import load_digits
        >>> test = load_digits().test
        >>> batches = evaluation_batches(test, image_size=(8, 8), batch_size=200)
        >>> [len(targets) for images, targets in batches]
        [200, 159]

    Args:
        split: the images.
        image_size: (height, width) in pixels.
        batch_size: images in a batch.
        resize_small: 0 resizes the whole image, to another aspect if need be. From 1 on, the short
            side is resized to this many times `image_size`, and the middle is cut out.
        antialias: whether shrinking smooths; for a model, `antialias_of(model)`.
        views: of test-time augmentation, which take the place of the whole image; None for none.
        shard: (index of this worker, number of workers): of so many images in a row it reads one.

    Returns:
        Pairs of images, float32 0..255 of shape (batch, height, width, 3), and targets, int32 of
        shape (batch,). With views there are batch * views images, those of an image together.
    """
    resize = functools.partial(images.resize_image, size=image_size, antialias=antialias)
    prepare = resize
    if views is not None:
        prepare = functools.partial(views.stack, size=image_size, antialias=antialias)
    index, count = shard
    if split.in_memory and not resize_small and views is None:
        pairs = tf.data.Dataset.from_tensor_slices((tf.constant(split.images), split.targets))
        batches = untuned(pairs).shard(count, index).batch(batch_size)
        resized = batches.map(lambda x, y: (resize(x), y), num_parallel_calls=_BATCHES)
        return resized.prefetch(_READY)

    def choose(shape: tf.Tensor) -> tf.Tensor:
        return augment.small_part(shape, size=image_size, ratio=resize_small, place=[0.5, 0.5])

    @tf.autograph.experimental.do_not_convert
    def load(*item: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pixels = loader.pixels(item, choose if resize_small else None)
        return prepare(pixels), loader.target(item)

    loader = split.loader()
    # A stream does not know its length by itself.
    items = split.items().apply(tf.data.experimental.assert_cardinality(len(split)))
    examples = items.shard(count, index).map(load, num_parallel_calls=_PARALLEL)
    batches = examples.batch(batch_size)
    if views is not None:
        batches = batches.map(lambda x, y: (tf.reshape(x, (-1, *image_size, 3)), y))
    return batches.prefetch(_READY)


@contextlib.contextmanager
def naming_damaged(split: Split, *, trained: Split | None = None) -> Iterator[None]:
    """Names the images that cannot be decoded, where the use of a split's batches ends in an error.

    In training most are replaced; of the images `trained` on, those are named that ended it. The
    training can be resumed once the images are as they were at its start.

    Example:
        >>> import numpy as np
        >>> split = Split(images=np.array([b"no image"], object), targets=np.array([0]))
        >>> with naming_damaged(split):
        ...     next(iter(evaluation_batches(split, image_size=(8, 8), batch_size=1)))
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


def _damaged_names(split: Split) -> list[str]:
    loader = split.loader()

    def look(place: tf.Tensor, item: Item) -> tf.Tensor:
        return decoding.once_made(place, loader.pixels(item, None))

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


def _load_together(split: Split, plan: _Plan) -> tf.data.Dataset:
    """Steps, images and targets of pixels in memory that are only resized, a batch at a time."""
    pixels, targets = tf.constant(split.images), tf.constant(split.targets)

    def load(step: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return step, plan.resize(tf.gather(pixels, indices)), tf.gather(targets, indices)

    items = _steps_and_items(split, plan).map(lambda step, item: (step, item[0]))
    return items.map(load, num_parallel_calls=_BATCHES)


def _load_singly(split: Split, plan: _Plan) -> tf.data.Dataset:
    """Steps, images and targets, each image decoded, cropped and varied by itself."""
    singly = _Singly(split, split.loader(), plan)
    batches = _steps_and_items(split, plan).map(singly.attach)
    return batches.interleave(
        singly.load_batch, cycle_length=2, num_parallel_calls=2, deterministic=True
    )


@dataclasses.dataclass(frozen=True)
class _Singly:
    """How the images of a batch are loaded one by one, each with random numbers of its own."""

    split: Split
    loader: Loader
    plan: _Plan

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.plan.image_size, 3)

    def attach(self, step: tf.Tensor, item: Item) -> tuple[tf.Tensor, ...]:
        """Gives each item of a batch the seed of its crop and the numbers that vary it."""
        plan = self.plan
        cropping = augment.draw_keys(plan.count, seed=plan.key(_CROP, step), shard=plan.shard)
        varying = augment.draw_uniform(
            randaugment.DRAWS * plan.augmentation.randaugment_layers,
            plan.count,
            seed=plan.key(_RANDAUGMENT, step),
            shard=plan.shard,
        )
        key = plan.key(_TRANSFORM, step)
        mirroring = augment.draw_transforms(plan.count, seed=key, shard=plan.shard)[-1]
        return step, item, cropping, tf.transpose(varying), mirroring

    def load_batch(self, step: tf.Tensor, *parts: tf.Tensor) -> tf.data.Dataset:
        """One batch; where that is an error, what can be loaded of it is made a batch."""
        single, count = tf.data.Dataset.from_tensor_slices(parts), self.plan.count
        examples = single.map(self._load_one, num_parallel_calls=_PARALLEL)
        batch = examples.batch(count, drop_remainder=True)
        if not self.split.in_memory:
            placed = single.enumerate().map(self._load_placed, num_parallel_calls=_PARALLEL)
            sound = placed.ignore_errors(log_warning=False).batch(count)
            nothing = (np.zeros(0, np.int64), np.zeros((0, *self.shape), np.float32))
            none = tf.data.Dataset.from_tensors((*nothing, np.zeros(0, np.int32)))
            substitute = sound.concatenate(none).take(1).map(self._mend(names=parts[0][-1]))
            batch = batch.ignore_errors(log_warning=False).concatenate(substitute).take(1)
        return batch.map(lambda images, targets: (step, images, targets))

    @tf.autograph.experimental.do_not_convert
    def _load_one(
        self, item: Item, crop_seed: tf.Tensor, varying: tf.Tensor, mirroring: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        image, augmentation = self._load(item, crop_seed), self.plan.augmentation
        uniform = decoding.once_made(varying, image)
        magnitude = augmentation.randaugment_magnitude
        varied = randaugment.distort(image, magnitude=magnitude, uniform=uniform)
        mirrored = augment.mirror(varied, uniform=mirroring) if augmentation.flip else varied
        return mirrored, self.loader.target(item)

    @tf.autograph.experimental.do_not_convert
    def _load_placed(
        self, place: tf.Tensor, parts: tuple[Item, tf.Tensor, tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, ...]:
        return place, *self._load_one(*parts)

    def _load(self, item: Item, crop_seed: tf.Tensor) -> tf.Tensor:
        pixels = self.loader.pixels(item, _choice(self.plan, seed=crop_seed))
        return tf.ensure_shape(self.plan.resize(pixels), self.shape)

    def _mend(self, *, names: tf.Tensor) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
        split = self.split

        def mend(
            places: tf.Tensor, images: tf.Tensor, targets: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor]:
            return replace_damaged(
                images, targets, places=places, names=names, damage=split.damage, name=split.name
            )

        return mend


def _steps_and_items(split: Split, plan: _Plan) -> tf.data.Dataset:
    """The steps with this worker's items, each epoch in an order of its own."""
    passes = Passes(
        key=functools.partial(plan.key, _SHUFFLE),
        batch_size=plan.batch_size,
        epochs=plan.epochs,
        first_step=plan.start_step,
        rows=plan.rows,
    )
    steps = tf.data.Dataset.range(plan.start_step, plan.steps * plan.epochs)
    return tf.data.Dataset.zip(untuned(steps), split.shuffled_batches(passes))


def _choice(plan: _Plan, *, seed: tf.Tensor) -> Choice | None:
    """How a part of an image is chosen at random, or None if it is not."""
    augmentation = plan.augmentation

    def choose(shape: tf.Tensor) -> tf.Tensor:
        if augmentation.resize_small:
            place = tf.random.stateless_uniform((2,), seed)
            ratio = augmentation.resize_small
            return augment.small_part(shape, size=plan.image_size, ratio=ratio, place=place)
        return augment.inception_part(shape, smallest_area=augmentation.crop, seed=seed)

    return choose if augmentation.is_cropped else None
