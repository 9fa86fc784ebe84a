"""Dispatches to the subcommands, and turns errors into one line and an exit code.

Exit codes: 0 success; 1 wrong input; 2 wrong usage; 130 interrupted; 75 stopped by SIGTERM or by
the loss of another worker, to be started again with --resume.
"""

import argparse
import contextlib
import importlib
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from keras_vit import __version__, environment
from keras_vit.cli import catalog, evaluate, export, flags, output, predict, train

PROGRAM = "keras-vit"
# What is wrong with the input, the disk or the machine is said in these, or in a library's own
# classes; any other of Python's is a mistake of ours, and shows where it was made.
_EXPECTED = (ValueError, OSError, ImportError, FloatingPointError, MemoryError, RuntimeError)
_DESCRIPTION = """\
Vision Transformers: train them on your own images, predict, evaluate, explain, try, export.

examples:
  keras-vit train --data digits --out digits-run
  keras-vit train --data photos --out photos-run --epochs 50
  keras-vit pretrain --data photos --out pretrained-run
  keras-vit predict photos-run holiday.jpg
  keras-vit predict photos-run holiday-photos --csv holiday.csv
  keras-vit predict hf://google/vit-base-patch16-224 holiday.jpg
  keras-vit evaluate photos-run
  keras-vit explain photos-run holiday.jpg --out seen
  keras-vit demo photos-run
  keras-vit export photos-run --out export/photos
  keras-vit check export/photos
  keras-vit push photos-run hf://owner/photos
  keras-vit list --variant B/16
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {output.cut(message)}; see {self.prog} --help\n")


class Interrupts:
    """Interrupts as Python does, and remembers that it did, inside a `with` block.

    An interruption may get lost where a library is imported or an object deleted. A training looks
    here before it begins.

    Attributes:
        received: whether there was one.
    """

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: object) -> None:
        self.received = True
        raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        self._is_set = is_main and self._before is signal.default_int_handler
        if self._is_set:
            signal.signal(signal.SIGINT, self)

    def __exit__(self, *_: object) -> None:
        if self._is_set:
            signal.signal(signal.SIGINT, self._before)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Example:
        >>> main(["predict", "no-such-run", "image.png"])
        1

    Args:
        argv: the arguments after the program's name; None for the process's own.

    Returns:
        The exit code.
    """
    environment.silence_tensorflow()  # its errors still arrive as exceptions
    arguments, unknown = make_parser().parse_known_args(argv)
    if unknown:
        arguments.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    for name, value in vars(arguments).items():
        if "" in (value if isinstance(value, list) else [value]):
            arguments.refuse(f"argument {name}: it is empty; give a value, or leave it out")
    if arguments.run is train.run:
        train.check_usage(arguments)
    arguments.command = shlex.join([PROGRAM, *(sys.argv[1:] if argv is None else argv)])
    with Interrupts():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        is_about_exports = arguments.run is export.run
        if arguments.run in (predict.run, evaluate.run):
            is_about_exports = flags.is_exported(arguments.source)
        if is_about_exports and "keras" not in sys.modules:
            os.environ["KERAS_BACKEND"] = "tensorflow"  # its graphs are written, whatever trained
        if arguments.run not in (catalog.run, export.check):
            with environment.without_log_lines(), environment.without_collection():
                # They register the classes with Keras; TensorFlow reads the images everywhere.
                for name in ("adaptation", "applications", "optimizers", "losses", "data"):
                    importlib.import_module(f"keras_vit.{name}")
        with _saying_warnings():
            exit_code: int = arguments.run(arguments)
    except KeyboardInterrupt as interruption:
        message = str(interruption) or "Interrupted: nothing was saved."
        output.remark(message)
        return getattr(interruption, "exit_code", 130)
    except BrokenPipeError:
        # The reader has gone, as in `keras-vit list | head`; Python would print an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if type(error).__module__ == "builtins" and not isinstance(error, _EXPECTED):
            raise
        # Without TensorFlow's names of nodes and operations.
        message = re.sub(r"\{\{.*?\}\}|\[Op:\w+\]( name: \S*)?", "", str(error))
        is_full = isinstance(error, MemoryError) or "OOM when allocating" in message
        message = f"{'Out of memory: nothing was written. ' if is_full else ''}{message}"
        output.remark(f"error: {' '.join(message.split()) or type(error).__name__}")
        return getattr(error, "exit_code", 1)
    return exit_code


@contextlib.contextmanager
def _saying_warnings() -> Iterator[None]:
    """Prints each warning for the user on a line of stderr, without the place in the code."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)  # the same once, not for each of many images
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if issubclass(category, UserWarning):
                output.remark(" ".join(str(message).split()))
            else:
                usual(message, category, *place)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser with all subcommands."""
    parser: argparse.ArgumentParser = _Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_parser in (
        train.add_parser, train.add_pretrain, predict.add_parser, evaluate.add_parser,
        predict.add_explain, predict.add_demo, export.add_parser, export.add_check,
        export.add_push, catalog.add_parser,
    ):  # fmt: skip
        add_parser(commands)
    return parser
