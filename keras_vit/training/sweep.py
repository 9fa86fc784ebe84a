"""`sweep_learning_rate`: chooses a learning rate by short trainings, as the paper did."""

import dataclasses
import gc
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit import backend
from keras_vit.data import ImageData
from keras_vit.limits import is_number
from keras_vit.training import run
from keras_vit.training.checkpoints import SETTINGS, Unfinished
from keras_vit.training.execution import Execution, Job
from keras_vit.training.objectives import Model, objective_of
from keras_vit.training.outcome import TERMINATED, TrainingInterrupted
from keras_vit.training.progress import Event
from keras_vit.training.recipe import Recipe
from keras_vit.training.settings import RESUME_OR_REPLACE
from keras_vit.training.train import check_free, default_config, default_recipe, train
from keras_vit.training.trials import Record, Sweep, Trial, TrialDone, finite

# Of the paper's fine-tuning (arXiv 2010.11929, Table 4: Pets, Flowers and CIFAR-100).
MOMENTUM_RATES = (0.001, 0.003, 0.01, 0.03)
# Times the recipe's own rate, for AdamW and LAMB; the paper's steps.
FACTORS = (0.1, 0.3, 1.0, 3.0)
SHARE = 0.2  # of the steps of the training


def sweep_learning_rate(
    data: ImageData,
    *,
    out: str | os.PathLike[str],
    model: Model | Callable[[], Model] | None = None,
    recipe: Recipe | None = None,
    rates: Sequence[float] | None = None,
    share: float = SHARE,
    seed: int = 0,
    existing: run.Existing = "refuse",
    execution: Execution | None = None,
    on_event: Callable[[Event | TrialDone], None] | None = None,
) -> Sweep:
    """Chooses the learning rate of a training by shorter ones, on the validation images.

    Each trial has its own schedule, from the warm-up to its end, in a share of the steps. `train`
    to the same `out`, with `sweep.recipe(recipe)`, then writes sweep.csv and sweep.png into the
    run, and the trials into config.json. Until then they are in the folder of the unfinished
    training. A sweep that was interrupted is resumed as a training is; trials that are complete
    are not repeated.

    Example:
        >>> import dataclasses, tempfile
        >>> from keras_vit.data import load_digits
        >>> from keras_vit.training import RECIPES
        >>> recipe = dataclasses.replace(RECIPES["digits"], epochs=None, steps=4)
        >>> out = tempfile.mkdtemp()
        >>> sweep = sweep_learning_rate(load_digits(), out=out, recipe=recipe, rates=(1e-6, 2e-3))
        >>> [trial.learning_rate for trial in sweep.trials]
        [1e-06, 0.002]
        >>> trained = train(load_digits(), out=out, recipe=sweep.recipe(recipe))
        >>> trained.config["sweep"]["learning_rate"] == sweep.learning_rate
        True

    Args:
        data: images in three splits; the test split is not used.
        out: the run directory of the training.
        model: as in `train`. A model is given back with the weights that it has now.
        recipe: of the training.
        rates: learning rates to try; None for the paper's 0.001, 0.003, 0.01 and 0.03 with the
            optimizer "momentum", and with others for 0.1, 0.3, 1 and 3 times the recipe's.
        share: fraction of the training's steps in a trial.
        seed: as in `train`.
        existing: as in `train`. "resume" of a finished run returns its sweep.
        execution: as in `train`.
        on_event: called with the events of each trial, see `train`, and a `TrialDone` after it.

    Returns:
        The trials, and the learning rate of the lowest validation loss.

    Raises:
        FileExistsError: as in `train`; or another sweep is unfinished.
        FloatingPointError: the loss is not finite with any learning rate.
        TrainingInterrupted: Ctrl-C or SIGTERM; the sweep can be resumed.
        ValueError: there are several workers, or what is resumed has other settings or no sweep.
    """
    out, recipe = Path(out), recipe or default_recipe(data)
    job = Job(data, recipe=recipe, execution=execution or Execution(), seed=seed)
    check_free(out, existing=existing)
    folder = Unfinished(out)
    is_begun = existing == "resume" and folder.exists()
    if existing == "resume" and run.is_run(out) and not is_begun:
        return _of_run(out)
    rates = _rates(recipe, rates)
    with run.hold(out):
        trials = _Trials(job, model or default_config(data), Record(folder.path), on_event)
        if is_begun:
            return trials.ended()
        try:
            return trials.run_all(rates, share=_checked(share), existing=existing)
        except KeyboardInterrupt as interruption:
            is_terminated = getattr(interruption, "exit_code", 0) == TERMINATED
            raise TrainingInterrupted(
                f"Interrupted in the sweep of the learning rate: what is done of it is in "
                f"{str(trials.record.folder)!r}, resume it (existing='resume', --resume).",
                path=trials.record.folder,
                signal_number=signal.SIGTERM if is_terminated else signal.SIGINT,
            ) from None


class _Trials:
    """What the trials of a sweep have in common, and how they are run."""

    def __init__(
        self,
        job: Job,
        model: Any,
        record: Record,
        on_event: Callable[[Event | TrialDone], None] | None,
    ) -> None:
        self.record = record
        self._job, self._model = job, model
        self._on_event = on_event or (lambda event: None)
        engine = job.execution.make_engine()
        if engine.count > 1:
            raise ValueError(
                f"A sweep runs in one process. Received: {engine.count} workers; choose the "
                "learning rate with one of them first, and give it to all (--learning-rate)."
            )
        # A model is trained in place: each trial starts from what it is now.
        self._variables = list(model.variables) if isinstance(model, keras.Model) else []
        self._values = [np.array(backend.values_of(variable)) for variable in self._variables]
        with engine.scope():
            self._settings = objective_of(model, job).settings()

    def ended(self) -> Sweep:
        """Returns the sweep that chose the learning rate of an unfinished training.

        Raises:
            ValueError: there is none, or it is for other settings.
        """
        if not self.record.exists():
            folder = self.record.folder.parent
            rate = run.read_fields(folder / SETTINGS)["recipe"]["learning_rate"]
            raise _no_sweep(f"training in {str(folder)!r}", rate)
        return self.record.read(self._settings)

    def run_all(self, rates: Sequence[float], *, share: float, existing: run.Existing) -> Sweep:
        """Runs the trials that are not done yet."""
        steps = max(round(self._job.plan.steps * share), 1)
        done = self._done(steps, existing=existing)
        for number, rate in enumerate(rates, start=1):
            if rate not in done:
                done[rate] = self._run_one(rate, steps)
                self.record.write(self._settings, Sweep(steps=steps, trials=tuple(done.values())))
                shutil.rmtree(self._place(rate), ignore_errors=True)
            self._on_event(
                TrialDone(trial=done[rate], number=number, count=len(rates), steps=steps)
            )
        sweep = Sweep(steps=steps, trials=tuple(done[rate] for rate in rates))
        _ = sweep.learning_rate  # raises if there is none
        self.record.write(self._settings, sweep)
        return sweep

    def _done(self, steps: int, *, existing: run.Existing) -> dict[float, Trial]:
        """Returns the trials of this length that are done, by their rates."""
        if existing == "refuse" and self.record.exists():
            raise FileExistsError(
                f"{str(self.record.folder)!r} holds an unfinished sweep; {RESUME_OR_REPLACE}."
            )
        if existing == "resume" and self.record.exists():
            sweep = self.record.read(self._settings)
            if sweep.steps == steps:
                return {trial.learning_rate: trial for trial in sweep.trials}
        shutil.rmtree(self.record.folder, ignore_errors=True)
        self.record.write(self._settings, Sweep(steps=steps, trials=()))
        return {}

    def _run_one(self, rate: float, steps: int) -> Trial:
        recipe, plan = self._job.recipe, self._job.plan
        short = dataclasses.replace(
            recipe,
            epochs=None,
            steps=steps,
            learning_rate=rate,
            warmup=min(plan.warmup_steps / plan.steps, 0.99),
            keep="last",
            patience=None,
            average=None,  # it is longer than a trial
        )
        try:
            result = train(
                self._job.data,
                out=self._place(rate),
                model=self._model,
                recipe=short,
                seed=self._job.seed,
                existing="resume",
                execution=self._job.execution,
                on_event=self._on_event,
            ).config["result"]
        except FloatingPointError:
            result = {"validation_loss": None, "validation_accuracy": None}
            shutil.rmtree(run.unfinished_path(self._place(rate)), ignore_errors=True)
        finally:
            for variable, value in zip(self._variables, self._values, strict=True):
                variable.assign(value)
            gc.collect()  # models are in circles of references
        numbers = {name: finite(result[f"validation_{name}"]) for name in ("loss", "accuracy")}
        return Trial(
            learning_rate=rate,
            validation_loss=numbers["loss"],
            validation_accuracy=numbers["accuracy"],
        )

    def _place(self, rate: float) -> Path:
        return self.record.folder / f"{rate:g}"


def _of_run(out: Path) -> Sweep:
    config = run.read_fields(out / run.CONFIG)
    if "sweep" not in config:
        raise _no_sweep(f"run {str(out)!r}", config["recipe"]["learning_rate"])
    return Sweep.from_dict(config["sweep"])


def _no_sweep(what: str, rate: float) -> ValueError:
    return ValueError(
        f"No sweep chose the learning rate of the {what}; resume it with its own "
        f"(--learning-rate {rate:g})."
    )


def _rates(recipe: Recipe, rates: Sequence[float] | None) -> tuple[float, ...]:
    """Returns the rates to try, in ascending order."""
    if rates is None and recipe.optimizer == "momentum":
        return MOMENTUM_RATES
    if rates is None:
        rates = [float(f"{recipe.learning_rate * factor:.3g}") for factor in FACTORS]
    if not rates or not all(is_number(rate) and 0 < rate <= 100 for rate in rates):
        raise ValueError(f"rates must be numbers above 0, at most 100. Received: rates={rates!r}.")
    return tuple(sorted(set(map(float, rates))))


def _checked(share: float) -> float:
    if not is_number(share) or not 0 < share <= 1:
        raise ValueError(f"share must be above 0, at most 1. Received: share={share!r}.")
    return share
