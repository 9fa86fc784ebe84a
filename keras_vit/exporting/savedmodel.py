"""Writes a SavedModel for TensorFlow Serving, with warm-up requests and the server's settings."""

import importlib.resources
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from keras_vit import atomic
from keras_vit.config import Resizing
from keras_vit.data import images as image_files
from keras_vit.exporting.clean import runners
from keras_vit.exporting.formats import DEFAULTS, Options
from keras_vit.exporting.rebuild import Description, Exportable
from keras_vit.exporting.samples import to_grey

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
# The status of a file that was decoded, and what is said of others.
OK = "OK"
DAMAGED = "The image is damaged, or its end is missing."
EMPTY = "The file is empty; send the bytes of an image."
UNKNOWN = "The file is no image of a known format; send a JPEG or PNG."
SINGLE_PIXEL = "An image of a single pixel shows nothing; send the whole image."
# The outputs for a file that was not decoded. NaN is no JSON.
BLANK: Mapping[str, Any] = {
    "classes": "",
    "class_ids": -1,
    **dict.fromkeys(("scores", "features", "values"), 0.0),
}
_PARALLEL_ROWS = 8  # files of a batch that are decoded at the same time


def check(exportable: Exportable, options: Options) -> None:
    """Raises a ValueError for a model of images that no file can be decoded to."""
    if exportable.image_shape[2] not in (1, 3):
        raise ValueError(
            "A SavedModel decodes image files, to colour or to grey. Received: a model of images "
            f"{exportable.image_shape}; export it as tflite or onnx."
        )


def write(
    exportable: Exportable,
    files: Mapping[str, Path],
    *,
    about: Description,
    options: Options = DEFAULTS,
    float32: Collection[str] = (),
) -> dict[str, int]:
    """Writes a version directory.

    The weights are attributes of a plain `tf.Module`: `model.export` and `ExportArchive.track`
    write every weight twice (keras-team/keras#23553), and a Keras model is saved with its layers.
    """
    (folder,) = files.values()
    functions = make_signatures(exportable, about.labels, top_k=options.top_k)
    module = tf.Module(name="vit")
    module.weights = [weight.value for weight in exportable.network.weights]
    save_module(module, folder, functions)
    requests = folder / runners.WARM_UP_FILE
    requests.parent.mkdir()
    write_warm_up(requests, exportable, functions, model_name=about.name)
    return dict.fromkeys(files, exportable.parameter_bytes)


def make_signatures(
    exportable: Exportable, labels: tuple[str, ...], *, top_k: int
) -> dict[str, Any]:
    """Makes a concrete function for every signature of the model.

    All call the same function for the network, so its graph is stored once.
    """
    shape, made = (None, *exportable.image_shape), _Signatures(exportable, labels, top_k=top_k)
    files = tf.TensorSpec((None,), tf.string, name="image_bytes")
    images = tf.TensorSpec(shape, tf.uint8, name="images")
    values = tf.TensorSpec(shape, tf.float32, name="pixel_values")
    functions = {SERVING_DEFAULT: (made.serving_default, files), "pixels": (made.pixels, values)}
    functions[signature_of(exportable)] = (made.image_tensor, images)
    if exportable.activation is not None:
        examples = tf.TensorSpec((None,), tf.string, name="inputs")
        functions["classify"] = (made.classify, examples)
        if exportable.config is not None:
            functions["features"] = (made.features, images)
    return {
        name: tf.function(function, autograph=False).get_concrete_function(spec)
        for name, (function, spec) in functions.items()
    }


def signature_of(exportable: Exportable) -> str:
    """Returns the name of the signature for pixels in uint8 that gives a model's own answer."""
    return "features" if exportable.answers == "features" else "image_tensor"


class _Signatures:
    def __init__(self, exportable: Exportable, labels: tuple[str, ...], *, top_k: int) -> None:
        self._exportable, self._labels, self._top_k = exportable, labels, top_k
        model, self._shape = exportable.outputs(), (None, *exportable.image_shape)
        self._network = tf.function(
            lambda images: model(images, training=False), autograph=False
        ).get_concrete_function(tf.TensorSpec(self._shape, tf.float32))

    def serving_default(self, image_bytes: Any) -> dict[str, Any]:
        """Takes JPEG and PNG files of any size; the status of each is "OK" or a sentence."""
        images, is_decoded = _decode_rows(image_bytes, self._exportable.resizing)
        status = tf.cond(
            tf.reduce_all(is_decoded),
            lambda: tf.fill(tf.shape(is_decoded), OK),
            lambda: tf.where(is_decoded, OK, _explain(image_bytes)),
        )
        return self._best(images, tf.equal(status, OK)) | {"status": status}

    def classify(self, inputs: Any) -> dict[str, Any]:
        """Answers tf.Examples: the server's Classify takes no output but classes and scores."""

        def read(row: Any) -> Any:
            feature = {EXAMPLE_FEATURE: tf.io.FixedLenFeature((), tf.string)}
            return tf.io.parse_single_example(row, feature)[EXAMPLE_FEATURE]

        answers = self._best(*_decode_rows(inputs, self._exportable.resizing, read=read))
        return {"classes": answers["classes"], "scores": answers["scores"]}

    def image_tensor(self, images: Any) -> dict[str, Any]:
        return self._scores(self._of_images(images))

    def pixels(self, pixel_values: Any) -> dict[str, Any]:
        values = tf.ensure_shape(pixel_values, self._shape)
        return self._scores(self._network(self._exportable.to_network(values, "normalized")))

    def features(self, images: Any) -> dict[str, Any]:
        return {"features": self._of_images(images)["features"]}

    def _of_images(self, images: Any) -> Any:
        # The server feeds any shape: images of half the height would give half as many outputs.
        pixels = tf.cast(tf.ensure_shape(images, self._shape), tf.float32)
        return self._network(self._exportable.to_network(pixels, "pixels"))

    def _scores(self, outputs: Any) -> dict[str, Any]:
        activation = self._exportable.activation
        if activation is None:
            return dict(outputs)
        return {"logits": outputs["logits"], "probabilities": activation(outputs["logits"])}

    def _best(self, images: Any, is_decoded: Any) -> dict[str, Any]:
        if self._exportable.image_shape[2] == 1:
            images = to_grey(images)
        answers = self._scores(self._network(self._exportable.to_network(images, "pixels")))
        if self._exportable.activation is not None:
            scores, class_ids = tf.math.top_k(answers["probabilities"], k=self._top_k)
            classes = tf.gather(tf.constant(self._labels), class_ids)  # (B, top_k)
            answers = {"classes": classes, "class_ids": class_ids, "scores": scores}
        return {
            name: tf.where(
                tf.reshape(is_decoded, (-1, *[1] * (value.shape.rank - 1))),
                value,
                tf.constant(BLANK[name], value.dtype),
            )
            for name, value in answers.items()
        }


def _decode_rows(
    rows: Any, resizing: Resizing, *, read: Callable[[Any], Any] = lambda row: row
) -> tuple[Any, Any]:
    """Decodes the file that `read` finds in each row, as evaluation does.

    Returns the pixels (B, height, width, 3), float32 in 0..255, and whether there are any (B,);
    otherwise they are zeros.
    """

    def decode(row: Any) -> Any:
        image = image_files.decode_image(read(row), others=False)
        shape = tf.shape(image)
        check = tf.debugging.Assert(shape[0] * shape[1] > 1, [SINGLE_PIXEL])
        with tf.control_dependencies([check] if check is not None else []):
            return image_files.resize_image(tf.identity(image), resizing)

    return _map_rows(decode, rows, spec=tf.TensorSpec((*resizing.size, 3), tf.float32))


@image_files.one_op
def _explain(contents: Any) -> Any:
    reasons = (DAMAGED, EMPTY, UNKNOWN, image_files.TOO_LARGE, SINGLE_PIXEL)
    most = image_files.max_pixels()

    def explain(content: Any) -> Any:
        is_jpeg = image_files.starts_with(content, image_files.JPEG)
        is_png = image_files.starts_with(content, image_files.PNG)
        pixels = tf.case(
            [
                (is_jpeg, lambda: image_files.pixels_of_jpeg(content)),
                (is_png, lambda: image_files.pixels_of_png(content)),
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
    """Maps each row alone; returns the results, zeros where it failed, and where it did not."""
    count = tf.size(rows, tf.int64)
    places = tf.range(count)
    # No operation of TensorFlow decodes without errors, but a dataset can pass over them.
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


def write_server_files(directory: Path, exportable: Exportable, labels: tuple[str, ...]) -> None:
    """Writes the server's settings, the labels, `serve.sh` and a README beside the versions."""
    height, width, _ = exportable.image_shape
    mean, std = (
        f"{values[0]:g}" if len(set(values)) == 1 else f"({', '.join(f'{v:g}' for v in values)})"
        for values in (exportable.input_config.image_mean, exportable.input_config.image_std)
    )
    values = {
        "name": directory.name,
        "sizes": ", ".join(map(str, BATCH_SIZES)),
        "largest": BATCH_SIZES[-1],
        "request": REQUEST_LIMIT,
        "height": height,
        "width": width,
        "values": "in [-1, 1]" if mean == std == "0.5" else f"(0..255 / 255 - {mean}) / {std}",
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
    pixels = np.full((*exportable.image_shape[:2], 3), _GREY, np.uint8)
    content = bytes(tf.io.encode_jpeg(pixels).numpy())
    with tf.io.TFRecordWriter(str(file)) as writer:
        for signature, function in functions.items():
            (spec,), _ = function.structured_input_signature
            for size in BATCH_SIZES if signature == SERVING_DEFAULT else (1,):
                shape = tf.TensorShape((size, *spec.shape[1:])).as_proto()
                tensor = tensor_pb2.TensorProto(
                    dtype=spec.dtype.as_datatype_enum, tensor_shape=shape
                )
                if spec.dtype == tf.uint8:
                    tensor.int_val.append(_GREY)
                elif spec.dtype == tf.float32:
                    tensor.float_val.append(0.0)
                else:
                    string = example(content) if signature == "classify" else content
                    tensor.string_val.extend([string] * size)
                given = spec.name, tensor.SerializeToString()
                writer.write(runners.warm_up_log(model_name, signature, *given))


def example(content: bytes) -> bytes:
    """Wraps the bytes of an image file in a serialised tf.Example."""
    values = tf.train.Feature(bytes_list=tf.train.BytesList(value=[content]))
    features = tf.train.Features(feature={EXAMPLE_FEATURE: values})
    return bytes(tf.train.Example(features=features).SerializeToString())


def save_module(module: tf.Module, folder: str | Path, signatures: Mapping[str, Any]) -> None:
    """Saves a module without its gradients, which would add functions for XLA."""
    options = tf.saved_model.SaveOptions(save_debug_info=False, experimental_custom_gradients=False)
    tf.saved_model.save(module, str(folder), signatures=signatures, options=options)
