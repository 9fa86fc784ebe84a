"""The original's twelve fine-tuning steps on JAX: a process of its own prints them.

Devices are made before anything else. Run as
`python jax_fine_tuning.py '{"each": [{}, {"layout": "both", "accumulate": 2}]}'`; see `LAYOUTS`.
With "index" and "address" it is one of two processes, with half of the devices and of the images.
"""

import json
import os
import sys
from typing import Any

import fine_tuning
import numpy as np
import processes

DEVICES, PROCESSES = 8, 2
# (devices that share the images, devices that share kernels)
LAYOUTS = {"one": (1, 1), "data": (8, 1), "both": (4, 2), "fully": (8, 1)}
DEFAULTS: dict[str, Any] = {
    "layout": "one",
    "accumulate": 1,
    "accumulator_dtype": "float32",
    "dropout_rate": 0.0,
    "precision": "float32",
    "remat": False,
    "scan_blocks": False,
    "sam_rho": 0.0,
}


def start(each: list[dict[str, Any]]) -> list[Any]:
    """Starts a process that runs several cases; see `DEFAULTS` for what one may say.

    Its result is a list: of each, losses, gradient norms, arrays, and how variables are split.
    """
    return [_start({"each": each}, DEVICES)]


def start_two(each: list[dict[str, Any]]) -> list[Any]:
    """Starts two processes that train together."""
    (address,) = processes.free_addresses(1)
    return [
        _start({"each": each, "index": index, "address": address}, DEVICES // PROCESSES)
        for index in range(PROCESSES)
    ]


def _start(case: dict[str, Any], devices: int) -> Any:
    # Half of the time is LLVM's; the numbers are the same to 2e-6.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return processes.start(__file__, case, {"XLA_FLAGS": flags, "KERAS_BACKEND": "jax"})


def _main(case: dict[str, Any]) -> None:
    import jax

    if "address" in case:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(case["address"], PROCESSES, case["index"])
    print(json.dumps([_train({**DEFAULTS, **one}) for one in case["each"]]))


def _set_layout(name: str) -> None:
    import keras

    import keras_vit

    shape = LAYOUTS[name]
    devices = np.array(keras.distribution.list_devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), devices)
    kind = keras_vit.FullySharded if name == "fully" else keras.distribution.ModelParallel
    layouts = keras_vit.layout_map(mesh)
    distribution = kind(layout_map=layouts, batch_dim_name="batch")
    keras.distribution.set_distribution(None if name == "one" else distribution)


def _train(case: dict[str, Any]) -> dict[str, Any]:
    import jax

    _set_layout(case["layout"])
    model = _compiled(case)
    logs = []
    for number in range(fine_tuning.STEPS):
        images, labels = fine_tuning.batch(number)
        own = np.array_split(np.arange(len(images)), jax.process_count())[jax.process_index()]
        logs.append(model.train_on_batch(images[own], labels[own], return_dict=True))
    return {
        "losses": [float(each["loss"]) for each in logs],
        "gradient_norms": [float(each["gradient_norm"]) for each in logs],
        "accuracies": [float(each["accuracy"]) for each in logs],
        "head_bias": _whole(model.get_layer("head").bias.value).tolist(),
        "cls": _whole(model.get_layer("patch_encoder").class_token.value).ravel().tolist(),
        **_splits(model),
    }


def _compiled(case: dict[str, Any]) -> Any:
    import keras

    import keras_vit
    from keras_vit.layers.random import overwritten_weights
    from keras_vit.optimizers import MomentumSGD, WarmupDecay

    keras.utils.set_random_seed(0)
    config = keras_vit.ViTConfig(
        **fine_tuning.SIZES,
        **{name: case[name] for name in ("remat", "scan_blocks", "dropout_rate")},
    )
    with overwritten_weights():
        model = keras_vit.VisionTransformer(config, dtype=case["precision"])
    fine_tuning.load_weights(model)
    schedule = WarmupDecay(
        fine_tuning.BASE, steps=fine_tuning.TOTAL, warmup_steps=fine_tuning.WARMUP
    )
    optimizer: Any = MomentumSGD(
        schedule, accumulator_dtype=case["accumulator_dtype"], global_clipnorm=1.0
    )
    if case["precision"] == "mixed_float16":
        # Small: whether a larger one overflows, and a step is left out, is up to rounding.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        accumulate=case["accumulate"],
        sam_rho=case["sam_rho"],
        report_gradient_norm=True,
    )
    return model


def _whole(value: Any) -> np.ndarray:
    """Returns all values of an array, also if other processes have some of them."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def _splits(model: Any) -> dict[str, Any]:
    """Says over how many devices a kernel lies, and what part of all weights and momenta one has.

    Of each variable with its own momentum, the same part.
    """
    momenta = [each for each in model.optimizer.variables if each.path.endswith("momentum")]
    weights = model.trainable_variables
    return {
        "devices": len(model.get_layer("block_0").mlp.fc1.kernel.value.sharding.device_set),
        "weights_part": _part(weights),
        "momenta_part": _part(momenta),
        "split_alike": [_shard(one) for one in weights] == [_shard(one) for one in momenta],
    }


def _shard(variable: Any) -> Any:
    return variable.value.sharding.shard_shape(variable.value.shape)


def _part(variables: list[Any]) -> float:
    own = sum(int(np.prod(_shard(variable))) for variable in variables)
    return own / sum(int(np.prod(variable.shape)) for variable in variables)


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")
    _main(json.loads(sys.argv[1]))
