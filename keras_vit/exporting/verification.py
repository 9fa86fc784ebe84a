"""Says what an artefact is asked, and asks it in a process without Keras and keras_vit."""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from keras_vit.exporting import samples, savedmodel
from keras_vit.exporting.clean import agreement, checker
from keras_vit.exporting.clean.agreement import Case, Check, Gate, Request
from keras_vit.exporting.clean.checker import Report
from keras_vit.exporting.formats import Format
from keras_vit.exporting.rebuild import Exportable
from keras_vit.exporting.samples import Batch, VerificationImages

# Float32 sums in another order differ; measured up to 2e-6.
SAVEDMODEL_LIMIT = 1e-5
# Of all other float32 artefacts: absolute, for values of order 1.
FLOAT_LIMIT = 1e-4
TIE = 1e-5  # rounding may exchange two classes whose scores are closer
_MOST_LISTED = 3  # failed checks in a message


class VerificationError(ValueError):
    """An artefact and its model differ; nothing was published."""


def run_checks(request: Request) -> Report:
    """Runs the checks of a request in a clean process, whatever they find.

    Raises:
        VerificationError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="keras-vit-") as name:
        checker.write(Path(name), request)
        package = Path(checker.__file__).parents[1]
        finished = subprocess.run(
            # -P: modules of the working directory must not stand for those of the package.
            [sys.executable, "-P", "-c", checker.START, str(package), name],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        if finished.returncode:
            lines = finished.stderr.strip().splitlines() or ["no message"]
            # TensorFlow tells the place in the graph after the error.
            errors = [line for line in lines if re.match(r"[\w.]+Error\b", line)] or lines
            raise VerificationError(
                f"The {request.format} artefact could not be checked: the process ended with code "
                f"{finished.returncode}: {errors[-1]}"
            )
        return checker.read_report(Path(name))


def require(checks: Iterable[Check], *, artefact: str) -> None:
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


def file_cases(exportable: Exportable, row: Format, pixels: Batch, gate: Gate) -> list[Case]:
    """Returns the case of an ONNX or TFLite file."""
    names = ["logits", "probabilities"] if exportable.activation else [exportable.answers]
    limit = FLOAT_LIMIT * _scale(pixels.batched)
    if row.weights != "float32":  # which may change one answer more
        names, limit = names[:1], row.limits.largest * agreement.deviation(gate)
    return [
        Case(
            signature="",
            inputs={"images": exportable.to_original(pixels.inputs)},
            expected={name: pixels.batched[name] for name in names},
            limit=limit,
            batch_sizes=row.batch_sizes,
        )
    ]


def make_gate(exportable: Exportable, row: Format, images: VerificationImages) -> Gate:
    """Returns what decides about an artefact of a format."""
    kind = getattr(exportable.activation, "__name__", "values")
    if kind == "softmax" and exportable.classes == 1:  # which is 1, whatever its logit
        kind = "values"
    output = exportable.answers if exportable.activation is None else "logits"
    signature, inputs = "", exportable.to_original(images.pixels)
    if row.has_signatures:
        signature, inputs = savedmodel.signature_of(exportable), images.pixels
    return Gate(
        signature=signature,
        images=inputs,
        outputs=(output,) if kind == "values" else (output, "probabilities"),
        expected=images.outputs[output],
        limits=row.limits,
        kind=kind,
        targets=images.targets,
    )


def savedmodel_cases(
    exportable: Exportable,
    row: Format,
    pixels: Batch,
    images: Sequence[samples.Image] = (),
    *,
    top_k: int,
) -> list[Case]:
    """Returns a case for every signature of a SavedModel; files are of the given images.

    All of them call one function for the network, so one of them shows it at every batch size.
    """
    contents = samples.make_files(exportable, images)
    resized = samples.resize_images(exportable, contents)
    files = samples.make_batch(exportable, contents, exportable.to_network(resized, "pixels"))
    normalized = exportable.normalized(pixels.inputs)
    if exportable.network_takes == "normalized":
        values = dataclasses.replace(pixels, inputs=normalized)
    else:  # which may amplify the rounding of the values
        inputs = exportable.to_network(normalized, "normalized")
        values = samples.make_batch(exportable, normalized, inputs)

    def case(signature: str, given: str, batch: Batch, *names: str) -> Case:
        return Case(
            signature=signature,
            inputs={given: batch.inputs},
            expected={name: batch.batched[name] for name in names},
            # "class_ids" is missing where rounding may exchange two classes.
            alone={name: batch.of_first[name] for name in names if name in batch.of_first},
            limit=SAVEDMODEL_LIMIT * _scale(batch.batched),
            batch_sizes=row.batch_sizes if signature == savedmodel.SERVING_DEFAULT else (1, 3, 0),
        )

    if exportable.activation is None:
        name = exportable.answers
        return [
            case("serving_default", "image_bytes", files, name),
            case("pixels", "pixel_values", values, name),
            case(savedmodel.signature_of(exportable), "images", pixels, name),
        ]
    best, of_first = (
        _best(outputs["probabilities"], top_k=top_k) for outputs in (files.batched, files.of_first)
    )
    files = Batch(inputs=contents, batched=files.batched | best, of_first=files.of_first | of_first)
    examples = np.array([savedmodel.example(content) for content in contents], object)
    made = [
        case("serving_default", "image_bytes", files, *best),
        case("classify", "inputs", dataclasses.replace(files, inputs=examples), "scores"),
        case("image_tensor", "images", pixels, "logits", "probabilities"),
        case("pixels", "pixel_values", values, "logits", "probabilities"),
    ]
    if exportable.config is not None:
        made.append(case("features", "images", pixels, "features"))
    return made


def _scale(outputs: Mapping[str, np.ndarray]) -> float:
    """Returns the factor of the limits: they hold for values of order 1, and rounding grows."""
    values = outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
    return max(1.0, float(np.abs(values).max()))


def _best(probabilities: np.ndarray, *, top_k: int) -> dict[str, np.ndarray]:
    """Returns the sorted scores, and the class numbers unless two scores are too close."""
    order = np.argsort(-probabilities, axis=1, kind="stable")
    sorted_scores = np.take_along_axis(probabilities, order, axis=1)
    best = {"scores": sorted_scores[:, :top_k]}
    gaps = -np.diff(sorted_scores[:, : top_k + 1], axis=1)
    if gaps.min(initial=1.0) > TIE:
        best["class_ids"] = order[:, :top_k].astype(np.int32)
    return best
