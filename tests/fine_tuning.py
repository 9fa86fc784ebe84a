"""The original's twelve fine-tuning steps: the model that takes them, and its batches.

On JAX, whose devices are made before anything else, processes take them: run as
`python fine_tuning.py '{"each": [{}, {"layout": "both", "gradient_accumulation_steps": 2}]}'`. With
"index" and "address" it is one of two processes, with half of the devices and of the images.
"""

import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import processes
import published

import keras_vit
from keras_vit.layers.random import skip_initialization
from keras_vit.optimizers import MomentumSGD, WarmupDecay

STEPS, TOTAL, WARMUP, BASE = 12, 40, 4, 0.3
SIZES: dict[str, Any] = {
    "input_shape": (32, 48, 3),
    "patch_size": 8,
    "hidden_dim": 64,
    "mlp_dim": 128,
    "num_heads": 4,
    "num_layers": 2,
    "classes": 10,
}
DEVICES, PROCESSES = 8, 2
# (devices that share the images, devices that share kernels)
LAYOUTS = {"both": (4, 2), "fully": (8, 1)}


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(zlib.crc32(f"batch {number}".encode()))
    images = generator.uniform(-1, 1, (16, 32, 48, 3)).astype(np.float32)
    return images, generator.integers(0, 10, 16)


def compiled(
    *,
    accumulator_dtype: Any = "float32",
    precision: str = "float32",
    gradient_accumulation_steps: int = 1,
    sam_rho: float = 0.0,
    jit_compile: Any = "auto",
    **fields: Any,
) -> keras_vit.VisionTransformer:
    """A model with the weights that the original began with, compiled for its steps."""
    with skip_initialization():
        model = keras_vit.VisionTransformer(keras_vit.ViTConfig(**SIZES, **fields), dtype=precision)
    with tempfile.TemporaryDirectory() as folder:
        path = published.write(Path(folder) / "weights.npz", keras_vit.ViTConfig(**SIZES))
        keras_vit.weights.load_weights(model, path)
    schedule = WarmupDecay(BASE, steps=TOTAL, warmup_steps=WARMUP)
    optimizer: keras.optimizers.Optimizer = MomentumSGD(
        schedule, accumulator_dtype=accumulator_dtype, global_clipnorm=1.0
    )
    if precision == "mixed_float16":
        # Small: whether a larger one overflows, and a step is left out, is up to rounding.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        gradient_accumulation_steps=gradient_accumulation_steps,
        sam_rho=sam_rho,
        report_gradient_norm=True,
        jit_compile=jit_compile,
    )
    return model


def trained(
    *, part: int = 0, parts: int = 1, **case: Any
) -> tuple[keras_vit.VisionTransformer, dict[str, list[float]]]:
    """A model after the steps, or after this process's part of each; and the logs of each step."""
    model = compiled(**case)
    logs: list[dict[str, Any]] = []
    for number in range(STEPS):
        own = [np.array_split(array, parts)[part] for array in batch(number)]
        logs.append(model.train_on_batch(*own, return_dict=True))
    return model, {name: [float(each[name]) for each in logs] for name in logs[0]}


def start(each: list[dict[str, Any]]) -> list[processes.Started]:
    """Starts a process of JAX that runs several cases: what `compiled` takes, and a "layout":
    "one" device, images shared by eight as "data", or one of `LAYOUTS`.

    Its result is a list: of each, the logs, arrays, and how variables are split.
    """
    return [_start({"each": each}, DEVICES)]


def start_two(each: list[dict[str, Any]]) -> list[processes.Started]:
    (address,) = processes.free_addresses(1)
    return [
        _start({"each": each, "index": index, "address": address}, DEVICES // PROCESSES)
        for index in range(PROCESSES)
    ]


def _start(case: dict[str, Any], devices: int) -> processes.Started:
    # Half of the time is LLVM's; the numbers are the same to 2e-6.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return processes.start(__file__, case, {"XLA_FLAGS": flags, "KERAS_BACKEND": "jax"})


def _main(case: dict[str, Any]) -> None:
    import jax

    if "address" in case:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(case["address"], PROCESSES, case["index"])
    print(json.dumps([_train(**one) for one in case["each"]]))


def _train(*, layout: str = "one", **case: Any) -> dict[str, Any]:
    import jax

    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(_distribution(layout))
    model, logs = trained(part=jax.process_index(), parts=jax.process_count(), **case)
    momenta = [each for each in model.optimizer.variables if each.path.endswith("momentum")]
    weights = model.trainable_variables
    return {
        **logs,
        "head_bias": _whole(model.get_layer("head").bias),
        "cls": _whole(model.get_layer("patch_encoder").class_token),
        "devices": len(model.get_layer("block_0").mlp.fc1.kernel.value.sharding.device_set),
        # What part of all weights and momenta a device has; and whether of each the same.
        "weights_part": _part(weights),
        "momenta_part": _part(momenta),
        "split_alike": [_shard(one) for one in weights] == [_shard(one) for one in momenta],
    }


def _distribution(layout: str) -> Any:
    if layout == "one":
        return None
    if layout == "data":
        return keras.distribution.DataParallel()
    devices = np.array(keras.distribution.list_devices()).reshape(LAYOUTS[layout])
    mesh = keras.distribution.DeviceMesh(LAYOUTS[layout], ("batch", "model"), devices)
    kind = keras_vit.FullySharded if layout == "fully" else keras.distribution.ModelParallel
    return kind(layout_map=keras_vit.layout_map(mesh), batch_dim_name="batch")


def _whole(variable: Any) -> list[float]:
    """Returns all values of a variable, also if other processes have some of them."""
    from jax.experimental import multihost_utils

    values = multihost_utils.process_allgather(variable.value, tiled=True)
    return [float(value) for value in np.ravel(values)]


def _shard(variable: Any) -> Any:
    return variable.value.sharding.shard_shape(variable.value.shape)


def _part(variables: list[Any]) -> float:
    own = sum(int(np.prod(_shard(variable))) for variable in variables)
    return own / sum(int(np.prod(variable.shape)) for variable in variables)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
