"""Experiment trackers: MLflow and Weights & Biases, by their own Keras callbacks."""

import json
import os
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import tensorflow as tf

from keras_vit import atomic, environment
from keras_vit.training import run
from keras_vit.training.progress import EpochDone, Event, TrainingDone

TRACKERS = ("mlflow", "wandb")


class Trackers:
    """Hands the epochs of a training to experiment trackers; it is an `on_event` of `train`.

    Each tracker begins a run of its own with the first step, or goes on with the active one. A
    training that is resumed goes on with the tracker's run of before. Where the tracker keeps its
    runs, and under which project, its own environment variables say, such as MLFLOW_TRACKING_URI,
    MLFLOW_EXPERIMENT_NAME, WANDB_MODE and WANDB_PROJECT.

    Example:
        >>> with Trackers((), out="photos-run") as trackers:
        ...     print(trackers.names)
        ()

    Args:
        names: some of `TRACKERS`.
        out: the run directory of the training; its name is the name of the run.
        settings: numbers and words to record with the run, such as those of the recipe.

    Attributes:
        names: the trackers that are in use; one that fails in the middle of a training is left out
            with a warning.

    Raises:
        ImportError: a tracker's package is not installed.
        ValueError: there is no such tracker.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        out: str | os.PathLike[str],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        listed = tuple(dict.fromkeys(names))
        unknown = sorted({*listed} - {*TRACKERS})
        if unknown:
            raise ValueError(
                f"There is no tracker {unknown[0]!r}; choose from {', '.join(TRACKERS)}."
            )
        self._all = {name: _KINDS[name]() for name in listed}
        self._out, self._settings = Path(out), dict(_flat(settings or {}))
        self._has_begun = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._all)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._each(lambda tracker: tracker.end(failed=kind is not None))

    def __call__(self, event: Event) -> None:
        """Records an event.

        Raises:
            OSError: a tracker cannot begin a run.
        """
        if not self._has_begun and not isinstance(event, TrainingDone):
            self._has_begun = True
            self._begin()
        if isinstance(event, EpochDone):
            self._each(lambda tracker: tracker.record(event))
        elif isinstance(event, TrainingDone) and self._has_begun:
            results = _results(event.run.path / run.METRICS)
            self._each(lambda tracker: tracker.summarise(results))

    def _begin(self) -> None:
        file = run.unfinished_path(self._out) / run.TRACKERS
        known = run.read_fields(file) if file.is_file() else {}
        for name, tracker in self._all.items():
            try:
                known[name] = tracker.begin(self._out.name, self._settings, known.get(name))
            except Exception as error:  # the libraries have many kinds
                reason = " ".join(str(error).split())
                raise OSError(
                    f"{name} cannot begin a run ({reason}); {tracker.advice}, or train without "
                    f"--log {name}."
                ) from error
        if known:
            with atomic.whole_file(file) as temporary:
                temporary.write_text(json.dumps(known), encoding="utf-8")

    def _each(self, use: "Callable[[_Tracker], None]") -> None:
        """Does something with each tracker; without those whose network or disk fails."""
        for name, tracker in list(self._all.items()):
            try:
                use(tracker)
            except Exception as error:  # a training is worth more than its record elsewhere
                del self._all[name]
                reason = " ".join(str(error).split())
                text = f"{name} records nothing more of this training: {reason}"
                warnings.warn(text, stacklevel=3)


class _Tracker:
    """One tracker."""

    advice = ""

    def begin(self, name: str, settings: Mapping[str, Any], identity: str | None) -> str:
        """Begins a run, or goes on with the one of this identity, and returns its identity."""
        raise NotImplementedError

    def record(self, epoch: EpochDone) -> None:
        """Records an epoch."""
        raise NotImplementedError

    def summarise(self, results: Mapping[str, float]) -> None:
        """Records the results of the training."""
        raise NotImplementedError

    def end(self, *, failed: bool) -> None:
        """Ends the run, if it was begun here."""
        raise NotImplementedError


class _MLflow(_Tracker):
    advice = "check MLFLOW_TRACKING_URI"

    def __init__(self) -> None:
        with environment.installed("--log mlflow needs MLflow", "mlflow"):
            import mlflow
            import mlflow.keras
        self._library: Any = mlflow
        self._is_ours = False
        self._callback = mlflow.keras.MlflowCallback()

    def begin(self, name: str, settings: Mapping[str, Any], identity: str | None) -> str:
        active = self._library.active_run()
        if active is None:
            self._is_ours = True
            active = self._library.start_run(run_id=identity, run_name=None if identity else name)
        if identity is None:
            self._library.log_params(settings)
        found: str = active.info.run_id
        return found

    def record(self, epoch: EpochDone) -> None:
        logs = {**_logs(epoch), "learning_rate": epoch.learning_rate}
        self._callback.on_epoch_end(epoch.epoch, logs)

    def summarise(self, results: Mapping[str, float]) -> None:
        self._library.log_metrics(results)

    def end(self, *, failed: bool) -> None:
        self._library.flush_async_logging()
        if self._is_ours:
            self._library.end_run("FAILED" if failed else "FINISHED")


class _WandB(_Tracker):
    advice = "run wandb login, or set WANDB_MODE=offline"

    def __init__(self) -> None:
        with environment.installed("--log wandb needs Weights & Biases", "wandb"):
            import wandb
            from wandb.integration.keras import WandbMetricsLogger
        self._library: Any = wandb
        self._callback_class, self._is_ours = WandbMetricsLogger, False
        self._rate = tf.Variable(0.0, trainable=False)

    def begin(self, name: str, settings: Mapping[str, Any], identity: str | None) -> str:
        if self._library.run is None:
            self._is_ours = True
            self._library.init(
                project=os.environ.get("WANDB_PROJECT", "keras-vit"),
                name=name,
                id=identity,
                resume="allow",
                config=dict(settings),
                # Standard output is ours: lines, a bar, or JSON.
                settings=self._library.Settings(silent=True, console="off"),
            )
        self._callback = self._callback_class()
        # It asks the model for the learning rate, which is in the record of an epoch.
        optimizer = types.SimpleNamespace(learning_rate=self._rate)
        self._callback.set_model(types.SimpleNamespace(optimizer=optimizer))
        found: str = self._library.run.id
        return found

    def record(self, epoch: EpochDone) -> None:
        self._rate.assign(epoch.learning_rate)
        self._callback.on_epoch_end(epoch.epoch, _logs(epoch))

    def summarise(self, results: Mapping[str, float]) -> None:
        self._library.run.summary.update(dict(results))

    def end(self, *, failed: bool) -> None:
        if self._is_ours and self._library.run is not None:
            self._library.finish(exit_code=int(failed))


_KINDS: dict[str, type[_Tracker]] = {"mlflow": _MLflow, "wandb": _WandB}


def _logs(epoch: EpochDone) -> dict[str, float]:
    """Returns the numbers of an epoch under the names that `fit` of Keras gives them."""
    values = {
        "loss": epoch.loss,
        "accuracy": epoch.accuracy,
        "val_loss": epoch.validation_loss,
        "val_accuracy": epoch.validation_accuracy,
    }
    return {name: value for name, value in values.items() if value is not None}


def _results(file: Path) -> dict[str, float]:
    """Returns the numbers in metrics.json, such as test_accuracy; none if it is not there."""
    metrics = run.read_fields(file) if file.is_file() else {}
    return {
        f"{split}_{name}": float(values[name])
        for split, values in metrics.items()
        for name in ("accuracy", "top5_accuracy", "loss")
        if isinstance(values, dict) and name in values
    }


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        inner = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat
