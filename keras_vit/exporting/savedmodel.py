"""Writes a SavedModel for TensorFlow Serving, with warm-up requests and the server's settings."""

import functools
import importlib.resources
import string
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from keras_vit import atomic
from keras_vit.data import decoding
from keras_vit.data import images as image_files
from keras_vit.exporting.clean import loader
from keras_vit.exporting.rebuild import Exportable

# The feature of a tf.Example with the file, as in the TensorFlow Model Garden.
EXAMPLE_FEATURE = "image/encoded"
# The server pads requests to these batch sizes; each has its warm-up requests.
BATCH_SIZES = (1, 2, 4, 8, 16)
_TEMPLATES = (
    "batching_parameters.txt",
    "models.config",
    "monitoring.config",
    "serve.sh",
    "README.md",
)
_GREY = 127
SINGLE_PIXEL = "An image of a single pixel shows nothing; send the whole image."


def make_signatures(
    exportable: Exportable, *, labels: tuple[str, ...], top_k: int
) -> dict[str, Any]:
    """Makes a concrete function for every signature of the model.

    All call the same function for the network, so its graph is stored once.

    Args:
        exportable: the rebuilt model.
        labels: a name for each class; empty without classifier.
        top_k: classes in an answer.
    """
    shape = (None, *exportable.image_shape)
    specs = {
        "image_bytes": tf.TensorSpec((None,), tf.string, name="image_bytes"),
        "images": tf.TensorSpec(shape, tf.uint8, name="images"),
        "pixel_values": tf.TensorSpec(shape, tf.float32, name="pixel_values"),
        "inputs": tf.TensorSpec((None,), tf.string, name="inputs"),
    }
    inputs, features = _Inputs(exportable), _only("features")
    if exportable.activation is None:
        functions = {
            "serving_default": ("image_bytes", _chain(inputs.of_files, features)),
            "pixels": ("pixel_values", _chain(inputs.of_values, features)),
            "features": ("images", _chain(inputs.of_images, features)),
        }
    else:
        best = _best(exportable.activation, labels=labels, top_k=top_k)
        scores = _scores(exportable.activation)
        functions = {
            "serving_default": ("image_bytes", _chain(inputs.of_files, best)),
            "image_tensor": ("images", _chain(inputs.of_images, scores)),
            "pixels": ("pixel_values", _chain(inputs.of_values, scores)),
            "classify": ("inputs", _chain(inputs.of_examples, best, _only("classes", "scores"))),
        }
        if exportable.config is not None:
            functions["features"] = ("images", _chain(inputs.of_images, features))
    return {
        name: tf.function(function, autograph=False).get_concrete_function(specs[spec])
        for name, (spec, function) in functions.items()
    }


class _Inputs:
    """One function for each kind of input, which returns the network's outputs by name."""

    def __init__(self, exportable: Exportable) -> None:
        self._exportable = exportable
        model, shape = exportable.outputs(), (None, *exportable.image_shape)
        self._network = tf.function(
            lambda images: model(images, training=False), autograph=False
        ).get_concrete_function(tf.TensorSpec(shape, tf.float32))
        self._decode = tf.function(
            lambda contents: decode_images(
                contents,
                size=exportable.image_shape[:2],
                antialias=exportable.input_config.antialias,
            ),
            autograph=False,
        ).get_concrete_function(tf.TensorSpec((None,), tf.string))

    def of_values(self, pixel_values: Any) -> Any:
        values = self._ensure_shape(pixel_values)
        return self._network(self._exportable.from_normalized(values))

    def of_images(self, images: Any) -> Any:
        pixels = tf.cast(self._ensure_shape(images), tf.float32)
        return self._network(self._exportable.from_pixels(pixels))

    def of_files(self, image_bytes: Any) -> Any:
        return self._network(self._exportable.from_pixels(self._decode(image_bytes)))

    def of_examples(self, inputs: Any) -> Any:
        feature = {EXAMPLE_FEATURE: tf.io.FixedLenFeature((), tf.string)}
        return self.of_files(tf.io.parse_example(inputs, feature)[EXAMPLE_FEATURE])

    def _ensure_shape(self, images: Any) -> Any:
        # The server feeds any shape: images of half the height would give half as many outputs.
        return tf.ensure_shape(images, (None, *self._exportable.image_shape))


def decode_images(contents: Any, *, size: tuple[int, int], antialias: bool) -> Any:
    """Decodes image files (B,) to pixels (B, height, width, 3), float32 in 0..255.

    Each file may have its own size and format. Evaluation calls the same two functions, but also
    reads WebP.

    Raises:
        tf.errors.InvalidArgumentError: a file is not an image, or has one pixel.
    """

    def decode(content: Any) -> Any:
        image = decoding.decode_image(content, webp=False)
        shape = tf.shape(image)
        check = tf.debugging.Assert(shape[0] * shape[1] > 1, [SINGLE_PIXEL])
        with tf.control_dependencies([check] if check is not None else []):
            return image_files.resize_image(tf.identity(image), size=size, antialias=antialias)

    spec = tf.TensorSpec((*size, 3), tf.float32)
    return tf.map_fn(decode, contents, fn_output_signature=spec)


def write_server_files(directory: Path, *, exportable: Exportable, labels: tuple[str, ...]) -> None:
    """Writes the server's settings, the labels, `serve.sh` and a README beside the versions."""
    height, width, _ = exportable.image_shape
    values = {
        "name": directory.name,
        "sizes": ", ".join(map(str, BATCH_SIZES)),
        "largest": BATCH_SIZES[-1],
        "height": height,
        "width": width,
        "values": pixel_values(exportable),
    }
    folder = importlib.resources.files("keras_vit.exporting") / "templates"
    for name in _TEMPLATES:
        template = string.Template((folder / name).read_text(encoding="utf-8"))
        with atomic.whole_file(directory / name) as file:
            file.write_text(template.substitute(values), encoding="utf-8")
            file.chmod(0o755 if name.endswith(".sh") else 0o644)
    if labels:
        with atomic.whole_file(directory / "labels.txt") as file:
            write_labels(file, labels)


def pixel_values(exportable: Exportable) -> str:
    """Describes the input range of the signature `pixels`."""
    mean, std = (
        f"{values[0]:g}" if len(set(values)) == 1 else f"({', '.join(f'{v:g}' for v in values)})"
        for values in (exportable.input_config.image_mean, exportable.input_config.image_std)
    )
    is_original = mean == std == "0.5"
    return "in [-1, 1]" if is_original else f"(0..255 / 255 - {mean}) / {std}"


def write_labels(file: Path, labels: Iterable[str]) -> None:
    """Writes one label per line."""
    file.write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")


def write_warm_up(
    file: Path, exportable: Exportable, functions: Mapping[str, Any], *, model_name: str
) -> None:
    """Writes a request for every signature and batch size; the server runs them as it loads.

    A tensor of one repeated value is stored as that value, so the file is small.
    """
    with tf.io.TFRecordWriter(str(file)) as writer:
        for signature, function in functions.items():
            (spec,), _ = function.structured_input_signature
            for batch_size in BATCH_SIZES:
                tensor = _grey_tensor(spec, exportable, signature, batch_size)
                writer.write(_prediction_log(model_name, signature, {spec.name: tensor}))


def example(content: bytes) -> bytes:
    """Wraps the bytes of an image file in a serialised tf.Example."""
    values = tf.train.Feature(bytes_list=tf.train.BytesList(value=[content]))
    features = tf.train.Features(feature={EXAMPLE_FEATURE: values})
    return bytes(tf.train.Example(features=features).SerializeToString())


def write_savedmodel(
    exportable: Exportable,
    folder: Path,
    *,
    labels: tuple[str, ...],
    top_k: int,
    model_name: str,
) -> None:
    """Writes a version directory.

    The weights are attributes of a plain `tf.Module`: `model.export` and `ExportArchive.track`
    write every weight twice (keras-team/keras#23553), and a Keras model is saved with its layers.

    Args:
        exportable: the rebuilt model.
        folder: the directory to write; it need not exist.
        labels: a name for each class; empty without classifier.
        top_k: classes in an answer.
        model_name: the model's name in the warm-up requests.

    Raises:
        ValueError: the images do not have three channels.
    """
    if exportable.image_shape[2] != 3:
        raise ValueError(
            "A SavedModel decodes images to RGB. Received: a model of images "
            f"{exportable.image_shape}; export it as tflite or onnx."
        )
    functions = make_signatures(exportable, labels=labels, top_k=top_k)
    module = tf.Module(name="vit")
    module.weights = [weight.value for weight in exportable.network.weights]
    save_module(module, folder, functions)
    extra = folder / "assets.extra"
    extra.mkdir()
    if labels:
        write_labels(extra / "labels.txt", labels)
    write_warm_up(
        extra / "tf_serving_warmup_requests", exportable, functions, model_name=model_name
    )


def save_module(module: tf.Module, folder: str | Path, signatures: Mapping[str, Any]) -> None:
    """Saves a module without its gradients, which would add functions for XLA."""
    options = tf.saved_model.SaveOptions(save_debug_info=False, experimental_custom_gradients=False)
    tf.saved_model.save(module, str(folder), signatures=signatures, options=options)


def _chain(*functions: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: functools.reduce(lambda x, function: function(x), functions, value)


def _only(*names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda outputs: {name: outputs[name] for name in names}


def _scores(activation: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    return lambda outputs: {
        "logits": outputs["logits"],
        "probabilities": activation(outputs["logits"]),
    }


def _best(
    activation: Callable[[Any], Any], *, labels: tuple[str, ...], top_k: int
) -> Callable[[Any], dict[str, Any]]:
    def best(outputs: Any) -> dict[str, Any]:
        scores, class_ids = tf.math.top_k(activation(outputs["logits"]), k=top_k)
        classes = tf.gather(tf.constant(labels), class_ids)  # (B, top_k)
        return {"classes": classes, "class_ids": class_ids, "scores": scores}

    return best


def _grey_tensor(
    spec: tf.TensorSpec, exportable: Exportable, signature: str, batch_size: int
) -> bytes:
    shape = tf.TensorShape((batch_size, *spec.shape[1:])).as_proto()
    tensor = tensor_pb2.TensorProto(dtype=spec.dtype.as_datatype_enum, tensor_shape=shape)
    if spec.dtype == tf.uint8:
        tensor.int_val.append(_GREY)
    elif spec.dtype == tf.float32:
        tensor.float_val.append(0.0)
    else:
        pixels = np.full((*exportable.image_shape[:2], 3), _GREY, np.uint8)
        content = bytes(tf.io.encode_jpeg(pixels).numpy())
        content = example(content) if signature == "classify" else content
        tensor.string_val.extend([content] * batch_size)
    return bytes(tensor.SerializeToString())


def _prediction_log(model_name: str, signature: str, inputs: Mapping[str, bytes]) -> bytes:
    # tensorflow_serving/apis: PredictionLog.predict_log = 6, PredictLog.request = 1;
    # PredictRequest: model_spec = 1 (ModelSpec: name = 1, signature_name = 3), inputs = 2.
    model = loader.field(1, model_name.encode()) + loader.field(3, signature.encode())
    request = loader.field(1, model)
    for name, tensor in inputs.items():
        request += loader.field(2, loader.field(1, name.encode()) + loader.field(2, tensor))
    return loader.field(6, loader.field(1, request))
