"""The pieces of the clean process: wire format, comparisons, requests, the blocked imports."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.exporting import clean
from keras_vit.exporting.clean import checker, loader, messages

FOLDER = Path(clean.__file__).parent
RANDOM = np.random.default_rng(0)
CASE = messages.Case(
    signature="",
    inputs={"images": np.arange(4.0)},
    expected={"logits": RANDOM.normal(size=(4, 3))},
    limit=1e-5,
)


@pytest.mark.parametrize(
    "value",
    [
        np.array([[0.5, -1], [2, 3]], np.float32),
        np.array([[1, 255]], np.uint8),
        np.array([-1, 7, 300], np.int32),
        np.array([b"a", b"", b"\0bytes\0"], object),
    ],
    ids=["float32", "uint8", "int32", "string"],
)
def test_tensors_are_read_as_tensorflow_wrote_them(value: Any) -> None:
    """A TensorProto of every type that signatures use is read back, listed or packed."""
    proto = tf.make_tensor_proto(value)
    actual = checker.read_tensor(proto.SerializeToString())
    np.testing.assert_array_equal(actual, tf.make_ndarray(proto))


def test_a_repeated_value_is_read_whole() -> None:
    """A TensorProto with one value for many elements is filled with it."""
    proto = tf.make_tensor_proto(np.array([0], np.uint8))
    short = type(proto)(dtype=proto.dtype, int_val=[127])
    short.tensor_shape.CopyFrom(tf.TensorShape((2, 3)).as_proto())
    expected = np.full((2, 3), 127, np.uint8)
    np.testing.assert_array_equal(tf.make_ndarray(short), expected)
    np.testing.assert_array_equal(checker.read_tensor(short.SerializeToString()), expected)


@pytest.mark.parametrize("size", [1, 5, 9])
def test_a_truncated_message_or_record_is_an_error(size: int, tmp_path: Path) -> None:
    """A message or a TFRecord file that ends too early is never read as shorter."""
    message = loader.field(1, 300) + loader.field(2, b"content")
    assert list(loader.fields(message)) == [(1, 300), (2, b"content")]
    with pytest.raises(ValueError, match="middle"):
        list(loader.fields(message[: -size - 1] if size > 1 else message[:-1]))
    file = tmp_path / "records"
    with tf.io.TFRecordWriter(str(file)) as writer:
        writer.write(message)
    assert list(loader.records(file.read_bytes())) == [message]
    with pytest.raises(ValueError, match="middle"):
        list(loader.records(file.read_bytes()[: -size - 4]))


def test_requests_survive_the_disk(tmp_path: Path) -> None:
    """What one process writes the other reads, bytes with zeros at their end included."""
    files = np.empty(2, object)
    files[:] = [b"\0image\0\0", b""]
    case = dataclasses.replace(CASE, inputs={"image_bytes": files})
    written = messages.Request(
        format="savedmodel", path=tmp_path, parameter_bytes=8, batch_sizes=(1, 2),
        labels=("a", "é"), cases=(case,),
    )  # fmt: skip
    messages.write_request(tmp_path, written)
    read = messages.read_request(tmp_path)
    assert list(read.cases[0].inputs["image_bytes"]) == list(files)
    np.testing.assert_array_equal(read.cases[0].expected["logits"], CASE.expected["logits"])
    for name in ("format", "path", "parameter_bytes", "batch_sizes", "labels", "library"):
        assert getattr(read, name) == getattr(written, name)


def test_a_comparison_passes_the_same_and_fails_another() -> None:
    """Equal passes; a moved value, NaN, a missing output and another shape fail."""
    case, logits = CASE, CASE.expected["logits"]
    wrong = logits.copy()
    wrong[2, 1] += 1.0
    nan = np.where(wrong == wrong[2, 1], np.nan, logits)
    verdicts = {
        "same": messages.compare(case, {"logits": logits}, rows=4),
        "moved": messages.compare(case, {"logits": wrong}, rows=4),
        "nan": messages.compare(case, {"logits": nan}, rows=4),
        "missing": messages.compare(case, {}, rows=4),
        "shape": messages.compare(case, {"logits": logits[:, :2]}, rows=4),
    }
    passed = {name: checks[0].passed for name, checks in verdicts.items()}
    assert passed == {"same": True, "moved": False, "nan": False, "missing": False, "shape": False}


def test_an_answer_that_depends_on_the_batch_is_noticed() -> None:
    """Batch invariance fails where one batch size gives other answers."""
    logits = CASE.expected["logits"]

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = len(inputs["images"])
        return {"logits": logits[:rows] + (0.5 if rows == 2 else 0.0)}

    failed = [check.name for check in messages.check_batches(CASE, run, (1, 2, 4))
              if not check.passed]  # fmt: skip
    assert failed == ["logits, batch 2, absolute difference", "batch invariance"]


def test_the_first_image_alone_is_held_to_the_model_alone() -> None:
    """Where the model's answer moves with the batch the artefact's must as well; no further."""
    logits = CASE.expected["logits"]
    case = dataclasses.replace(CASE, alone={"logits": logits[:1] + 1e-4})

    def failed(drift: float) -> list[str]:
        checks = messages.check_batches(
            case, lambda inputs: {"logits": logits[: len(inputs["images"])] + drift
                                  * (len(inputs["images"]) == 1)}, (1, 4)
        )  # fmt: skip
        return [check.name for check in checks if not check.passed]

    assert failed(1e-4) == []
    assert failed(0.0) == ["logits, batch 1, absolute difference"]
    assert failed(2e-4) == ["logits, batch 1, absolute difference", "batch invariance"]


@pytest.mark.parametrize("package", ["keras", "keras_vit", "keras.layers", "keras_vit.config"])
def test_neither_keras_nor_this_package_can_be_imported(package: str) -> None:
    """In the clean process both imports fail, and TensorFlow works without them."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('b', {str(FOLDER / 'bootstrap.py')!r})\n"
        "b = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(b)\n"
        "b.block()\n"
        "try:\n"
        f"    import {package}\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "an artefact must do without it" in done.stdout


def test_forbidden_ops_and_xla_are_found(tmp_path: Path) -> None:
    """The scan of a SavedModel sees Python functions and functions compiled by XLA."""

    def scan(function: Callable[[Any], Any]) -> tuple[set[str], bool]:
        module = tf.Module()
        module.call = tf.function(function, input_signature=[tf.TensorSpec((None,), tf.float32)])
        tf.saved_model.save(module, tmp_path / function.__name__)
        content = (tmp_path / function.__name__ / "saved_model.pb").read_bytes()
        operations, compiled = checker.graph_operations(content)
        return operations & checker.FORBIDDEN, compiled > 0

    def plain(x: Any) -> Any:
        return x + 1

    def python(x: Any) -> Any:
        return tf.numpy_function(lambda y: y, [x], tf.float32)

    def compiled(x: Any) -> Any:
        return tf.function(lambda y: y * 2, jit_compile=True)(x)

    assert scan(plain) == (set(), False)
    assert scan(python) == ({"PyFunc"}, False)
    assert scan(compiled)[1]
