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
from keras_vit.data import decoding, header
from keras_vit.data import images as image_files
from keras_vit.exporting.clean import loader
from keras_vit.exporting.rebuild import Exportable

# The feature of a tf.Example with the file, as in the TensorFlow Model Garden.
EXAMPLE_FEATURE = "image/encoded"
# The server pads requests to these batch sizes; each has its warm-up requests.
BATCH_SIZES = (1, 2, 4, 8, 16)
REQUEST_LIMIT = 128  # images; the server splits requests, and refuses larger ones
_TEMPLATES = (
    "batching_parameters.txt",
    "models.config",
    "monitoring.config",
    "serve.sh",
    "README.md",
)
_GREY = 127

SERVING_DEFAULT = "serving_default"
# What `serving_default` may take: files of images, or pixels in a batch of one size.
DEFAULT_SIGNATURES = ("image_bytes", "image_tensor")
# The status of a file that was decoded, and what is said of others.
OK = "OK"
DAMAGED = "The image is damaged, or its end is missing."
EMPTY = "The file is empty; send the bytes of an image."
UNKNOWN = "The file is no image of a known format; send a JPEG or PNG."
SINGLE_PIXEL = "An image of a single pixel shows nothing; send the whole image."
# The outputs for a file that was not decoded. NaN is no JSON.
BLANK: Mapping[str, Any] = {"classes": "", "class_ids": -1, "scores": 0.0, "features": 0.0}
_PARALLEL_ROWS = 8  # files of a batch that are decoded at the same time

_Answer = Callable[[Any], dict[str, Any]]


def make_signatures(
    exportable: Exportable,
    *,
    labels: tuple[str, ...],
    top_k: int,
    default: str = DEFAULT_SIGNATURES[0],
) -> dict[str, Any]:
    """Makes a concrete function for every signature of the model.

    All call the same function for the network, so its graph is stored once.

    Args:
        exportable: the rebuilt model.
        labels: a name for each class; empty without classifier.
        top_k: classes in an answer.
        default: which of `DEFAULT_SIGNATURES` is `serving_default`. "image_tensor" takes pixels;
            files then have the signature `image_bytes`.
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
            "image_bytes": ("image_bytes", inputs.files_to(features)),
            "pixels": ("pixel_values", _chain(inputs.of_values, features)),
            "features": ("images", _chain(inputs.of_images, features)),
        }
        of_pixels = functions["features"]
    else:
        best = _best(exportable.activation, labels=labels, top_k=top_k)
        scores = _scores(exportable.activation)
        functions = {
            "image_bytes": ("image_bytes", inputs.files_to(best)),
            "image_tensor": ("images", _chain(inputs.of_images, scores)),
            "pixels": ("pixel_values", _chain(inputs.of_values, scores)),
            "classify": ("inputs", inputs.examples_to(_chain(best, _only("classes", "scores")))),
        }
        of_pixels = functions["image_tensor"]
        if exportable.config is not None:
            functions["features"] = ("images", _chain(inputs.of_images, features))
    is_tensor = default == "image_tensor"
    first = of_pixels if is_tensor else functions.pop("image_bytes")
    return {
        name: tf.function(function, autograph=False).get_concrete_function(specs[spec])
        for name, (spec, function) in {SERVING_DEFAULT: first, **functions}.items()
    }


class _Inputs:
    """One function for each kind of input, which returns the network's outputs by name."""

    def __init__(self, exportable: Exportable) -> None:
        self._exportable = exportable
        model, shape = exportable.outputs(), (None, *exportable.image_shape)
        self._network = tf.function(
            lambda images: model(images, training=False), autograph=False
        ).get_concrete_function(tf.TensorSpec(shape, tf.float32))

    def of_values(self, pixel_values: Any) -> Any:
        values = self._ensure_shape(pixel_values)
        return self._network(self._exportable.from_normalized(values))

    def of_images(self, images: Any) -> Any:
        pixels = tf.cast(self._ensure_shape(images), tf.float32)
        return self._network(self._exportable.from_pixels(pixels))

    def files_to(self, answer: _Answer) -> _Answer:
        """Returns a function of image files to the answers, and the status of each file."""

        def function(image_bytes: Any) -> dict[str, Any]:
            images, status = decode_images(image_bytes, **self._decoding)
            is_decoded = tf.equal(status, OK)
            return self._answers(images, is_decoded, answer) | {"status": status}

        return function

    def examples_to(self, answer: _Answer) -> _Answer:
        """Returns a function of tf.Examples to the answers.

        They have no status: the server's Classify takes no output but classes and scores.
        """

        def read(row: Any) -> Any:
            feature = {EXAMPLE_FEATURE: tf.io.FixedLenFeature((), tf.string)}
            return tf.io.parse_single_example(row, feature)[EXAMPLE_FEATURE]

        def function(inputs: Any) -> dict[str, Any]:
            images, is_decoded = _decode_rows(inputs, read=read, **self._decoding)
            return self._answers(images, is_decoded, answer)

        return function

    @property
    def _decoding(self) -> dict[str, Any]:
        config = self._exportable.input_config
        return {"size": self._exportable.image_shape[:2], "antialias": config.antialias}

    def _answers(self, images: Any, is_decoded: Any, answer: _Answer) -> dict[str, Any]:
        """Returns the answers for decoded images, and `BLANK` for what could not be decoded."""
        if self._exportable.image_shape[2] == 1:
            images = image_files.to_grey(images)
        answers = answer(self._network(self._exportable.from_pixels(images)))
        return {
            name: tf.where(
                tf.reshape(is_decoded, (-1, *[1] * (value.shape.rank - 1))),
                value,
                tf.constant(BLANK[name], value.dtype),
            )
            for name, value in answers.items()
        }

    def _ensure_shape(self, images: Any) -> Any:
        # The server feeds any shape: images of half the height would give half as many outputs.
        return tf.ensure_shape(images, (None, *self._exportable.image_shape))


def decode_images(contents: Any, *, size: tuple[int, int], antialias: bool) -> tuple[Any, Any]:
    """Decodes JPEG and PNG files (B,) of any size as evaluation does.

    Returns:
        The pixels (B, height, width, 3), float32 in 0..255, and a status (B,): "OK", or a sentence
        that says why the file could not be decoded; its pixels are zeros.
    """
    images, is_decoded = _decode_rows(contents, size=size, antialias=antialias)
    return images, tf.cond(
        tf.reduce_all(is_decoded),
        lambda: tf.fill(tf.shape(is_decoded), OK),
        lambda: tf.where(is_decoded, OK, _explain(contents)),
    )


def _decode_rows(
    rows: Any,
    *,
    size: tuple[int, int],
    antialias: bool,
    read: Callable[[Any], Any] = lambda row: row,
) -> tuple[Any, Any]:
    """Decodes the file that `read` finds in each row; returns pixels and whether there are any."""

    def decode(row: Any) -> Any:
        image = decoding.decode_image(read(row), others=False)
        shape = tf.shape(image)
        check = tf.debugging.Assert(shape[0] * shape[1] > 1, [SINGLE_PIXEL])
        with tf.control_dependencies([check] if check is not None else []):
            return image_files.resize_image(tf.identity(image), size=size, antialias=antialias)

    return _map_rows(decode, rows, spec=tf.TensorSpec((*size, 3), tf.float32))


@header.one_op
def _explain(contents: Any) -> Any:
    """Says of each file (B,) why it could not be decoded."""
    reasons = (DAMAGED, EMPTY, UNKNOWN, decoding.TOO_LARGE, SINGLE_PIXEL)
    most = decoding.max_pixels()

    def explain(content: Any) -> Any:
        is_jpeg = header.starts_with(content, header.JPEG)
        is_png = header.starts_with(content, header.PNG)
        pixels = tf.case(
            [
                (is_jpeg, lambda: header.pixels_of_jpeg(content)),
                (is_png, lambda: header.pixels_of_png(content)),
            ],
            default=lambda: tf.constant(0, tf.int64),
        )
        is_empty = tf.strings.length(content) == 0
        conditions = [False, is_empty, ~(is_jpeg | is_png), pixels > most, pixels == 1]
        return tf.argmax(tf.stack(conditions), output_type=tf.int32)

    # Where the header itself is damaged the number is 0.
    numbers, _ = _map_rows(explain, contents, spec=tf.TensorSpec((), tf.int32))
    return tf.gather(tf.constant(reasons), numbers)


def _map_rows(function: Callable[[Any], Any], rows: Any, *, spec: tf.TensorSpec) -> tuple[Any, Any]:
    """Maps each row alone. No operation of TensorFlow decodes without errors, but a dataset can
    pass over them.

    Returns:
        The results, zeros where the function failed, and whether it did not.
    """
    count = tf.size(rows, tf.int64)
    places = tf.range(count)
    dataset = tf.data.Dataset.from_tensor_slices((places, rows)).map(
        lambda place, row: (place, tf.ensure_shape(function(row), spec.shape)),
        num_parallel_calls=_PARALLEL_ROWS,
    )
    # A last row that cannot fail, because there is no batch of none.
    last = tf.data.Dataset.from_tensors((count, tf.zeros(spec.shape, spec.dtype)))
    options = tf.data.Options()  # its rewrites would take longer than the work, in each request
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    whole = dataset.ignore_errors().concatenate(last).batch(count + 1).with_options(options)
    done, results = whole.get_single_element()
    done, results = done[:-1, None], results[:-1]
    shape = tf.concat([[count], tf.shape(results, tf.int64)[1:]], axis=0)
    flags = tf.scatter_nd(done, tf.ones_like(done[:, 0]), [count])
    values = tf.ensure_shape(tf.scatter_nd(done, results, shape), (None, *spec.shape))
    return values, tf.equal(flags, 1)


def write_server_files(directory: Path, *, exportable: Exportable, labels: tuple[str, ...]) -> None:
    """Writes the server's settings, the labels, `serve.sh` and a README beside the versions."""
    height, width, _ = exportable.image_shape
    values = {
        "name": directory.name,
        "sizes": ", ".join(map(str, BATCH_SIZES)),
        "largest": BATCH_SIZES[-1],
        "request": REQUEST_LIMIT,
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
    """Writes a request for every batch size; the server runs them as it loads.

    The sizes are those of `serving_default`. Of the other signatures, which have the same network,
    one request is enough: it makes their graph. A tensor of one repeated value is stored as that
    value, so the file is small.
    """
    with tf.io.TFRecordWriter(str(file)) as writer:
        for signature, function in functions.items():
            (spec,), _ = function.structured_input_signature
            for batch_size in BATCH_SIZES if signature == SERVING_DEFAULT else (1,):
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
    default_signature: str = DEFAULT_SIGNATURES[0],
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
        default_signature: see `make_signatures`.

    Raises:
        ValueError: the images have neither one nor three channels.
    """
    if exportable.image_shape[2] not in (1, 3):
        raise ValueError(
            "A SavedModel decodes image files, to colour or to grey. Received: a model of images "
            f"{exportable.image_shape}; export it as tflite or onnx."
        )
    functions = make_signatures(exportable, labels=labels, top_k=top_k, default=default_signature)
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
