"""What the subcommands print: lines and tables for people, JSON lines for machines."""

import dataclasses
import json as json_format
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import rich.box
import rich.console
import rich.progress
import rich.table

if TYPE_CHECKING:
    from keras_vit.data import ImageData
    from keras_vit.evaluation import Evaluation, Prediction
    from keras_vit.training import Event, Run, StepDone

# With more classes than this the table has only the worst.
_MAX_CLASSES = 30


def plain(text: object) -> str:
    r"""Returns text with escapes for characters that could move a terminal's cursor or hide text.

    Example:
        >>> plain("a \x1b[31mred\x1b[0m dog")
        'a \\x1b[31mred\\x1b[0m dog'
    """
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in str(text)
    )


def say(text: object, *, file: TextIO | None = None) -> None:
    """Prints text that contains file names, labels or other foreign words, see `plain`."""
    print(plain(text), file=file, flush=True)


def show_data(data: "ImageData", *, json: bool) -> None:
    """Prints the numbers of images and classes, and which images were left out."""
    if json:
        print_json(
            "data",
            source=data.source,
            labels=data.labels,
            images=data.counts,
            damaged=data.damaged,
            left_out=data.reasons,
        )
        return
    counts = ", ".join(f"{count} {name}" for name, count in data.counts.items() if count)
    classes = f"{len(data.labels)} classes" if data.labels else "no classes"
    say(f"{data.source}: {classes}; images: {counts}")
    for reason, names in data.reasons.items():
        say(f"Left out because they {reason}: {_summary(names)}")


class TrainDisplay:
    """Shows the progress of a training: a progress bar and one line per epoch, or JSON.

    Args:
        json: whether to print JSON.

    Attributes:
        has_ended: whether a training ran to its end; False if the run was finished before.
    """

    def __init__(self, *, json: bool) -> None:
        self.has_ended = False
        self._json = json
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[numbers]}"),
            transient=True,
            disable=json or not is_terminal(),
        )
        self._task = self._bar.add_task("compiling", total=None, numbers="")

    def __enter__(self) -> "TrainDisplay":
        if not self._json:
            self._print("  epoch    loss  accuracy  val. loss  val. accuracy  seconds    left")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, event: "Event") -> None:
        """Shows one event of the training."""
        from keras_vit import training

        if isinstance(event, training.TrainingDone):
            self.has_ended = True
            self._bar.stop()
        elif isinstance(event, training.StepDone):
            self._bar.update(
                self._task,
                completed=event.step,
                total=event.steps,
                description=f"epoch {event.epoch}",
                numbers=_numbers(event),
            )
        elif self._json:
            print_json("epoch", **dataclasses.asdict(event))
        else:
            mark = "*" if event.is_best else " "
            self._print(
                f"{event.epoch:>4}/{event.epochs:<4}{event.loss:>6.3f}"
                f"{_per_cent(event.accuracy):>8}{event.validation_loss:>11.3f}"
                f"{_per_cent(event.validation_accuracy, digits=2):>13} {mark}"
                f"{event.seconds:>9.1f}{_clock(event.seconds_left):>8}"
            )

    def finish(
        self, run: "Run", evaluations: "Mapping[str, Evaluation]", *, seconds: float
    ) -> None:
        """Prints the result of `train` and the next command."""
        if self._json:
            numbers = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
            print_json(
                "done", run=str(run.path), seconds=seconds, **run.config["result"], **numbers
            )
            return
        test, validation = evaluations["test"], evaluations["validation"]
        self._print(
            f"Epoch kept (*): {run.config['result']['best_epoch']}, "
            f"validation accuracy {validation.accuracy:.2%}."
        )
        self._print(
            f"Test accuracy: {test.accuracy:.2%} of {test.images} images, after {seconds:.0f} s."
        )
        replaced = run.config["result"]["replaced"]
        if replaced:
            self._print(f"Replaced while training, because damaged: {_summary(replaced)}")
        sample = run.path / "sample.png"
        image = sample if sample.exists() else "IMAGE"
        self._print(f"Saved in {run.path}. Next: keras-vit predict {run.path} {image}")

    def show_finished(self, run: "Run") -> None:
        """Prints that the run was finished before."""
        if self._json:
            print_json("finished", run=str(run.path), **run.config["result"])
            return
        self._print(f"{run.path} is a finished run of these settings: nothing was left to do.")

    def finish_pretraining(self, run: "Run", *, seconds: float) -> None:
        """Prints the result of `pretrain` and the next command."""
        result = run.config["result"]
        if self._json:
            print_json("done", run=str(run.path), seconds=seconds, **result)
            return
        self._print(
            f"Epoch kept (*): {result['best_epoch']}, validation loss "
            f"{result['validation_loss']:.4f}, after {seconds:.0f} s."
        )
        self._print(f"Look at {run.path / 'reconstructions.png'}.")
        self._print(
            f"Saved in {run.path}. Next: keras-vit train --data {run.config['data']['source']} "
            f"--out NEW-RUN --weights {run.path}"
        )

    def _print(self, line: str) -> None:
        self._bar.console.print(plain(line), highlight=False, markup=False, soft_wrap=True)


def show_predictions(predictions: "Mapping[str, Sequence[Prediction]]", *, json: bool) -> None:
    """Prints the most probable classes of each image."""
    if json:
        for image, classes in predictions.items():
            rows = [dataclasses.asdict(prediction) for prediction in classes]
            print(json_format.dumps({"image": image, "predictions": rows}), flush=True)
        return
    if not predictions:
        return
    table = _table("image", "label")
    table.add_column("probability", justify="right")
    for image, classes in predictions.items():
        for rank, prediction in enumerate(classes):
            table.add_row(
                "" if rank else plain(image),
                plain(prediction.label),
                f"{prediction.probability:.2%}",
                end_section=rank == len(classes) - 1,
            )
    _print_table(table)


def show_evaluations(evaluations: "Mapping[str, Evaluation]", *, json: bool) -> None:
    """Prints the metrics of each split, and a table of the classes of the last."""
    if json:
        for name, evaluation in evaluations.items():
            print_json("evaluation", split=name, **evaluation.to_dict())
        return
    for name, evaluation in evaluations.items():
        top5 = evaluation.top5_accuracy
        print(
            f"{name}: {evaluation.images} images, accuracy {evaluation.accuracy:.2%}, "
            + ("" if top5 is None else f"top-5 accuracy {top5:.2%}, ")
            + f"loss {evaluation.loss:.4f}"
        )
    _print_table(_class_table(evaluation))


def _class_table(evaluation: "Evaluation") -> rich.table.Table:
    scores = list(evaluation.class_scores)
    title = None
    if len(scores) > _MAX_CLASSES:
        scores = sorted(scores, key=lambda score: 2 if score.recall is None else score.recall)
        title = f"the {_MAX_CLASSES} classes of {len(scores)} with the lowest recall"
        scores = scores[:_MAX_CLASSES]
    table = _table("class", title=title)
    for name in ("images", "recognised", "right when named"):
        table.add_column(name, justify="right")
    for score in scores:
        rates = _per_cent(score.recall), _per_cent(score.precision)
        table.add_row(plain(score.label), str(score.images), *rates)
    return table


def _numbers(event: "StepDone") -> str:
    """Returns the text after the bar: loss, speed, memory, time left."""
    memory = f"{event.memory / 2**30:.1f} GiB"
    if event.images_per_second is None or event.seconds_left is None:
        return f"loss {event.loss:.3f}  {memory}"
    return (
        f"loss {event.loss:.3f}  {event.images_per_second:.0f} images/s  {memory}  "
        f"{_clock(event.seconds_left)} left"
    )


def _summary(files: Sequence[str]) -> str:
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    return f"{len(files)} ({', '.join(files[:5])}{more})"


def print_json(event: str, **fields: Any) -> None:
    """Prints an event and its fields as JSON, on one line."""
    print(json_format.dumps({"event": event, **fields}), flush=True)


def _table(*columns: str, title: str | None = None) -> rich.table.Table:
    return rich.table.Table(*columns, title=title, box=rich.box.SIMPLE, pad_edge=False)


def _print_table(table: rich.table.Table) -> None:
    console = rich.console.Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no width: do not break lines
    console.print(table)


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return rich.console.Console().is_terminal


def _per_cent(fraction: float | None, *, digits: int = 1) -> str:
    return "-" if fraction is None else f"{fraction:.{digits}%}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
