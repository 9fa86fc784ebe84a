"""Images that are the same wherever they are made, and what an artefact answered to them.

The record beside an artefact keeps the answers and not the images: whoever has the folder alone
can make the images again, and see whether the artefact still answers the same.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from keras_vit.exporting.clean import messages, runners
from keras_vit.exporting.description import Description

COUNT, FEW = 4, 2
LARGEST = 2**18  # bytes of one output in the record: of larger ones there are fewer images
# By how much of their spread answers may have changed; processors compute float16 and int8 each in
# their own way. Rounded weights alone are computed with in float32.
LIMIT, HALF_LIMIT, INT8_LIMIT = 1e-3, 1e-2, 5e-2
_LIMITS = {
    "onnx-fp16": HALF_LIMIT,
    **dict.fromkeys(("onnx-int8", "tflite-int8", "tflite-int8-full"), INT8_LIMIT),
}
_INPUTS = ("image_bytes", "images", "pixel_values")  # of a SavedModel, which are made here


def draw(shape: tuple[int, int, int], count: int = COUNT) -> np.ndarray:
    """Draws smooth images by whole numbers alone, uint8 (count, height, width, channels).

    Example:
        >>> draw((2, 2, 3), 1)[0, :, 0].tolist()
        [[0, 85, 170], [60, 145, 230]]
    """
    height, width, channels = shape
    number, y, x, channel = np.ogrid[:count, :height, :width, :channels]
    steps = 480 * (number + 1) * y // (4 * height) + 480 * (3 + number) * x // (4 * width)
    wave = (steps + 85 * channel + 37 * number) % 512
    images: np.ndarray = np.where(wave < 256, wave, 511 - wave).astype(np.uint8)
    return images


def make(
    name: str,
    about: Description,
    *,
    cases: Sequence[messages.Case] = (),
    recorded: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[messages.Case, ...]:
    """Returns what to ask an artefact, and what it answered before.

    Args:
        name: the format.
        about: the description of the model.
        cases: those that a SavedModel was checked with: each has a signature, and its input.
        recorded: the answers in the record; None where there are none yet.
    """
    if recorded is not None:
        return tuple(_recorded(name, about, answer) for answer in recorded)
    if name != "savedmodel":
        return (_case(name, about, "", "images", COUNT),)
    # All signatures have the same network, so that one of them is asked about all images.
    asked = [(case.signature, given) for case in cases for given in case.inputs if given in _INPUTS]
    return tuple(
        _case(name, about, *each, COUNT if place == 0 else FEW) for place, each in enumerate(asked)
    )


def record(cases: Sequence[messages.Case], answers: Sequence[Mapping[str, np.ndarray]]) -> Any:
    """Returns answers as plain values for JSON, the numbers as the bytes of float32 in base64."""
    kept = []
    for case, answer in zip(cases, answers, strict=True):
        (given,) = case.inputs
        rows = {
            name: value[: max(LARGEST * len(value) // max(value.nbytes, 1), 1)]
            for name, value in answer.items()
        }
        fewest = min(map(len, rows.values()), default=0)
        outputs = {
            name: {
                "shape": list(value[:fewest].shape),
                "float32": base64.b64encode(value[:fewest].astype("<f4").tobytes()).decode(),
            }
            for name, value in rows.items()
        }
        kept.append({"signature": case.signature, "input": given, "outputs": outputs})
    return kept


def _recorded(name: str, about: Description, answer: Mapping[str, Any]) -> messages.Case:
    expected = {
        output: np.frombuffer(base64.b64decode(value["float32"]), "<f4").reshape(value["shape"])
        for output, value in answer["outputs"].items()
    }
    rows = max(map(len, expected.values()))
    return _case(name, about, answer["signature"], answer["input"], rows, expected)


def _case(
    name: str,
    about: Description,
    signature: str,
    given: str,
    count: int,
    expected: dict[str, np.ndarray] | None = None,
) -> messages.Case:
    pixels = draw(about.image_shape, count)
    if given == "image_bytes":
        value = np.empty(count, object)
        value[:] = [_png(image) for image in pixels]
    elif given == "pixel_values":
        value = about.normalized(pixels)
    else:
        value = pixels if runners.family(name) == "savedmodel" else about.prepared(pixels)
    return messages.Case(
        signature=signature,
        inputs={given: value},
        expected=expected or {},
        limit=_LIMITS.get(name, LIMIT),
        measure="spread",
    )


def _png(pixels: np.ndarray) -> bytes:
    """Encodes pixels (height, width, 3), or grey ones of one channel, as a PNG."""
    with io.BytesIO() as file:
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
        return file.getvalue()
