"""Compiles a training step for devices that are not there, and reads what the compiler says of it.

XLA compiles ahead of time for a mesh of TPUs with the package libtpu, and for NVIDIA GPUs with
jax-cuda12-plugin; neither needs the device. The step is that of `model.fit` and `keras-vit train`
on JAX: AdamW with clipping, sigmoid cross-entropy over the classes, mixed bfloat16. No array is
made: a variable is a shape, a dtype and a sharding.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

# An H100 as NVIDIA describes it, in the words of XLA's `GpuTargetConfigProto`.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
runtime_version { major: 12 minor: 8 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_ITEM = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1, "f64": 8}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"= (?P<type>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*?)\)(?:,|$)")
_CONTRACTING = re.compile(r'lhs_contracting_dim(?:s={|ensions":\[)([0-9",]*)')
_KERNEL = re.compile(r'op_name="[^"]*/(\w+)/pallas_call"')
# These move nothing: they name memory that is there.
_NAMES = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant", "after-all"}


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Bytes that each device sends in one step, and how many transfers there are, by kind.

    A ring of n devices is assumed: a gather or a scatter of S bytes sends S * (n - 1) / n, a sum of
    S bytes twice that.
    """

    count: dict[str, int]
    sent: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one step on one device; sizes in bytes.

    Attributes:
        state: weights, optimizer and batch: what lies there before the step.
        temporary: what the step needs besides.
        collectives: what the device sends.
        flops: operations of the device; 0 where the compiler does not count.
        work: operations and bytes, read from the program.
    """

    state: int
    temporary: int
    collectives: Collectives
    flops: float
    work: "Work"


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step of a program for one device computes and moves.

    Attributes:
        products: operations of the matrix products: two for each multiplication.
        attention: operations of attention's kernels, of which the gradient has twice those of the
            forward pass; what it computes again does not count.
        bytes: what the instructions read and write, each as if nothing stayed in a cache.
        kernels: how often the program calls each kernel of this package.
    """

    products: float
    attention: float
    bytes: float
    kernels: dict[str, int]


def compile_step(config: Any, *, batch: int, mesh: str, target: str) -> Compiled:
    """Compiles a training step of a config for a mesh of devices.

    Args:
        config: a `ViTConfig`.
        batch: images of all devices.
        mesh: "data" for whole weights on each device, "fsdp" for shares.
        target: "cpu:8" for virtual devices of this process, "gpu:8" for H100s, "tpu:v5e:16x16".
    """
    import jax
    import keras

    devices = devices_of(target)
    optimizer = _optimizer()  # outside of the scope, as it has a value
    with _as_default(devices[0]), keras.StatelessScope(initialize_variables=False):
        model = _model(config, optimizer, batch)
        state, data = _arguments(model, batch, jax.sharding.Mesh(np.asarray(devices), (mesh,)))
        shardings = jax.tree.map(lambda each: each.sharding, state)
        step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(None, shardings))
        compiled = step.lower(state, data).compile()
    sizes, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    text = compiled.as_text()
    kept = sizes.argument_size_in_bytes
    return Compiled(
        state=kept,
        temporary=sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        collectives=collectives(text, devices=len(devices)),
        flops=costs.get("flops", 0.0),
        work=work_of(text),
    )


def devices_of(target: str) -> list[Any]:
    """Returns the devices of a target, see `compile_step`.

    Raises:
        ValueError: the target is none, or this machine cannot compile for it.
    """
    import jax
    from jax.experimental import topologies

    platform, _, rest = target.partition(":")
    # A plugin for GPUs refuses to start without one, unless JAX is told to run elsewhere.
    if not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
    try:
        if platform == "cpu":
            devices = jax.devices("cpu")
            if len(devices) < int(rest):
                raise ValueError(f"there are {len(devices)} virtual devices")
            return list(devices[: int(rest)])
        if platform == "gpu":
            options = {"target_config": _H100, "topology": f"1x1x{int(rest)}"}
            return list(topologies.get_topology_desc("", "cuda", **options).devices)
        if platform == "tpu":
            # Without these libtpu asks a server of Google's cloud about the machine.
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
            return list(topologies.get_topology_desc(rest, "tpu").devices)
        raise ValueError("no such kind of device")
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ValueError(
            "A target is cpu:8, gpu:8 (with jax-cuda12-plugin and jax-cuda12-pjrt installed) or "
            f"tpu:v5e:16x16 (with libtpu). Received: {target!r} ({error})."
        ) from None


@contextlib.contextmanager
def _as_default(device: Any) -> Iterator[None]:
    """Lets the layers choose the forms that they take on a device that is not there."""
    import jax

    if device.platform == "cpu":
        yield
        return
    backend = mock.patch.object(jax, "default_backend", return_value=device.platform)
    with jax.default_device(device), backend:
        yield


def _optimizer() -> Any:
    """Returns the optimizer of `augreg-*`, the recipes for ImageNet-21k."""
    from keras_vit.optimizers import AdamW, WarmupDecay

    rate = WarmupDecay(1e-3, steps=1_000_000, warmup_steps=10_000)
    return AdamW(rate, weight_decay=0.1, global_clipnorm=1.0)


def _model(config: Any, optimizer: Any, batch: int) -> Any:
    """Returns a compiled model whose variables have no values."""
    import keras

    import keras_vit
    from keras_vit.backend import private

    model = keras_vit.VisionTransformer(config, dtype="mixed_bfloat16")
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer, loss, report_gradient_norm=True)
    model.optimizer.build(model.trainable_variables)
    shapes = ((batch, *config.input_shape), (batch, config.classes))
    private.build_for(model, tuple(map(keras.KerasTensor, shapes)))
    return model


def _arguments(model: Any, batch: int, axes: Any) -> tuple[Any, Any]:
    """Returns the state and the data of a step, as shapes with the shardings of a training."""
    import jax
    import keras

    from keras_vit import parallel

    (name,) = axes.axis_names
    places = np.array([f"cpu:{index}" for index in range(axes.size)])
    mesh = keras.distribution.DeviceMesh((axes.size,), (name,), places)
    kind = parallel.FullySharded if name == "fsdp" else keras.distribution.ModelParallel
    layouts = kind(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name=name)

    def array(shape: Any, dtype: str, spec: Any) -> Any:
        place = jax.sharding.NamedSharding(axes, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    state = tuple(
        [array(v.shape, v.dtype, layouts.get_variable_layout(v).axes) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    shapes = ((batch, *model.input_shape[1:]), (batch, model.config.classes))
    return state, tuple(array(shape, "float32", (name,)) for shape in shapes)


def collectives(text: str, *, devices: int) -> Collectives:
    """Counts what each device sends in a compiled program without loops around transfers."""
    count: dict[str, int] = {}
    sent: dict[str, float] = {}
    seen = set()
    for line in text.splitlines():
        found = _COLLECTIVE.search(line)
        if not found:
            continue
        channel = _CHANNEL.search(line)
        key = (found["kind"], channel[1] if channel else line)
        if key in seen:  # a program may have the two halves of a transfer
            continue
        seen.add(key)
        arrays = [_size(*each) for each in _ARRAY.findall(found["type"])]
        if found["start"] and found["type"].startswith("(("):
            # The start of a gather or a scatter returns its operands too; the whole is the larger.
            half = len(arrays) // 2
            whole = max(sum(arrays[:half]), sum(arrays[half:]))
        else:
            whole = sum(arrays) * (devices if found["kind"] == "reduce-scatter" else 1)
        share = (devices - 1) / devices
        sending = whole * share * (2 if found["kind"] == "all-reduce" else 1)
        count[found["kind"]] = count.get(found["kind"], 0) + 1
        sent[found["kind"]] = sent.get(found["kind"], 0.0) + sending
    return Collectives(count, sent)


def work_of(text: str) -> Work:
    """Reads a compiled program without loops; XLA itself counts nothing for an absent GPU."""
    types: dict[str, str] = {}
    products = attention = moved = 0.0
    kernels: dict[str, int] = {}
    is_main = False
    for line in text.splitlines():
        is_main = line.startswith("ENTRY") or (is_main and line != "}")
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        name, type_, kind, inside = found.groups()
        types[name] = type_
        operands = [types.get(each, "") for each in re.findall(r"%([\w.-]+)", inside)]
        if is_main and kind not in _NAMES:
            moved += sum(_bytes(each) for each in [type_, *operands])
        contracting = _CONTRACTING.search(line)
        if contracting and (kind == "dot" or "__cublas" in line):
            sides = _shape(operands[0])
            inner = math.prod(sides[int(n)] for n in re.findall(r"\d+", contracting[1]))
            products += 2.0 * math.prod(_shape(type_)) * inner
        kernel = _KERNEL.search(line)
        if kernel and kind == "custom-call":
            kernels[kernel[1]] = kernels.get(kernel[1], 0) + 1
            if kernel[1].startswith("attention"):
                batch, tokens, *_, heads, width = _shape(operands[0])
                once = 4.0 * batch * heads * tokens**2 * width
                attention += once if kernel[1] == "attention" else 2 * once
    return Work(products, attention, moved, kernels)


def _bytes(type_: str) -> int:
    return sum(_size(*each) for each in _ARRAY.findall(type_))


def _shape(type_: str) -> list[int]:
    """Returns the sides of the first array of a type."""
    found = _ARRAY.search(type_)
    return [int(side) for side in found[2].split(",") if side] if found else []


def _size(kind: str, shape: str) -> int:
    return _ITEM.get(kind, 4) * math.prod(int(side) for side in shape.split(",") if side)
