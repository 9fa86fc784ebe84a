"""keras_vit and KerasHub, on the TensorFlow backend."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import CLASSES, Case

Run = Callable[[], Any]


def import_framework(name: str) -> None:
    """Imports the contender."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras  # noqa: F401

    if name == "KerasHub":
        import keras_hub  # noqa: F401
    else:
        import keras_vit  # noqa: F401


def version(name: str) -> str:
    """Returns the contender's version."""
    if name == "KerasHub":
        import keras_hub as package
    else:
        import keras_vit as package
    return str(package.__version__)


def make_run(name: str, case: Case, folder: Path) -> Run:
    """Returns a function that runs the case once."""
    if case.replicas > 1:
        return _training_of_replicas(name, case)
    model = make_model(name, case)
    images = images_of(case, model.input_shape[1])
    if case.task == "training":
        labels = compile_model(name, model, case)
        return lambda: model.train_on_batch(images, labels)
    if not name.endswith("tf.function"):
        return lambda: model.predict(images, batch_size=case.batch, verbose=0)
    import tensorflow as tf

    function = tf.function(lambda x: model(x, training=False), autograph=False)
    tensor = tf.constant(images)
    return lambda: function(tensor).numpy()


def make_model(name: str, case: Case) -> Any:
    """Makes the network with random weights.

    For inference its weights have the case's precision, for training float32.
    """
    is_mixed = case.task == "training" and case.precision != "float32"
    dtype = f"mixed_{case.precision}" if is_mixed else case.precision
    if name == "KerasHub":
        return _hub_model(case, dtype)
    import keras_vit

    config = dataclasses.replace(_config(case), remat=name == "keras_vit remat")
    if name == "keras_vit patch dropout":
        config = dataclasses.replace(config, patch_dropout_rate=0.5)
    if name == "keras_vit DINOv2":
        config = _dinov2(config)
    return keras_vit.VisionTransformer(config, dtype=dtype)


def _dinov2(config: Any) -> Any:
    """Returns DINOv2's network of that size, with patches of 14 pixels and as many tokens."""
    rows, columns = config.grid
    return dataclasses.replace(
        config, input_shape=(14 * rows, 14 * columns, 3), patch_size=14, layer_scale=1.0
    )


def images_of(case: Case, side: int = 0) -> np.ndarray:
    """Returns a batch of random images in [-1, 1], of the case's size unless another is given."""
    side = side or case.image_size
    shape = (case.batch, side, side, 3)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def write_weights(name: str, case: Case, folder: Path) -> None:
    """Writes the file that a cold start reads."""
    import_framework(name)
    model = make_model(name, case)
    if name == "KerasHub":
        model.save_to_preset(str(folder / "hub"))
        return
    import keras_vit

    keras_vit.weights.save_npz(model, folder / "ours.npz")


def first_prediction(name: str, case: Case, folder: Path) -> None:
    """Loads the network from its file and predicts once."""
    if name == "KerasHub":
        import keras_hub

        model = keras_hub.models.ViTImageClassifier.from_preset(
            str(folder / "hub"), preprocessor=None
        )
    else:
        model = _load(case, folder / "ours.npz")
    model.predict(images_of(case), batch_size=case.batch, verbose=0)


def _load(case: Case, path: Path) -> Any:
    import keras_vit

    builder = getattr(keras_vit, f"ViT{case.variant.replace('/', '')}", None)
    if builder is not None and not case.layers:
        size = (case.image_size, case.image_size, 3)
        return builder(weights=str(path), input_shape=size, classes=CLASSES)
    model = keras_vit.VisionTransformer(_config(case))  # no published size
    keras_vit.weights.load_weights(model, path)
    return model


def _config(case: Case) -> Any:
    import keras_vit

    sizes: dict[str, Any] = dict(case.sizes)
    side = sizes.pop("image_size")
    return keras_vit.ViTConfig(input_shape=(side, side, 3), classes=CLASSES, **sizes)


def _hub_model(case: Case, dtype: str) -> Any:
    import keras_hub

    sizes = case.sizes
    side = sizes.pop("image_size")
    backbone = keras_hub.models.ViTBackbone(image_shape=(side, side, 3), dtype=dtype, **sizes)
    return keras_hub.models.ViTImageClassifier(backbone, num_classes=CLASSES, dtype=dtype)


def _momentum(name: str) -> Any:
    """Makes the optimizer of the paper's fine-tuning, from the library of the contender."""
    import keras

    if name == "KerasHub":
        return keras.optimizers.SGD(1e-3, momentum=0.9)
    from keras_vit.optimizers import MomentumSGD

    return MomentumSGD(1e-3, momentum=0.9, accumulator_dtype="float32")


def compile_model(name: str, model: Any, case: Case) -> np.ndarray:
    """Compiles the model and returns the labels of its batch."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # JAX traces a step each time unless it is compiled.
    is_compiled = keras.backend.backend() == "jax"
    model.compile(_momentum(name), loss, jit_compile=is_compiled)
    return np.arange(case.batch) % CLASSES


def _training_of_replicas(name: str, case: Case) -> Run:
    """Trains on all GPUs, or on logical devices of the processor, which share its cores."""
    import tensorflow as tf

    from keras_vit.data.source import untuned
    from keras_vit.training import Execution

    processor = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * case.replicas
    tf.config.set_logical_device_configuration(processor, parts)
    strategy = Execution(strategy="mirrored").make_strategy()
    if strategy.num_replicas_in_sync != case.replicas:
        raise RuntimeError(f"there are {strategy.num_replicas_in_sync} devices")
    with strategy.scope():
        model = make_model(name, case)
        labels = compile_model(name, model, case)
    batch = tf.data.Dataset.from_tensors((images_of(case), labels))
    batch = untuned(batch).cache().repeat()
    batches = strategy.experimental_distribute_dataset(batch)
    model.prepare(batches)
    turns = iter(batches)
    return lambda: {key: float(value) for key, value in model.train_function(turns).items()}
