"""Checks artefacts on the disk, in a process where Keras and keras_vit cannot be imported."""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from keras_vit import version
from keras_vit.exporting import savedmodel
from keras_vit.exporting.clean import messages
from keras_vit.exporting.rebuild import Exportable
from keras_vit.exporting.samples import Answers, References

RECORD = "verification.json"
# Float32 sums in another order differ; measured up to 2e-6.
SAVEDMODEL_LIMIT = 1e-5
# The measure and the limit of each format: kernels and numbers of bits differ.
FILE_LIMITS: Mapping[str, tuple[str, float]] = {
    "onnx": ("absolute", 1e-4),
    "tflite": ("absolute", 1e-4),
    "tflite-fp16": ("relative", 5e-3),
    "tflite-int8": ("cosine", 0.995),
    "tflite-int8-full": ("top1", 0.98),
}
TIE = 1e-5  # rounding may exchange two classes whose scores are closer
_BOOTSTRAP = Path(__file__).parent / "clean" / "bootstrap.py"
_PACKAGES = ("tensorflow", "keras", "numpy", "onnx", "onnxruntime", "tf2onnx", "ai-edge-litert")
_MOST_LISTED = 3  # failed checks in a message


class VerificationError(ValueError):
    """An artefact and its model differ; nothing was published."""


def check_artefact(request: messages.Request) -> tuple[list[messages.Check], dict[str, str]]:
    """Runs the checks of a request in a clean process.

    Returns:
        The checks, all passed, and the versions of the runtimes.

    Raises:
        VerificationError: a check or the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="keras-vit-") as name:
        folder = Path(name)
        messages.write_request(folder, request)
        finished = subprocess.run(
            [sys.executable, "-P", str(_BOOTSTRAP), str(folder)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        if finished.returncode:
            lines = finished.stderr.strip().splitlines() or ["no message"]
            raise VerificationError(
                f"The {request.format} artefact could not be checked: the process ended with code "
                f"{finished.returncode}: {lines[-1]}"
            )
        checks, runtime = messages.read_report(folder)
    require(checks, artefact=request.format)
    return checks, runtime


def require(checks: Iterable[messages.Check], *, artefact: str) -> None:
    """Raises a VerificationError that names the failed checks, if there are any."""
    failed = [check for check in checks if not check.passed]
    if failed:
        texts = [f"{check.name}: {check.measured} (limit {check.limit})" for check in failed]
        if len(texts) > _MOST_LISTED:
            texts[_MOST_LISTED:] = [f"and {len(texts) - _MOST_LISTED} more"]
        raise VerificationError(
            f"The {artefact} artefact does not do what the model does, and was not put in place: "
            f"{'; '.join(texts)}."
        )


def savedmodel_cases(
    exportable: Exportable, references: References, *, top_k: int
) -> tuple[messages.Case, ...]:
    """Returns a case for every signature of a SavedModel."""

    def case(
        signature: str, name: str, value: np.ndarray, answers: Answers, *names: str
    ) -> messages.Case:
        return messages.Case(
            signature=signature,
            inputs={name: value},
            expected={name: answers.of_batch[name] for name in names},
            # "class_ids" is missing where rounding may exchange two classes.
            alone={name: answers.of_first[name] for name in names if name in answers.of_first},
            limit=SAVEDMODEL_LIMIT * _scale(answers.of_batch),
        )

    files, pixels, values = references.files, references.pixels, references.values
    of_files, of_pixels, of_values = references.of_files, references.of_pixels, references.of_values
    if exportable.activation is None:
        return (
            case("serving_default", "image_bytes", files, of_files, "features"),
            case("pixels", "pixel_values", values, of_values, "features"),
            case("features", "images", pixels, of_pixels, "features"),
        )
    best, best_of_first = (
        _best(outputs["probabilities"], top_k=top_k)
        for outputs in (of_files.of_batch, of_files.of_first)
    )
    answers = Answers(of_batch=of_files.of_batch | best, of_first=of_files.of_first | best_of_first)
    examples = np.array([savedmodel.example(content) for content in files], object)
    cases = [
        case("serving_default", "image_bytes", files, answers, *best),
        case("classify", "inputs", examples, answers, "scores"),
        case("image_tensor", "images", pixels, of_pixels, "logits", "probabilities"),
        case("pixels", "pixel_values", values, of_values, "logits", "probabilities"),
    ]
    if exportable.config is not None:
        cases.append(case("features", "images", pixels, of_pixels, "features"))
    return tuple(cases)


def file_case(
    exportable: Exportable, artefact: str, images: np.ndarray, expected: Mapping[str, np.ndarray]
) -> messages.Case:
    """Returns the case of an ONNX or TFLite file.

    Args:
        exportable: the rebuilt model.
        artefact: the format.
        images: a batch of the original model's input.
        expected: the model's outputs for it, by name.
    """
    measure, limit = FILE_LIMITS[artefact]
    names = ["features"] if exportable.activation is None else ["logits", "probabilities"]
    if measure == "absolute":
        limit *= _scale(expected)
    else:
        names = names[:1]  # the softmax would amplify the errors of rounded weights
    return messages.Case(
        signature="",
        inputs={"images": images},
        expected={name: expected[name] for name in names},
        limit=limit,
        measure=measure,
    )


def write_record(
    folder: Path,
    exportable: Exportable,
    *,
    checks: Mapping[str, Iterable[messages.Check]],
    runtime: Mapping[str, str],
    images: str,
) -> None:
    """Writes `verification.json` beside the files that it describes.

    Args:
        folder: where the files are.
        exportable: the rebuilt model.
        checks: the checks of each format.
        runtime: versions of what ran the checks; empty if nothing ran.
        images: a description of the images.
    """
    versions = {"keras-vit": version.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    record = {
        "verified": bool(runtime),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {**versions, **runtime},
        "images": images,
        "pixels": {
            "takes": exportable.takes,
            "image_mean": list(exportable.input_config.image_mean),
            "image_std": list(exportable.input_config.image_std),
        },
        "files": {
            str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        },
        "checks": {name: list(map(dataclasses.asdict, each)) for name, each in checks.items()},
    }
    target = folder / "assets.extra" if "savedmodel" in checks else folder
    (target / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _scale(outputs: Mapping[str, np.ndarray]) -> float:
    """Returns the factor of the limits: they hold for values of order 1, and rounding grows."""
    name = "logits" if "logits" in outputs else "features"
    return max(1.0, float(np.abs(outputs[name]).max()))


def _best(probabilities: np.ndarray, *, top_k: int) -> dict[str, np.ndarray]:
    """Returns the sorted scores, and the class numbers unless two scores are too close."""
    order = np.argsort(-probabilities, axis=1, kind="stable")
    sorted_scores = np.take_along_axis(probabilities, order, axis=1)
    best = {"scores": sorted_scores[:, :top_k]}
    gaps = -np.diff(sorted_scores[:, : top_k + 1], axis=1)
    if gaps.min(initial=1.0) > TIE:
        best["class_ids"] = order[:, :top_k].astype(np.int32)
    return best


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
