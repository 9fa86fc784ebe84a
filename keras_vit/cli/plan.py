"""What `keras-vit train` chooses where no flag says it, and `--plan`, which shows it."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import rich.progress

from keras_vit.cli import flags, next_command, output, recipe_flags

if TYPE_CHECKING:
    from keras_vit import VisionTransformer, ViTConfig
    from keras_vit.data import ImageData
    from keras_vit.training import Execution, Provenance, Recipe, TrainingPlan
    from keras_vit.training.planning import Started

# --weights of this name are fresh ones, and nothing is asked for.
NONE = "none"
# Flags that say what to train, so that nothing is left to choose.
_SAYING = ("model", "recipe", "set", "patch_size", "teacher")


class Decision(NamedTuple):
    """What to train, and how.

    Attributes:
        recipe: the recipe.
        execution: the execution.
        start: makes the model.
        weights: what it starts from, as `training.Provenance.of` takes it; None for fresh weights.
        variant: that published weights are of.
        teacher: that it learns from, if any.
    """

    recipe: "Recipe"
    execution: "Execution"
    start: "Callable[[], Any]"
    weights: str | None = None
    variant: str | None = None
    teacher: str | None = None

    def provenance(self, command: str) -> "Provenance":
        """Returns what the run says of where it comes from."""
        from keras_vit import training

        return training.Provenance.of(
            command, weights=self.weights, model=self.variant, teacher=self.teacher
        )


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--plan`."""
    parser.add_argument(
        "--plan",
        action="store_true",
        help="look at the images and the machine, print what would be trained and how long it "
        "takes, and end; nothing is downloaded or written (default: train)",
    )


def leaves_open(arguments: argparse.Namespace) -> bool:
    """Whether no flag says what to train: neither a model, nor weights, nor a recipe."""
    is_said = any(getattr(arguments, name) for name in _SAYING)
    return not is_said and arguments.data != "digits" and arguments.weights in (None, NONE)


def decide(
    arguments: argparse.Namespace, data: "ImageData", *, config: "ViTConfig | None", given: Decision
) -> Decision:
    """Returns what to train: as it was started, as the flags say, or else what suits the images.

    Args:
        arguments: the command line's.
        data: the images.
        config: the model of the flags, None where it comes with its weights.
        given: what the flags say, or the defaults before this looked at the images.
    """
    from keras_vit import training
    from keras_vit.training import planning

    is_open = leaves_open(arguments)
    is_resumed = arguments.existing == "resume" and arguments.out is not None
    started = planning.Started.read(arguments.out) if is_resumed else None
    if started is not None:
        return _resumed(arguments, data, started, given)
    if planning.is_one_of_several():
        if is_open and training.is_first_worker() and not arguments.json:
            output.say("Several workers train together: nothing is chosen, the flags decide.")
        return given
    if is_open:
        return _chosen(arguments, data, given.execution)
    return _checked(arguments, data, config, given)


def _resumed(
    arguments: argparse.Namespace, data: "ImageData", started: "Started", given: Decision
) -> Decision:
    """What was started goes on, whatever can be reached now."""
    from keras_vit.training import planning

    execution, recipe = given.execution, given.recipe
    if arguments.precision is None:
        execution = dataclasses.replace(execution, precision=started.precision)
    if arguments.accumulate is None:
        execution = dataclasses.replace(execution, accumulate=started.accumulate)
    start = given.start
    if leaves_open(arguments):
        recipe = recipe_flags.override_recipe(started.recipe, arguments)
        start = functools.partial(getattr, started, "config")
    elif arguments.patience is None and not started.has_patience:
        recipe = dataclasses.replace(recipe, patience=None)
    if arguments.plan:
        plan = planning.describe(
            data,
            model="as started",
            config=started.config,
            recipe=recipe,
            execution=execution,
        )
        _show(arguments, _measured(arguments, data, plan), is_started=True)
    return given._replace(recipe=recipe, execution=execution, start=start)


def _chosen(arguments: argparse.Namespace, data: "ImageData", execution: "Execution") -> Decision:
    """No flag says what to train: what suits the images and the machine."""
    from keras_vit.training import planning

    if arguments.precision is None:
        execution = dataclasses.replace(execution, precision=planning.fast_precision(execution))
    plan = planning.choose(
        data,
        weights=None if arguments.weights == NONE else planning.AUTO,
        image_size=arguments.image_size,
        execution=execution,
    )
    recipe = recipe_flags.override_recipe(plan.recipe, arguments)
    plan = _measured(arguments, data, dataclasses.replace(plan, recipe=recipe))
    _show(arguments, plan)
    start = functools.partial(_begin, plan)
    return Decision(plan.recipe, plan.execution, start, plan.weights, plan.model)


def _checked(
    arguments: argparse.Namespace, data: "ImageData", config: "ViTConfig | None", given: Decision
) -> Decision:
    """The flags say what to train; where memory may be short, batches are split to fit."""
    from keras_vit import VARIANTS, training
    from keras_vit.training import planning

    name = arguments.model or ("digits-hybrid" if arguments.data == "digits" else "tiny")
    if config is None and arguments.model in VARIANTS:
        size = arguments.image_size or given.recipe.image_size
        config = training.model_config(arguments.model, image_size=size)
    is_tight = False
    if config is not None and arguments.accumulate is None and arguments.data != "digits":
        execution = given.execution
        is_tight = planning.may_be_tight(config, data, recipe=given.recipe, execution=execution)
    if not arguments.plan and not is_tight:
        return given
    plan = planning.describe(
        data,
        model=name if arguments.model or config else "the model",
        weights=None if arguments.weights == NONE else arguments.weights,
        config=config,
        recipe=given.recipe,
        execution=given.execution,
    )
    plan = _measured(arguments, data, plan)
    does_not_fit = plan.cost is not None and not plan.cost.fits
    if arguments.plan or plan.is_split or does_not_fit:
        _show(arguments, plan)
    return given._replace(execution=plan.execution)


def _begin(plan: "TrainingPlan") -> "ViTConfig | VisionTransformer":
    with flags.saying_warnings():
        return plan.make_model()


def _measured(
    arguments: argparse.Namespace, data: "ImageData", plan: "TrainingPlan"
) -> "TrainingPlan":
    is_hidden = arguments.json or not output.is_terminal()
    with rich.progress.Progress(transient=True, disable=is_hidden) as bar:
        bar.add_task("measuring a few steps", total=None)
        return plan.measured(data, seed=arguments.seed, fits=arguments.accumulate is None)


def _show(arguments: argparse.Namespace, plan: "TrainingPlan", *, is_started: bool = False) -> None:
    if arguments.json:
        output.print_json("plan", **plan.to_dict())
    elif is_started:
        output.say(f"{arguments.out} goes on as it was started: {plan.steps_text}")
    else:
        output.say(plan)
    if arguments.plan and not arguments.json:
        output.say_next(*next_command.after_plan(arguments))
