"""What decides about an artefact: sound ones pass, those made wrong on purpose are refused."""

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from exported import served_model

from keras_vit.exporting import clean, samples, verification
from keras_vit.exporting.clean import agreement, checker, loader, messages
from keras_vit.exporting.clean.agreement import Gate
from keras_vit.exporting.rebuild import Exportable, rebuild

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from keras_vit.exporting import onnx_files  # noqa: E402

RANDOM = np.random.default_rng(3)
INT8 = verification.LIMITS["tflite-int8"]


@pytest.fixture(scope="module")
def exportable() -> Exportable:
    """A square model whose GELU is the exact one."""
    return rebuild(served_model(input_shape=(32, 32, 3), activation="gelu"))


@pytest.fixture(scope="module")
def gates(exportable: Exportable) -> dict[str, Gate]:
    """The gates of a float32 file and of one in int8, on images and with classes that are known."""
    images = [samples.draw_scene(seed, height=40, width=40) for seed in range(70)]
    known = samples.make_gate_images(exportable, images)
    targets = known.outputs["logits"].argmax(axis=1)
    known = samples.GateImages(
        pixels=known.pixels, outputs=known.outputs, targets=targets, about=""
    )
    return {name: verification.gate(exportable, name, known) for name in ("onnx", "tflite-int8")}


def failures(model: Any, gate: Gate) -> list[str]:
    """The checks of the gate that a model in ONNX fails."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    checks = messages.run_gate(
        gate, lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))
    )
    return [check.name.removeprefix("gate: ") for check in checks if not check.passed]


def change(model: Any, path: str, function: Callable[[np.ndarray], Any]) -> None:
    """Replaces a weight of a model in ONNX by a function of it."""
    (weight,) = [each for each in model.graph.initializer if each.name == path]
    value = np.array(onnx.numpy_helper.to_array(weight))
    changed = np.asarray(function(value), np.float32)
    assert changed.shape == value.shape
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, path))


def change_head(model: Any, function: Callable[[np.ndarray], Any]) -> None:
    for name in ("kernel", "bias"):
        change(model, f"head/{name}", function)


def swap_sides(model: Any) -> None:
    turn = onnx.helper.make_node("Transpose", ["images"], ["turned"], perm=(0, 2, 1, 3))
    for node in model.graph.node:
        node.input[:] = ["turned" if name == "images" else name for name in node.input]
    model.graph.node.insert(0, turn)


def scale_from_zero(model: Any) -> None:
    change(model, "rescaling/scale", lambda value: value / 2)
    change(model, "rescaling/offset", np.zeros_like)


def use_tanh(model: Any) -> None:
    for node in model.graph.node:
        if node.op_type == "Gelu":
            node.attribute[0].s = b"tanh"


def leave_out_a_block(model: Any) -> None:
    for layer in ("attention/out", "mlp/fc2"):
        for name in ("kernel", "bias"):
            change(model, f"block_1/{layer}/{name}", np.zeros_like)


def age(model: Any) -> None:
    for weight in [each.name for each in model.graph.initializer]:
        if weight.endswith(("kernel", "gamma")):
            change(model, weight, lambda value: value * RANDOM.normal(1, 0.2, value.shape))


def answer_always(model: Any, gate: Gate, classes: Any) -> None:
    """Gives classes the mean answer of the model, whatever the image."""
    means = gate.expected.mean(axis=0)

    def constant(value: np.ndarray) -> np.ndarray:
        value[..., classes] = means[classes] if value.ndim == 1 else 0.0
        return value

    change_head(model, constant)


WRONG: dict[str, Callable[[Any, Gate], Any]] = {
    "a layer of zeros": lambda m, _: change(m, "block_1/mlp/fc1/kernel", np.zeros_like),
    "two classes swapped": lambda m, _: change_head(m, lambda v: v[..., [0, 2, 1, 3, 4, 5, 6]]),
    "labels in another order": lambda m, _: change_head(m, lambda v: np.roll(v, 1, axis=-1)),
    "0..1 for -1..1": lambda m, _: scale_from_zero(m),
    "BGR for RGB": lambda m, _: change(
        m, "patch_encoder/projection/kernel", lambda v: v[:, ::-1]
    ),
    "rows for columns": lambda m, _: swap_sides(m),
    "a scale of twice": lambda m, _: change(m, "block_0/attention/out/kernel", lambda v: v * 2),
    "no second block": lambda m, _: leave_out_a_block(m),
    "a constant answer": lambda m, gate: answer_always(m, gate, slice(None)),
    "one constant logit": lambda m, gate: answer_always(m, gate, 4),
    "weights of another epoch": lambda m, _: age(m),
    "NaN in one weight": lambda m, _: change(
        m, "block_2/mlp/fc2/bias", lambda v: np.where(np.arange(len(v)) == 3, np.nan, v)
    ),
}  # fmt: skip


@pytest.mark.parametrize("limits", ["onnx", "tflite-int8"])
def test_the_sound_file_passes_and_wrong_ones_are_refused(
    limits: str, exportable: Exportable, gates: dict[str, Gate]
) -> None:
    """The file as it is written passes; each kind of wrong one fails, at the limits of int8 too."""
    sound, gate = onnx_files.make_onnx(exportable), gates[limits]
    assert failures(sound, gate) == []
    failed = {}
    for name, spoil in WRONG.items():
        model = copy.deepcopy(sound)
        spoil(model, gate)
        failed[name] = failures(model, gate)
    print(failed)
    assert [name for name in WRONG if not failed[name]] == []


def test_another_gelu_is_refused_in_float32(exportable: Exportable, gates: dict[str, Gate]) -> None:
    """The tanh form for the exact one errs by less than int8 does, and by more than float32."""
    model = onnx_files.make_onnx(exportable)
    use_tanh(model)
    assert "error / spread" in failures(model, gates["onnx"])
    assert failures(model, gates["tflite-int8"]) == []


def head_gate(logits: np.ndarray, *, kind: str = "softmax", **fields: Any) -> Gate:
    """A gate of int8 on logits alone."""
    fields = {"targets": np.full(len(logits), -1), **fields}
    return Gate(
        signature="", inputs={}, outputs=("logits",), expected=logits, limits=INT8, kind=kind,
        **fields,
    )  # fmt: skip


def refused(gate: Gate, answers: np.ndarray) -> set[str]:
    measured = agreement.measure(gate, {gate.outputs[0]: answers})
    return {
        name
        for name, (value, limit, is_least) in measured.items()
        if (value < limit if is_least else value > limit)
    }


def logits_of(classes: int, *, bias: float = 0.0, count: int = 64) -> np.ndarray:
    """Logits as a trained head gives them: a class leads, and the rest is spread."""
    logits = RANDOM.normal(bias, 1, (count, classes))
    logits[np.arange(count), RANDOM.integers(0, classes, count)] += 6
    return logits


HEADS = {
    "seven": (logits_of(7), "softmax"),
    "two": (logits_of(2), "softmax"),
    "one": (logits_of(1), "values"),
    "a bias of -10": (logits_of(1000, bias=-10.0), "softmax"),
    "21,843 with that bias": (logits_of(21_843, bias=-10.0), "softmax"),
    "one logit of 100": (logits_of(7) + 100 * (np.arange(7) == 2), "softmax"),
    "independent": (logits_of(40, bias=-10.0), "sigmoid"),
    "one, independent": (logits_of(1), "sigmoid"),
    "features": (RANDOM.normal(3, 1, (32, 5, 16)), "values"),
}


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_held(name: str) -> None:
    """Errors of 3 per cent of the spread pass; a constant, NaN, zeros and other images' do not."""
    logits, kind = HEADS[name]
    gate = head_gate(logits, kind=kind)
    spread = agreement.spread(gate)
    assert 0.5 < spread < 4
    noise = RANDOM.normal(0, 0.03 * spread, logits.shape)
    assert refused(gate, logits + noise) == set()
    assert refused(gate, logits + 10 * noise)
    assert refused(gate, np.broadcast_to(logits.mean(axis=0), logits.shape))
    assert refused(gate, np.zeros_like(logits))
    assert refused(gate, logits[::-1])
    assert refused(gate, np.where(logits == logits.max(), np.nan, logits))
    assert refused(gate, logits[:-1])
    assert refused(gate, np.empty(0))


def test_the_issue_of_a_cosine_near_one_is_measured() -> None:
    """Answers that a cosine calls equal to 0.9999 are refused, where a bias is what they share."""
    logits = RANDOM.normal(-10, 0.1, (64, 21_843))
    wrong = logits + RANDOM.normal(0, 0.05, logits.shape)
    assert messages.lowest_cosine(wrong, logits) > 0.9999
    assert "error / spread" in refused(head_gate(logits), wrong)


def test_what_softmax_does_not_see_is_no_error() -> None:
    """All logits may move together; those of independent classes may not."""
    logits = logits_of(7)
    assert refused(head_gate(logits), logits + 5) == set()
    assert "error / spread" in refused(head_gate(logits, kind="sigmoid"), logits + 5)


def test_accuracy_may_not_fall() -> None:
    """On labelled images the artefact may lose a point, or one image where they are few."""
    logits = np.zeros((200, 2))
    logits[:, 0] = np.where(np.arange(200) % 2, 1.0, -1.0)
    logits[:6, 0] *= 0.01  # the model hardly decides
    targets = logits.argmax(axis=1)
    gate = head_gate(logits, targets=targets)
    for flipped, is_refused in ((0, False), (2, False), (3, True)):
        answers = logits.copy()
        answers[:flipped, 0] *= -1
        assert ("accuracy" in refused(gate, answers)) == is_refused
    unknown = head_gate(logits, targets=np.where(np.arange(200) < 3, -1, targets))
    answers = logits.copy()
    answers[:3, 0] *= -1
    assert "accuracy" not in refused(unknown, answers)


def test_probabilities_must_be_those_of_the_logits() -> None:
    """Right logits with the probabilities of other images are refused."""
    logits = logits_of(7)
    gate = head_gate(logits)
    gate = Gate(**{**vars(gate), "outputs": ("logits", "probabilities")})
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    for probabilities, limit in ((shares, False), (shares[::-1], True), (np.empty(0), True)):
        measured = agreement.measure(gate, {"logits": logits, "probabilities": probabilities})
        value, least, _ = measured["probabilities beside its own logits'"]
        assert (value > least) == limit


def test_given_images_decide_and_drawn_ones_fill_up(tmp_path: Path) -> None:
    """Of many images every second one decides, with its class; few are joined by drawn ones."""
    exportable = rebuild(served_model())
    images = [np.full((40, 56, 3), seed, np.uint8) for seed in range(80)]
    many = samples.make_gate_images(exportable, images, list(range(80)))
    assert many.about == "40 of 80 given"
    assert sorted(many.targets) == list(range(1, 80, 2))
    np.testing.assert_array_equal(many.pixels[:, 0, 0, 0], many.targets)
    kept = samples.calibration_pixels(exportable, images, most=100)
    assert sorted(kept[:, 0, 0, 0]) == list(range(0, 80, 2))
    few = samples.make_gate_images(exportable, images[:3], [1, 1, 1])
    assert few.about == "3 of 3 given, 29 drawn"
    assert sorted(few.targets) == [-1] * 29 + [1] * 3
    assert len(samples.make_gate_images(exportable, images, work=0).pixels) == samples.COUNT


BOOTSTRAP = Path(clean.__file__).parent / "bootstrap.py"
CASE = messages.Case(
    signature="",
    inputs={"images": np.arange(4.0)},
    expected={"logits": RANDOM.normal(size=(4, 3))},
    limit=1e-5,
)


def test_tensors_are_read_as_tensorflow_wrote_them() -> None:
    """TensorProtos of every type that signatures use, packed, and one value for many elements."""
    values: list[Any] = [
        np.array([[0.5, -1], [2, 3]], np.float32),
        np.array([[1, 255]], np.uint8),
        np.array([-1, 7, 300], np.int32),
        np.array([b"a", b"", b"\0bytes\0"], object),
    ]
    protos = list(map(tf.make_tensor_proto, values))
    short = type(protos[0])(dtype=tf.uint8.as_datatype_enum, int_val=[127])
    short.tensor_shape.CopyFrom(tf.TensorShape((2, 3)).as_proto())
    values.append(np.full((2, 3), 127, np.uint8))
    for proto, value in zip([*protos, short], values, strict=True):
        np.testing.assert_array_equal(tf.make_ndarray(proto), value)
        actual = checker.read_tensor(proto.SerializeToString())
        np.testing.assert_array_equal(actual, value)


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


def test_neither_keras_nor_this_package_can_be_imported() -> None:
    """In the clean process their imports fail, those of their modules too."""
    code = f"""
import importlib, runpy
runpy.run_path({str(BOOTSTRAP)!r})["block"]()
for package in ("keras", "keras_vit", "keras.layers", "keras_vit.config"):
    try:
        importlib.import_module(package)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("an artefact must do without it") == 4


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
