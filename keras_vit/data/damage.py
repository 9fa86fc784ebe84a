"""Training goes on when an image cannot be decoded: another replaces it, and its name is logged."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_LOGGER = logging.getLogger(__name__)


class Damage:
    """The names of the images that could not be decoded while training.

    Example:
        >>> damage = Damage()
        >>> damage.add("cat/7.jpg")
        >>> damage.names
        ('cat/7.jpg',)

    Args:
        strict: whether such an image ends the training, instead of being replaced and named.

    Attributes:
        fatal: the sentence that a training ended with, as an error in a graph loses its type.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.fatal: str | None = None
        self._names: set[str] = set()
        self._lock = threading.Lock()  # tf.data calls from several threads

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_names, (self.strict, self.names)  # a lock cannot be copied

    def add(self, name: str) -> None:
        """Adds a name, and logs it the first time."""
        with self._lock:
            is_known = name in self._names
            self._names.add(name)
        if not is_known:
            _LOGGER.warning("%r cannot be decoded; another image stands in for it.", name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names so far, in alphabetic order."""
        with self._lock:
            return tuple(sorted(self._names))


def _with_names(strict: bool, names: tuple[str, ...]) -> Damage:
    damage = Damage(strict=strict)
    damage._names.update(names)
    return damage


def try_load(
    load: Callable[[], tf.Tensor], *, shape: tuple[int, int, int]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Loads an image inside a graph, where an error cannot be caught.

    Example:
        >>> import tensorflow as tf
        >>> def load():
        ...     return tf.cast(tf.io.decode_png("no image"), tf.float32)
        >>> _, sound = try_load(load, shape=(1, 1, 3))
        >>> bool(sound)
        False

    Args:
        load: makes the image, float32.
        shape: (height, width, 3) of the image.

    Returns:
        The image, float32, black if it could not be loaded; and whether it could.
    """
    # A dataset is the one thing in a graph that goes on after an error.
    black = tf.data.Dataset.from_tensors((tf.zeros(shape), False))
    pairs = tf.data.Dataset.from_tensors(0).map(lambda _: (tf.ensure_shape(load(), shape), True))
    first = pairs.ignore_errors(log_warning=False).concatenate(black).take(1)
    image, sound = first.get_single_element()
    return image, sound


def replace_damaged(
    images: tf.Tensor,
    targets: tf.Tensor,
    *,
    sound: tf.Tensor,
    names: tf.Tensor,
    damage: Damage,
    name: Callable[[Any], str],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Puts the next sound image of the batch, with its target, in the place of each damaged one.

    Args:
        images: shape (batch, height, width, 3).
        targets: shape (batch,).
        sound: whether each could be loaded, shape (batch,).
        names: what `name` makes a name of, shape (batch,).
        damage: where the names go.
        name: makes a name of one of `names`.

    Returns:
        Images and targets of the same shapes.

    Raises:
        ValueError: none of the batch could be loaded; or one could not, where `damage` is strict.
            From `tf.data` it comes as `tf.errors.InvalidArgumentError`.
    """

    def record(names: np.ndarray, any_sound: np.ndarray) -> None:
        damaged_names = [name(one) for one in names]
        if damage.strict or not any_sound:
            reason = "be decoded" if damage.strict else "be decoded, which is all of a batch"
            listed = ", ".join(map(repr, damaged_names))
            damage.fatal = f"{listed} cannot {reason}; repair or remove the images."
            raise ValueError(damage.fatal)
        for one in damaged_names:
            damage.add(one)

    def replaced() -> tuple[tf.Tensor, tf.Tensor]:
        tf.numpy_function(record, [tf.boolean_mask(names, ~sound), tf.reduce_any(sound)], [])
        places = tf.range(tf.size(targets))
        following = (places[:, None] + places) % tf.size(targets)
        first = tf.argmax(tf.cast(tf.gather(sound, following), tf.int32), axis=1)
        replacements = tf.gather(following, first, batch_dims=1)
        return tf.gather(images, replacements), tf.gather(targets, replacements)

    pair = tf.cond(tf.reduce_all(sound), lambda: (images, targets), replaced)
    return pair[0], pair[1]
