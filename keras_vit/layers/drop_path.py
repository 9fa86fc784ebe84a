"""Stochastic depth."""

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="keras_vit")
class DropPath(keras.layers.Layer):
    """Drops a residual branch for whole samples in training (stochastic depth, arXiv 1603.09382).

    What is kept is divided by `1 - rate`, so that the expectation stays.

    Example:
        >>> DropPath(0.5)(keras.ops.ones((2, 3, 4)), training=False).shape
        TensorShape([2, 3, 4])

    Args:
        rate: fraction of samples whose branch is dropped, in [0, 1).
        seed: integer seed of the masks; None for a random one.

    Raises:
        ValueError: the rate is outside [0, 1).
    """

    def __init__(self, rate: float, *, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 <= rate < 1:
            raise ValueError(f"rate must lie in [0, 1). Received: rate={rate!r}.")
        self.rate = rate
        self.seed = seed
        if rate > 0:
            self.seed_generator = keras.random.SeedGenerator(seed)

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not training or self.rate == 0:
            return inputs
        shape = (keras.ops.shape(inputs)[0],) + (1,) * (len(inputs.shape) - 1)
        drawn = keras.random.uniform(shape, seed=self.seed_generator)
        kept = keras.ops.cast(drawn >= self.rate, inputs.dtype)
        return inputs * kept / (1 - self.rate)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape
