"""What the subcommands print: lines and tables for people, JSON lines for machines."""

import collections
import contextlib
import dataclasses
import json as json_format
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import rich.box
import rich.console
import rich.progress
import rich.table

from keras_vit.limits import counted, short

if TYPE_CHECKING:
    from keras_vit.data import ImageData, SkippedFile
    from keras_vit.evaluation import Evaluation, Prediction
    from keras_vit.training import EpochDone, Event, OpenedModel, Run

_MAX_CLASSES = 30  # with more classes the table has only the worst
# A training of more epochs than this has about so many lines.
_MANY_EPOCHS, _EPOCH_LINES = 40, 25
_MAX_ROWS = 20  # images in a table; more are a line each
_TIMED = 20  # steps until a log says how long it will take


def plain(text: object) -> str:
    """Escapes what in a text could move a terminal's cursor or hide text."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in str(text)
    )


def say(text: object, *, file: TextIO | None = None) -> None:
    """Prints text that contains file names, labels or other foreign words, see `plain`."""
    print(plain(text), file=file, flush=True)


def cut(message: str) -> str:
    """Shortens a message that repeats a very long value, in the middle."""
    return short(re.sub(r"\S{300,}", lambda word: short(word[0], 200), message), 2500)


def remark(message: str) -> None:
    """Prints a sentence that is not of the result to standard error."""
    say(f"keras-vit: {cut(message)}", file=sys.stderr)


def warn(message: str | None) -> None:
    """Prints a warning to standard error, if there is one."""
    if message is not None:
        remark(f"warning: {message}")


def say_next(*words: object) -> None:
    """Prints the next command, to be run as it is printed."""
    # A name such as "-5.png" would be a flag.
    typed = [f"./{w}" if w[:1] == "-" and Path(w).exists() else w for w in map(str, words)]
    say(f"Next: {shlex.join(['keras-vit', *typed])}")


def after_looking(opened: "OpenedModel", *, is_measured: bool = False) -> tuple[object, ...]:
    """Returns the command that comes after a model was asked for images, or measured on them."""
    if opened.exported:
        return "check", opened.source
    if opened.run is not None and opened.has_classifier and not is_measured:
        return "evaluate", opened.source
    return "export", opened.source, "--out", "export"


def after_training(run: "Run") -> tuple[object, ...]:
    """Returns the command that comes after a training."""
    if run.has_classifier:
        sample = run.path / "sample.png"
        return ("predict", run.path, sample) if sample.is_file() else ("evaluate", run.path)
    if run.labels:
        new = run.path.with_name(f"{run.path.name}-classifier")
        return "train", "--data", run.config["data"]["source"], "--out", new, "--weights", run.path
    return "export", run.path, "--out", "export"


def show_data(data: "ImageData", *, json: bool) -> None:
    """Prints the numbers of images and classes, and which images were left out."""
    if json:
        print_json(
            "data",
            source=data.source,
            labels=data.labels,
            images=data.counts,
            damaged=data.damaged,
            skipped=data.reasons,
        )
        return
    counts = ", ".join(f"{count} {name}" for name, count in data.counts.items() if count)
    classes = f"{len(data.labels)} classes" if data.labels else "no classes"
    say(f"{data.source}: {classes}; images: {counts}")
    show_skipped(data.skipped, root=data.source)
    if hasattr(data.test, "images") and len(data.test) and data.labels:
        tested = set(data.test.targets.tolist())
        rest = [label for place, label in enumerate(data.labels) if place not in tested]
        if rest:
            say(f"Without test images, so that nothing is measured of them: {_summary(rest)}")


def show_skipped(skipped: "Sequence[SkippedFile]", *, root: str = "") -> None:
    """Prints what was found beside images, by the reason why it is not among them.

    Args:
        skipped: what was found.
        root: the folder of the data, from which paths inside it are shown.
    """
    reasons: dict[str, list[str]] = {}
    for one in skipped:
        inside = root and Path(one.name).is_relative_to(root)
        name = str(Path(one.name).relative_to(root)) if inside else one.name
        reasons.setdefault(one.reason, []).append(name)
    for reason, names in reasons.items():
        say(f"Left out because they {reason}: {_summary(names)}")


class _Display(contextlib.AbstractContextManager["_Display"]):
    def __init__(
        self,
        *columns: rich.progress.ProgressColumn,
        json: bool,
        task: str,
        redirect_stderr: bool = True,  # above the bar, as lines of stdout
        **options: Any,
    ) -> None:
        self._json = json
        self._bar = rich.progress.Progress(
            *columns,
            transient=True,
            disable=json or not is_terminal(),
            redirect_stderr=redirect_stderr,
        )
        self._task = self._bar.add_task(task, **options)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _print(self, line: str) -> None:
        if self._bar.disable:
            say(line)
        else:
            self._bar.console.print(plain(line), highlight=False, markup=False, soft_wrap=True)


class TrainDisplay(_Display):
    """Shows the progress of a training: a progress bar and one line per epoch, or JSON.

    Args:
        json: whether to print JSON.

    Attributes:
        has_ended: whether a training ran to its end; False if the run was finished before.
    """

    def __init__(self, *, json: bool) -> None:
        super().__init__(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[numbers]}"),
            json=json,
            task="compiling",
            total=None,
            numbers="",
        )
        self.has_ended = False
        self._has_best = False  # among the epochs since the last line
        self._has_head = json
        # Steps until a log says how long it will take, as a terminal's bar and each epoch do.
        self._untimed = 0 if json or is_terminal() else _TIMED

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
            numbers = f"loss {event.loss:.3f}  {event.memory / 2**30:.1f} GiB"
            if event.images_per_second is not None and event.seconds_left is not None:
                numbers = (
                    f"loss {event.loss:.3f}  {event.images_per_second:.0f} images/s  "
                    f"{event.memory / 2**30:.1f} GiB  {_clock(event.seconds_left)} left"
                )
            self._bar.update(
                self._task,
                completed=event.step,
                total=event.steps,
                description=f"epoch {event.epoch}",
                numbers=numbers,
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
        """Prints the result of a training, evaluated or not, and the next command."""
        result = run.config["result"]
        if self._json:
            numbers = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
            print_json("done", run=str(run.path), seconds=seconds, **result, **numbers)
            return
        test = evaluations.get("test")
        if test is None:
            self._print(f"{_saved_epoch(result)}, after {seconds:.0f} s.")
            self._print(f"Look at {run.path / 'reconstructions.png'}.")
        else:
            self._print(f"{_saved_epoch(result)}.")
            images = counted(test.images, "image")
            self._print(f"Test accuracy: {test.accuracy:.2%} of {images}, after {seconds:.0f} s.")
        if test is not None and result["replaced"]:
            files = _summary(result["replaced"])
            self._print(f"Replaced while training, because damaged: {files}")
        report = run.path / "report.html"
        look = f"; open {report} in a browser" if report.is_file() else ""
        self._print(f"Saved in {run.path}{look}.")
        say_next(*after_training(run))

    def show_finished(self, run: "Run") -> None:
        """Prints the result of a run that was finished before."""
        result = run.config["result"]
        if self._json:
            print_json("finished", run=str(run.path), **result)
            return
        self._print(f"{run.path} was already finished with these settings; nothing to do.")
        self._print(f"{_saved_epoch(result)}.")
        say_next(*after_training(run))


def _saved_epoch(result: Mapping[str, Any]) -> str:
    accuracy = result["validation_accuracy"]
    shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
    loss = f"validation loss {result['validation_loss']:.4f}"
    return f"Saved epoch (*): {result['best_epoch']}, {loss}{shown}"


class PredictDisplay(_Display):
    """Shows predictions as they come: JSON, a table of a few images, or a line for each of many.

    Args:
        total: number of images; None if it is not known.
        is_listed: whether each image is shown, or only how many each class has.
        json: whether to print JSON.

    Attributes:
        images: how many were predicted.
        failures: how many could not be read.
        first: the name of the first that was predicted.
    """

    def __init__(self, *, total: int | None, is_listed: bool, json: bool) -> None:
        super().__init__(
            *rich.progress.Progress.get_default_columns(),
            rich.progress.MofNCompleteColumn(),
            json=json,
            task="predicting",
            redirect_stderr=False,
            total=total,
        )
        self.images = self.failures = 0
        self.first: str | None = None
        self._is_listed = is_listed
        self._counts: collections.Counter[str] = collections.Counter()
        self._few: list[tuple[str, Sequence[Prediction]]] = []
        self._messages: list[str] = []

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for message in self._messages:
            remark(message)

    def fail(self, message: str) -> None:
        """Says on stderr why an image has no prediction; after the end where a bar is shown."""
        self.failures += 1
        self._bar.advance(self._task)
        (remark if self._bar.disable else self._messages.append)(message)

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
                self._print_lines()

    def finish(self, skipped: "Sequence[SkippedFile]") -> None:
        """Prints the table of a few images, or how many images each class has, and the rest.

        Args:
            skipped: what folders hold beside images.
        """
        if self._json:
            return
        if self._few and self.images <= _MAX_ROWS:
            rows: list[Sequence[str]] = []
            for image, classes in self._few:
                for rank, one in enumerate(classes):
                    rows.append(("" if rank else image, one.label, f"{one.probability:.2%}"))
                rows.append(())
            print_table(rows, "image", "label", ">probability")
        elif self.images:
            self._print_lines()
            most = self._counts.most_common(_MAX_ROWS)
            rest = len(self._counts) - len(most)
            more = f", and {rest} more classes" if rest else ""
            say(f"{self.images} images; {', '.join(f'{label}: {n}' for label, n in most)}{more}")
        if self.failures:
            print(f"{counted(self.failures, 'image')} failed (see the errors above).")
        show_skipped(skipped)

    def _print_lines(self) -> None:
        for image, classes in self._few:
            named = ", ".join(f"{one.label} {one.probability:.2%}" for one in classes)
            self._print(f"{image}: {named}")
        self._few = []


def show_evaluations(evaluations: "Mapping[str, Evaluation]", *, json: bool) -> None:
    """Prints the metrics of each split, and a table of the classes of the last."""
    for name, evaluation in evaluations.items():
        if json:
            print_json("evaluation", split=name, **evaluation.to_dict())
            continue
        top5 = evaluation.top5_accuracy
        print(
            f"{name}: {counted(evaluation.images, 'image')}, accuracy {evaluation.accuracy:.2%}, "
            + ("" if top5 is None else f"top-5 accuracy {top5:.2%}, ")
            + f"loss {evaluation.loss:.4f}"
        )
    if json:
        return
    scores, title = list(evaluation.class_scores), None
    if len(scores) > _MAX_CLASSES:
        scores = sorted(scores, key=lambda score: 2 if score.recall is None else score.recall)
        title = f"the {_MAX_CLASSES} classes of {len(scores)} with the lowest recall"
    rows = [
        (each.label, str(each.images), _per_cent(each.recall), _per_cent(each.precision))
        for each in scores[:_MAX_CLASSES]
    ]
    print_table(rows, "class", ">images", ">recall", ">precision", title=title)


@contextlib.contextmanager
def progress(
    text: str, *columns: rich.progress.ProgressColumn, json: bool
) -> Iterator[Callable[[int, int], None]]:
    """Gives what takes (completed, total); the bar is drawn on a terminal, without JSON."""
    shown = *rich.progress.Progress.get_default_columns(), *columns
    with rich.progress.Progress(*shown, transient=True, disable=json or not is_terminal()) as bar:
        task = bar.add_task(plain(text), total=None)
        yield lambda completed, total: bar.update(task, completed=completed, total=total)


def _summary(files: Sequence[str]) -> str:
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    return f"{len(files)} ({', '.join(files[:5])}{more})"


def print_json(event: str, **fields: Any) -> None:
    """Prints an event and its fields as JSON, on one line."""
    print(json_format.dumps({"event": event, **fields}), flush=True)


def print_table(rows: Iterable[Sequence[str]], *columns: str, title: str | None = None) -> None:
    """Prints a table; a column that begins with ">" is of numbers, a row of nothing is a line."""
    table = rich.table.Table(title=title, box=rich.box.SIMPLE, pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name[0] == ">" else "left")
    for row in rows:
        if row:
            table.add_row(*map(plain, row))
        else:
            table.add_section()
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
