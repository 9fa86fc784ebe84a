"""The original's twelve fine-tuning steps through `model.fit`: a process of its own prints them.

A process has one strategy, and logical devices are made before anything else. Run as
`python fine_tuning.py '{"replicas": 2, "each": [{"xla": true}, {"accumulate": 4}]}'`; under
TF_CONFIG it is one of the workers.
"""

import hashlib
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import processes

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
DEFAULTS: dict[str, Any] = {
    "replicas": 1,
    "multi_worker": False,
    "xla": False,
    "accumulate": 1,
    "accumulator_dtype": "float32",
    "optimizer": "momentum",
    "remat": False,
    "precision": "float32",
    "sam_rho": 0.0,
    "dropout_rate": 0.0,
    "clip": 1.0,
    "evaluate": False,
    "optimize_graphs": False,
}


def start(
    each: list[dict[str, Any]], environment: dict[str, str] | None = None, *, replicas: int = 1
) -> processes.Started:
    """Starts a process that runs several cases; see `DEFAULTS` for what one may say.

    Its result is a list: of each, losses, gradient norms, arrays, a hash of the weights and of
    every replica's.
    """
    case = {"replicas": replicas, "multi_worker": environment is not None, "each": each}
    return processes.start(__file__, case, environment)


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    """The original's batch of that number."""
    generator = np.random.default_rng(zlib.crc32(f"batch {number}".encode()))
    images = generator.uniform(-1, 1, (16, 32, 48, 3)).astype(np.float32)
    return images, generator.integers(0, 10, 16)


def _main(case: dict[str, Any]) -> None:
    each = case.pop("each")
    strategy = _strategy({**DEFAULTS, **case})
    print(json.dumps([_train({**DEFAULTS, **case, **one}, strategy) for one in each]))


def _train(case: dict[str, Any], strategy: Any) -> dict[str, Any]:
    import keras

    import keras_vit

    keras.utils.set_random_seed(0)
    processes.optimize_graphs(case["optimize_graphs"])
    with strategy.scope():
        config = keras_vit.ViTConfig(
            **SIZES, remat=case["remat"], dropout_rate=case["dropout_rate"]
        )
        model = keras_vit.VisionTransformer(config, dtype=case["precision"])
        load_weights(model)
        model.compile(
            _optimizer(case),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            accumulate=case["accumulate"],
            sam_rho=case["sam_rho"],
            report_gradient_norm=True,
            jit_compile=case["xla"],
        )
    numbers = _fit(model, is_evaluated=case["evaluate"])
    return {**numbers, "replicas": _replica_hashes(strategy, model)}


def _strategy(case: dict[str, Any]) -> Any:
    processes.make_devices(case["replicas"])
    import tensorflow as tf

    if case["multi_worker"]:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if case["replicas"] == 1:
        return tf.distribute.get_strategy()
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    return tf.distribute.MirroredStrategy(devices)


def load_weights(model: Any) -> None:
    """Gives a model the weights that the original began with."""
    import published

    import keras_vit

    with tempfile.TemporaryDirectory() as folder:
        path = published.write(Path(folder) / "weights.npz", keras_vit.ViTConfig(**SIZES))
        keras_vit.weights.load(model, path)


def _optimizer(case: dict[str, Any]) -> Any:
    import keras

    from keras_vit import training

    optimizer: keras.optimizers.Optimizer
    if case["optimizer"] == "momentum":
        optimizer = training.MomentumSGD(
            training.WarmupDecay(BASE, steps=TOTAL, warmup_steps=WARMUP),
            accumulator_dtype=case["accumulator_dtype"],
            global_clipnorm=case["clip"],
        )
    else:
        optimizer = keras.optimizers.get(case["optimizer"])
        optimizer.global_clipnorm = case["clip"]
    if case["precision"] == "mixed_float16":
        # Small: whether a larger one overflows, and a step is left out, is up to rounding.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
    return optimizer


def _fit(model: Any, *, is_evaluated: bool) -> dict[str, Any]:
    """Trains, evaluates if asked to, and returns the numbers of both."""
    import tensorflow as tf

    images, labels = zip(*map(batch, range(STEPS)), strict=True)
    data = tf.data.Dataset.from_tensor_slices((np.concatenate(images), np.concatenate(labels)))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = data.batch(16, drop_remainder=True).with_options(options)
    history = model.fit(
        data.repeat(), epochs=STEPS, steps_per_epoch=1, shuffle=False, verbose=0
    ).history
    validation = []
    if is_evaluated:
        batches = data.unbatch().take(20).batch(8).with_options(options)
        evaluated = model.evaluate(batches, verbose=0, return_dict=True)
        validation = [float(np.ravel(evaluated[name])[0]) for name in ("loss", "accuracy")]
    weights = {variable.path: variable.numpy() for variable in model.weights}
    content = b"".join(value.tobytes() for value in weights.values())
    return {
        "losses": [float(np.ravel(value)[0]) for value in history["loss"]],
        "gradient_norms": [float(np.ravel(value)[0]) for value in history["gradient_norm"]],
        "head_bias": weights["head/bias"].tolist(),
        "cls": weights["patch_encoder/class_token"].ravel().tolist(),
        "validation": validation,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _replica_hashes(strategy: Any, model: Any) -> list[str]:
    """One hash of all weights for each replica of this process."""
    copies = [strategy.experimental_local_results(v.value) for v in model.weights]
    return [
        hashlib.sha256(b"".join(copy.numpy().tobytes() for copy in replica)).hexdigest()
        for replica in zip(*copies, strict=True)
    ]


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
