"""What decides about an artefact: sound ones pass, those made wrong on purpose are refused."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exported
import numpy as np
import processes
import pytest
import tensorflow as tf
from exported import served_model

from keras_vit.exporting import FORMATS, samples, verification
from keras_vit.exporting.clean import agreement, checker, runners
from keras_vit.exporting.clean.agreement import Case, Gate
from keras_vit.exporting.rebuild import Exportable, rebuild

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from keras_vit.exporting import onnx_files  # noqa: E402

RANDOM = np.random.default_rng(3)
INT8 = FORMATS["tflite-int8"].limits
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


@pytest.fixture(scope="module")
def exportable() -> Exportable:
    """A square model whose GELU is the exact one."""
    return rebuild(served_model(input_shape=(32, 32, 3), activation="gelu"))


@pytest.fixture(scope="module")
def gates(exportable: Exportable) -> dict[str, Gate]:
    """The gates of a float32 file and of one in int8, on images and with classes that are known."""
    images = [samples.draw_scene(seed, height=40, width=40) for seed in range(70)]
    known = samples.make_verification_images(exportable, images)
    targets = known.outputs["logits"].argmax(axis=1)
    known = dataclasses.replace(known, targets=targets)
    return {
        name: verification.make_gate(exportable, FORMATS[name], known)
        for name in ("onnx", "tflite-int8")
    }


def failures(model: Any, gate: Gate) -> list[str]:
    return exported.failures(runners.OnnxRunner(model.SerializeToString()), gate)


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
    assert "error / std" in failures(model, gates["onnx"])
    assert failures(model, gates["tflite-int8"]) == []


def head_gate(logits: np.ndarray, *, kind: str = "softmax", **fields: Any) -> Gate:
    """A gate of int8 on logits alone."""
    fields = {"targets": np.full(len(logits), -1), **fields}
    return Gate(
        signature="", images=np.empty(0), outputs=("logits",), expected=logits, limits=INT8,
        kind=kind, **fields,
    )  # fmt: skip


def refused(gate: Gate, answers: np.ndarray) -> set[str]:
    checks = agreement.measure(gate, {gate.outputs[0]: answers})
    return {check.name.removeprefix("gate: ") for check in checks if not check.passed}


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


@pytest.mark.parametrize(("logits", "kind"), HEADS.values(), ids=HEADS)
def test_every_head_is_held(logits: np.ndarray, kind: str) -> None:
    """Errors of 0.03 standard deviations pass; a constant, NaN, zeros and other images' do not."""
    gate = head_gate(logits, kind=kind)
    deviation = agreement.deviation(gate)
    assert 0.5 < deviation < 4
    noise = RANDOM.normal(0, 0.03 * deviation, logits.shape)
    assert refused(gate, logits + noise) == set()
    assert refused(gate, logits + 10 * noise)
    assert refused(gate, np.broadcast_to(logits.mean(axis=0), logits.shape))
    assert refused(gate, np.zeros_like(logits))
    assert refused(gate, logits[::-1])
    assert refused(gate, np.where(logits == logits.max(), np.nan, logits))
    assert refused(gate, logits[:-1])
    assert refused(gate, np.empty(0))


def test_answers_of_a_cosine_near_one_are_refused() -> None:
    """What a cosine calls equal to 0.9999 is not, where a bias is what all images share.

    All logits may move together, as softmax does not see it; those of independent classes may not.
    """
    logits = RANDOM.normal(-10, 0.1, (64, 21_843))
    wrong = logits + RANDOM.normal(0, 0.05, logits.shape)
    lengths = np.linalg.norm(logits, axis=1) * np.linalg.norm(wrong, axis=1)
    assert ((logits * wrong).sum(axis=1) / lengths).min() > 0.9999
    assert "error / std" in refused(head_gate(logits), wrong)
    logits = logits_of(7)
    assert refused(head_gate(logits), logits + 5) == set()
    assert "error / std" in refused(head_gate(logits, kind="sigmoid"), logits + 5)


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
    gate = dataclasses.replace(gate, outputs=("logits", "probabilities"))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    for probabilities, limit in ((shares, False), (shares[::-1], True), (np.empty(0), True)):
        checks = agreement.measure(gate, {"logits": logits, "probabilities": probabilities})
        assert checks[-1].name == "gate: probabilities beside its own logits'"
        assert checks[-1].passed != limit


def test_given_images_decide_and_drawn_ones_fill_up(tmp_path: Path) -> None:
    """Of many images every second one decides, with its class; few are joined by drawn ones."""
    exportable = rebuild(served_model())
    images = [np.full((40, 56, 3), seed, np.uint8) for seed in range(80)]
    many = samples.make_verification_images(exportable, images, list(range(80)))
    assert many.about == "40 of 80 given"
    assert sorted(many.targets) == list(range(1, 80, 2))
    np.testing.assert_array_equal(many.pixels[:, 0, 0, 0], many.targets)
    kept = samples.make_calibration(exportable, images)
    assert sorted(kept[:, 0, 0, 0]) == list(range(0, 80, 2))
    few = samples.make_verification_images(exportable, images[:3], [1, 1, 1])
    assert few.about == "3 of 3 given, 29 drawn"
    assert sorted(few.targets) == [-1] * 29 + [1] * 3
    assert len(samples.make_verification_images(exportable, images, work=0).pixels) == samples.COUNT


CASE = Case(
    signature="",
    inputs={"images": np.arange(4.0)},
    expected={"logits": RANDOM.normal(size=(4, 3))},
    limit=1e-5,
)


def test_requests_survive_the_disk(tmp_path: Path) -> None:
    """What one process writes the other reads, bytes with zeros at their end included."""
    files = np.array([b"\0image\0\0", b""], object)
    case = dataclasses.replace(CASE, inputs={"image_bytes": files})
    written = agreement.Request(
        format="savedmodel", runtime="savedmodel", path=tmp_path, parameter_bytes=8,
        weight_bytes=8, labels=["a", "é"], cases=(case,), gate=head_gate(logits_of(7)),
    )  # fmt: skip
    checker.write(tmp_path, written)
    read = checker.read_request(tmp_path)
    assert list(read.cases[0].inputs["image_bytes"]) == list(files)
    np.testing.assert_array_equal(read.cases[0].expected["logits"], CASE.expected["logits"])
    np.testing.assert_array_equal(read.gate.expected, written.gate.expected)
    assert read.gate.limits == INT8
    for name in ("format", "runtime", "path", "parameter_bytes", "weight_bytes", "labels"):
        assert getattr(read, name) == getattr(written, name)


def test_a_comparison_passes_the_same_and_fails_another() -> None:
    """Equal passes; a moved value, NaN, a missing output and another shape fail."""
    logits = CASE.expected["logits"]
    wrong = logits.copy()
    wrong[2, 1] += 1.0
    nan = np.where(wrong == wrong[2, 1], np.nan, logits)
    assert agreement.compare(CASE, {"logits": logits}, rows=4)[0].passed
    for answers in ({"logits": wrong}, {"logits": nan}, {}, {"logits": logits[:, :2]}):
        assert not agreement.compare(CASE, answers, rows=4)[0].passed


def test_answers_depend_on_the_batch_as_much_as_the_model_s() -> None:
    """Where the model's first image alone moves the artefact's must as well; no further."""
    logits = CASE.expected["logits"]

    def failed(alone: float, drifts: dict[int, float]) -> list[str]:
        case = dataclasses.replace(
            CASE, alone={"logits": logits[:1] + alone}, batch_sizes=(1, 2, 4)
        )

        def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            rows = len(inputs["images"])
            return {"logits": logits[:rows] + drifts.get(rows, 0.0)}

        found = agreement.check_batches(case, run)
        return [
            each.name.removeprefix("logits, ").split(",")[0] for each in found if not each.passed
        ]

    assert failed(0.0, {}) == failed(1e-4, {1: 1e-4}) == []
    assert failed(0.0, {2: 0.5}) == ["batch 2", "batch invariance"]
    assert failed(1e-4, {}) == ["batch 1"]
    assert failed(1e-4, {1: 2e-4}) == ["batch 1", "batch invariance"]


def test_neither_keras_nor_this_package_can_be_imported() -> None:
    """In the clean process their imports fail, those of their modules too."""
    code = """
import importlib
for package in ("keras", "keras_vit", "keras.layers", "keras_vit.config"):
    try:
        importlib.import_module(package)
    except ImportError:
        print(package)
"""
    start = checker.START.replace("run(sys.argv[2])", code)
    done = processes.python("-P", "-c", start, Path(checker.__file__).parents[1])
    assert done.stdout.split() == ["keras", "keras_vit", "keras.layers", "keras_vit.config"]


def test_forbidden_ops_and_xla_are_found(tmp_path: Path) -> None:
    """The scan of a SavedModel sees Python functions and functions compiled by XLA."""

    def scan(name: str, function: Callable[[Any], Any]) -> tuple[set[str], bool]:
        module = tf.Module()
        module.call = tf.function(function, input_signature=[tf.TensorSpec((None,), tf.float32)])
        tf.saved_model.save(module, tmp_path / name)
        graph = runners.SavedModelRunner(tmp_path / name).meta_graph.graph_def
        operations, compiled = runners.graph_operations(graph)
        return operations & runners.FORBIDDEN, compiled > 0

    compiled = tf.function(lambda x: x * 2, jit_compile=True)
    assert scan("plain", lambda x: x + 1) == (set(), False)
    python = scan("python", lambda x: tf.numpy_function(lambda y: y, [x], tf.float32))
    assert python == ({"PyFunc"}, False)
    assert scan("compiled", lambda x: compiled(x))[1]
