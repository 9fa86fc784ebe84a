"""The training step that is right under every `tf.distribute` strategy, and compiled by XLA.

Keras clips gradients before it sums them over replicas, and switches XLA off under a strategy. Here
a step is: forward and backward of each replica, compiled alone; the sum; then the optimizer, whose
own sum is taken out. Some of what is overridden is Keras' private part: tests/test_backend_trainer
and tests/test_multi_worker hold it, and pyproject.toml keeps Keras to the tested range.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import tensorflow as tf

from keras_vit.backend.tensorflow_steps import (
    batch_checks,
    check_parts,
    global_norm,
    in_parts,
    leave_sum_to_trainer,
    raise_clearly,
    reducible,
    replicas,
    sum_over_replicas,
    wants_xla,
    with_loss_scale,
)

_TINY = 1e-12  # keeps SAM's division finite
_BATCH = 32  # Keras' own, where none is given

# A mixin; to the type checker it is the model that it becomes a part of.
if TYPE_CHECKING:
    from keras import Model as _Model
else:
    _Model = object


class ExactTrainer(_Model):
    """Put before `keras.Model` among the bases of a model: makes its `fit` exact.

    One device, `MirroredStrategy` and `MultiWorkerMirroredStrategy` train the same; `TPUStrategy`
    runs the same code.
    """

    _accumulate = 1
    _sam_rho = 0.0
    _norm: "_Untracked | None" = None
    train_function: Any
    _jit_request: bool | Literal["auto"] = "auto"
    _is_xla = False

    def compile(
        self,
        optimizer: Any = "rmsprop",
        *args: Any,
        accumulate: int = 1,
        sam_rho: float = 0.0,
        report_gradient_norm: bool = False,
        jit_compile: bool | Literal["auto"] = "auto",
        **kwargs: Any,
    ) -> None:
        """Configures training, with the arguments of `keras.Model.compile` and a few more.

        Args:
            optimizer: any Keras optimizer; wrapped in a `LossScaleOptimizer` if layers compute in
                float16.
            args: of `keras.Model.compile`.
            accumulate: parts that the batch of a replica is cut into, one after another: the memory
                of a part, the gradient of the whole.
            sam_rho: radius of sharpness-aware minimisation (arXiv 2010.01412); 0 for none. A step
                takes twice the time.
            report_gradient_norm: whether the logs have "gradient_norm", the norm before clipping,
                mean over the epoch.
            jit_compile: whether XLA compiles the forward and backward pass. "auto": on a GPU. On a
                CPU it is slower, and does not use bfloat16 units; a TPU always compiles.
            kwargs: of `keras.Model.compile`.

        Raises:
            ValueError: what was asked for cannot be right under the strategy.
        """
        if accumulate < 1 or sam_rho < 0:
            raise ValueError(
                "accumulate must be at least 1 and sam_rho at least 0. "
                f"Received: accumulate={accumulate!r}, sam_rho={sam_rho!r}."
            )
        optimizer = keras.optimizers.get(optimizer)
        if optimizer is not None and self._computes_in_float16():
            optimizer = with_loss_scale(optimizer)
        super().compile(optimizer, *args, **kwargs, jit_compile=False)
        self._check_strategy()
        self._accumulate, self._sam_rho = accumulate, sam_rho
        self._norm = None
        if report_gradient_norm:
            self._norm = _Untracked(keras.metrics.Mean(name="gradient_norm"))
        self._jit_request = jit_compile
        self._is_xla = wants_xla(jit_compile) and not self.run_eagerly
        if self.optimizer is not None:
            leave_sum_to_trainer(self.optimizer)

    def get_compile_config(self) -> dict[str, Any] | None:
        config = super().get_compile_config()
        return config and {
            **config,
            "accumulate": self._accumulate,
            "sam_rho": self._sam_rho,
            "report_gradient_norm": self._norm is not None,
            "jit_compile": self._jit_request,
        }

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see `keras.Model.fit`.

        Raises:
            ValueError: a batch cannot be divided evenly among replicas and parts.
        """
        try:
            return super().fit(*args, **kwargs)
        finally:
            # Keras would start the next `fit` at the epoch that this one was resumed at.
            self._initial_epoch = None

    def prepare(self, batches: Any) -> None:
        """Makes `train_function`, as `fit` does, for a loop of one's own.

        Args:
            batches: the (distributed) data, of which a strategy needs to see the first batch.
        """
        if self._distribute_strategy is not None:
            self._maybe_symbolic_build(data_batch=_of_first_replica(self, next(iter(batches))))
        self.make_train_function()

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Predicts; see `keras.Model.predict`. An array of one batch goes straight to the model."""
        is_plain = verbose == 0 and steps is None and not callbacks
        is_alone = self._distribute_strategy is None and not tf.distribute.has_strategy()
        is_batch = isinstance(x, np.ndarray) and 0 < len(x) <= (batch_size or _BATCH)
        if not (is_plain and is_alone and is_batch):
            return super().predict(x, batch_size, verbose, steps, callbacks)
        # Keras would build a tf.data pipeline first: 0.2 s, as long as ViT-B takes for an image.
        is_double = x.dtype == np.float64
        return self.predict_on_batch(tf.constant(x, keras.config.floatx() if is_double else None))

    def reset_metrics(self) -> None:
        super().reset_metrics()
        if self._norm is not None:
            self._norm.value.reset_state()

    def train_step(self, data: Any) -> dict[str, Any]:
        """Runs one step on the batch of one replica."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        images = keras.tree.flatten(x)[0]
        check_parts(images.shape[0], self._accumulate)
        size = tf.shape(images)[0]
        count = replicas()
        if not self.trainable_variables:
            raise ValueError("There is nothing to train: every weight of the model is frozen.")
        with tf.control_dependencies(batch_checks(size, count, self._accumulate)):
            scale = tf.convert_to_tensor(self.optimizer.scale_loss(1.0))
            loss, y_pred, gradients = self._gradients(x, y, weight, scale)
        self._loss_tracker.update_state(loss * count, sample_weight=size)
        if self._norm is not None:
            self._norm.value.update_state(global_norm(gradients) / scale)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        logs = self.compute_metrics(x, y, y_pred, sample_weight=weight)
        if self._norm is not None:
            logs["gradient_norm"] = self._norm.value.result()
        return reducible(logs)

    def test_step(self, data: Any) -> dict[str, Any]:
        """Runs one evaluation step on the batch of one replica."""
        return reducible(super().test_step(data))

    def make_train_function(self, force: bool = False) -> None:
        if self.train_function is not None and not force:
            return
        super().make_train_function(force=force)
        run: Callable[[Any], dict[str, Any]] = self.train_function

        def checked(iterator: Any) -> Any:
            try:
                return run(iterator)
            except (tf.errors.InvalidArgumentError, tf.errors.InternalError) as error:
                raise_clearly(error)
                raise

        self.train_function = checked

    def _gradients(
        self, x: Any, y: Any, weight: Any, scale: tf.Tensor
    ) -> tuple[tf.Tensor, Any, list[Any]]:
        """Returns this replica's loss and predictions, and the gradients summed over replicas."""

        def ascend(x: Any, y: Any, weight: Any, scale: tf.Tensor) -> list[Any]:
            # No state changes: the second pass then draws the same masks as the first.
            with keras.StatelessScope():
                return self._pass(x, y, weight, scale)[2]

        def descend(x: Any, y: Any, weight: Any, scale: tf.Tensor, steps: list[Any]) -> Any:
            moved = [
                variable.value if step is None else variable.value + tf.cast(step, variable.dtype)
                for variable, step in zip(self.trainable_variables, steps, strict=True)
            ]
            mapping = list(zip(self.trainable_variables, moved, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                result = self._pass(x, y, weight, scale, sources=moved)
            for variable in self.non_trainable_variables:
                value = scope.get_current_value(variable)
                if value is not None:
                    variable.assign(value)
            return result

        if not self._sam_rho:
            loss, y_pred, gradients = self._compiled(self._pass)(x, y, weight, scale)
        else:
            upward = sum_over_replicas(self._compiled(ascend)(x, y, weight, scale))
            reach = self._sam_rho / (global_norm(upward) + _TINY * scale)
            steps = [None if g is None else tf.cast(reach, g.dtype) * g for g in upward]
            loss, y_pred, gradients = self._compiled(descend)(x, y, weight, scale, steps)
        return loss, y_pred, sum_over_replicas(gradients)

    def _pass(
        self, x: Any, y: Any, weight: Any, scale: tf.Tensor, sources: list[Any] | None = None
    ) -> tuple[tf.Tensor, Any, list[Any]]:
        """Forward and backward: the loss, the predictions, the gradients of loss * scale."""

        def part(x: Any, y: Any, weight: Any) -> tuple[tf.Tensor, Any, list[Any]]:
            with tf.GradientTape() as tape:
                tape.watch(sources or [])
                y_pred = self(x, training=True)
                loss = self._compute_loss(
                    x=x, y=y, y_pred=y_pred, sample_weight=weight, training=True
                )
                scaled = loss * tf.cast(scale, loss.dtype)
            return loss, y_pred, tape.gradient(scaled, sources or self.trainable_variables)

        return in_parts(part, (x, y, weight), count=self._accumulate)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self._is_xla:
            return function
        compiled: Callable[..., Any] = tf.function(function, jit_compile=True, autograph=False)
        return compiled

    def _computes_in_float16(self) -> bool:
        return any(layer.compute_dtype == "float16" for layer in self._flatten_layers())

    def _check_strategy(self) -> None:
        strategy = self.distribute_strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise ValueError(
                "Keras cannot train under ParameterServerStrategy; use MirroredStrategy on one "
                "machine, MultiWorkerMirroredStrategy on several."
            )
        if strategy.num_replicas_in_sync > 1 and self.steps_per_execution > 1:
            raise ValueError(
                f"steps_per_execution={self.steps_per_execution} does not work with "
                f"{strategy.num_replicas_in_sync} replicas; leave it at 1."
            )
        if getattr(self.optimizer, "gradient_accumulation_steps", None):
            raise ValueError(
                "The optimizer's gradient_accumulation_steps does not work with this model's "
                "training step; leave it out, and give compile(accumulate=...) instead."
            )

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # Keras' own reduces the first batch over replicas, which fails with several workers.
        if self._distribute_strategy is None:
            return
        if iterator is not None:
            for _, _, batches in iterator:
                data_batch = _of_first_replica(self, next(batches))
                break
        with self.distribute_strategy.scope():
            self._symbolic_build(data_batch=data_batch)


def _of_first_replica(model: keras.Model, batch: Any) -> Any:
    local = model.distribute_strategy.experimental_local_results
    return keras.tree.map_structure(lambda value: local(value)[0], batch)


class _Untracked:
    """Hides a metric from the model, which would report it in evaluation too."""

    def __init__(self, value: keras.metrics.Metric) -> None:
        self.value = value
