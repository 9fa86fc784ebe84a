"""Holds what an export is asked for against what there is."""

import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from keras_vit.export import samples, tflite
from keras_vit.export.rebuild import Exportable

FORMATS = ("savedmodel", *tflite.FORMATS, "onnx")
# Images for int8 throughout: one half sets the ranges, the other is the accuracy gate.
CALIBRATION_COUNTS = (16, 512)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NEEDS = {
    "onnx": (("onnx", "onnxruntime"), "onnx"),
    **dict.fromkeys(tflite.FORMATS, (("ai_edge_litert",), "tflite")),
}


def checked_directory(path: str | Path) -> Path:
    """Returns the absolute directory, whose name is also the model's."""
    directory = Path(path).absolute()
    if not _NAME.fullmatch(directory.name):
        raise ValueError(
            "The directory's name is the model's name in addresses and settings: letters, digits, "
            f"'_', '-' and '.'. Received: {directory.name!r}."
        )
    return directory


def checked_formats(
    formats: Iterable[str], *, images: Sequence[samples.Image], verify: bool
) -> tuple[str, ...]:
    """Returns the formats, known, each once, and with all that they need."""
    wanted = (formats,) if isinstance(formats, str) else tuple(formats)
    unknown = [name for name in wanted if name not in FORMATS]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(
            f"formats must be some of {', '.join(FORMATS)}, each once. Received: {wanted!r}."
        )
    fewest, _ = CALIBRATION_COUNTS
    if "tflite-int8-full" in wanted and len(images) < fewest:
        raise ValueError(
            f"tflite-int8-full needs at least {fewest} images of the kind that the model will "
            f"see, to set its ranges and to measure what it loses. Received: {len(images)} images."
        )
    for name in wanted:
        packages, extra = _NEEDS.get(name, ((), ""))
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing and (verify or name == "onnx"):
            raise ImportError(
                f"To export {name}, {missing[0]} is needed, which is not installed; "
                f'run: pip install "keras-vit[{extra}]"'
            )
    return wanted


def check_network(formats: Sequence[str], exportable: Exportable) -> None:
    """Raises a ValueError for a network that one of the formats cannot hold."""
    config = exportable.config
    if config is None or config.resnet_layers is None or not config.departures:
        return
    if not set(formats).isdisjoint(tflite.FORMATS):
        # Converted, a group normalisation has rank 5.
        raise ValueError(
            "TFLite files hold a hybrid only as it was published; export this one as savedmodel or "
            f"onnx. Received: a hybrid with {', '.join(config.departures)} set."
        )


def checked_labels(
    labels: Sequence[str] | str | Path | None, exportable: Exportable
) -> tuple[str, ...]:
    """Returns a label for each class; none without classifier."""
    classes = exportable.classes
    if classes is None:
        return ()
    if labels is None:
        return tuple(map(str, range(classes)))
    if isinstance(labels, str | Path):
        labels = Path(labels).read_text(encoding="utf-8").splitlines()
    if len(labels) != classes:
        raise ValueError(
            f"The model has {classes} classes; give a label for each. "
            f"Received: {len(labels)} labels."
        )
    return tuple(labels)
