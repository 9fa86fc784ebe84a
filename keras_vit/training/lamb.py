"""LAMB as DeiT III trains with it: AdamW whose step is scaled by each variable's own size."""

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="keras_vit")
class LAMB(keras.optimizers.Adam):
    """AdamW's step, times the norm of the variable over that of the step (arXiv 1904.00962).

    Weight decay is a part of the step that is scaled. Variables that do not decay take AdamW's step
    as it is. `keras.optimizers.Lamb` has the decay outside, and scales every variable.

    Example:
        >>> variable = keras.Variable([3.0, 4.0])
        >>> LAMB(0.1, weight_decay=1.0).apply([keras.ops.ones(2)], [variable])
        >>> [round(float(value), 3) for value in variable.numpy()]  # moved by 0.1 of its norm of 5
        [2.688, 3.61]

    Args:
        learning_rate: number or schedule.
        weight_decay: decay of the variables that are not excluded from it.
        epsilon: keeps the division finite.
        kwargs: of `keras.optimizers.Adam`, but for `amsgrad`.

    Source: FusedLAMB of NVIDIA/apex, apex/optimizers/fused_lamb.py, which facebookresearch/deit
        trains with (README_revenge.md); its clipping to a global norm of 1 is `global_clipnorm`.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        *,
        weight_decay: float = 0.0,
        epsilon: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, epsilon=epsilon, **kwargs)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        ops, dtype = keras.ops, variable.dtype
        index = self._get_variable_index(variable)
        mean, square = self._momentums[index], self._velocities[index]
        gradient = ops.cast(gradient, dtype)
        self.assign_add(mean, (gradient - mean) * (1 - self.beta_1))
        self.assign_add(square, (ops.square(gradient) - square) * (1 - self.beta_2))
        count = ops.cast(self.iterations + 1, dtype)
        unbiased = mean / (1 - ops.power(self.beta_1, count))
        deviation = ops.sqrt(square / (1 - ops.power(self.beta_2, count)))
        step = unbiased / (deviation + self.epsilon)
        rate = ops.cast(learning_rate, dtype)
        if self.weight_decay and self._use_weight_decay(variable):
            value = ops.convert_to_tensor(variable)
            step = step + self.weight_decay * value
            rate = rate * _ratio(_norm(value), _norm(step))
        self.assign_sub(variable, rate * step)

    def _apply_weight_decay(self, variables: Any) -> None:
        """Nothing: `update_step` does it."""

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        return {name: value for name, value in config.items() if name != "amsgrad"}


def _norm(values: Any) -> Any:
    return keras.ops.sqrt(keras.ops.sum(keras.ops.square(values)))


def _ratio(size: Any, step: Any) -> Any:
    """Size / step, or 1 where either is zero."""
    is_finite = keras.ops.logical_and(size > 0, step > 0)
    return keras.ops.where(is_finite, size / keras.ops.where(is_finite, step, 1.0), 1.0)
