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


def replace_damaged(
    images: tf.Tensor,
    targets: tf.Tensor,
    *,
    places: tf.Tensor,
    names: tf.Tensor,
    damage: Damage,
    name: Callable[[Any], str],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes a batch of what could be loaded of it.

    In the place of each damaged image stands the next sound one, with its target.

    Args:
        images: those that could be loaded, in the order of the batch, (sound, height, width, 3).
        targets: theirs, shape (sound,).
        places: where in the batch they stand, int64 of shape (sound,).
        names: what `name` makes a name of, for each image of the batch, shape (batch,).
        damage: where the names go.
        name: makes a name of one of `names`.

    Returns:
        Images and targets of the whole batch.

    Raises:
        ValueError: none of the batch could be loaded; or one could not, where `damage` is strict.
            From `tf.data` it comes as `tf.errors.InvalidArgumentError`.
    """

    def record(damaged: np.ndarray, any_sound: np.ndarray) -> None:
        damaged_names = [name(one) for one in damaged]
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
            following = tf.searchsorted(places, batch_places) % tf.size(places)
        return tf.gather(images, following), tf.gather(targets, following)

    is_whole = tf.equal(tf.size(places), tf.size(names))
    pair = tf.cond(is_whole, lambda: (images, targets), replaced)
    return pair[0], pair[1]
