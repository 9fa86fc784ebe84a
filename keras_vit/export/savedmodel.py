"""Writes a SavedModel for TensorFlow Serving: signatures, weights once, warm-up requests."""

from pathlib import Path

import tensorflow as tf

from keras_vit.export import serving_files, signatures
from keras_vit.export.rebuild import Exportable


def write_savedmodel(
    exportable: Exportable,
    folder: Path,
    *,
    labels: tuple[str, ...],
    top_k: int,
    model_name: str,
) -> None:
    """Writes a version directory.

    The weights hang on a plain `tf.Module`: `model.export` and `ExportArchive.track` write every
    weight twice (keras-team/keras#23553), and a saved Keras model drags its layers along.

    Args:
        exportable: the rebuilt model.
        folder: where to; it need not exist.
        labels: a name for each class; empty without classifier.
        top_k: classes in an answer.
        model_name: the name under which it will be served, for the warm-up requests.

    Raises:
        ValueError: the images have other than three channels.
    """
    if exportable.image_shape[2] != 3:
        raise ValueError(
            "A SavedModel decodes images to RGB. Received: a model of images "
            f"{exportable.image_shape}; export it as tflite or onnx."
        )
    functions = signatures.make_signatures(exportable, labels=labels, top_k=top_k)
    module = tf.Module(name="vit")
    module.weights = [weight.value for weight in exportable.network.weights]
    # Nobody trains it, and the gradients would bring functions for XLA.
    options = tf.saved_model.SaveOptions(save_debug_info=False, experimental_custom_gradients=False)
    tf.saved_model.save(module, str(folder), signatures=functions, options=options)
    extra = folder / "assets.extra"
    extra.mkdir()
    if labels:
        serving_files.write_labels(extra / "labels.txt", labels)
    serving_files.write_warm_up(
        extra / "tf_serving_warmup_requests", exportable, functions, model_name=model_name
    )
