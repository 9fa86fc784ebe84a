"""What `keras-vit train` chooses where no flag says it, and `--plan`, which shows it."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from keras_vit.cli import flags, next_command, output, recipe_flags

if TYPE_CHECKING:
    from keras_vit import ViTConfig
    from keras_vit.data import ImageData
    from keras_vit.training import Execution, Recipe, TrainingPlan
    from keras_vit.training.planning import Started

# --weights of this name are fresh ones, and nothing is asked for.
NONE = "none"
# Flags that say what to train, so that nothing is left to choose.
_SAYING = ("model", "recipe", "set", "patch_size", "teacher")


class Decision(NamedTuple):
    """What to train, and how."""

    recipe: "Recipe"
    execution: "Execution"
    start: "Callable[[], Any]"  # makes the model
    weights: str | None = None  # as `training.Provenance.of` takes them
    variant: str | None = None  # that published weights are of
    teacher: str | None = None


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--plan`."""
    parser.add_argument(
        "--plan",
        action="store_true",
        help="look at the images and the machine, print what would be trained, and end; nothing is "
        "downloaded or written (default: train)",
    )


def decide(
    arguments: argparse.Namespace, data: "ImageData", *, config: "ViTConfig | None", given: Decision
) -> Decision:
    """Returns what to train: as it was started, as the flags say, or else what suits the images.

    The config is that of the flags, None where the model comes with its weights.
    """
    from keras_vit import training
    from keras_vit.training import planning

    is_open = not any(getattr(arguments, name) for name in _SAYING)
    is_open = is_open and arguments.data != "digits" and arguments.weights in (None, NONE)
    is_resumed = arguments.existing == "resume" and arguments.out is not None
    started = planning.Started.read(arguments.out) if is_resumed else None
    if started is None and planning.is_one_of_several():
        if is_open and training.is_first_worker() and not arguments.json:
            output.say("Several workers train together: nothing is chosen, the flags decide.")
        return given
    if started is None and is_open:
        plan = _chosen(arguments, data, given.execution)
        start = functools.partial(_begin, plan)
        given = Decision(plan.recipe, plan.execution, start, plan.weights, plan.model)
    elif started is None:
        plan = _described(arguments, data, config, given)
    else:
        given = _resumed(arguments, started, given, is_open=is_open)
        named = given._replace(weights=None, variant="as started")
        plan = _described(arguments, data, started.config, named)
    if arguments.plan or (is_open and started is None):
        _show(arguments, plan, is_started=started is not None)
    return given


def _resumed(
    arguments: argparse.Namespace, started: "Started", given: Decision, *, is_open: bool
) -> Decision:
    """What was started goes on, whatever can be reached now."""
    names = [name for name in ("precision", "accumulate") if getattr(arguments, name) is None]
    fields = {name: getattr(started, name) for name in names}
    given = given._replace(execution=dataclasses.replace(given.execution, **fields))
    if is_open:
        recipe = recipe_flags.override_recipe(started.recipe, arguments)
        return given._replace(recipe=recipe, start=lambda: started.config)
    return given


def _chosen(
    arguments: argparse.Namespace, data: "ImageData", execution: "Execution"
) -> "TrainingPlan":
    """No flag says what to train: what suits the images and the machine."""
    from keras_vit import training
    from keras_vit.training import planning

    if arguments.precision is None:
        execution = dataclasses.replace(execution, precision=planning.fast_precision(execution))
    weights, size = None if arguments.weights == NONE else planning.AUTO, arguments.image_size
    plan = training.plan(data, weights=weights, image_size=size, execution=execution)
    recipe = recipe_flags.override_recipe(plan.recipe, arguments)
    return dataclasses.replace(plan, recipe=recipe)


def _described(
    arguments: argparse.Namespace, data: "ImageData", config: "ViTConfig | None", given: Decision
) -> "TrainingPlan":
    """Returns the plan of what the flags say."""
    from keras_vit import VARIANTS, training

    name = given.variant
    if config is None and name and name in VARIANTS:
        size = arguments.image_size or given.recipe.image_size
        config = training.model_config(name, image_size=size)
    default = "digits-hybrid" if arguments.data == "digits" else "tiny"
    return training.TrainingPlan(
        data=data,
        model=name or (default if config else "the model"),
        config=config,
        recipe=given.recipe,
        execution=given.execution,
        weights=given.weights,
    )


def _begin(plan: "TrainingPlan") -> Any:
    with flags.saying_warnings():
        return plan.make_model()


def _show(arguments: argparse.Namespace, plan: "TrainingPlan", *, is_started: bool) -> None:
    if arguments.json:
        output.print_json("plan", **plan.to_dict())
        return
    choice = f"{arguments.out} goes on as it was started:" if is_started else plan.choice_text
    output.say(f"{choice} {plan.steps_text}")
    if arguments.plan:
        output.say_next(*next_command.after_plan(arguments))
