"""Experiment trackers: MLflow and Weights & Biases, by their own clients."""

import contextlib
import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from keras_vit import atomic, environment
from keras_vit.training import run
from keras_vit.training.progress import EpochDone, Event, TrainingDone


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """Hands the epochs of a training to "mlflow" or "wandb"; it is an `on_event` of `train`.

    Each goes on with its active run, or with that of a resumed training, or begins one. One that
    fails later is left out of `names`, with a warning.
    """

    def __init__(
        self, names: Iterable[str], *, out: str | Path, settings: dict[str, Any] | None = None
    ) -> None:
        self.names, self._out, self._settings = tuple(names), Path(out), run.flat(settings or {})
        self._runs: dict[str, Any] = {}
        for name in self.names:
            if name not in TRACKERS:
                raise ValueError(f"There is no tracker {name!r}; choose from mlflow, wandb.")
            with environment.installed(f"--log {name} needs {TRACKERS[name][0]}", name):
                importlib.import_module(name)

    def __exit__(self, *error: Any) -> None:
        self._each(lambda opened, log: opened.__exit__(*error))

    def __call__(self, event: Event) -> None:
        """Records an event; raises an OSError where a tracker cannot begin."""
        if self.names and not self._runs and not isinstance(event, TrainingDone):
            self._begin()
        if isinstance(event, EpochDone):
            logs = {name.replace("validation", "val"): n for name, n in _numbers(vars(event))}
            self._each(lambda opened, log: log(logs, step=event.epoch))
        elif isinstance(event, TrainingDone) and (event.run.path / run.METRICS).is_file():
            results = dict(_numbers(run.flat(run.read_fields(event.run.path / run.METRICS))))
            self._each(lambda opened, log: log(results))

    def _begin(self) -> None:
        file = run.unfinished_path(self._out) / run.TRACKERS
        known = run.read_fields(file) if file.is_file() else {}
        for name in self.names:
            _, advice, begin = TRACKERS[name]
            opened = begin(self._out.name, self._settings, known.get(name))
            try:
                known[name], log = opened.__enter__()
            except Exception as error:  # the clients have many kinds
                reason = " ".join(str(error).split())
                advice = f"{advice}, or train without --log {name}."
                raise OSError(f"{name} cannot begin a run ({reason}); {advice}") from error
            self._runs[name] = opened, log
        with atomic.whole_file(file) as temporary:
            temporary.write_text(json.dumps(known), encoding="utf-8")

    def _each(self, use: Callable[..., object]) -> None:
        for name in [name for name in self.names if name in self._runs]:
            try:
                use(*self._runs[name])
            except Exception as error:  # a training is worth more than its record elsewhere
                self.names = tuple(other for other in self.names if other != name)
                reason = " ".join(str(error).split())
                text = f"{name} records nothing more of this training: {reason}"
                warnings.warn(text, stacklevel=3)


@contextlib.contextmanager
def _mlflow(name: str, settings: dict[str, Any], identity: str | None) -> Iterator[Any]:
    mlflow = importlib.import_module("mlflow")
    with contextlib.ExitStack() as stack:
        if mlflow.active_run() is None:
            run_name = None if identity else name
            stack.enter_context(mlflow.start_run(identity, run_name=run_name))
        if identity is None:
            mlflow.log_params(settings)
        yield mlflow.active_run().info.run_id, mlflow.log_metrics


@contextlib.contextmanager
def _wandb(name: str, settings: dict[str, Any], identity: str | None) -> Iterator[Any]:
    wandb = importlib.import_module("wandb")
    with contextlib.ExitStack() as stack:
        if wandb.run is None:
            project = os.environ.get("WANDB_PROJECT", "keras-vit")
            quiet = wandb.Settings(silent=True, console="off")  # standard output is ours
            known = {"id": identity, "resume": "allow", "config": settings, "settings": quiet}
            wandb.init(project=project, name=name, **known)
            stack.push(lambda kind, *_: wandb.finish(exit_code=int(kind is not None)))
        wandb.define_metric("epoch/*", step_metric="epoch/epoch")

        def log(numbers: dict[str, float], step: int | None = None) -> None:
            epoch = {} if step is None else {"epoch/epoch": step}
            prefix = "epoch/" if epoch else ""
            wandb.log({prefix + name: number for name, number in numbers.items()} | epoch)

        yield wandb.run.id, log


def _numbers(fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if name.endswith(("loss", "accuracy", "learning_rate")) and value is not None:
            yield name.replace(".", "_"), value


# What each is called, what to do where it cannot begin, and what begins it.
TRACKERS = {
    "mlflow": ("MLflow", "check MLFLOW_TRACKING_URI", _mlflow),
    "wandb": ("Weights & Biases", "run wandb login, or set WANDB_MODE=offline", _wandb),
}
