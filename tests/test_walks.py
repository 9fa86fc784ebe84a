"""The walks of CONTRIBUTING.md: the functions that data passes, as a run passes them."""

import dataclasses
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import image_files
import numpy as np
import pytest
from conftest import TINY

import keras_vit
from keras_vit import data, evaluation, explain, training
from keras_vit.cli.main import main
from keras_vit.data import images

ROOT = Path(keras_vit.__file__).parent
TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
COUNTS = re.findall(r"^\| (An? .+) \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)
WALKS = dict(re.findall(r"^(An? [^\n]+):\n\n```text\n(.+?)```", TEXT, re.MULTILINE | re.DOTALL))
COMMAND = "A training by the command line"
CONFIG = dataclasses.replace(TINY, input_shape=(32, 32, 3), num_layers=1, classes=2)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_files.write_classes(tmp_path_factory.mktemp("photos"), count=8)


@functools.cache
def room_of(code: CodeType) -> str | None:
    """The room of a function; None for other packages and for what an import runs."""
    path = Path(code.co_filename)
    if path.suffix != ".py" or not path.is_relative_to(ROOT) or code.co_name == "<module>":
        return None
    return path.relative_to(ROOT).with_suffix("").as_posix()


def stack(frame: FrameType | None) -> Iterator[str | None]:
    while frame is not None:
        yield room_of(frame.f_code)
        frame = frame.f_back


def count(walk: Callable[[], Any]) -> tuple[int, int]:
    """Runs a walk; returns how many rooms run at all, and how many are entered again once left."""
    rooms: set[str] = set()
    returned: set[str] = set()
    last = None

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal last
        room = room_of(frame.f_code) if event == "call" else None
        if room is None:
            return
        if room != last and room in rooms and room not in stack(frame.f_back):
            returned.add(room)
        rooms.add(room)
        last = room

    sys.setprofile(profile)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return len(rooms), len(returned)


def trace(walk: Callable[[], Any], functions: list[str]) -> str:
    """Runs a walk; returns those of the functions that it calls, as CONTRIBUTING.md lists them."""
    lines: list[str] = []
    called: set[str] = set()

    @functools.cache
    def name(code: CodeType) -> tuple[str, str] | None:
        room = room_of(code)
        function = code.co_qualname.replace(".<locals>", "")
        return (room, function) if room and f"{room}: {function}" in functions else None

    def profile(frame: FrameType, event: str, _: object) -> None:
        place = name(frame.f_code) if event == "call" else None
        if place is None or ": ".join(place) in called:
            return
        if not called and ": ".join(place) != functions[0]:
            return  # the validation images, say, which are prepared before
        room, function = place
        waiting, caller = set(), frame.f_back
        while caller is not None:
            waiting.add((name(caller.f_code) or ("",))[0])
            caller = caller.f_back
        rooms = {each.split(": ")[0] for each in called}
        called.add(": ".join(place))
        if lines and re.sub("^<- ", "", lines[-1]).startswith(f"{room}: "):
            lines[-1] += f", {function}"
        else:
            mark = "<- " if room in rooms and room not in waiting else ""
            lines.append(f"{mark}{room}: {function}")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        walk()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return "\n".join([*lines, ""])


def run(name: str, photos: Path, out: Path) -> Callable[[], Any]:
    photo = photos / "plain" / "000.jpg"
    if name == "A training image to the step":
        recipe = training.Recipe(
            epochs=1,
            batch_size=8,
            learning_rate=0.01,
            augmentation=data.Augmentation(erase=0.5, rotation=10, randaugment_layers=1),
        )
        photo_data = data.load_data(photos)
        return lambda: training.train(photo_data, out=out, model=CONFIG, recipe=recipe)
    if name == COMMAND:
        return lambda: main(f"train --data {photos} --out {out} --model tiny --epochs 1".split())
    model = keras_vit.VisionTransformer(CONFIG)
    weights = out.with_suffix(".npz")
    keras_vit.weights.save_npz(model, weights)
    labels = ("cat", "dog")
    walks: dict[str, Callable[[], Any]] = {
        "An image through the model": lambda: model(np.zeros((1, 32, 32, 3), np.float32)),
        "A checkpoint to its variable": lambda: keras_vit.weights.load_weights(model, weights),
        "A model to its export": lambda: keras_vit.export(model, out, labels=labels),
        "An image file to a prediction": lambda: evaluation.predict(
            model, [data.read_image(photo)], labels=labels
        ),
        "An attention map to the page": lambda: explain.write_explanation(
            model, data.read_image(photo), out, labels=labels
        ),
    }
    return walks[name]


@pytest.mark.full
@pytest.mark.parametrize("name", WALKS)
def test_data_passes_what_contributing_lists(name: str, photos: Path, tmp_path: Path) -> None:
    functions = [
        f"{room}: {function}"
        for room, names in re.findall(r"^(?:<- )?(\S+): (.+)$", WALKS[name], re.MULTILINE)
        for function in names.split(", ")
    ]

    images._decoder.cache_clear()  # or a graph of another test decodes the image

    assert trace(run(name, photos, tmp_path / "out"), functions) == WALKS[name]


@pytest.mark.full
def test_contributing_says_how_many_rooms_run(photos: Path, tmp_path: Path) -> None:
    """All that run, on the list or not."""
    counted = []
    for name in (*WALKS, COMMAND):
        images._decoder.cache_clear()
        counted.append(
            (name, *map(str, count(run(name, photos, tmp_path / name.replace(" ", "-")))))
        )
    assert counted == COUNTS
