"""Checks artefacts on the disk, in a process where Keras and keras_vit cannot be imported."""

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
from typing import Any

import numpy as np

from keras_vit import version
from keras_vit.exporting.clean import messages
from keras_vit.exporting.rebuild import Exportable
from keras_vit.exporting.samples import Answers, References

RECORD = "verification.json"
# What float32 rounding allows between two orders of the same sums; measured up to 2e-6.
SAVEDMODEL_LIMIT = 1e-5
# How a file is compared and what it may reach: other kernels, other numbers of bits.
FILE_LIMITS: Mapping[str, tuple[str, float]] = {
    "onnx": ("absolute", 1e-4),
    "tflite": ("absolute", 1e-4),
    "tflite-fp16": ("relative", 5e-3),
    "tflite-int8": ("cosine", 0.995),
    "tflite-int8-full": ("top1", 0.98),
}
# Two classes whose scores are closer than this may change places.
TIE = 1e-5
_BOOTSTRAP = Path(__file__).parent / "clean" / "bootstrap.py"
_PACKAGES = ("tensorflow", "keras", "numpy", "onnx", "onnxruntime", "tf2onnx", "ai-edge-litert")
_SHOWN = 3


class VerificationError(ValueError):
    """An artefact does not do what the model does; nothing was put in place."""


def check_artefact(request: messages.Request) -> tuple[list[messages.Check], dict[str, str]]:
    """Runs the checks of a request in a clean process.

    Returns:
        The checks, all passed, and the versions of what ran there.

    Raises:
        VerificationError: a check failed, or the process did.
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
            said = finished.stderr.strip().splitlines() or ["nothing"]
            raise VerificationError(
                f"The {request.format} artefact could not be checked: the process ended with code "
                f"{finished.returncode} and said: {said[-1]}"
            )
        checks, runtime = messages.read_report(folder)
    require(checks, artefact=request.format)
    return checks, runtime


def require(checks: Iterable[messages.Check], *, artefact: str) -> None:
    """Raises a VerificationError that names what failed, if anything did."""
    failed = [check for check in checks if not check.passed]
    if failed:
        listed = "; ".join(
            f"{check.name}: {check.measured} (limit {check.limit})" for check in failed[:_SHOWN]
        )
        more = f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
        raise VerificationError(
            f"The {artefact} artefact does not do what the model does, and was not put in place: "
            f"{listed}{more}."
        )


def savedmodel_cases(
    exportable: Exportable, references: References, *, labels: tuple[str, ...], top_k: int
) -> tuple[messages.Case, ...]:
    """Returns a case for every signature of a SavedModel."""
    from keras_vit.exporting import savedmodel

    def case(
        signature: str, name: str, value: np.ndarray, answers: Answers, *names: str
    ) -> messages.Case:
        return messages.Case(
            signature=signature,
            inputs={name: value},
            expected={name: answers.of_batch[name] for name in names},
            # Without "class_ids" if two classes are too close in it.
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
    best = _best(of_files.of_batch["probabilities"], top_k=top_k)
    answers = Answers(
        of_batch=of_files.of_batch | best,
        of_first=of_files.of_first | _best(of_files.of_first["probabilities"], top_k=top_k),
    )
    examples = np.empty(len(files), object)
    examples[:] = [savedmodel.example(content) for content in files]
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
    """Returns the one case of an ONNX or TFLite file.

    Args:
        exportable: the rebuilt model.
        artefact: the format.
        images: a batch as the original model takes it.
        expected: the model's outputs for it, by name.
    """
    measure, limit = FILE_LIMITS[artefact]
    names = ["features"] if exportable.activation is None else ["logits", "probabilities"]
    if measure != "absolute":
        names = names[:1]  # rounded weights are measured before the softmax, which stretches errors
    scale = _scale(dict(expected)) if measure == "absolute" else 1.0
    return messages.Case(
        signature="",
        inputs={"images": images},
        expected={name: expected[name] for name in names},
        limit=limit * scale,
        measure=measure,
    )


def write_record(
    folder: Path,
    *,
    checks: Mapping[str, Iterable[messages.Check]],
    runtime: Mapping[str, str],
    images: str,
    pixels: Mapping[str, Any],
) -> None:
    """Writes `verification.json` beside the files that it is about.

    Args:
        folder: where the files are.
        checks: what was checked, by format.
        runtime: versions of what ran the checks; empty if nothing was.
        images: on which images.
        pixels: what the model takes, see `pixels_of`.
    """
    record = {
        "verified": bool(runtime),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"keras-vit": version.__version__, **_versions(), **runtime},
        "images": images,
        "pixels": dict(pixels),
        "files": {
            str(file.relative_to(folder)): {
                "bytes": file.stat().st_size,
                "sha256": _sha256(file),
            }
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        },
        "checks": {
            name: [dataclasses.asdict(check) for check in found] for name, found in checks.items()
        },
    }
    target = folder / "assets.extra" if "savedmodel" in checks else folder
    text = json.dumps(record, indent=1) + "\n"
    (target / RECORD).write_text(text, encoding="utf-8")


def pixels_of(exportable: Exportable) -> dict[str, Any]:
    """Says what a model makes of pixels: (x / 255 - mean) / std, inside or before it."""
    return {
        "takes": exportable.takes,
        "image_mean": list(exportable.pixels.image_mean),
        "image_std": list(exportable.pixels.image_std),
    }


def _scale(outputs: dict[str, np.ndarray]) -> float:
    """Rounding grows with the numbers: the limit holds for values of order 1."""
    name = "logits" if "logits" in outputs else "features"
    return max(1.0, float(np.abs(outputs[name]).max()))


def _best(probabilities: np.ndarray, *, top_k: int) -> dict[str, np.ndarray]:
    order = np.argsort(-probabilities, axis=1, kind="stable")
    sorted_scores = np.take_along_axis(probabilities, order, axis=1)
    best = {"scores": sorted_scores[:, :top_k]}
    gaps = -np.diff(sorted_scores[:, : top_k + 1], axis=1)
    if gaps.min(initial=1.0) > TIE:
        best["class_ids"] = order[:, :top_k].astype(np.int32)
    return best


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
