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
from collections.abc import Callable
from typing import Any

import fine_tuning
import keras
import numpy as np
import processes
import tensorflow as tf

import keras_vit
from keras_vit.optimizers import LAMB
from keras_vit.training import DistillationModel

SIZE, IMAGES, BATCH, CLASSES = 16, 32, 8, 5
CONFIG = keras_vit.ViTConfig(
    input_shape=(SIZE, SIZE, 3),
    patch_size=8,
    hidden_dim=16,
    mlp_dim=32,
    num_heads=2,
    num_layers=1,
    classes=CLASSES,
)


@dataclasses.dataclass(frozen=True)
class Way:
    """A compiled model and its data; each epoch makes iterators, which take as long as tracing."""

    make: Callable[[], Any]
    data: str = "plain"
    epochs: int = 1
    # Others evaluate as another way does; their weights are compared all the same.
    is_evaluated: bool = True


def start(
    ways: list[str], *, replicas: int = 1, environment: dict[str, str] | None = None
) -> processes.Started:
    """Starts a process that trains in each of these ways.

    Its result, by the name of each way: what `fit` logs of each epoch, one number of each weight at
    the end, and a hash of each replica.
    """
    case = {"replicas": replicas, "ways": ways, "multi_worker": environment is not None}
    return processes.start(__file__, case, environment)


def start_strategies(cases: list[tuple[int, int]]) -> processes.Started:
    """Starts a process that trains models of these widths, each on devices of its own strategy."""
    return processes.start(__file__, {"replicas": 4, "strategies": cases})


def _main(case: dict[str, Any]) -> None:
    processes.make_devices(case["replicas"])
    if "strategies" in case:
        _train_one_after_another(case["strategies"])
        return
    strategy = tf.distribute.get_strategy()
    if case["multi_worker"]:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    elif case["replicas"] > 1:
        strategy = _mirrored(case["replicas"])
    print(json.dumps({name: _train(name, strategy) for name in case["ways"]}))


def _mirrored(count: int) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])


def _train_one_after_another(cases: list[tuple[int, int]]) -> None:
    for width, count in cases:
        with _mirrored(count).scope():
            model = _vit(hidden_dim=width)
            model.compile("sgd", "mse")
        model.fit(np.zeros((8, SIZE, SIZE, 3)), np.zeros((8, CLASSES)), batch_size=8, verbose=0)
        print("trained")


def _train(name: str, strategy: Any) -> dict[str, Any]:
    way = WAYS[name]
    keras.utils.set_random_seed(0)
    # TensorFlow rewrites the graphs of the original's steps alone, as a user's.
    processes.optimize_graphs(name == "original")
    with strategy.scope():
        model = way.make()
        if way.data != "original":
            _fill(model)
    logs = _loop(model, strategy) if name == "own_loop" else _fit(way, model, strategy)
    copies = [strategy.experimental_local_results(v.value) for v in model.weights]
    hashes = [
        hashlib.sha256(b"".join(copy.numpy().tobytes() for copy in replica)).hexdigest()
        for replica in zip(*copies, strict=True)
    ]
    weights = [_number_of(v.numpy()) for v in model.weights if v.dtype == "float32"]
    return {"logs": logs, "weights": weights, "replicas": hashes}


def _number_of(values: np.ndarray) -> float:
    """A sum of all values, each with a factor of its own, of the order of one of them."""
    factors = np.random.default_rng(values.size).standard_normal(values.shape)
    return float(np.sum(factors * values) / np.sqrt(values.size))


def _fit(way: Way, model: Any, strategy: Any) -> dict[str, list[float]]:
    """Trains by `fit`, and evaluates the images of the last, uneven batch too."""
    data = _dataset(way.data, strategy)
    steps: dict[str, Any] = {}
    if way.data == "original":  # each step is an epoch, so that its numbers are logged
        steps = {"steps_per_epoch": 1}
    history = model.fit(
        data,
        epochs=way.epochs,
        shuffle=False,
        verbose=0,
        validation_data=data if way.is_evaluated else None,
        **steps,
    ).history
    return {key: [float(np.ravel(v)[0]) for v in values] for key, values in history.items()}


def _loop(model: Any, strategy: Any) -> dict[str, list[float]]:
    """A loop as TensorFlow's guide has it, with the optimizer that was compiled."""
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

    losses = [float(step(batch)) for batch in _dataset("plain", strategy)]
    return {"loss": [float(np.mean(losses))]}


@functools.cache
def _dataset(kind: str, strategy: Any) -> Any:
    """Data of several ways, distributed as `fit` does it."""
    arrays, size = _arrays(kind)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(size).with_options(options)
    is_alone = strategy.num_replicas_in_sync == 1 or kind == "original"
    return data if is_alone else strategy.experimental_distribute_dataset(data)


def _arrays(kind: str) -> tuple[tuple[Any, ...], int]:
    """The arrays of all images, and how many a batch has."""
    if kind == "original":
        x, y = map(np.concatenate, zip(*map(fine_tuning.batch, range(12)), strict=True))
        return (x, y), 16
    # The last batch has one image.
    images = IMAGES + (kind in ("uneven", "weighted", "heads"))
    generator = np.random.default_rng(3)
    x = generator.uniform(-1, 1, (images, SIZE, SIZE, 3)).astype(np.float32)
    y = generator.integers(0, CLASSES, images)
    if kind == "distilled":
        y = np.eye(CLASSES, dtype=np.float32)[y]
    weights = generator.uniform(0, 2, images).astype(np.float32) ** 3
    if kind == "heads":
        return (x, {"kind": y, "size": x.mean(axis=(1, 2))[:, :1]}, weights), BATCH
    return ((x, y, weights) if kind == "weighted" else (x, y)), BATCH


def _fill(model: Any) -> None:
    """Gives every weight a value that its name alone decides."""
    for variable in model.weights:
        if variable.dtype != "float32" or any(n in variable.path for n in ("seed", "kernel_b")):
            continue
        generator = np.random.default_rng(zlib.crc32(variable.path.split("/", 1)[-1].encode()))
        value = generator.standard_normal(variable.shape) / 4
        is_scale = variable.path.endswith("gamma")
        variable.assign(value / max(np.sqrt(variable.shape[0]), 1) * 2 + is_scale)


def _vit(**fields: Any) -> keras_vit.VisionTransformer:
    return keras_vit.VisionTransformer(dataclasses.replace(CONFIG, **fields))


def _compiled(
    model: Any = None, *, loss: Any = None, optimizer: Any = None, **arguments: Any
) -> Any:
    """Compiled with a clipping that matters: the gradients are about ten times as long."""
    model = model or _vit()
    model.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.2),
        loss or _cross_entropy(),
        **{"metrics": ["accuracy"], **arguments},
    )
    return model


def _cross_entropy(**arguments: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def _subclass(
    compiled: Callable[..., Any] = _compiled, loss: keras.losses.Loss | None = None, **methods: Any
) -> Any:
    mine = type("Mine", (keras_vit.VisionTransformer,), methods)
    return compiled(mine(CONFIG), loss=loss)


def _textbook_step(self: Any, data: Any) -> dict[str, Any]:
    """Of the Keras guide "Customizing what happens in fit() with TensorFlow"."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight)
    gradients = tape.gradient(loss, self.trainable_variables)
    self.optimizer.apply(gradients, self.trainable_variables)
    for metric in self.metrics:
        if metric.name == "loss":  # Keras has divided it
            metric.update_state(loss * tf.distribute.get_strategy().num_replicas_in_sync)
        else:
            metric.update_state(y, y_pred)
    return {metric.name: metric.result() for metric in self.metrics}


def _added_loss(
    self: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
) -> Any:
    own = keras_vit.VisionTransformer.compute_loss(self, x, y, y_pred, sample_weight, training)
    return own + 0.1 * keras.ops.mean(y_pred**2)


def _mean_loss(self: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


def _object_loss(self: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    return _cross_entropy()(y, y_pred)


def _unclipped(model: Any = None, **options: Any) -> Any:
    """Clipping would hide gradients that are summed twice."""
    return _compiled(model, optimizer=keras.optimizers.SGD(0.02, momentum=0.9), **options)


def _wrapper(**options: Any) -> Any:
    """Two heads with a regulariser on a model without one; images weigh differently in one loss."""
    images = keras.Input((SIZE, SIZE, 3))
    features = _vit(classes=None)(images)
    heads = {
        name: keras.layers.Dense(units, kernel_regularizer="l2", name=name)(features)
        for name, units in {"kind": CLASSES, "size": 1}.items()
    }
    return _compiled(
        keras_vit.ExactModel(images, heads),
        loss={"kind": _by_weight(), "size": "mse"},
        loss_weights={"kind": 0.5, "size": 2.0},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        **options,
    )


def _distilled() -> Any:
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    return _compiled(DistillationModel(_vit(), _vit()), loss=loss, metrics=None)


def _adapted() -> Any:
    vit = _vit()
    _fill(vit)
    return _compiled(keras_vit.lora(vit, rank=2, alpha=40))


def _multiple() -> Any:
    parts = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
        {"head/.*": keras.optimizers.SGD(0.05, clipnorm=0.02)},
    )
    return _compiled(optimizer=keras.optimizers.MultiOptimizer(parts))


def _schedule_free() -> Any:
    # The key's bias has no gradient: without this epsilon Adam would divide its noise by itself.
    optimizer = keras.optimizers.ScheduleFreeAdamW(1e-2, clipnorm=0.1, epsilon=1e-2)
    return _compiled(optimizer=optimizer)


def _lamb() -> Any:
    optimizer = LAMB(0.01, weight_decay=0.05, global_clipnorm=1.0, epsilon=1e-2)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return _compiled(optimizer=optimizer)


def _original(**options: Any) -> Way:
    make = functools.partial(fine_tuning.compiled, **options)
    return Way(make, "original", epochs=fine_tuning.STEPS, is_evaluated=False)


def _by_weight() -> keras.losses.Loss:
    return _cross_entropy(reduction="mean_with_sample_weight")


def _ignoring() -> keras.losses.Loss:
    return _cross_entropy(ignore_class=0)


STEPS = "gradient_accumulation_steps"
WAYS = {
    "original": _original(),
    "original_xla": _original(jit_compile=True, **{STEPS: 2}),
    "original_in_parts": _original(**{STEPS: 4}),
    "original_recomputed": _original(remat=True),
    "original_in_two_passes": _original(sam_rho=0.05),
    "original_in_float16": _original(precision="mixed_float16"),
    "fit": Way(_compiled),
    "train_step": Way(lambda: _subclass(train_step=_textbook_step), is_evaluated=False),
    "compute_loss": Way(lambda: _subclass(compute_loss=_added_loss)),
    "compute_loss_of_ops": Way(lambda: _subclass(compute_loss=_mean_loss)),
    "compute_loss_of_object": Way(lambda: _subclass(compute_loss=_object_loss)),
    "own_loop": Way(_compiled),
    "wrapper": Way(_wrapper, "heads"),
    "wrapper_in_parts": Way(lambda: _wrapper(**{STEPS: 2}), "heads", is_evaluated=False),
    "distilled": Way(_distilled, "distilled"),
    "lora": Way(_adapted),
    "multiple": Way(_multiple),
    "schedule_free": Way(_schedule_free),
    "lamb": Way(_lamb),
    "uneven": Way(_unclipped, "uneven", epochs=2),
    "uneven_in_parts": Way(lambda: _unclipped(**{STEPS: 3}), "uneven", is_evaluated=False),
    "weighted": Way(lambda: _compiled(loss=_by_weight()), "weighted"),
    "weighted_in_parts": Way(
        lambda: _compiled(loss=_by_weight(), **{STEPS: 2}), "weighted", is_evaluated=False
    ),
    "weighted_train_step": Way(
        lambda: _subclass(_unclipped, _by_weight(), train_step=_textbook_step),
        "weighted",
        is_evaluated=False,
    ),
    "ignored": Way(lambda: _compiled(loss=_ignoring()), "uneven"),
    "ignored_in_parts": Way(
        lambda: _compiled(loss=_ignoring(), **{STEPS: 2}), "uneven", is_evaluated=False
    ),
}

if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
