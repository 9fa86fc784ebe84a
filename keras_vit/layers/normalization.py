"""Layer normalisation, in the form that becomes one kernel."""

from typing import Any

import keras

from keras_vit import backend
from keras_vit.layers.initialization import initializer


@keras.saving.register_keras_serializable(package="keras_vit")
class LayerNormalization(keras.layers.Layer):
    """Normalises each token over its width, then scales and shifts it (arXiv 1607.06450).

    Statistics are float32's whatever the dtype. Its weights are those of
    `keras.layers.LayerNormalization`.

    Example:
        >>> LayerNormalization()(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 5, 8])

    Args:
        epsilon: added to the variance.

    Input shape: (..., D). Output shape: the same.
    """

    def __init__(self, *, epsilon: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, input_shape: tuple[Any, ...]) -> None:
        shape = (input_shape[-1],)
        self.gamma = self.add_weight(name="gamma", shape=shape, initializer=initializer("ones"))
        self.beta = self.add_weight(name="beta", shape=shape, initializer=initializer("zeros"))

    def call(self, inputs: Any) -> Any:
        return backend.layer_norm(inputs, self.gamma, self.beta, epsilon=self.epsilon)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape
