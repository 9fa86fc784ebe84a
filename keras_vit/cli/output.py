"""What the subcommands print: lines and tables for people, JSON lines for machines."""

import collections
import contextlib
import dataclasses
import json as json_format
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import rich.box
import rich.console
import rich.progress
import rich.table

from keras_vit.cli import next_command
from keras_vit.limits import counted

if TYPE_CHECKING:
    from keras_vit.data import ImageData, LeftOut
    from keras_vit.evaluation import Evaluation, Prediction
    from keras_vit.exporting.records import Verdict
    from keras_vit.training import EpochDone, Event, Run, StepDone

# With more classes than this the table has only the worst.
_MAX_CLASSES = 30
# A training of more epochs than this has about so many lines.
_MANY_EPOCHS, _EPOCH_LINES = 40, 25
# Up to so many images are a table, more a line each.
_MAX_ROWS = 20
_TIMED = 20  # steps


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


def warn(message: str | None) -> None:
    """Prints a warning to standard error, if there is one."""
    if message is not None:
        say(f"keras-vit: warning: {message}", file=sys.stderr)


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
    show_left_out(data.left_out, root=data.source)
    untested = _untested(data)
    if untested:
        say(f"Without test images, so that nothing is measured of them: {_summary(untested)}")


def _untested(data: "ImageData") -> list[str]:
    """Returns the classes without test images, where there are others that have some."""
    has_targets = hasattr(data.test, "images") and len(data.test)
    tested = set(data.test.targets.tolist()) if has_targets and data.labels else None
    return [
        label
        for place, label in enumerate(data.labels)
        if tested is not None and place not in tested
    ]


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
        self._has_best = False  # among the epochs since the last line
        self._has_head = json
        # Steps until a log says how long it will take, as a terminal's bar and each epoch do.
        self._untimed = 0 if json or is_terminal() else _TIMED

    def __enter__(self) -> "TrainDisplay":
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
        """Shows one event of the training; the first of its steps comes after the table's head."""
        from keras_vit import training

        if isinstance(event, training.StepDone) and not self._has_head:
            self._print("  epoch    loss  accuracy  val. loss  val. accuracy  seconds    left")
            self._has_head = True
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
            self._untimed -= 1
            if self._untimed == 0 and event.seconds_left is not None:
                self._print(f"time left about {_clock(event.seconds_left)}")
        elif self._json:
            is_epoch = isinstance(event, training.EpochDone)
            print_json("epoch" if is_epoch else "plan", **dataclasses.asdict(event))
        elif isinstance(event, training.PlanChanged):
            self._print(event.text)
        else:
            self._show_epoch(event)

    def _show_epoch(self, event: "EpochDone") -> None:
        """Prints a line, of a long training for one epoch in several."""
        self._untimed = 0
        every = -(-event.epochs // _EPOCH_LINES) if event.epochs > _MANY_EPOCHS else 1
        self._has_best = self._has_best or event.is_best
        if every > 1 and event.epoch == 1:
            self._print(f"(a line for one epoch in {every}; history.csv has all)")
        if event.epoch % every == 0 or event.epoch in (1, event.epochs):
            mark = "*" if self._has_best else " "
            self._has_best = False
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
            f"Test accuracy: {test.accuracy:.2%} of {counted(test.images, 'image')}, after "
            f"{seconds:.0f} s."
        )
        replaced = run.config["result"]["replaced"]
        if replaced:
            self._print(f"Replaced while training, because damaged: {_summary(replaced)}")
        self._say_saved(run)

    def show_finished(self, run: "Run") -> None:
        """Prints the result of a run that was finished before."""
        result = run.config["result"]
        if self._json:
            print_json("finished", run=str(run.path), **result)
            return
        self._print(f"{run.path} is a finished run of these settings: nothing was left to do.")
        accuracy = result["validation_accuracy"]
        shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        self._print(
            f"Epoch kept (*): {result['best_epoch']}, validation loss "
            f"{result['validation_loss']:.4f}{shown}."
        )
        say_next(*next_command.after_training(run))

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
        self._say_saved(run)

    def _say_saved(self, run: "Run") -> None:
        report = run.path / "report.html"
        look = f"; open {report} in a browser" if report.is_file() else ""
        self._print(f"Saved in {run.path}{look}.")
        say_next(*next_command.after_training(run))

    def _print(self, line: str) -> None:
        self._bar.console.print(plain(line), highlight=False, markup=False, soft_wrap=True)


class PredictDisplay:
    """Shows predictions as they come: JSON, a table of a few images, or a line for each of many.

    A progress bar shows how many are done.

    Args:
        total: number of images; None if it is not known.
        is_listed: whether each image is shown, or only how many each class has.
        left_out: what folders hold beside images; more may be added until the end.
        json: whether to print JSON.

    Attributes:
        images: how many were predicted.
        failures: how many could not be read.
        first: the name of the first that was predicted.
    """

    def __init__(
        self,
        *,
        total: int | None,
        is_listed: bool,
        left_out: "Sequence[LeftOut]",
        json: bool,
    ) -> None:
        self.images = self.failures = 0
        self.first: str | None = None
        self._is_listed, self._json = is_listed, json
        self._left_out = left_out
        self._counts: collections.Counter[str] = collections.Counter()
        self._few: list[tuple[str, Sequence[Prediction]]] = []
        self._messages: list[str] = []
        self._has_bar = not json and is_terminal()
        self._bar = rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            rich.progress.MofNCompleteColumn(),
            transient=True,
            disable=not self._has_bar,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("predicting", total=total)

    def __enter__(self) -> "PredictDisplay":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        for message in self._messages:
            say(message, file=sys.stderr)

    def fail(self, message: str) -> None:
        """Says on stderr why an image has no prediction; after the end where a bar is shown."""
        self.failures += 1
        self._bar.advance(self._task)
        if self._has_bar:
            self._messages.append(message)
        else:
            say(message, file=sys.stderr)

    def show(self, image: str, classes: "Sequence[Prediction]") -> None:
        """Shows the most probable classes of an image."""
        self.images += 1
        self.first = self.first or image
        self._counts[classes[0].label] += 1
        self._bar.advance(self._task)
        if self._json:
            rows = [dataclasses.asdict(prediction) for prediction in classes]
            print(json_format.dumps({"image": image, "predictions": rows}), flush=True)
        elif self._is_listed:
            self._few.append((image, classes))
            if self.images > _MAX_ROWS:
                self._flush()

    def finish(self) -> None:
        """Prints the table of a few images, or how many images each class has, and the rest."""
        if self._json:
            return
        if self._few and self.images <= _MAX_ROWS:
            _print_table(_prediction_table(self._few))
        elif self.images:
            self._flush()
            most = self._counts.most_common(_MAX_ROWS)
            rest = len(self._counts) - len(most)
            more = f", and {rest} more classes" if rest else ""
            say(f"{self.images} images; {', '.join(f'{label}: {n}' for label, n in most)}{more}")
        if self.failures:
            print(f"Without prediction: {self.failures}, as told on stderr.")
        show_left_out(self._left_out)

    def _flush(self) -> None:
        for image, classes in self._few:
            named = ", ".join(f"{one.label} {one.probability:.2%}" for one in classes)
            line = plain(f"{image}: {named}")
            if self._has_bar:
                self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
            else:
                print(line, flush=True)
        self._few = []


def _prediction_table(rows: "Sequence[tuple[str, Sequence[Prediction]]]") -> rich.table.Table:
    table = _table("image", "label")
    table.add_column("probability", justify="right")
    for image, classes in rows:
        for rank, prediction in enumerate(classes):
            table.add_row(
                "" if rank else plain(image),
                plain(prediction.label),
                f"{prediction.probability:.2%}",
                end_section=rank == len(classes) - 1,
            )
    return table


def say_next(*words: object) -> None:
    """Prints the next command, to be run as it is printed.

    Example:
        >>> say_next("predict", "my run", "cat.jpg")
        Next: keras-vit predict 'my run' cat.jpg
    """
    typed = [_typed(str(word)) for word in words]
    say(f"Next: {shlex.join(['keras-vit', *typed])}")


def _typed(word: str) -> str:
    """Returns a word that is no flag where it names a file like "-5.png"."""
    return f"./{word}" if word.startswith("-") and Path(word).exists() else word


def show_left_out(left_out: "Sequence[LeftOut]", *, root: str = "") -> None:
    """Prints what was found beside images, by the reason why it is not among them.

    Args:
        left_out: what was found.
        root: the folder of the data, from which paths inside it are shown.
    """
    reasons: dict[str, list[str]] = {}
    for one in left_out:
        inside = root and Path(one.name).is_relative_to(root)
        name = str(Path(one.name).relative_to(root)) if inside else one.name
        reasons.setdefault(one.reason, []).append(name)
    for reason, names in reasons.items():
        say(f"Left out because they {reason}: {_summary(names)}")


def show_evaluations(evaluations: "Mapping[str, Evaluation]", *, json: bool) -> None:
    """Prints the metrics of each split, and a table of the classes of the last."""
    if json:
        for name, evaluation in evaluations.items():
            print_json("evaluation", split=name, **evaluation.to_dict())
        return
    for name, evaluation in evaluations.items():
        top5 = evaluation.top5_accuracy
        print(
            f"{name}: {counted(evaluation.images, 'image')}, accuracy {evaluation.accuracy:.2%}, "
            + ("" if top5 is None else f"top-5 accuracy {top5:.2%}, ")
            + f"loss {evaluation.loss:.4f}"
        )
    _print_table(_class_table(evaluation))


@contextlib.contextmanager
def progress(
    text: str, *columns: rich.progress.ProgressColumn, json: bool
) -> Iterator[Callable[[int, int], None]]:
    """Gives what takes (completed, total); the bar is drawn on a terminal, without JSON."""
    shown = *rich.progress.Progress.get_default_columns(), *columns
    with rich.progress.Progress(*shown, transient=True, disable=json or not is_terminal()) as bar:
        task = bar.add_task(plain(text), total=None)
        yield lambda completed, total: bar.update(task, completed=completed, total=total)


def show_verdicts(verdicts: "Sequence[Verdict]") -> None:
    """Prints what `keras-vit check` found of each artefact."""
    table = _table("format", "artefact")
    table.add_column("size", justify="right")
    table.add_column("files")
    for each in verdicts:
        files = "as exported" if each.is_whole else "CHANGED"
        table.add_row(each.format, plain(each.path.name), f"{each.bytes / 1e6:.1f} MB", files)
    _print_table(table)


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
