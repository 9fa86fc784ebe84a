"""Stochastic depth."""

from typing import Any

import keras

from keras_vit.layers.random import RandomLayer, drop_samples


@keras.saving.register_keras_serializable(package="keras_vit")
class DropPath(RandomLayer):
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
        if not 0 <= rate < 1:
            raise ValueError(f"rate must lie in [0, 1). Received: rate={rate!r}.")
        super().__init__(is_random=rate > 0, seed=seed, **kwargs)
        self.rate = rate
        self.seed = seed

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.built = True

    def call(self, inputs: Any, training: bool | None = None, seed: Any = None) -> Any:
        """Drops with `seed`, drawn by `next_seed`; with a fresh one if it is None."""
        return drop_samples(inputs, self.rate, seed=self.seed_of_call(seed, training))

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape
