"""A tiny exported model, and image files, for the tests of export."""

import dataclasses
import io
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conftest import TINY, randomize
from PIL import Image

from keras_vit.exporting import export, samples
from keras_vit.exporting.clean import agreement, runners
from keras_vit.model import VisionTransformer

LABELS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
SERVED = dataclasses.replace(TINY, include_preprocessing=True, classifier_activation="softmax")


def served_model(**fields: Any) -> VisionTransformer:
    """A tiny classifier of pixels with every weight random."""
    return randomize(VisionTransformer(dataclasses.replace(SERVED, **fields)))


def export_for_ever(directory: Path, connection: Connection) -> None:
    """Exports version after version until the process is killed; each is told by a True."""
    model = served_model()
    while True:
        export(model, directory, labels=LABELS, verify=False)
        connection.send(True)


def failures(runner: runners.Runner, gate: agreement.Gate) -> list[str]:
    """The checks of a gate that a file fails."""
    checks = agreement.run_gate(gate, lambda inputs: runner.run("", inputs))
    return [check.name.removeprefix("gate: ") for check in checks if not check.passed]


def photo(
    seed: int = 0, *, height: int = 40, width: int = 56, kind: str = "PNG", mode: str = "RGB"
) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(samples.draw_scene(seed, height=height, width=width)).convert(mode).save(
        stream, kind
    )
    return stream.getvalue()
