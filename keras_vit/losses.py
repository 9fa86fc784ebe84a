"""The losses of the recipes; the targets are probabilities of the classes."""

from typing import Any, Literal

import keras

LossName = Literal["softmax", "sigmoid"]


@keras.saving.register_keras_serializable(package="keras_vit")
class SigmoidCrossEntropy(keras.losses.Loss):
    """Binary cross-entropy of each class, summed over the classes, mean over the batch.

    Keras' `BinaryCrossentropy` takes the mean over the classes.

    Args:
        from_logits: whether the model returns logits, not probabilities.

    Example:
        >>> loss = SigmoidCrossEntropy()
        >>> round(float(loss([[1.0, 0.0]], [[0.0, 0.0]])), 4)  # twice the logarithm of 2
        1.3863

    Source: google-research/big_vision, big_vision/utils.py, sigmoid_xent.
    """

    def __init__(
        self, name: str = "sigmoid_cross_entropy", *, from_logits: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.from_logits = from_logits

    def call(self, y_true: Any, y_pred: Any) -> Any:
        losses = keras.ops.binary_crossentropy(y_true, y_pred, self.from_logits)  # (B, C)
        return keras.ops.sum(losses, axis=-1)  # (B,)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "from_logits": self.from_logits}


def make_loss(name: LossName, *, from_logits: bool = True) -> keras.losses.Loss:
    """Makes a loss for targets that are probabilities of the classes.

    Args:
        name: "softmax", or "sigmoid" for independent classes.
        from_logits: whether the model returns logits, not probabilities.
    """
    if name == "softmax":
        return keras.losses.CategoricalCrossentropy(from_logits=from_logits)
    return SigmoidCrossEntropy(from_logits=from_logits)
