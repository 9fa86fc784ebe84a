"""Checks artefacts on the disk, in a process where Keras and keras_vit cannot be imported."""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit import version
from keras_vit.exporting import savedmodel
from keras_vit.exporting.clean import agreement, messages
from keras_vit.exporting.clean.agreement import Gate, Limits
from keras_vit.exporting.description import Description
from keras_vit.exporting.rebuild import Exportable
from keras_vit.exporting.samples import Answers, GateImages, References

RECORD = "verification.json"
SELF = "record_sha256"
_NO_SHA256 = 64 * "0"
# Float32 sums in another order differ; measured up to 2e-6.
SAVEDMODEL_LIMIT = 1e-5
# Of all other float32 artefacts: absolute, for values of order 1.
FLOAT_LIMIT = 1e-4
# What decides about each artefact, in spreads of the model's answers. Measured on random networks
# from two blocks to B/16: float32 errors of 4e-6 and at most 2e-5, exact GELU by its other formula
# 2e-4; kernels in float16 2e-3 and 6e-3; in int8 0.09 and 0.4. A constant answer errs by 1.
_FLOAT = Limits(error=5e-5, largest=5e-4, of_one=5e-4, best=1.0, accuracy=0.0)
_HALF = Limits(error=5e-3, largest=0.03, of_one=0.03, best=1.0, accuracy=0.001)
_HALF_PRODUCTS = Limits(error=0.01, largest=0.06, of_one=0.06, best=1.0, accuracy=0.001)
_INT8 = Limits(error=0.1, largest=0.6, of_one=0.6, best=0.98, accuracy=0.01)
_INT8_WEIGHTS = Limits(error=0.06, largest=0.3, of_one=0.3, best=0.98, accuracy=0.01)
LIMITS: Mapping[str, Limits] = {
    **dict.fromkeys(("savedmodel", "onnx", "tflite"), _FLOAT),
    "tflite-fp16": _HALF,
    "onnx-fp16": _HALF_PRODUCTS,
    **dict.fromkeys(("tflite-int8", "onnx-int8"), _INT8),
    **dict.fromkeys(("tflite-int8-weights", "onnx-int8-weights"), _INT8_WEIGHTS),
    "tflite-int8-full": Limits(error=0.2, largest=1.0, of_one=0.8, best=0.98, accuracy=0.01),
}
TIE = 1e-5  # rounding may exchange two classes whose scores are closer
_BOOTSTRAP = Path(__file__).parent / "clean" / "bootstrap.py"
_PACKAGES = ("tensorflow", "keras", "numpy", "onnx", "onnxruntime", "tf2onnx", "ai-edge-litert")
_MOST_LISTED = 3  # failed checks in a message


class VerificationError(ValueError):
    """An artefact and its model differ; nothing was published."""


def run_checks(request: messages.Request) -> messages.Report:
    """Runs the checks of a request in a clean process, whatever they find.

    Raises:
        VerificationError: the process failed.
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
        return messages.read_report(folder)


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
    exportable: Exportable, images: np.ndarray, expected: Mapping[str, np.ndarray], *, gate: Gate
) -> messages.Case:
    """Returns the case of an ONNX or TFLite file.

    Args:
        exportable: the rebuilt model.
        images: a batch of the original model's input.
        expected: the model's outputs for it, by name.
        gate: that of the file, which says by how much rounded weights may change one answer.
    """
    names = ["features"] if exportable.activation is None else ["logits", "probabilities"]
    limit = FLOAT_LIMIT * _scale(expected)
    if gate.limits is not _FLOAT:
        names, limit = names[:1], gate.limits.largest * agreement.spread(gate)
    return messages.Case(
        signature="",
        inputs={"images": images},
        expected={name: expected[name] for name in names},
        limit=limit,
    )


def is_rounded(artefact: str) -> bool:
    """Whether a format rounds weights, so that its answers differ by more than float32's."""
    return LIMITS[artefact] is not _FLOAT


def gate(exportable: Exportable, artefact: str, images: GateImages) -> Gate:
    """Returns what decides about an artefact, for `run_checks`.

    Args:
        exportable: the rebuilt model.
        artefact: the format.
        images: those that decide.
    """
    output = "features" if exportable.activation is None else "logits"
    kind = _kind(exportable)
    outputs = (output,) if kind == "values" else (output, "probabilities")
    signature, inputs = "", {"images": exportable.to_original(images.pixels)}
    if artefact == "savedmodel":
        signature = "image_tensor" if output == "logits" else "features"
        inputs = {"images": images.pixels}
    return Gate(
        signature=signature,
        inputs=inputs,
        outputs=outputs,
        expected=images.outputs[output],
        limits=LIMITS[artefact],
        kind=kind,
        targets=images.targets,
    )


def _kind(exportable: Exportable) -> str:
    """Returns how the model decides; a single logit without sigmoid is a value."""
    name = getattr(exportable.activation, "__name__", "")
    is_decided = name == "sigmoid" or (name == "softmax" and exportable.classes != 1)
    return name if is_decided else "values"


def write_record(
    folder: Path,
    about: Description,
    *,
    checks: Mapping[str, Iterable[messages.Check]],
    answers: Mapping[str, Any],
    files: Mapping[str, str],
    floats: Mapping[str, Iterable[str]],
    runtime: Mapping[str, str],
    images: str,
) -> None:
    """Writes `verification.json` beside the files that it describes.

    Args:
        folder: where the files are.
        about: what they say of themselves.
        checks: the checks of each format.
        answers: what each format answered, as `references.record` returns it.
        files: the path of each format in the folder.
        floats: of formats in int8, the kernels that stayed float32, where there are some.
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
        "description": about.to_dict(),
        "artefacts": dict(files),
        "float32": {name: list(each) for name, each in floats.items()},
        "files": {
            str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": sha256(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        },
        "checks": {name: list(map(dataclasses.asdict, each)) for name, each in checks.items()},
        "answers": dict(answers),
        SELF: _NO_SHA256,
    }
    text = json.dumps(record, indent=1) + "\n"
    target = folder / "assets.extra" if "savedmodel" in checks else folder
    (target / RECORD).write_text(text.replace(_NO_SHA256, _text_sha256(text)), encoding="utf-8")


def is_whole(text: str) -> bool:
    """Whether a record is as it was written: it holds the SHA-256 of itself with zeros for it."""
    found = re.search(rf'"{SELF}": "([0-9a-f]{{64}})"', text)
    if found is None:
        return False
    start, end = found.span(1)
    return _text_sha256(text[:start] + _NO_SHA256 + text[end:]) == found[1]


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


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
