"""The original's twelve fine-tuning steps on JAX: a process of its own prints them.

Devices are made before anything else, and a process has one layout of them. Run as
`python jax_fine_tuning.py '{"layout": [4, 2], "each": [{}, {"accumulate": 2}]}'`: images are shared
by four, kernels by two.
"""

import json
import os
import sys
from typing import Any

import fine_tuning
import numpy as np
import processes

DEVICES = 8
DEFAULTS: dict[str, Any] = {
    "accumulate": 1,
    "accumulator_dtype": "float32",
    "dropout_rate": 0.0,
    "precision": "float32",
    "remat": False,
    "sam_rho": 0.0,
}


def start(layout: list[int], each: list[dict[str, Any]]) -> Any:
    """Starts a process that runs several cases; see `DEFAULTS` for what one may say.

    Its result is a list: of each, losses, gradient norms, arrays, and over how many devices the
    images and one kernel lie.
    """
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {"XLA_FLAGS": flags, "KERAS_BACKEND": "jax"}
    return processes.start(__file__, {"layout": layout, "each": each}, environment)


def _main(case: dict[str, Any]) -> None:
    import keras

    import keras_vit

    images, kernels = case["layout"]
    devices = keras.distribution.list_devices()[: images * kernels]
    shape = np.array(devices).reshape(images, kernels)
    mesh = keras.distribution.DeviceMesh(shape.shape, ("batch", "model"), shape)
    if images * kernels > 1:
        layout = keras_vit.layout_map(mesh)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
        )
    print(json.dumps([_train({**DEFAULTS, **one}) for one in case["each"]]))


def _train(case: dict[str, Any]) -> dict[str, Any]:
    import keras

    import keras_vit
    from keras_vit.optimizers import MomentumSGD, WarmupDecay

    keras.utils.set_random_seed(0)
    config = keras_vit.ViTConfig(
        **fine_tuning.SIZES, remat=case["remat"], dropout_rate=case["dropout_rate"]
    )
    model = keras_vit.VisionTransformer(config, dtype=case["precision"])
    fine_tuning.load_weights(model)
    schedule = WarmupDecay(
        fine_tuning.BASE, steps=fine_tuning.TOTAL, warmup_steps=fine_tuning.WARMUP
    )
    model.compile(
        MomentumSGD(schedule, accumulator_dtype=case["accumulator_dtype"], global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        accumulate=case["accumulate"],
        sam_rho=case["sam_rho"],
        report_gradient_norm=True,
    )
    logs = []
    for number in range(fine_tuning.STEPS):
        model.reset_metrics()
        logs.append(model.train_on_batch(*fine_tuning.batch(number), return_dict=True))
    kernel = model.get_layer("block_0").mlp.fc1.kernel.value
    weights = {variable.path: np.asarray(variable.value) for variable in model.weights}
    evaluated = model.evaluate(*fine_tuning.batch(0), batch_size=16, verbose=0, return_dict=True)
    return {
        "losses": [float(each["loss"]) for each in logs],
        "gradient_norms": [float(each["gradient_norm"]) for each in logs],
        "accuracies": [float(each["accuracy"]) for each in logs],
        "head_bias": weights["head/bias"].tolist(),
        "cls": weights["patch_encoder/class_token"].ravel().tolist(),
        "evaluated": sorted(evaluated),
        "devices": len(kernel.devices()),
        "parts": kernel.shape[1] // kernel.sharding.shard_shape(kernel.shape)[1],
    }


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")
    _main(json.loads(sys.argv[1]))
