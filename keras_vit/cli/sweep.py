"""`keras-vit train --learning-rate sweep`: chooses the learning rate by short trainings."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import rich.progress

from keras_vit.cli import output
from keras_vit.cli.recipe_flags import SWEEP
from keras_vit.limits import counted

if TYPE_CHECKING:
    from keras_vit.data import ImageData
    from keras_vit.training import Event, Execution, Recipe, Sweep, TrialDone
    from keras_vit.training.objectives import Model


def sweep(
    arguments: argparse.Namespace,
    data: "ImageData",
    *,
    model: "Callable[[], Model]",
    recipe: "Recipe",
    execution: "Execution",
) -> "Recipe":
    """Returns the recipe, with the learning rate that a sweep chose where the flags ask for one."""
    if arguments.learning_rate != SWEEP:
        return recipe
    from keras_vit import training

    with _Display(json=arguments.json) as display:
        found = training.sweep_learning_rate(
            data,
            out=arguments.out,
            model=model,
            recipe=recipe,
            seed=arguments.seed,
            existing=arguments.existing,
            execution=execution,
            on_event=display.show,
        )
    display.finish(found)
    return found.recipe(recipe)


class _Display:
    """Shows a sweep: a bar and a line for each trial, or JSON."""

    def __init__(self, *, json: bool) -> None:
        self._json, self._is_begun = json, False
        is_hidden = json or not output.is_terminal()
        self._bar = rich.progress.Progress(transient=True, disable=is_hidden)
        self._task = self._bar.add_task("sweep", total=None)

    def __enter__(self) -> "_Display":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, event: "Event | TrialDone") -> None:
        """Shows one event of the trials."""
        from keras_vit import training

        if isinstance(event, training.StepDone):
            self._bar.update(self._task, completed=event.step, total=event.steps)
        elif isinstance(event, training.TrialDone):
            self._show_trial(event)

    def finish(self, found: "Sweep") -> None:
        """Prints the choice."""
        if self._json:
            output.print_json("sweep", **found.to_dict())
            return
        edge = " At the edge of those tried: others may be better." if found.is_at_edge else ""
        output.say(
            f"Learning rate {found.learning_rate:g}, of the lowest validation loss.{edge} The run "
            "has sweep.png and sweep.csv."
        )

    def _show_trial(self, event: "TrialDone") -> None:
        trial = event.trial
        if self._json:
            output.print_json("trial", **dataclasses.asdict(event))
            return
        if not self._is_begun:
            output.say(
                f"Sweep of the learning rate, {event.count} trainings of "
                f"{counted(event.steps, 'step')}:"
            )
            self._is_begun = True
        if trial.validation_loss is None:
            output.say(f"  {trial.learning_rate:g}: the loss was not finite")
            return
        accuracy = trial.validation_accuracy
        shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        output.say(f"  {trial.learning_rate:g}: validation loss {trial.validation_loss:.4f}{shown}")
