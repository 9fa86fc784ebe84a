"""The signatures of a served model: what TensorFlow Serving is asked and answers.

Only TensorFlow ops; every output has the batch first and a type that JSON can carry.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_vit.data import images as image_files
from keras_vit.export.rebuild import Exportable

# The feature of a tf.Example that holds the file, as in TensorFlow Model Garden's
# official/vision/serving.
EXAMPLE_FEATURE = "image/encoded"
SINGLE_PIXEL = "An image of a single pixel shows nothing; send the whole image."


def make_signatures(
    exportable: Exportable, *, labels: tuple[str, ...], top_k: int
) -> dict[str, Any]:
    """Makes the concrete functions of every signature that the model can have.

    All call one and the same function for the network, which is therefore stored once.

    Args:
        exportable: the rebuilt model.
        labels: a name for each class; empty without classifier.
        top_k: classes in an answer.
    """
    height, width, channels = exportable.image_shape
    specs = {
        "image_bytes": tf.TensorSpec((None,), tf.string, name="image_bytes"),
        "images": tf.TensorSpec((None, height, width, channels), tf.uint8, name="images"),
        "pixel_values": tf.TensorSpec(
            (None, height, width, channels), tf.float32, name="pixel_values"
        ),
        "inputs": tf.TensorSpec((None,), tf.string, name="inputs"),
    }
    inputs = _Inputs(exportable)
    if exportable.activation is None:
        made = {
            "serving_default": ("image_bytes", _chain(inputs.of_files, _only("features"))),
            "pixels": ("pixel_values", _chain(inputs.of_values, _only("features"))),
            "features": ("images", _chain(inputs.of_images, _only("features"))),
        }
    else:
        best = _best(exportable.activation, labels=labels, top_k=top_k)
        scores = _scores(exportable.activation)
        made = {
            "serving_default": ("image_bytes", _chain(inputs.of_files, best)),
            "image_tensor": ("images", _chain(inputs.of_images, scores)),
            "pixels": ("pixel_values", _chain(inputs.of_values, scores)),
            "classify": ("inputs", _chain(inputs.of_examples, best, _only("classes", "scores"))),
        }
        if exportable.config is not None:
            made["features"] = ("images", _chain(inputs.of_images, _only("features")))
    return {
        name: tf.function(function, autograph=False).get_concrete_function(specs[spec])
        for name, (spec, function) in made.items()
    }


class _Inputs:
    """The ways into the network, each answering with its outputs by name."""

    def __init__(self, exportable: Exportable) -> None:
        self._exportable = exportable
        model, shape = exportable.outputs(), (None, *exportable.image_shape)
        self._network = tf.function(
            lambda images: model(images, training=False), autograph=False
        ).get_concrete_function(tf.TensorSpec(shape, tf.float32))
        self._decode = tf.function(
            lambda contents: decode_images(
                contents, size=exportable.image_shape[:2], antialias=exportable.antialias
            ),
            autograph=False,
        ).get_concrete_function(tf.TensorSpec((None,), tf.string))

    def of_values(self, pixel_values: Any) -> Any:
        values = self._checked(pixel_values)
        return self._network(self._exportable.from_normalized(values))

    def of_images(self, images: Any) -> Any:
        pixels = tf.cast(self._checked(images), tf.float32)
        return self._network(self._exportable.from_pixels(pixels))

    def of_files(self, image_bytes: Any) -> Any:
        return self._network(self._exportable.from_pixels(self._decode(image_bytes)))

    def of_examples(self, inputs: Any) -> Any:
        feature = {EXAMPLE_FEATURE: tf.io.FixedLenFeature((), tf.string)}
        return self.of_files(tf.io.parse_example(inputs, feature)[EXAMPLE_FEATURE])

    def _checked(self, images: Any) -> Any:
        # The server feeds any shape: images of half the height would become half as many answers.
        return tf.ensure_shape(images, (None, *self._exportable.image_shape))


def decode_images(contents: Any, *, size: tuple[int, int], antialias: bool) -> Any:
    """Turns the bytes of image files (B,) into pixels (B, height, width, 3), float32 in 0..255.

    Each file may have its own size and format; evaluation goes through the same two functions, and
    knows WebP besides.

    Raises:
        tf.errors.InvalidArgumentError: the bytes are no image, or an image of one pixel.
    """

    def decode(content: Any) -> Any:
        image = image_files.decode_image(content, webp=False)
        shape = tf.shape(image)
        several = tf.debugging.Assert(shape[0] * shape[1] > 1, [SINGLE_PIXEL])
        with tf.control_dependencies([several] if several is not None else []):
            return image_files.resize_image(tf.identity(image), size=size, antialias=antialias)

    spec = tf.TensorSpec((*size, 3), tf.float32)
    return tf.map_fn(decode, contents, fn_output_signature=spec)


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
        found = tf.math.top_k(activation(outputs["logits"]), k=top_k)
        return {
            "classes": tf.gather(tf.constant(labels), found.indices),  # (B, top_k)
            "class_ids": found.indices,
            "scores": found.values,
        }

    return best
