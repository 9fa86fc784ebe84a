"""Rounded ONNX and TFLite files: what is rounded, what is not, and how they answer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import LABELS, served_model

from keras_vit.exporting import (
    export,
    onnx_files,
    onnx_rounding,
    samples,
    sensitivity,
    tflite,
    verification,
)
from keras_vit.exporting.clean import agreement, messages, runners
from keras_vit.exporting.clean.agreement import Gate
from keras_vit.exporting.description import describe
from keras_vit.exporting.rebuild import Exportable, rebuild
from keras_vit.model import VisionTransformer

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

FIELDS: dict[str, Any] = {"hidden_dim": 48, "mlp_dim": 96, "num_layers": 2}
# Of each block, and the head: those of at least 1024 elements.
KERNELS = {
    f"block_{block}/{name}/kernel"
    for block in range(2)
    for name in ("attention/qkv", "attention/out", "mlp/fc1", "mlp/fc2")
}


@pytest.fixture(scope="module")
def exportable() -> Exportable:
    return rebuild(served_model(**FIELDS))


@pytest.fixture(scope="module")
def made(exportable: Exportable) -> Any:
    return onnx_files.make_onnx(exportable)


@pytest.fixture(scope="module")
def images(exportable: Exportable) -> samples.GateImages:
    return samples.make_gate_images(exportable)


def gate_of(exportable: Exportable, name: str, images: samples.GateImages) -> Gate:
    return verification.gate(exportable, name, images, None)  # type: ignore[arg-type]


def failures(runner: runners.Runner, gate: Gate) -> list[str]:
    checks = messages.run_gate(gate, lambda inputs: runner.run("", inputs))
    return [f"{check.name} {check.measured}" for check in checks if not check.passed]


def types(model: Any) -> dict[str, int]:
    return {each.name: each.data_type for each in model.graph.initializer}


@pytest.mark.parametrize("name", onnx_rounding.FORMATS)
def test_every_rounded_onnx_file_passes_its_gate(
    name: str, exportable: Exportable, made: Any, images: samples.GateImages
) -> None:
    """With operators of ONNX alone, of the first, usual and last opset; the float model stays."""
    gate, before = gate_of(exportable, name, images), made.SerializeToString()
    for opset in (17, 22, onnx_files.OPSET):
        model = made if opset == onnx_files.OPSET else onnx_files.make_onnx(exportable, opset=opset)
        rounded = onnx_rounding.rounded(model, name)
        assert [each.version for each in rounded.opset_import] == [opset]
        onnx.checker.check_model(rounded, full_check=True)
        assert {node.domain for node in rounded.graph.node} == {""}
        runner = runners.OnnxRunner(rounded.SerializeToString())
        assert failures(runner, gate) == []
    assert made.SerializeToString() == before
    # The limits are its own: a file that rounds as much does not pass for one in float32.
    assert failures(runner, gate_of(exportable, "onnx", images))
    empty = runner.run("", {"images": gate.inputs["images"][:0]})
    assert empty["logits"].shape == (0, 7)


def test_what_is_rounded_and_what_is_not(made: Any) -> None:
    """Products of int8 cannot saturate; what reads pixels and writes logits stays float32."""
    kinds = onnx.TensorProto
    assert set(onnx_rounding.kernels(made)) == KERNELS
    int8 = onnx_rounding.rounded(made, "onnx-int8")
    small = [each for each in int8.graph.initializer if each.data_type == kinds.INT8]
    kernels = [onnx.numpy_helper.to_array(each) for each in small if len(each.dims) == 2]
    assert len(kernels) == len(KERNELS)
    assert max(int(np.abs(each.astype(int)).max()) for each in kernels) == 64
    assert 2 * 255 * 64 < 2**15
    assert [node.op_type for node in int8.graph.node].count("MatMulInteger") == len(KERNELS)
    half = types(onnx_rounding.rounded(made, "onnx-fp16"))
    floats = {name for name, kind in half.items() if kind == kinds.FLOAT}
    assert floats == {"rescaling/scale", "rescaling/offset", "head/kernel", "head/bias"}
    weights = types(onnx_rounding.rounded(made, "onnx-int8-weights"))
    assert {name for name, kind in weights.items() if kind == kinds.INT8} == {
        f"{name}_int8" for name in KERNELS
    }


@pytest.mark.parametrize("name", ["onnx-int8", "onnx-int8-weights"])
def test_chosen_kernels_stay_float(name: str, made: Any) -> None:
    """They are those of the model, to the bit; the bytes of the weights are told."""
    stays = sorted(KERNELS)[:3]
    rounded = onnx_rounding.rounded(made, name, floats=stays)
    before, after = (
        {each.name: each for each in model.graph.initializer} for model in (made, rounded)
    )
    assert [kernel in after for kernel in sorted(KERNELS)] == [True] * 3 + [False] * 5
    for kernel in stays:
        np.testing.assert_array_equal(
            *(onnx.numpy_helper.to_array(each[kernel]) for each in (before, after))
        )
    told = onnx_rounding.weight_bytes(made, name, floats=stays)
    assert told < rounded.ByteSize() < told + 25_000
    everything = onnx_rounding.rounded(made, name, floats=KERNELS)
    assert types(everything) == types(made)


def test_weights_of_all_formats_go_to_files_of_their_own(
    exportable: Exportable, tmp_path: Path, images: samples.GateImages
) -> None:
    """Each format has its own, beside its graph."""
    files = {name: tmp_path / f"{name}.onnx" for name in onnx_files.FORMATS}
    about = describe(exportable, name="big", labels=LABELS)
    sizes = onnx_files.write_onnx(exportable, files, about=about, largest=10_000)
    for name, file in files.items():
        weights = file.with_name(f"{file.name}.data").stat().st_size
        assert 0.8 * sizes[name] < weights < 1.2 * sizes[name]
        assert failures(runners.OnnxRunner(file), gate_of(exportable, name, images)) == []


def test_int8_weights_in_tflite(
    exportable: Exportable, tmp_path: Path, images: samples.GateImages
) -> None:
    """Kernels are int8 with a scale for each channel; the answers pass the gate of the format."""
    from ai_edge_litert import interpreter as litert

    name = "tflite-int8-weights"
    files = {each: tmp_path / f"{each}.tflite" for each in ("tflite", name)}
    about = describe(exportable, name="pets", labels=LABELS)
    tflite.write_tflite(exportable, files, about=about)
    small = [
        details
        for details in litert.Interpreter(str(files[name])).get_tensor_details()
        if details["dtype"] == np.int8
    ]
    assert len(small) == len(KERNELS)
    for details in small:
        assert len(details["quantization_parameters"]["scales"]) == details["shape"][0]
    runner, gate = runners.TfliteRunner(files[name]), gate_of(exportable, name, images)
    assert failures(runner, gate) == []
    assert failures(runner, gate_of(exportable, "tflite", images))


def fragile_model() -> VisionTransformer:
    """One whose second block has inputs, or kernels, of very different sizes."""
    model = served_model(**FIELDS)
    model.get_layer("block_1").attention_norm.gamma.assign(np.geomspace(1e-3, 300, 48))
    return model


@pytest.mark.parametrize("name", ["onnx-int8", "tflite-int8"])
def test_what_costs_most_stays_float(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fails in int8 passes with some kernels in float32; the record names them."""
    (made,) = export(fragile_model(), tmp_path / "pets", formats=[name], labels=LABELS)
    assert all(check.passed for check in made.checks)
    assert "block_1/attention/qkv/kernel" in made.floats
    record = json.loads((made.path.parent / "verification.json").read_text())
    assert record["float32"] == {name: list(made.floats)}
    assert set(made.floats) < {*KERNELS, "patch_encoder/projection/kernel"}
    if name == "onnx-int8":
        monkeypatch.setattr(sensitivity, "attempts", lambda exportable, name: 0)
        with pytest.raises(verification.VerificationError, match="does not do what the model"):
            export(fragile_model(), tmp_path / "failed", formats=[name], labels=LABELS)


def test_files_restore_the_chosen_kernels(exportable: Exportable, tmp_path: Path) -> None:
    """Chosen kernels are in float32 in each TFLite file, all others in int8, in their order."""
    from ai_edge_litert import interpreter as litert

    stays = {"block_0/mlp/fc2/kernel", "patch_encoder/projection/kernel"}
    names = ("tflite-int8", "tflite-int8-weights")
    files = {name: tmp_path / f"{name}.tflite" for name in names}
    about = describe(exportable, name="pets", labels=LABELS)
    floats = dict.fromkeys(names, stays)
    sizes = tflite.write_tflite(exportable, files, about=about, floats=floats)
    for name, file in files.items():
        plain = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        interpreter = litert.Interpreter(str(file), experimental_op_resolver_type=plain)
        shapes = [
            details["shape"].tolist()
            for details in interpreter.get_tensor_details()
            if details["dtype"] == np.int8
        ]
        assert sorted(shapes) == sorted([[144, 48], [48, 48], [96, 48]] * 2 + [[48, 96]])
        assert sizes[name] < file.stat().st_size


def test_the_costs_of_kernels_are_measured(
    exportable: Exportable, images: samples.GateImages, made: Any
) -> None:
    """They add up to the error of the file with all of them rounded, and choosing follows them."""
    name = "onnx-int8"
    gate = gate_of(exportable, name, images)
    request = messages.Request(
        format=name, path=Path(), parameter_bytes=0, batch_sizes=(), labels=(), cases=(), gate=gate
    )
    costs = sensitivity.measure(exportable, request)
    assert {cost.kernel for cost in costs} == KERNELS
    runner = runners.OnnxRunner(onnx_rounding.rounded(made, name).SerializeToString())
    chosen = {"images": gate.inputs["images"][:8]}
    error = agreement.centred(gate, runner.run("", chosen)["logits"])
    error -= agreement.centred(gate, gate.expected[:8])
    together = sum(cost.error for cost in costs)
    assert 0.5 < np.mean(np.square(error)) / together < 2
    half = sensitivity.choose(costs, share=0.5)
    assert sum(cost.error for cost in costs if cost.kernel not in half) <= 0.5 * together
    assert set(sensitivity.choose(costs, share=0.0)) == KERNELS
    assert sensitivity.choose(costs, share=1.0) == ()
