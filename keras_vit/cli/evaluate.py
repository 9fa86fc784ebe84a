"""`keras-vit evaluate`: how good the model of a run is."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import measures, output, precision

if TYPE_CHECKING:
    from keras_vit.data import ImageData
    from keras_vit.evaluation import Evaluation
    from keras_vit.training import Run

_DESCRIPTION = """\
Measures the model of a run: accuracy, loss, and how each class fares.

Without --data on the run's own validation and test images, the same that training set aside; the
numbers are those of the run's metrics.json. With --data on another folder with the same classes:
on its test/ if it has splits, otherwise on all of its images.

Of a run of keras-vit pretrain the features are measured, by few labelled images of each class and
by nearest neighbours; if it was made without labels, give --data with class folders.

examples:
  keras-vit evaluate digits-run
  keras-vit evaluate photos-run --data more-photos --out more-photos-report
  keras-vit evaluate photos-run --more --out report
  keras-vit evaluate pretrained-run
  keras-vit evaluate imagenet-run --data imagenet/val --real real.json
  keras-vit evaluate photos-run --json
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "evaluate",
        help="measure the model of a run",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="RUN", help="a run directory, the --out of a training")
    parser.add_argument(
        "--data", metavar="PATH", help="a folder of other images (default: the run's own)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write metrics.json and confusion.png there (default: nowhere; to RUN, "
        "if it lacks them after an interruption)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --data, stop at damaged images (default: leave them out)",
    )
    precision.add_flag(parser)
    measures.add_flags(parser)
    output.add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates, prints, and writes where asked."""
    from keras_vit import evaluation

    opened = precision.load_run(arguments)
    if opened.model.config.classes is None:
        _show_features(opened, arguments)
        return 0
    is_own = arguments.data is None and arguments.precision == "float32"
    recorded = _recorded(opened.path) if is_own else None
    data = _data(arguments, opened)
    evaluations = {
        name: evaluation.evaluate(opened.model, data.split(name), labels=opened.labels)
        for name in ("validation", "test")
        if len(data.split(name))
    }
    if not evaluations:
        raise ValueError(f"{data.source!r} holds no validation or test images to measure on.")
    is_first = is_own and recorded is None
    out = Path(arguments.out) if arguments.out else opened.path
    if arguments.out or is_first:
        out.mkdir(parents=True, exist_ok=True)
        evaluation.write_report(out, evaluations)
    output.show_evaluations(evaluations, json=arguments.json)
    if arguments.more:
        measures.show(opened, data, out=arguments.out, json=arguments.json)
    if arguments.real is not None:
        measures.show_real(opened, data, file=arguments.real, json=arguments.json)
    if not arguments.json:
        _say_more(evaluations, recorded=recorded, out=out if arguments.out or is_first else None)
    return 0


def _show_features(opened: "Run", arguments: argparse.Namespace) -> None:
    if arguments.real is not None:
        raise ValueError(f"The run {arguments.directory!r} has no classifier; --real measures one.")
    if arguments.data is not None:
        data = output.load_data(arguments.data, strict=arguments.strict, json=arguments.json)
    elif opened.labels:
        from keras_vit import training

        data = training.load_run_data(opened)
    else:
        raise ValueError(
            f"The run {arguments.directory!r} was made without labels; give --data with one "
            "sub-folder per class to measure its features on."
        )
    measures.show_features(opened, data, json=arguments.json)


def _data(arguments: argparse.Namespace, opened: "Run") -> "ImageData":
    from keras_vit import training

    if arguments.data is None:
        return training.load_run_data(opened)
    return output.load_data(
        arguments.data, strict=arguments.strict, json=arguments.json, labels=opened.labels
    )


def _recorded(directory: Path) -> dict[str, Any] | None:
    from keras_vit import training

    file = directory / "metrics.json"
    return training.read_fields(file) if file.is_file() else None


def _say_more(
    evaluations: "dict[str, Evaluation]", *, recorded: dict[str, Any] | None, out: Path | None
) -> None:
    if recorded is not None:
        numbers = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
        verdict = "the same numbers" if numbers == recorded else "OTHER numbers"
        print(f"The run's metrics.json holds {verdict}.")
    if out is not None:
        output.say(f"Written: {out / 'metrics.json'} and {out / 'confusion.png'}")
