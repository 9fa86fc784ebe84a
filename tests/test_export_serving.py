"""An exported SavedModel in TensorFlow's loaders and the server's own, and what lies beside it."""

import hashlib
import json
import multiprocessing
import os
import re
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cpp_loader
import image_files
import numpy as np
import pytest
import tensorflow as tf
from exported import LABELS, photo, served_model
from google.protobuf import text_format
from serving_rig import IMAGE, Served, serving

from keras_vit import VisionTransformer, data
from keras_vit.exporting import FORMATS, export, rebuild, samples, savedmodel, verification
from keras_vit.exporting.artefacts import Artefact
from keras_vit.exporting.clean import agreement, runners

Arrays = dict[str, np.ndarray]

LIMIT = 1e-5  # float32 rounding in another order of the same sums; measured up to 1e-6
SIZE = (32, 48)
# Pixels of its own.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILES = {
    "PNG": photo(0),
    "JPEG": photo(1, height=61, width=17, kind="JPEG"),
    "grey": photo(4, mode="L"),
    "RGBA": photo(5, mode="RGBA"),
    "palette": photo(6, mode="P"),
    "two pixels": photo(8, height=2, width=1),
}
BEST = {"classes": ("string", (-1, 3)), "scores": ("float32", (-1, 3))}
# Of BatchingParameters in tensorflow/serving, servables/tensorflow/session_bundle_config.proto.
BATCHING = {
    "max_batch_size", "batch_timeout_micros", "max_enqueued_batches", "num_batch_threads",
    "max_execution_batch_size", "enable_large_batch_splitting", "allowed_batch_sizes",
}  # fmt: skip
LIBRARIES = ("libtensorflow_cc.so.2", "libtensorflow_framework.so.2")


def bomb(kind: str) -> bytes:
    """A small file whose header claims 30,000 by 30,000 pixels."""
    content = photo(kind=kind)
    frame = content.find(b"\xff\xc0") + 5  # of a JPEG: marker, length, precision
    places = {"PNG": (16, ">II"), "JPEG": (frame, ">HH")}
    place, form = places[kind]
    size = struct.pack(form, 30_000, 30_000)
    return content[:place] + size + content[place + len(size) :]


# What is sent as an image, and a word of the answer.
HOSTILE = {
    "empty": (b"", "empty"),
    "no image": (b"<html>404</html>", "no image of a known format"),
    **{kind: (photo(7, kind=kind), "send a JPEG or PNG") for kind in ("WEBP", "GIF", "BMP")},
    "truncated JPEG": (photo(kind="JPEG")[:400], "damaged"),
    "truncated PNG": (photo()[:400], "damaged"),
    "one pixel": (photo(height=1, width=1), "single pixel"),
    **{f"{kind} bomb": (bomb(kind), "more pixels than") for kind in ("PNG", "JPEG")},
}
# Inputs and outputs with their types and shapes, as docs/serving.md has them.
IMAGES, SCORES = ("uint8", (-1, *SIZE, 3)), ("float32", (-1, 7))
PROBABILITIES = {"logits": SCORES, "probabilities": SCORES}
SIGNATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "serving_default": (
        {"image_bytes": ("string", (-1,))},
        {**BEST, "class_ids": ("int32", (-1, 3)), "status": ("string", (-1,))},
    ),
    "image_tensor": ({"images": IMAGES}, PROBABILITIES),
    "pixels": ({"pixel_values": ("float32", IMAGES[1])}, PROBABILITIES),
    "features": ({"images": IMAGES}, {"features": ("float32", (-1, 24))}),
    "classify": ({"inputs": ("string", (-1,))}, BEST),
}


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return served_model(image_mean=MEAN, image_std=STD)


@pytest.fixture(scope="module")
def artefact(model: VisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    """One verified version, in a directory of its own."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "photo.jpg").write_bytes(photo(kind="JPEG"))
    images = [folder / "photo.jpg"]
    (made,) = export(model, folder / "pets", labels=LABELS, images=images, top_k=3)
    return made


@pytest.fixture(scope="module")
def directory(artefact: Artefact) -> Path:
    return artefact.path.parent


@pytest.fixture(scope="module")
def ask(directory: Path) -> Iterator[Callable[..., Arrays]]:
    """Asks a signature: of a session, or of the server where KERAS_VIT_SERVING_IMAGE is."""
    if IMAGE:
        with serving(directory) as served:
            yield served.predict
    else:
        loaded = runners.SavedModelRunner(directory / "1")
        yield lambda signature, **inputs: loaded.run(signature, inputs)


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    pytest.importorskip("tensorflow_serving.apis", reason="pip install tensorflow-serving-api")
    with serving(directory) as server:
        yield server


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (2, *SIZE, 3), np.uint8)


def evaluated(model: VisionTransformer, contents: Iterable[bytes]) -> np.ndarray:
    """What `evaluate` and `predict` would compute for these files."""
    resized = [
        data.resize_image(data.decode_image(content), data.Resizing(SIZE)) for content in contents
    ]
    return np.asarray(model(np.stack(resized)))


def best_of(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-scores, axis=1)[:, :3]
    return order, np.take_along_axis(scores, order, 1)


def named(classes: np.ndarray) -> list[list[bytes]]:
    return [[LABELS[index].encode() for index in row] for row in classes]


def test_everything_that_belongs_to_a_served_model_is_there(directory: Path) -> None:
    """The version has weights, labels, warm-up and record; the settings stand beside it."""
    names = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}
    extras = {"labels.txt", "tf_serving_warmup_requests", "verification.json"}
    graph = {"fingerprint.pb", "saved_model.pb", "variables/variables.index"}
    version = {"variables/variables.data-00000-of-00001", *graph}
    version |= {f"assets.extra/{name}" for name in extras}
    settings = {"batching_parameters.txt", "labels.txt", "models.config", "monitoring.config"}
    assert names == {"README.md", "serve.sh", *settings, *(f"1/{name}" for name in version)}
    assert (directory / "labels.txt").read_text().splitlines() == list(LABELS)
    assert "$" not in (directory / "models.config").read_text()


def test_the_record_tells_what_was_checked(artefact: Artefact) -> None:
    """The record has versions, the SHA-256 of every other file, and checks that all passed."""
    record = json.loads((artefact.path / "assets.extra/verification.json").read_text())
    assert record["verified"] is True
    assert record["images"] == "1 of 1 given, 31 drawn"
    assert {"keras-vit", "tensorflow", "keras", "loader"} <= set(record["versions"])
    for name, file in record["files"].items():
        content = (artefact.path / name).read_bytes()
        assert file == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert len(record["files"]) == 6
    checks = {check["name"]: check for check in record["checks"]["savedmodel"]}
    assert all(check["passed"] for check in checks.values())
    assert len(record["checks"]["savedmodel"]) == len(artefact.checks)
    assert set(SIGNATURES) <= {name.partition(":")[0] for name in checks}
    assert checks["warm-up requests"]["measured"] == len(savedmodel.BATCH_SIZES) + 4
    about = record["description"]
    assert about["takes"] == "pixels"
    assert (about["image_mean"], about["image_std"]) == (list(MEAN), list(STD))
    readme = (artefact.path.parent / "README.md").read_text()
    assert "(0..255 / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)" in readme


def test_the_settings_are_what_the_server_parses(directory: Path) -> None:
    """The names are the server's; the batching sizes rise to the largest."""
    config = pytest.importorskip("tensorflow_serving.config.model_server_config_pb2")
    listed = config.ModelServerConfig()
    text_format.Parse((directory / "models.config").read_text(), listed)
    (served,) = listed.model_config_list.config
    assert (served.name, served.base_path) == ("pets", "/models/pets")

    text = (directory / "batching_parameters.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    forms = re.compile(r"(\w+)(?: \{ value: (\w+) \}|: \[([0-9, ]+)\])")
    settings = {match[1]: match[2] or match[3] for match in map(forms.fullmatch, lines) if match}
    assert settings.keys() == BATCHING
    assert len(settings) == len(lines)
    *sizes, largest = map(int, settings["allowed_batch_sizes"].split(", "))
    assert sizes == sorted(sizes) == list(savedmodel.BATCH_SIZES)
    # The server loads no model unless the last size is the limit, and batches are within it.
    assert int(settings["max_execution_batch_size"]) == sizes[-1] < largest
    assert int(settings["max_batch_size"]) == largest == savedmodel.REQUEST_LIMIT
    assert settings["enable_large_batch_splitting"] == "true"
    assert min(int(settings[name]) for name in ("num_batch_threads", "max_enqueued_batches")) >= 1
    words = (directory / "monitoring.config").read_text().split()
    assert words[:4] == ["prometheus_config", "{", "enable:", "true"]


def test_warm_up_requests_are_those_of_the_server(directory: Path) -> None:
    """TensorFlow Serving's own description of the log reads every request."""
    logs = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    requests = []
    file = directory / "1/assets.extra/tf_serving_warmup_requests"
    for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
        request = logs.PredictionLog.FromString(record).predict_log.request
        assert request.model_spec.name == "pets"
        ((name, tensor),) = request.inputs.items()
        requests.append((request.model_spec.signature_name, name, tf.make_ndarray(tensor).shape[0]))
    assert sorted(requests) == sorted(
        (signature, name, size)
        for signature, (inputs, _) in SIGNATURES.items()
        for name in inputs
        for size in (savedmodel.BATCH_SIZES if signature == "serving_default" else (1,))
    )


def described(tensors: Any) -> dict[str, Any]:
    return {
        name: (tf.as_dtype(each.dtype).name, tuple(one.size for one in each.tensor_shape.dim))
        for name, each in tensors.items()
    }


def test_signatures_are_as_documented_and_answer_as_the_model(
    directory: Path, ask: Callable[..., Arrays], model: VisionTransformer, pixels: np.ndarray
) -> None:
    """Names, types and shapes; pixels normalised by mean and deviation of its own; features."""
    assert {
        name: (described(each.inputs), described(each.outputs))
        for name, each in runners.SavedModelRunner(directory / "1").signatures.items()
    } == SIGNATURES
    expected = np.asarray(model(pixels))
    values = np.float32((pixels / 255 - np.array(MEAN)) / np.array(STD))
    # TensorFlow's public loader as well.
    public = tf.saved_model.load(str(directory / "1")).signatures
    assert set(public) == set(SIGNATURES)
    for answer in (
        ask("image_tensor", images=pixels),
        ask("pixels", pixel_values=values),
        public["image_tensor"](images=tf.constant(pixels)),
    ):
        np.testing.assert_allclose(answer["probabilities"], expected, atol=LIMIT)
        np.testing.assert_allclose(tf.nn.softmax(answer["logits"]), expected, atol=LIMIT)
    features = ask("features", images=pixels)["features"]
    pooled = model.features(pixels.astype("float32"), ["pooling"])["pooling"]
    np.testing.assert_allclose(features, pooled, atol=LIMIT)


def test_good_files_are_classified_as_evaluation_does_and_bad_ones_fail_alone(
    ask: Callable[..., Arrays], model: VisionTransformer
) -> None:
    """Every kind, each of its own size, in one request; what is hostile has a reason, no answer."""
    hostile, good = [content for content, _ in HOSTILE.values()], list(FILES.values())
    answer = ask("serving_default", image_bytes=np.array(hostile + good, object))
    told = [status.decode() for status in answer["status"]]
    words = [word for _, word in HOSTILE.values()] + ["OK"] * len(good)
    wrong = [(word, text) for word, text in zip(words, told, strict=True) if word not in text]
    assert wrong == []
    bad = len(hostile)
    assert not answer["scores"][:bad].any()
    assert (answer["class_ids"][:bad] == -1).all()
    assert not any(answer["classes"][:bad].ravel())
    best, scores = best_of(evaluated(model, good))
    np.testing.assert_array_equal(answer["class_ids"][bad:], best)
    np.testing.assert_allclose(answer["scores"][bad:], scores, atol=LIMIT)
    assert answer["classes"][bad:].tolist() == named(best)

    # Of tf.Examples one without an image, and junk, get no class.
    examples = [b"junk", *map(savedmodel.example, (*good, b"junk"))]
    answer = ask("classify", inputs=np.array(examples, object))
    np.testing.assert_allclose(answer["scores"][1:-1], scores, atol=LIMIT)
    assert answer["classes"][1:-1].tolist() == named(best)
    assert not answer["scores"][[0, -1]].any()
    assert not any(answer["classes"][[0, -1]].ravel())


def test_photos_are_served_upright_and_resized_as_the_model_says(
    ask: Callable[..., Arrays], model: VisionTransformer
) -> None:
    """All eight orientations, and a photo that shrinks: what the model makes of Pillow's pixels."""
    photos = [image_files.photo(turn, "PNG") for turn in range(1, 9)]
    upright = [image_files.as_pillow(contents) for contents in photos]
    resized = np.stack([data.resize_image(pixels, data.Resizing(SIZE)) for pixels in upright])
    expected = np.asarray(model(resized))
    answer = ask("serving_default", image_bytes=np.array(photos, object))

    np.testing.assert_allclose(answer["scores"], best_of(expected)[1], atol=LIMIT)
    plain = np.stack(
        [data.resize_image(one, data.Resizing(SIZE, antialias=False)) for one in upright]
    )
    assert np.abs(np.asarray(model(plain)) - expected).max() > LIMIT


def test_wrong_types_and_shapes_are_refused(ask: Callable[..., Arrays], pixels: np.ndarray) -> None:
    """Each with a reason, and the next request is answered."""
    for signature, inputs, word in (
        ("image_tensor", {"images": pixels.astype("float32")}, "float.*uint8|uint8.*float"),
        ("image_tensor", {"images": pixels[:, :16]}, "expected shape|Cannot feed value of shape"),
        ("serving_default", {"image_bytes": np.zeros(1)}, "string.*(double|float64)|double.*str"),
    ):
        with pytest.raises(Exception, match=f"(?s){word}"):
            ask(signature, **inputs)
    assert np.isfinite(ask("image_tensor", images=pixels)["logits"]).all()


def address(kind: str, server: Served, *, port: int | None = None) -> tuple[str, ...]:
    """What tells a client of examples/serving where to ask."""
    if kind == "rest":
        return ("--url", f"http://127.0.0.1:{port or server.rest_port}", "--model", server.name)
    return ("--address", f"127.0.0.1:{port or server.grpc_port}", "--model", server.name)


def run_client(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[1] / "examples" / "serving" / f"{name}_client.py"
    command = [sys.executable, str(script), "--timeout", "300", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rest", "grpc"])
def test_the_clients_print_labels_when_the_server_is_ready(
    kind: str, served: Served, model: VisionTransformer, tmp_path: Path
) -> None:
    """In batches, asking again where refused or cut off; a bad file is told and exits 1."""
    files = []
    for name in ("PNG", "JPEG", "grey", "RGBA"):
        files.append(tmp_path / f"{name}.image")
        files[-1].write_bytes(FILES[name])
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    if not IMAGE:
        lost = [""] if kind == "rest" else []
        served.refusals = [*lost, "UNAVAILABLE", "RESOURCE_EXHAUSTED"]
    process = run_client(kind, *files, bad, *address(kind, served), "--batch", 2)
    expected = evaluated(model, [file.read_bytes() for file in files])
    for line, file, row in zip(process.stdout.splitlines(), files, expected, strict=True):
        best = row.argmax()
        assert line.startswith(f"{file}: {LABELS[best]} {row[best]:.1%}, ")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith(f"{bad}: The file is no image")
    assert not served.refusals


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rest", "grpc"])
def test_the_clients_give_up_after_the_retries(kind: str, served: Served, tmp_path: Path) -> None:
    """Where nothing listens, and where the server has another model: one line, exit code 1."""
    file = tmp_path / "image.png"
    file.write_bytes(FILES["PNG"])
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # nobody else gets it, and nothing listens
        nowhere = address(kind, served, port=nobody.getsockname()[1])
        for where in (nowhere, (*address(kind, served), "--model", "other")):
            process = run_client(kind, file, *where, "--retries", 1)
            assert (process.returncode, process.stdout) == (1, "")
            assert process.stderr.splitlines()[-1].startswith(f"{file}: ")


def library(version: str, folder: Path) -> Path:
    """The C++ libraries of a TensorFlow wheel, from KERAS_VIT_WHEELS or the package registry."""
    wheels = Path(os.environ.get("KERAS_VIT_WHEELS", folder))
    if not list(wheels.glob(f"tensorflow_cpu-{version}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", str(wheels), f"tensorflow-cpu=={version}"]
        subprocess.run(command, check=True)
    (wheel,) = wheels.glob(f"tensorflow_cpu-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in LIBRARIES:
            archive.extract(f"tensorflow/{name}", folder)
    return folder / "tensorflow"


@pytest.mark.full
def test_loaders_of_the_server_read_the_model(tmp_path: Path, pixels: np.ndarray) -> None:
    """Every signature of a hybrid, JPEG and PNG included, and every warm-up request.

    Wrong types and shapes are refused with a reason, and the next request is answered.
    """
    hybrid, path = served_model(resnet_layers=(1, 1), patch_size=1), tmp_path / "pets/1"
    export(hybrid, path.parent, labels=LABELS, verify=False)
    exportable = rebuild.rebuild(hybrid)
    batch = samples.make_verification_images(exportable).batch
    cases = verification.savedmodel_cases(exportable, FORMATS["savedmodel"], batch, top_k=5)
    signatures = runners.SavedModelRunner(path).signatures

    def request(signature: str, inputs: Any, *outputs: str) -> cpp_loader.Request:
        each = signatures[signature]
        feeds = {each.inputs[name].name: value for name, value in inputs.items()}
        return feeds, [each.outputs[name].name for name in outputs]

    warm_up = list(runners.warm_up_requests(path))
    assert len(warm_up) == len(savedmodel.BATCH_SIZES) + 4
    number = {"classify": "scores", "serving_default": "scores", "features": "features"}
    bad = np.array([b"junk", cases[0].inputs["image_bytes"][0], b""], object)
    requests = [
        request("image_tensor", {"images": pixels[:, :16]}, "logits"),
        request("image_tensor", {"images": pixels.astype("float32")}, "logits"),
        request("serving_default", {"image_bytes": bad}, "scores"),
        *(request(name, inputs, number.get(name, "logits")) for name, inputs in warm_up),
        *(
            request(case.signature, {name: value[:rows]}, *case.expected)
            for rows in (0, samples.COUNT)
            for case in cases
            for name, value in case.inputs.items()
        ),
    ]
    installed = Path(tf.__file__).parent
    for version in (tf.__version__, "2.18.1", "2.20.0"):
        folder = installed if version == tf.__version__ else library(version, tmp_path / version)
        with multiprocessing.get_context("spawn").Pool(1) as processes:  # without TensorFlow
            told, answers = processes.apply(cpp_loader.run_all, (path, requests, folder))
        assert told == version
        shape, dtype, (scores,), *warmed = answers[: -2 * len(cases)]
        assert re.match("3: .*is not compatible with expected shape", shape)  # INVALID_ARGUMENT
        assert re.match("3: .*(float.*uint8|uint8.*float)", dtype)
        assert [row.any() for row in scores] == [False, True, False]
        assert all(np.isfinite(each[0]).all() for each in warmed)
        none, whole = answers[-2 * len(cases) : -len(cases)], answers[-len(cases) :]
        for case, empty, answer in zip(cases, none, whole, strict=True):
            actual = dict(zip(case.expected, answer, strict=True))
            assert [each.shape for each in empty] == [(0, *each.shape[1:]) for each in answer]
            for check in agreement.compare(case, actual, rows=samples.COUNT):
                print(version, check.name, check.measured)
                assert float(check.measured) <= 1e-4
