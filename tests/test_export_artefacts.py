"""One call exports, checks on the disk, and puts in place what passed, and nothing else."""

import concurrent.futures
import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from exported import LABELS, photo, served_model
from serving_harness import batching, messages

from keras_vit.exporting import (
    VerificationError,
    export,
    rebuild,
    savedmodel,
    verification,
)
from keras_vit.exporting.artefacts import Artefact
from keras_vit.exporting.clean.messages import Request

# Pixels of its own.
PIXELS = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Artefact, ...]]:
    """A directory with one verified version of a tiny model."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "photo.jpg").write_bytes(photo(kind="JPEG"))
    made = export(
        served_model(**PIXELS),
        folder / "pets",
        labels=LABELS,
        images=[folder / "photo.jpg"],
        top_k=2,
    )
    return folder / "pets", made


def test_everything_that_belongs_to_a_served_model_is_there(
    exported: tuple[Path, tuple[Artefact, ...]],
) -> None:
    """The version has weights, labels, warm-up and record; the settings stand beside it."""
    directory, made = exported
    names = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}
    assert names == {
        "README.md",
        "batching_parameters.txt",
        "labels.txt",
        "models.config",
        "monitoring.config",
        "serve.sh",
        "1/fingerprint.pb",
        "1/saved_model.pb",
        "1/variables/variables.data-00000-of-00001",
        "1/variables/variables.index",
        "1/assets.extra/labels.txt",
        "1/assets.extra/tf_serving_warmup_requests",
        "1/assets.extra/verification.json",
    }
    assert made[0].path == directory / "1"
    assert (directory / "labels.txt").read_text().splitlines() == list(LABELS)
    assert "$" not in (directory / "models.config").read_text()


def test_the_record_tells_what_was_checked(exported: tuple[Path, tuple[Artefact, ...]]) -> None:
    """The record has versions, the SHA-256 of every other file, and checks that all passed."""
    directory, made = exported
    record = json.loads((directory / "1/assets.extra/verification.json").read_text())
    assert record["verified"] is True
    assert record["images"] == "1 of 1 given, 31 drawn"
    assert {"keras-vit", "tensorflow", "keras", "loader"} <= set(record["versions"])
    for name, file in record["files"].items():
        content = (directory / "1" / name).read_bytes()
        assert file == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert len(record["files"]) == 6
    assert all(check["passed"] for check in record["checks"]["savedmodel"])
    assert len(record["checks"]["savedmodel"]) == len(made[0].checks)
    names = {check["name"].partition(":")[0] for check in record["checks"]["savedmodel"]}
    assert {"serving_default", "image_tensor", "pixels", "features", "classify"} <= names


def test_the_settings_are_what_the_server_parses(
    exported: tuple[Path, tuple[Artefact, ...]],
) -> None:
    """The server's own messages read every file; the batching sizes rise to the largest."""
    text_format = pytest.importorskip("google.protobuf.text_format")
    config = pytest.importorskip("tensorflow_serving.config.model_server_config_pb2")
    directory, _ = exported
    parsed = text_format.Parse(
        (directory / "models.config").read_text(), config.ModelServerConfig()
    ).model_config_list.config[0]
    assert (parsed.name, parsed.base_path) == ("pets", "/models/pets")
    settings = text_format.Parse(
        (directory / "batching_parameters.txt").read_text(), messages.message("BatchingParameters")
    )
    *sizes, largest = settings.allowed_batch_sizes
    assert sizes == sorted(sizes) == list(savedmodel.BATCH_SIZES)
    assert settings.max_execution_batch_size.value == sizes[-1]
    assert settings.max_batch_size.value == largest == savedmodel.REQUEST_LIMIT
    assert min(settings.num_batch_threads.value, settings.max_enqueued_batches.value) >= 1
    monitoring = text_format.Parse(
        (directory / "monitoring.config").read_text(), messages.message("MonitoringConfig")
    )
    assert monitoring.prometheus_config.enable
    with pytest.raises(text_format.ParseError):
        text_format.Parse("max_batch: 1", messages.message("BatchingParameters"))


def test_warm_up_requests_are_those_of_the_server(
    exported: tuple[Path, tuple[Artefact, ...]],
) -> None:
    """TensorFlow Serving's own description of the log reads every request."""
    logs = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    import tensorflow as tf

    directory, _ = exported
    file = directory / "1/assets.extra/tf_serving_warmup_requests"
    requests = []
    for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
        request = logs.PredictionLog.FromString(record).predict_log.request
        assert request.model_spec.name == "pets"
        ((name, tensor),) = request.inputs.items()
        requests.append((request.model_spec.signature_name, name, tf.make_ndarray(tensor).shape[0]))
    inputs = {
        "serving_default": "image_bytes",
        "image_tensor": "images",
        "pixels": "pixel_values",
        "features": "images",
        "classify": "inputs",
    }
    assert sorted(requests) == sorted(
        (signature, name, size)
        for signature, name in inputs.items()
        for size in (savedmodel.BATCH_SIZES if signature == "serving_default" else (1,))
    )


def make_session(
    run: Callable[[str, batching.Arrays], batching.Arrays], text: str
) -> batching.BatchingSession:
    """A batching session with the settings in a text."""
    text_format = pytest.importorskip("google.protobuf.text_format")
    settings = text_format.Parse(text, messages.message("BatchingParameters"))
    return batching.BatchingSession(run, settings)


def test_a_large_request_is_split_as_the_settings_say(
    exported: tuple[Path, tuple[Artefact, ...]],
) -> None:
    """The kit's settings take 128 images in batches of 16, and no image more."""
    text = (exported[0] / "batching_parameters.txt").read_text()
    session = make_session(lambda signature, inputs: {"y": 2 * inputs["x"]}, text)
    x = np.arange(savedmodel.REQUEST_LIMIT)
    np.testing.assert_array_equal(session.run("pixels", {"x": x})["y"], 2 * x)
    assert session.sizes == {16: 8}
    with pytest.raises(batching.BatchingError, match="Task size 129 is larger than"):
        session.run("pixels", {"x": np.arange(savedmodel.REQUEST_LIMIT + 1)})
    session.close()
    with pytest.raises(batching.Closed):
        session.run("pixels", {"x": x})


def test_the_harness_refuses_settings_that_the_server_does_not_load() -> None:
    """The last allowed size is max_batch_size even where batches are split to smaller ones."""
    sizes = "max_batch_size {{ value: 32 }} allowed_batch_sizes: [1, {last}] "
    splits = (
        "enable_large_batch_splitting {{ value: true }} max_execution_batch_size {{ value: {n} }}"
    )
    make_session(lambda signature, inputs: inputs, (sizes + splits).format(last=32, n=8)).close()
    for last, n, word in ((8, 8, "must match max_batch_size"), (32, 64, "less than or equal")):
        with pytest.raises(batching.BatchingError, match=word):
            make_session(lambda signature, inputs: inputs, (sizes + splits).format(last=last, n=n))


@pytest.mark.parametrize("splits", ["true", "false"])
def test_a_full_queue_refuses_and_other_shapes_fail_together(splits: str) -> None:
    """Beyond the queue a request is UNAVAILABLE; tasks of other shapes fail the whole batch."""
    started, goes_on = threading.Event(), threading.Event()

    def run(signature: str, inputs: batching.Arrays) -> batching.Arrays:
        started.set()
        assert goes_on.wait(300)
        return inputs

    text = (
        "max_batch_size { value: 2 } max_enqueued_batches { value: 2 } "
        "num_batch_threads { value: 1 } batch_timeout_micros { value: 1000000 } "
        f"enable_large_batch_splitting {{ value: {splits} }}"
    )
    session = make_session(run, text)
    with concurrent.futures.ThreadPoolExecutor(5) as pool:

        def ask(*shape: int) -> concurrent.futures.Future[batching.Arrays]:
            return pool.submit(session.run, "pixels", {"x": np.zeros(shape)})

        running = ask(2)
        assert started.wait(300)  # it has left the queue, and the only thread is busy
        waiting = []
        for shape, rows in (((1, 3), 1), ((1, 4), 2), ((2, 3), 4)):
            waiting.append(ask(*shape))
            while sum(batch.rows for batch in session._queues["pixels"]) < rows:
                time.sleep(0.001)
        with pytest.raises(batching.BatchingError, match="queue to which this task") as refused:
            session.run("pixels", {"x": np.zeros((1, 3))})
        assert refused.value.code == "UNAVAILABLE"
        goes_on.set()
        assert running.result()["x"].shape == (2,)
        failed = [future for future in waiting if future.exception() is not None]
    codes = {getattr(each.exception(), "code", None) for each in failed}
    assert (failed, codes) == (waiting[:2], {"FAILED_PRECONDITION"})
    session.close()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"classes": None, "classifier_activation": None}, id="features"),
        pytest.param(
            {"classes": None, "classifier_activation": None, "pooling": None},
            id="tokens",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"include_preprocessing": False, "classifier_activation": "sigmoid"}, id="sigmoid"
        ),
        pytest.param(
            {"pooling": "map", "class_token": False, "representation_dim": 12},
            id="map",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.full
def test_other_kinds_of_models_are_exported_and_verified(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """Models without classifier or pooling, multi-label ones, and the other parts."""
    made = export(served_model(**fields), tmp_path / "other")
    assert all(check.passed for check in made[0].checks)


def test_an_artefact_that_differs_is_put_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If what was written is not what the model computes, no version appears and none is lost."""
    directory = tmp_path / "pets"
    export(served_model(), directory, verify=False)
    write = savedmodel.write_savedmodel

    def write_another(exportable: rebuild.Exportable, *arguments: Any, **options: Any) -> None:
        head = exportable.network.get_layer("head")
        head.bias.assign_add(np.linspace(0, 1e-3, 7))
        write(exportable, *arguments, **options)

    monkeypatch.setattr(savedmodel, "write_savedmodel", write_another)
    with pytest.raises(VerificationError, match=r"not put in place: .*difference.*limit"):
        export(served_model(), directory)
    assert [child.name for child in directory.iterdir() if child.is_dir()] == ["1"]


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    """An artefact that cannot even be opened is an error that says so."""
    (tmp_path / "variables").mkdir()
    (tmp_path / "saved_model.pb").write_bytes(b"nothing")
    (tmp_path / "variables/variables.index").write_bytes(b"nothing")
    request = Request(
        format="savedmodel", path=tmp_path, parameter_bytes=8, batch_sizes=(1,), labels=(), cases=()
    )
    with pytest.raises(VerificationError, match="could not be checked"):
        verification.run_checks(request)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ["savedmodel", "pdf"]}, "formats must be some of"),
        ({"formats": []}, "formats must be some of"),
        ({"labels": ["one"]}, "7 classes; give a label for each"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"images": ["absent.png"]}, "no image file 'absent.png'"),
    ],
    ids=["format", "no format", "labels", "top_k", "images"],
)
def test_arguments_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Each wrong argument is refused in one sentence, and nothing is written."""
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        export(served_model(), tmp_path / "pets", **options)
    assert not (tmp_path / "pets").exists()


def test_a_name_that_no_address_can_carry_is_refused(tmp_path: Path) -> None:
    """The directory names the model in URLs and in a shell script."""
    with pytest.raises(ValueError, match="name is the model's name"):
        export(served_model(), tmp_path / "my pets; rm")


def test_a_model_of_five_channels_has_no_savedmodel(tmp_path: Path) -> None:
    """No image file has as many channels; the message names the way out."""
    with pytest.raises(ValueError, match="export it as tflite or onnx"):
        export(served_model(input_shape=(32, 48, 5)), tmp_path / "five")
    assert not list((tmp_path / "five").glob("[0-9]*"))


def test_pixels_of_the_model_reach_what_is_exported(
    exported: tuple[Path, tuple[Artefact, ...]],
) -> None:
    """Signatures compute with mean and deviation of its own; record and README say so."""
    directory, (made,) = exported
    mean, std = PIXELS["image_mean"], PIXELS["image_std"]
    record = json.loads((made.path / "assets.extra/verification.json").read_text())
    about = record["description"]
    assert (about["takes"], about["image_mean"]) == ("pixels", list(mean))
    assert about["image_std"] == list(std)
    readme = (directory / "README.md").read_text()
    assert "(0..255 / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)" in readme
    model = served_model(**PIXELS)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), np.uint8)
    expected = np.asarray(model(pixels))
    signatures = tf.saved_model.load(str(made.path)).signatures
    values = tf.constant((pixels / 255 - np.array(mean)) / np.array(std), tf.float32)
    for answer in (
        signatures["image_tensor"](images=tf.constant(pixels)),
        signatures["pixels"](pixel_values=values),
    ):
        np.testing.assert_allclose(answer["probabilities"], expected, rtol=0, atol=1e-5)
