"""Ways in which people train a Vision Transformer; a process of its own prints what each gives.

Run as `python training_ways.py '{"replicas": 2, "ways": ["fit", "uneven"]}'`; under TF_CONFIG it is
one of the workers.
"""

import dataclasses
import functools
import hashlib
import json
import sys
import zlib
from typing import Any

import numpy as np
import processes

SIZE, IMAGES, BATCH, CLASSES = 16, 32, 8, 5
# These train two epochs, all others one: each makes four iterators over all replicas, which take
# as long as tracing.
LONGER = ("fit", "own_loop", "uneven")
# Ways whose names begin so have a last batch of one image.
UNEVEN = ("uneven", "weighted", "ignored")
OTHER_DATA = (*UNEVEN, "distilled")
# What evaluates as another way does; its weights, which every way has, are compared all the same.
UNEVALUATED = (
    "train_step",
    "cloned",
    "uneven_accumulated",
    "uneven_train_step",
    "weighted_accumulated",
    "weighted_train_step",
    "ignored_accumulated",
)


def start(ways: list[str], *, replicas: int = 1, environment: dict[str, str] | None = None) -> Any:
    """Starts a process that trains in each of these ways.

    Its result, by the name of each way: losses, validation losses, the root mean square of each
    weight at the end, and a hash of each replica.
    """
    case = {"replicas": replicas, "ways": ways, "multi_worker": environment is not None}
    return processes.start(__file__, case, environment)


def _main(case: dict[str, Any]) -> None:
    processes.make_devices(case["replicas"])
    processes.optimize_graphs(False)  # tests/fine_tuning.py does
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    if case["multi_worker"]:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    elif case["replicas"] > 1:
        devices = [device.name for device in tf.config.list_logical_devices("CPU")]
        strategy = tf.distribute.MirroredStrategy(devices)
    print(json.dumps({name: _train(name, strategy) for name in case["ways"]}))


def _train(name: str, strategy: Any) -> dict[str, Any]:
    import keras

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, trained = WAYS[name]()
        _fill(model)
        if trained is not model:
            _fill(trained)
    history = _loop(trained, strategy) if name == "own_loop" else _fit(name, trained, strategy)
    copies = [strategy.experimental_local_results(v.value) for v in model.weights]
    hashes = [
        hashlib.sha256(b"".join(copy.numpy().tobytes() for copy in replica)).hexdigest()
        for replica in zip(*copies, strict=True)
    ]
    squares = [
        float(np.sqrt(np.mean(v.numpy() ** 2))) for v in model.weights if v.dtype == "float32"
    ]
    return {**history, "weights": squares, "replicas": hashes}


def _fit(name: str, model: Any, strategy: Any) -> dict[str, Any]:
    """Trains by `fit`, and evaluates the images of the last, uneven batch too."""
    kind = name.partition("_")[0]
    data = _dataset(kind if kind in OTHER_DATA else "plain", strategy)
    history = model.fit(
        data,
        epochs=_epochs(name),
        shuffle=False,
        verbose=0,
        validation_data=None if name in UNEVALUATED else data,
    ).history
    flat = {key: [float(np.ravel(v)[0]) for v in values] for key, values in history.items()}
    return {"losses": flat["loss"], "validation": flat.get("val_loss", [])}


def _epochs(name: str) -> int:
    return 2 if name in LONGER else 1


def _loop(model: Any, strategy: Any) -> dict[str, Any]:
    """A loop as TensorFlow's guide has it, with the optimizer that was compiled."""
    import keras
    import tensorflow as tf

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    @tf.function
    def step(batch: Any) -> Any:
        def replica_step(batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    batches = _dataset("plain", strategy)
    losses = [
        np.mean([float(step(batch)) for batch in batches]) for _ in range(_epochs("own_loop"))
    ]
    return {"losses": [float(loss) for loss in losses], "validation": []}


@functools.cache
def _dataset(kind: str, strategy: Any) -> Any:
    """Data of several ways, distributed as `fit` does it."""
    import tensorflow as tf

    images = IMAGES + (kind in UNEVEN)
    generator = np.random.default_rng(3)
    x = generator.uniform(-1, 1, (images, SIZE, SIZE, 3)).astype(np.float32)
    y = generator.integers(0, CLASSES, images)
    arrays: tuple[Any, ...] = (x, y)
    if kind == "distilled":
        arrays = (x, np.eye(CLASSES, dtype=np.float32)[y])
    if kind == "weighted":
        arrays = (x, y, generator.uniform(0, 2, images).astype(np.float32) ** 3)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH).with_options(options)
    is_alone = strategy.num_replicas_in_sync == 1
    return data if is_alone else strategy.experimental_distribute_dataset(data)


def _fill(model: Any) -> None:
    """Gives every weight a value that its name alone decides."""
    for variable in model.weights:
        if variable.dtype != "float32" or any(n in variable.path for n in ("seed", "kernel_b")):
            continue
        generator = np.random.default_rng(zlib.crc32(variable.path.split("/", 1)[-1].encode()))
        value = generator.standard_normal(variable.shape) / 4
        is_scale = variable.path.endswith("gamma")
        variable.assign(value / max(np.sqrt(variable.shape[0]), 1) * 2 + is_scale)


def _vit(**fields: Any) -> Any:
    import keras_vit

    return keras_vit.VisionTransformer(_config(**fields))


def _config(**fields: Any) -> Any:
    import keras_vit

    config = keras_vit.ViTConfig(
        input_shape=(SIZE, SIZE, 3),
        patch_size=8,
        hidden_dim=16,
        mlp_dim=32,
        num_heads=2,
        num_layers=1,
        classes=CLASSES,
    )
    return dataclasses.replace(config, **fields)


def _features() -> Any:
    return _vit(classes=None)


def _compiled(model: Any, *, loss: Any = None, optimizer: Any = None, **arguments: Any) -> Any:
    """Compiled with a clipping that matters: the gradients are about ten times as long."""
    import keras

    model.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.2),
        loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **arguments,
    )
    return model


def _alone(model: Any) -> tuple[Any, Any]:
    return model, model


def _subclass(loss: dict[str, Any] | None = None, **methods: Any) -> tuple[Any, Any]:
    import keras

    import keras_vit

    made = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **(loss or {}))
    mine = type("Mine", (keras_vit.VisionTransformer,), methods)
    return _alone(_compiled(mine(_config()), loss=made))


def _textbook_step(self: Any, data: Any) -> dict[str, Any]:
    """Of the Keras guide "Customizing what happens in fit() with TensorFlow"."""
    import keras
    import tensorflow as tf

    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight)
    gradients = tape.gradient(loss, self.trainable_variables)
    self.optimizer.apply(gradients, self.trainable_variables)
    for metric in self.metrics:
        if metric.name == "loss":
            metric.update_state(loss * _replicas())  # Keras has divided it
        else:
            metric.update_state(y, y_pred)
    return {metric.name: metric.result() for metric in self.metrics}


def _replicas() -> int:
    import tensorflow as tf

    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def _added_loss(
    self: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
) -> Any:
    import keras

    from keras_vit import VisionTransformer

    own = VisionTransformer.compute_loss(self, x, y, y_pred, sample_weight, training)
    return own + 0.1 * keras.ops.mean(y_pred**2)


def _mean_loss(self: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    import keras

    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


def _object_loss(self: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, y_pred)


def _wrapper() -> tuple[Any, Any]:
    import keras

    import keras_vit

    images = keras.Input((SIZE, SIZE, 3))
    outputs = keras.layers.Dense(CLASSES, kernel_regularizer="l2")(_features()(images))
    return _alone(_compiled(keras_vit.ExactModel(images, outputs)))


def _sequential() -> tuple[Any, Any]:
    import keras

    import keras_vit

    model = keras.Sequential([_features(), keras.layers.Dense(CLASSES)])
    model.build((None, SIZE, SIZE, 3))
    return _alone(_compiled(keras_vit.ExactModel.from_model(model)))


def _frozen() -> tuple[Any, Any]:
    import keras

    import keras_vit

    base = _features()
    base.trainable = False
    images = keras.Input((SIZE, SIZE, 3))
    outputs = keras.layers.Dense(CLASSES)(base(images, training=False))
    return _alone(_compiled(keras_vit.ExactModel(images, outputs)))


def _cloned() -> tuple[Any, Any]:
    import keras

    return _alone(_compiled(keras.models.clone_model(_compiled(_vit()))))


def _distilled() -> tuple[Any, Any]:
    import keras

    from keras_vit.training import DistillationModel

    student, teacher = _vit(), _vit(num_layers=1)
    _fill(teacher)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    return student, _compiled(DistillationModel(student, teacher), loss=loss)


def _adapted() -> tuple[Any, Any]:
    import keras_vit

    vit = _vit()
    _fill(vit)
    return _alone(_compiled(keras_vit.lora(vit, rank=2, alpha=40)))


def _multiple() -> tuple[Any, Any]:
    import keras

    parts = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
        {"head/.*": keras.optimizers.SGD(0.05, clipnorm=0.02)},
    )
    return _alone(_compiled(_vit(), optimizer=keras.optimizers.MultiOptimizer(parts)))


def _optimized(optimizer: str, **arguments: Any) -> tuple[Any, Any]:
    import keras

    made = getattr(keras.optimizers, optimizer)(**arguments)
    return _alone(_compiled(_vit(), optimizer=made))


def _lossy(name: str, *, accumulate: int = 1, **arguments: Any) -> tuple[Any, Any]:
    import keras

    loss = getattr(keras.losses, name)(**arguments)
    return _alone(_compiled(_vit(), loss=loss, accumulate=accumulate))


_CROSS = "SparseCategoricalCrossentropy"
_BY_WEIGHT: dict[str, Any] = {"from_logits": True, "reduction": "mean_with_sample_weight"}
WAYS: dict[str, Any] = {
    "fit": lambda: _alone(_compiled(_vit())),
    "train_step": lambda: _subclass(train_step=_textbook_step),
    "compute_loss": lambda: _subclass(compute_loss=_added_loss),
    "compute_loss_of_ops": lambda: _subclass(compute_loss=_mean_loss),
    "compute_loss_of_object": lambda: _subclass(compute_loss=_object_loss),
    "own_loop": lambda: _alone(_compiled(_vit())),
    "wrapper": _wrapper,
    "sequential": _sequential,
    "frozen": _frozen,
    "cloned": _cloned,
    "distilled": _distilled,
    "lora": _adapted,
    "uneven": lambda: _alone(_compiled(_vit())),
    "uneven_accumulated": lambda: _alone(_compiled(_vit(), accumulate=3)),
    "uneven_train_step": lambda: _subclass(train_step=_textbook_step),
    "weighted": lambda: _lossy(_CROSS, **_BY_WEIGHT),
    "weighted_accumulated": lambda: _lossy(_CROSS, accumulate=2, **_BY_WEIGHT),
    "ignored": lambda: _lossy(_CROSS, from_logits=True, ignore_class=0),
    "ignored_accumulated": lambda: _lossy(_CROSS, accumulate=2, from_logits=True, ignore_class=0),
    "weighted_train_step": lambda: _subclass(
        {"reduction": "mean_with_sample_weight"}, train_step=_textbook_step
    ),
    "multiple": _multiple,
    # The key's bias has no gradient: without this epsilon Adam would divide its noise by itself.
    "schedule_free": lambda: _optimized(
        "ScheduleFreeAdamW", learning_rate=1e-2, clipnorm=0.1, epsilon=1e-2
    ),
}

if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
