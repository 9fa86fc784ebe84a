"""Tests of what is in examples/."""

import dataclasses
import functools
import http.server
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import browser
import numpy as np
import processes
import pytest
from conftest import TINY
from exported import LABELS, photo
from test_explain_attention import sharp
from trainings import Listener

import keras_vit
from keras_vit import data, evaluation, training

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

# How the page in the browser has to resize images.
RESIZED: dict[str, dict[str, Any]] = {
    "center": {"crop_pct": 0.7, "interpolation": "bicubic", "crop_mode": "center"},
    "squash": {"crop_pct": 0.9, "interpolation": "lanczos", "crop_offset": "floor"},
    "plain": {"antialias": False},
}


def run(script: str, *argv: str, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return processes.python(EXAMPLES / script, *argv, folder=folder, **variables)


def test_the_quickstart_is_short() -> None:
    """A first script is read in a minute: under 25 lines."""
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) < 25


@pytest.mark.full
def test_the_quickstart_runs(tmp_path: Path) -> None:
    """One epoch trains, measures and reads a digit."""
    *_, measured, read = run("quickstart.py", "1", folder=tmp_path).stdout.splitlines()
    assert measured.startswith("Of 359 digits")
    assert "it reads a " in read
    assert {"model.keras", "sample.png"} <= {file.name for file in tmp_path.glob("digits-run/*")}


def test_the_loop_is_short_and_has_the_losses_of_train(tmp_path: Path) -> None:
    """Plain Keras on the package's layers, pipeline and optimizer, step by step; 38 of them."""
    assert len((EXAMPLES / "loop.py").read_text().splitlines()) < 150
    printed = run("loop.py", "--epochs", "2", folder=tmp_path).stdout
    recipe = dataclasses.replace(training.RECIPES["digits"], epochs=2)
    listener = Listener()
    training.train(data.load_digits(), out=tmp_path / "run", recipe=recipe, on_event=listener)
    expected = [each.loss for each in listener.events if isinstance(each, training.EpochDone)]
    losses = [float(line.split()[3].rstrip(",")) for line in printed.splitlines()]
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


@pytest.mark.full
def test_the_example_of_keras_cv_trains(tmp_path: Path) -> None:
    """One epoch through the adapter ends with an accuracy."""
    pytest.importorskip("keras_cv")
    done = run("keras_cv_augment.py", "1", folder=tmp_path)
    assert done.stdout.startswith("Of 359 digits")
    assert "cannot be seeded" in done.stderr


@pytest.mark.full
def test_a_sweep_names_its_best_run(tmp_path: Path) -> None:
    """A row for each learning rate, in order; the run of the lowest validation loss is there."""
    argv = ("sweep.py", "--epochs", "1", "--rates", "0.002", "1e-6")
    done = run(*argv, folder=tmp_path).stdout
    _, _, high, low, best, edge = done.splitlines()
    assert (high.split()[1], low.split()[1]) == ("0.002", "1e-06")
    assert float(high.split()[3]) < float(low.split()[3])
    assert best == "The best run is sweep/0.002."
    assert edge.startswith("Its learning rate is at the edge")
    assert (tmp_path / "sweep" / "0.002" / "model.keras").is_file()
    assert run(*argv, folder=tmp_path).stdout == done


@pytest.mark.full
def test_learning_from_few_runs_small(tmp_path: Path) -> None:
    """All four comparisons on a small scale: the table and the picture; its numbers say little."""
    run("learn_from_few.py", "--quick", "--out", "few", folder=tmp_path)
    few = tmp_path / "few"
    rows = {row["name"]: row for row in json.loads((few / "few.json").read_text())}
    assert len(rows) == 16
    assert rows["LoRA at rank 8"]["trained"] < 0.05
    assert (few / "few.md").read_text().count("\n") == 2 + len(rows)
    assert (few / "few.png").stat().st_size > 10_000


@pytest.mark.full
@pytest.mark.parametrize("name", RESIZED)
def test_the_page_in_a_browser_names_what_predict_names(name: str, tmp_path: Path) -> None:
    """By the real runtime, from npm: images that shrink and that grow; what is none is told."""
    config = dataclasses.replace(
        TINY, include_preprocessing=True, image_mean=(0.4, 0.5, 0.6), image_std=(0.2, 0.3, 0.25)
    )
    config = dataclasses.replace(config, **RESIZED[name])
    model = sharp(config)
    taken = model.copy(config=dataclasses.replace(config, include_preprocessing=name == "center"))
    keras_vit.export(taken, tmp_path / "pets", formats=["onnx"], labels=LABELS, verify=False)
    shutil.copy(EXAMPLES / "browser" / "index.html", tmp_path)
    packed = ["npm", "pack", "onnxruntime-web@1.30.0"]
    subprocess.run(packed, cwd=tmp_path, check=True, capture_output=True)
    with tarfile.open(tmp_path / "onnxruntime-web-1.30.0.tgz") as archive:
        archive.extractall(tmp_path, filter="data")
    files = [tmp_path / name for name in ("small.png", "large.png", "palette.png")]
    for file, (seed, side, mode) in zip(
        files, ((8, 20, "RGB"), (10, 110, "RGB"), (14, 70, "P")), strict=True
    ):
        file.write_bytes(photo(seed, height=side, width=side + 7, mode=mode))
    expected = evaluation.predict(model, list(map(data.read_image, files)), labels=LABELS, top=5)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    page = f"http://127.0.0.1:{server.server_address[1]}/index.html"
    page += "?model=pets/onnx/1&runtime=package/dist/"
    with (
        processes.serving(server),
        browser.opened_browser() as chromium,
        browser.opened_page(chromium, page) as (opened, heard),
    ):
        opened.wait_for_selector("#file:enabled")
        for file, classes in zip(files, expected, strict=True):
            opened.set_input_files("#file", file)
            opened.get_by_text(file.name, exact=True).wait_for()
            rows = [row.inner_text().split() for row in opened.locator("#classes tr").all()]
            assert [label for label, *_ in rows] == [each.label for each in classes]
            shares = [float(share) / 100 for _, share, _ in rows]
            assert shares == pytest.approx([each.probability for each in classes], abs=1e-4)
        opened.set_input_files("#file", EXAMPLES / "quickstart.py")
        opened.get_by_text("quickstart.py is not an image").wait_for()
        assert heard == []
