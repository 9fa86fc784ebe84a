"""Attacks run directories: damages each file or its JSON, then predicts or evaluates."""

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from campaigns import mutations, oracle
from campaigns.images import run_folder
from keras_vit.cli.main import main, make_parser

_LABELS = ["dark", "striped"]
_MODEL, _CONFIG, _SPLITS, _METRICS = "model.keras", "config.json", "splits.csv", "metrics.json"
# Processor time: an undamaged run builds its model and traces graphs.
_SECONDS = {"predict": 2.0, "evaluate": 10.0}
# Replacements of a value in a JSON file.
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 0.5, 10**6, 10**30, float("nan"), float("inf"), "", "4", "../..",
    "\x1b[2J\u202e", "x" * 10_000, [], [0], ["a", "b"], {}, {"": None},
)  # fmt: skip
_TEXTS = (b"", b"\0" * 100, b"[" * 100_000, b" " * 3_000_000, b"\xff\xfe{}", b"<html></html>")


class Campaign:
    """Damages one file of a run, then predicts a picture or evaluates the run.

    A damage must be refused, or change no number of the output.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._original = _write_run(folder)
        self._run = folder / "attacked"
        self._picture = folder / "images" / "dark" / "0.png"
        self._outputs = {name: self._act(name, self._original) for name in ("predict", "evaluate")}

    def case(self, rng: np.random.Generator) -> oracle.Case:
        name = str(rng.choice([_CONFIG] * 4 + [_MODEL] * 4 + [_SPLITS, _METRICS]))
        action = (
            "evaluate"
            if name in (_SPLITS, _METRICS)
            else str(rng.choice(["predict"] * 9 + ["evaluate"]))
        )
        content = (self._original / name).read_bytes()
        damaged, what = _damaged(name, content, rng)

        def act() -> str:
            shutil.rmtree(self._run, ignore_errors=True)
            shutil.copytree(self._original, self._run)
            (self._run / name).write_bytes(damaged)
            return self._act(action, self._run)

        return oracle.Case(
            what=f"{action}, {name}: {what}",
            act=act,
            sound=self._outputs[action],
            names=(name, str(self._run), str(self._folder / "images")),
            has_checksum=name != _SPLITS,  # a file that may list any image in any split
            seconds=_SECONDS[action],
        )

    def _act(self, action: str, run: Path) -> str:
        """Runs the command, and returns a digest of the numbers that it prints, without names."""
        arguments = [action, str(run), "--json"]
        if action == "predict":
            arguments.insert(2, str(self._picture))
        parsed = make_parser().parse_args(arguments)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = parsed.run(parsed)  # `main` would print the error and hide where it came from
        if code:
            raise RuntimeError(f"the exit code is {code}, without an error")
        numbers = [list(_numbers(json.loads(line))) for line in out.getvalue().splitlines()]
        return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()


def _numbers(value: Any) -> Iterator[float | None]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif not isinstance(value, str):
        yield value


def _damaged(name: str, content: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    choice = rng.integers(10)
    if choice == 0:
        return content, "undamaged"
    if choice == 1:
        text = _TEXTS[int(rng.integers(len(_TEXTS)))]
        return text, f"{len(text)} bytes, {text[:4]!r} ..."
    if choice < 7 and name.endswith(".json"):
        fields = json.loads(content)
        what = _change(fields, rng)
        return json.dumps(fields).encode(), what
    return mutations.mutate(content, rng)


def _change(fields: Any, rng: np.random.Generator) -> str:
    """Changes or removes one value, at any depth."""
    keys = list(fields) if isinstance(fields, dict) else list(range(len(fields)))
    key = keys[int(rng.integers(len(keys)))]
    if isinstance(fields[key], dict | list) and fields[key] and rng.integers(4):
        return f"{key}/{_change(fields[key], rng)}"
    if rng.integers(5) == 0:
        del fields[key]
        return f"{key} removed"
    fields[key] = _VALUES[int(rng.integers(len(_VALUES)))]
    return f"{key} is {str(fields[key])[:20]!r}"


def _write_run(folder: Path) -> Path:
    """Makes a run of a tiny model, with its images, splits and metrics."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    rows = ["split,label,path"]
    for label in _LABELS:
        (folder / "images" / label).mkdir(parents=True)
        for index in range(3):
            picture = rng.integers(0, 256, (16, 16, 3), np.uint8)
            file = folder / "images" / label / f"{index}.png"
            file.write_bytes(tf.io.encode_png(picture).numpy())
            rows.append(f"{('train', 'validation', 'test')[index]},{label},{label}/{index}.png")
    config = keras_vit.ViTConfig(
        input_shape=(16, 16, 3),
        patch_size=8,
        hidden_dim=8,
        mlp_dim=8,
        num_heads=2,
        num_layers=2,
        classes=2,
        include_preprocessing=True,
    )
    run = run_folder(folder / "run", keras_vit.VisionTransformer(config), labels=_LABELS)
    fields = json.loads((run / _CONFIG).read_text())
    fields["data"] = {"source": str(folder / "images")}
    (run / _CONFIG).write_text(json.dumps(fields))
    (run / _SPLITS).write_text("\n".join(rows) + "\n")
    with contextlib.redirect_stdout(io.StringIO()):
        main(["evaluate", str(run)])  # writes metrics.json
    return run
