"""From training on the digits to predictions of every exported format: what a user does."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from exported import LABELS, served_model

import keras_vit
from keras_vit import cli, data, training

ROOT = Path(keras_vit.__file__).parents[1]
FORMATS = (
    *("savedmodel", "tflite", "tflite-fp16", "tflite-int8", "tflite-int8-weights"),
    *("onnx", "onnx-fp16", "onnx-int8", "onnx-int8-weights"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a .keras file, with a file of labels beside it."""
    folder = tmp_path_factory.mktemp("saved")
    served_model().save(folder / "model.keras")
    (folder / "labels.txt").write_text("\n".join(LABELS))
    return folder


def test_a_keras_file_is_exported(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what it wrote and where, and how to go on."""
    out = saved / "out" / "pets"
    arguments = ["export", str(saved / "model.keras"), "--out", str(out)]
    assert cli.main([*arguments, "--labels", str(saved / "labels.txt"), "--no-verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"savedmodel: {out / '1'} (0.")
    assert lines[0].endswith("not checked)")
    assert lines[1] == f"Next: {out / 'serve.sh'}"
    assert (out / "labels.txt").read_text().splitlines() == list(LABELS)


def test_machines_read_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json there is one object for each artefact, with its checks."""
    pytest.importorskip("onnxruntime")
    out = saved / "json"
    arguments = ["export", str(saved / "model.keras"), "--out", str(out), "--formats", "onnx"]
    assert cli.main([*arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    actual = json.loads(line)
    assert (actual["event"], actual["format"]) == ("artefact", "onnx")
    assert Path(actual["path"]).is_file()
    assert all(check["passed"] for check in actual["checks"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.keras"], "There is no model file 'absent.keras'"),
        (["absent-run"], "absent-run"),
        (["MODEL", "--formats", "pdf"], "formats must be some of"),
        (["MODEL", "--images", "absent.png"], "absent.png"),
    ],
    ids=["file", "run", "format", "image"],
)
def test_mistakes_are_one_line_and_exit_1(
    arguments: list[str],
    message: str,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be exported is told in one line, and nothing is written."""
    arguments = [str(saved / "model.keras") if each == "MODEL" else each for each in arguments]
    assert cli.main(["export", *arguments, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def digits(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits as the README makes it, and its export in every format."""
    folder = tmp_path_factory.mktemp("digits")
    shutil.copytree(digits_run, folder / "digits-run")
    arguments = ["--out", str(folder / "digits"), "--formats", ",".join(FORMATS)]
    assert cli.main(["export", str(folder / "digits-run"), *arguments]) == 0
    return folder


def file_runner(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from images to logits, in onnxruntime or LiteRT."""
    if path.suffix == ".onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        return lambda images: session.run(["logits"], {"images": images})[0]
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    runner = litert.Interpreter(str(path)).get_signature_runner("serving_default")
    return lambda images: np.concatenate([runner(images=image[None])["logits"] for image in images])


@pytest.mark.slow
def test_every_format_is_as_accurate_as_the_model(digits: Path) -> None:
    """Test accuracy is the model's in float32 and float16, and within 0.5 points in int8."""
    run = training.Run.load(digits / "digits-run")
    test = data.load_digits().test
    pixels = np.asarray(data.resize_image(test.images, size=run.image_size))
    right = {"model": np.asarray(run.model(pixels)).argmax(-1) == test.targets}
    for path in (*digits.glob("digits/tflite/1/*.tflite"), *digits.glob("digits/onnx/1/*.onnx")):
        right[path.name] = file_runner(path)(pixels).argmax(-1) == test.targets
    right["savedmodel"] = served_classes(digits, test.images) == test.targets
    accuracy = {name: float(np.mean(hits)) for name, hits in right.items()}
    print(accuracy)
    assert len(accuracy) == 1 + len(FORMATS)
    for name, value in accuracy.items():
        assert abs(value - accuracy["model"]) <= (0.005 if "int8" in name else 0.0), accuracy


def served_classes(digits: Path, images: np.ndarray) -> np.ndarray:
    """The classes that the server names for the images, sent as PNG files."""
    pytest.importorskip("tensorflow_serving.apis")
    from serving_harness.client import serving

    files = np.empty(len(images), object)
    files[:] = [tf.io.encode_png(image).numpy() for image in images]
    with serving(digits / "digits") as server:
        return server.predict("serving_default", image_bytes=files)["class_ids"][:, 0]


@pytest.mark.slow
def test_three_commands_from_the_run_to_a_served_prediction(digits: Path) -> None:
    """Train, export, ask: the REST client prints the digit that the sample shows."""
    pytest.importorskip("tensorflow_serving.apis")
    from serving_harness.client import serving

    sample = digits / "digits-run" / "sample.png"
    with serving(digits / "digits") as server:
        url = f"http://127.0.0.1:{server.rest_port}"
        client = ROOT / "examples/serving/rest_client.py"
        command = [sys.executable, str(client), "--url", url, "--model", "digits", str(sample)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    model = keras.saving.load_model(digits / "digits-run" / "model.keras", compile=False)
    pixels = data.read_images([sample], size=model.input_shape[1:3])
    assert done.stdout.startswith(f"{sample}: {np.asarray(model(pixels)).argmax()} ")
