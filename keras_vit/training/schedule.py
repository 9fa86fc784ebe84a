"""The learning rate over the steps: linear warm-up, then cosine or linear decay."""

import math
from typing import Any, Literal

import keras

Decay = Literal["cosine", "linear", "constant"]

# Where the linear decay ends (google-research/vision_transformer, vit_jax/utils.py,
# create_learning_rate_schedule).
LINEAR_END = 1e-5


@keras.saving.register_keras_serializable(package="keras_vit")
class WarmupDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly from zero, then falls; step for step the original's schedule.

    Example:
        >>> schedule = WarmupDecay(0.3, steps=40, warmup_steps=4)
        >>> [round(float(schedule(step)), 3) for step in (0, 2, 4, 22, 40)]
        [0.0, 0.15, 0.3, 0.15, 0.0]

    Args:
        learning_rate: the highest.
        steps: of the whole training.
        warmup_steps: of the rise.
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
        return rate * keras.ops.minimum(1.0, step / self.warmup_steps)

    def get_config(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "decay": self.decay,
        }
