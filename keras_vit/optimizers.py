"""The optimizers of the recipes, layer-wise learning rates, and the learning rate's schedule.

`import keras_vit` registers them, so that a compiled model loads without another import.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import keras

from keras_vit import backend
from keras_vit.backend import private
from keras_vit.config import ViTConfig

Decay = Literal["cosine", "linear", "constant"]

# Where the linear decay ends (google-research/vision_transformer, vit_jax/utils.py,
# create_learning_rate_schedule).
LINEAR_END = 1e-5
# The name of the optimizer's variable that says when a `Cooldown` begins, and a step that never is.
_COOLDOWN_START, _NEVER = "cooldown_start", 1e9


class _LayerRates(private.OwnWeightDecay):
    """Scales the learning rate of each variable, for `_step`; a mixin, the base before Keras'."""

    def __init__(self, *args: Any, layer_rates: Mapping[str, float] | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_rates = dict(layer_rates or {})

    def build(self, variables: Any) -> None:
        if not self.built:
            self._factors = [self.layer_rates.get(variable.path, 1.0) for variable in variables]
        super().build(variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        # Keras has clipped the gradients before: the decay is not clipped, as in optax's chain.
        rate = learning_rate * self._factors[private.index_of(self, variable)]
        if self.weight_decay and private.is_decayed(self, variable):
            # At the variable's own rate, as in torch's parameter groups: Keras decays all at one.
            dtype = variable.dtype
            factor = keras.ops.cast(rate, dtype) * keras.ops.cast(self.weight_decay, dtype)
            self.assign_sub(variable, keras.ops.convert_to_tensor(variable) * factor)
        self._step(gradient, variable, rate)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "layer_rates": self.layer_rates}


@keras.saving.register_keras_serializable(package="keras_vit")
class AdamW(_LayerRates, keras.optimizers.AdamW):
    """`keras.optimizers.AdamW` with layer-wise learning rates, and a fused kernel on TensorFlow.

    Args:
        learning_rate: number or schedule.
        layer_rates: factor of the learning rate by variable path; 1 for all others.
        kwargs: of `keras.optimizers.AdamW`.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        *,
        layer_rates: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, layer_rates=layer_rates, **kwargs)

    def _step(self, gradient: Any, variable: Any, rate: Any) -> None:
        is_fused = not self.amsgrad and backend.adam_step(
            variable,
            private.averages_of(self, private.index_of(self, variable)),
            gradient,
            rate=rate,
            betas=(self.beta_1, self.beta_2),
            epsilon=self.epsilon,
            # Keras counts from 0, bias correction from 1: the first average is (1 - beta) g.
            step=self.iterations + 1,
        )
        if not is_fused:
            keras.optimizers.AdamW.update_step(self, gradient, variable, rate)


@keras.saving.register_keras_serializable(package="keras_vit")
class MomentumSGD(_LayerRates, keras.optimizers.Optimizer):
    """Stochastic gradient descent with optax's momentum, the paper's optimizer for fine-tuning.

    m = g + momentum * m, w = w - rate * m, as `optax.trace` defines it.

    Args:
        learning_rate: number or schedule.
        momentum: factor of the old momentum in the new.
        accumulator_dtype: dtype of the momentum: "bfloat16", as the original's, or "float32".
        layer_rates: factor of the learning rate by variable path; 1 for all others.
        kwargs: of `keras.optimizers.Optimizer`.

    Source: optax, `sgd(rate, momentum, accumulator_dtype)`;
        google-research/vision_transformer, vit_jax/train.py.
    """

    def __init__(
        self,
        learning_rate: Any = 0.03,
        *,
        momentum: float = 0.9,
        accumulator_dtype: str = "bfloat16",
        layer_rates: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, layer_rates=layer_rates, **kwargs)
        self.momentum = momentum
        self.accumulator_dtype = accumulator_dtype

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        # Of gradients alone: Keras' SGD keeps rate * gradient, which differs once the rate changes.
        self._momenta = [
            self.add_variable(
                shape=variable.shape,
                dtype=self.accumulator_dtype,
                initializer="zeros",
                layout=_layout_of(variable),
                name="momentum",
            )
            for variable in variables
        ]

    def _step(self, gradient: Any, variable: Any, rate: Any) -> None:
        accumulator = self._momenta[private.index_of(self, variable)]
        if backend.momentum_step(
            variable, accumulator, gradient, rate=rate, momentum=self.momentum
        ):
            return
        # optax rounds the product to the accumulator's dtype before the sum.
        decayed = keras.ops.convert_to_tensor(accumulator) * self.momentum
        trace = keras.ops.cast(gradient, "float32") + keras.ops.cast(decayed, "float32")
        self.assign(accumulator, keras.ops.cast(trace, accumulator.dtype))
        # The float32 sum makes the step, as in optax, not what a bfloat16 accumulator keeps.
        step = keras.ops.cast(rate, "float32") * trace
        self.assign_sub(variable, keras.ops.cast(step, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        own = {"momentum": self.momentum, "accumulator_dtype": self.accumulator_dtype}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="keras_vit")
class LAMB(private.OwnWeightDecay, keras.optimizers.Adam):
    """AdamW's step, times the norm of the variable over that of the step (arXiv 1904.00962).

    The step includes the weight decay. Variables without weight decay take AdamW's step unscaled.
    `keras.optimizers.Lamb` decays outside of the scaled step, and scales every variable.

    Example:
        >>> variable = keras.Variable([3.0, 4.0])
        >>> LAMB(0.1, weight_decay=1.0).apply([keras.ops.ones(2)], [variable])
        >>> [round(float(value), 3) for value in variable.numpy()]  # moved by 0.1 of its norm of 5
        [2.688, 3.61]

    Args:
        learning_rate: number or schedule.
        weight_decay: weight decay of the variables that are not excluded from it.
        epsilon: added to the denominator of the step.
        kwargs: of `keras.optimizers.Adam`, except `amsgrad`.

    Source: FusedLAMB of NVIDIA/apex, apex/optimizers/fused_lamb.py, the optimizer of
        facebookresearch/deit (README_revenge.md); its clipping to a global norm of 1 is
        `global_clipnorm`.
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
        index = private.index_of(self, variable)
        mean, square = private.averages_of(self, index)
        gradient = ops.cast(gradient, dtype)
        self.assign_add(mean, (gradient - mean) * (1 - self.beta_1))
        self.assign_add(square, (ops.square(gradient) - square) * (1 - self.beta_2))
        count = ops.cast(self.iterations + 1, dtype)
        # Both averages begin at zero: after n steps their weights sum to 1 - beta^n.
        unbiased = mean / (1 - ops.power(self.beta_1, count))
        deviation = ops.sqrt(square / (1 - ops.power(self.beta_2, count)))
        step = unbiased / (deviation + self.epsilon)
        rate = ops.cast(learning_rate, dtype)
        if self.weight_decay and private.is_decayed(self, variable):
            value = ops.convert_to_tensor(variable)
            step = step + self.weight_decay * value
            norm, step_norm = (ops.sqrt(ops.sum(ops.square(x))) for x in (value, step))
            is_finite = ops.logical_and(norm > 0, step_norm > 0)
            # The trust ratio: norm / step_norm, or 1 where either is zero.
            rate = rate * ops.where(is_finite, norm / ops.where(is_finite, step_norm, 1.0), 1.0)
        self.assign_sub(variable, rate * step)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        return {name: value for name, value in config.items() if name != "amsgrad"}


def decayed_rates(model: keras.Model, config: ViTConfig, decay: float) -> dict[str, float]:
    """Returns the factor of the learning rate of each variable, smaller for lower layers.

    Example:
        >>> from keras_vit import VisionTransformer
        >>> config = ViTConfig(input_shape=(16, 16, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=2, classes=3)
        >>> rates = decayed_rates(VisionTransformer(config), config, 0.5)
        >>> [rates[f"{name}/kernel"] for name in ("head", "block_1/mlp/fc1", "block_0/mlp/fc1")]
        [1.0, 0.5, 0.25]

    Args:
        model: a `VisionTransformer`, built.
        config: the model's.
        decay: factor from one block to the one before it.

    Source: BEiT (arXiv 2106.08254), Appendix; layers are counted as there.
    """
    top = config.num_layers + 1

    def depth(path: str) -> int:
        name = path.split("/")[0]
        kind, _, index = name.rpartition("_")
        if kind in ("block", "positions"):
            return int(index) + 1
        return 0 if name in ("stem", "patch_encoder", "positions", "embedding_norm") else top

    return {
        variable.path: decay ** (top - depth(variable.path))
        for variable in model.trainable_variables
    }


@keras.saving.register_keras_serializable(package="keras_vit")
class WarmupDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly from zero, then decays; equal to the original's schedule at every step.

    Example:
        >>> schedule = WarmupDecay(0.3, steps=40, warmup_steps=4)
        >>> [round(float(schedule(step)), 3) for step in (0, 2, 4, 22, 40)]
        [0.0, 0.15, 0.3, 0.15, 0.0]

    Args:
        learning_rate: the peak.
        steps: number of steps in all.
        warmup_steps: number of steps of the rise.
        decay: "cosine" to zero, "linear" to 1e-5, or "constant".

    Source: google-research/vision_transformer, vit_jax/utils.py, create_learning_rate_schedule.
    """

    def __init__(
        self, learning_rate: float, *, steps: int, warmup_steps: int = 0, decay: Decay = "cosine"
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.steps = steps
        self.warmup_steps = warmup_steps
        self.decay = decay

    def __call__(self, step: Any) -> Any:
        step = keras.ops.cast(step, "float32")
        progress = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        progress = keras.ops.clip(progress, 0.0, 1.0)
        if self.decay == "cosine":
            rate = self.learning_rate * 0.5 * (1 + keras.ops.cos(math.pi * progress))
        elif self.decay == "linear":
            rate = LINEAR_END + (self.learning_rate - LINEAR_END) * (1 - progress)
        else:
            rate = keras.ops.full_like(progress, self.learning_rate)
        if not self.warmup_steps:
            return rate
        # The rise multiplies the decay, which begins where the rise ends, as the original's does.
        return rate * keras.ops.minimum(1.0, step / self.warmup_steps)

    def get_config(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "decay": self.decay,
        }


@keras.saving.register_keras_serializable(package="keras_vit")
class Cooldown(keras.optimizers.schedules.LearningRateSchedule):
    """Follows a schedule until `begin_cooldown`, and from then on falls linearly to zero.

    The step at which it begins is a variable of the optimizer: a compiled step stays compiled, and
    a checkpoint of the optimizer holds it. Until then the rates are those of the schedule, to the
    bit.

    Example:
        >>> schedule = Cooldown(WarmupDecay(0.4, steps=100, decay="constant"), steps=4)
        >>> optimizer = AdamW(schedule)
        >>> weight = keras.Variable([1.0])
        >>> optimizer.build([weight])
        >>> schedule.attach(optimizer)
        >>> optimizer.apply([keras.ops.ones(1)])
        >>> begin_cooldown(optimizer)  # after one step
        >>> [round(float(schedule(step)), 3) for step in (0, 1, 2, 4, 5, 9)]
        [0.4, 0.4, 0.3, 0.1, 0.0, 0.0]

    Args:
        schedule: the schedule to follow.
        steps: number of steps of the fall.

    Source: Zhai et al., arXiv 2106.04560, Section 3.5: training at any length, ended by a linear
        cooldown.
    """

    def __init__(
        self, schedule: keras.optimizers.schedules.LearningRateSchedule, *, steps: int
    ) -> None:
        super().__init__()
        self.schedule = schedule
        self.steps = steps
        self._start: Any = _NEVER

    def attach(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Gives a built optimizer the variable that `begin_cooldown` sets."""
        self._start = optimizer.add_variable(
            shape=(),
            initializer=keras.initializers.Constant(_NEVER),
            dtype="float32",
            aggregation="only_first_replica",
            name=_COOLDOWN_START,
        )

    def __call__(self, step: Any) -> Any:
        step, start = (keras.ops.cast(value, "float32") for value in (step, self._start))
        rate = self.schedule(keras.ops.minimum(step, start))
        return rate * (1 - keras.ops.clip((step - start) / self.steps, 0.0, 1.0))

    def get_config(self) -> dict[str, Any]:
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "steps": self.steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Cooldown":
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, steps=config["steps"])


def begin_cooldown(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the learning rate of an optimizer with a `Cooldown` fall from the next step on."""
    (start,) = [each for each in optimizer.variables if each.name == _COOLDOWN_START]
    start.assign(float(backend.values_of(optimizer.iterations)))


def _layout_of(variable: keras.Variable) -> Any:
    # Keras lays out a copy as its variable where both have one dtype, and not otherwise.
    distribution = keras.distribution.distribution()
    return None if distribution is None else distribution.get_variable_layout(variable)
