"""Writes the curves of a training for TensorBoard."""

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_vit import atomic
from keras_vit.training.execution import Workers
from keras_vit.training.progress import EpochDone
from keras_vit.training.run import EVENTS
from keras_vit.training.unfinished import Unfinished

EVERY = 10  # steps

_NUMBERS = {
    tf.errors.ResourceExhaustedError: errno.ENOSPC,
    tf.errors.PermissionDeniedError: errno.EACCES,
    tf.errors.NotFoundError: errno.ENOENT,
}

# As tf.summary.scalar makes it, which needs TensorBoard itself to be installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)


class EventFiles:
    """Event files in the folder of a training, written by its first worker.

    Args:
        folder: of the training.
        workers: those that train together.
    """

    def __init__(self, folder: Unfinished, workers: Workers) -> None:
        path = str(folder.path / EVENTS)
        is_first = workers.index == 0
        self._path = path
        with self._telling():
            self._writer = (
                tf.summary.create_file_writer(path) if is_first else tf.summary.create_noop_writer()
            )

    def close(self) -> None:
        """Brings to the files what is not there yet."""
        with self._telling():
            self._writer.close()

    def write_step(self, step: int, logs: dict[str, Any]) -> None:
        """Writes the numbers of one step, for one step in ten."""
        if step % EVERY == 0:
            self._write(step, {f"step/{name}": value for name, value in logs.items()})

    def write_epoch(self, step: int, done: EpochDone) -> None:
        """Writes the numbers of one epoch."""
        values = {
            "train/loss": done.loss,
            "train/accuracy": done.accuracy,
            "validation/loss": done.validation_loss,
            "validation/accuracy": done.validation_accuracy,
            "learning_rate": done.learning_rate,
        }
        self._write(step, {name: value for name, value in values.items() if value is not None})
        with self._telling():
            self._writer.flush()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Makes an error of the disk of TensorFlow's, which has no number."""
        try:
            yield
        except tf.errors.OpError as error:
            number = _NUMBERS.get(type(error), errno.EIO)
            with atomic.telling(self._path, kept="the checkpoints are kept", again="resume"):
                raise OSError(number, "") from error

    def _write(self, step: int, values: dict[str, Any]) -> None:
        with self._telling(), self._writer.as_default(step=step):
            for name, value in values.items():
                number = tf.cast(tf.reshape(value, ()), tf.float32)
                tf.summary.write(name, number, metadata=_SCALAR)
