"""Names what images show: the likeliest classes of each, with their probabilities."""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np

from keras_vit.data import antialias_of, resize_image
from keras_vit.evaluation.metrics import log_softmax


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One class that an image may show.

    Attributes:
        label: its name.
        probability: 0..1.
    """

    label: str
    probability: float


def predict(
    model: keras.Model, images: Sequence[np.ndarray], *, labels: Sequence[str], top: int = 5
) -> list[tuple[Prediction, ...]]:
    """Names the likeliest classes of each image, the likeliest first.

    Example:
        >>> import keras_vit, numpy as np
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=2)
        >>> photo = np.zeros((480, 640, 3), np.uint8)
        >>> predict(keras_vit.VisionTransformer(config), [photo], labels=["cat", "dog"], top=1)
        [(Prediction(label='cat', probability=0.5),)]

    Args:
        model: takes pixels 0..255 of shape (batch, height, width, 3), gives logits or
            probabilities of shape (batch, classes).
        images: pixels 0..255 of shape (height, width, 3), of any size.
        labels: the name of each class, in the order of the model's outputs.
        top: how many classes to name; all of them if there are fewer.

    Returns:
        The predictions for each image.

    Raises:
        ValueError: the model has another number of classes, or an image another shape.
    """
    if model.output_shape[-1] != len(labels):
        raise ValueError(
            f"The model has {model.output_shape[-1]} classes. Received: {len(labels)} labels."
        )
    for image in images:
        if np.ndim(image) != 3 or np.shape(image)[2] != 3:
            raise ValueError(
                "An image has the shape (height, width, 3). "
                f"Received: an array of shape {np.shape(image)}."
            )
    size, antialias = tuple(model.input_shape[1:3]), antialias_of(model)
    predictions = []
    for image in images:  # one by one, so that an image's numbers do not depend on the others
        resized = resize_image(image, size=size, antialias=antialias)
        outputs = model(resized[None], training=False)
        probabilities = np.exp(log_softmax(np.asarray(outputs), model=model))[0]
        likeliest = np.argsort(-probabilities, kind="stable")[:top]
        predictions.append(
            tuple(Prediction(labels[place], float(probabilities[place])) for place in likeliest)
        )
    return predictions
