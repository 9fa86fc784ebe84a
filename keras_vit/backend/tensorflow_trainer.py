"""The training step that is right under every `tf.distribute` strategy, and compiled by XLA.

Keras clips gradients before it sums them over replicas, counts uneven replicas alike, and switches
XLA off under a strategy. Here a step is: forward and backward of each replica, compiled alone, of
its share of the loss; the sum; then the optimizer, which sums no more. Some of what is overridden
is Keras' private part (backend/private): tests/test_backend_trainer and tests/test_training_ways
hold it, and pyproject.toml keeps Keras to the tested range.
"""

import concurrent.futures
import math
import types
import warnings
from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from keras_vit.backend import private
from keras_vit.backend.tensorflow_steps import (
    Whole,
    count_images,
    counted,
    current_part,
    global_norm,
    in_parts,
    measure_whole,
    part_of,
    raise_clearly,
    reducible,
    shared_loss,
    wants_xla,
    with_loss_scale,
)
from keras_vit.backend.tensorflow_updates import (
    parts_of,
    replicas,
    sum_in_apply,
    sum_over_replicas,
    summed_already,
)

_TINY = 1e-12  # keeps SAM's division finite
_OFF = {"accumulate": 1, "sam_rho": 0.0, "report_gradient_norm": False}
_FAILED = (tf.errors.InvalidArgumentError, tf.errors.InternalError, tf.errors.CancelledError)
_BATCH = 32  # Keras' own, where none is given


class ExactTrainer(private.StepHooks):
    """Put before `keras.Model` among the bases of a model: makes its `fit` exact.

    One device, `MirroredStrategy` and `MultiWorkerMirroredStrategy` train the same; `TPUStrategy`
    runs the same code.

    Example:
        >>> class Mine(ExactTrainer, keras.Model):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dense = keras.layers.Dense(2)
        ...
        ...     def call(self, x):
        ...         return self.dense(x)
        >>> model = Mine()
        >>> model.compile("sgd", "mse", accumulate=2)
        >>> history = model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
        >>> sorted(history.history)
        ['loss']
    """

    _accumulate = 1
    _sam_rho = 0.0
    _norm: types.SimpleNamespace | None = None
    train_function: Any
    _jit_request: bool | Literal["auto"] = "auto"
    _is_xla = False
    _loss_factor = 1.0

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
                float16. Under several replicas its `apply` sums gradients before it clips them,
                whoever calls it.
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
        if sam_rho and any(getattr(layer, "remat", False) for layer in private.layers_of(self)):
            # Their gradient is that of the variables, which SAM has replaced by others.
            raise ValueError(
                f"sam_rho={sam_rho} and remat=True do not go together: blocks that are computed "
                "anew would not be trained; choose one of them (--sam-rho 0, or --no-remat)."
            )
        optimizer = keras.optimizers.get(optimizer)
        if optimizer is not None and self._computes_in_float16():
            optimizer = with_loss_scale(optimizer)
        super().compile(optimizer, *args, **kwargs, jit_compile=False)
        self._check_strategy()
        self._accumulate, self._sam_rho = accumulate, sam_rho
        self._norm = None
        if report_gradient_norm:
            # In a namespace Keras does not find the metric, and does not report it in evaluation.
            self._norm = types.SimpleNamespace(value=keras.metrics.Mean(name="gradient_norm"))
        self._jit_request = jit_compile
        self._is_xla = wants_xla(jit_compile) and not self.run_eagerly
        if self.optimizer is not None and self.distribute_strategy.num_replicas_in_sync > 1:
            sum_in_apply(self.optimizer)

    def get_compile_config(self) -> dict[str, Any] | None:
        config = super().get_compile_config()
        own = {
            "accumulate": self._accumulate,
            "sam_rho": self._sam_rho,
            "report_gradient_norm": self._norm is not None,
        }
        # What is off is left out, so that a `keras.Model` can be compiled alike.
        used = {name: value for name, value in own.items() if value != _OFF[name]}
        return config and {**config, **used, "jit_compile": self._jit_request}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see `keras.Model.fit`."""
        try:
            return super().fit(*args, **kwargs)
        finally:
            # Keras would start the next `fit` at the epoch that this one was resumed at.
            private.forget_initial_epoch(self)

    def prepare(self, batches: Any) -> None:
        """Makes `train_function`, as `fit` does, for a loop of one's own.

        Args:
            batches: the (distributed) data, of which a strategy needs to see the first batch.
        """
        if private.strategy_of(self) is not None:
            self._exact_build(None, _of_first_replica(self, next(iter(batches))))
        self.make_train_function()

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of what was compiled; see `keras.Model.compute_loss`.

        One that overrides this returns the loss of the images it is given, their mean, as on one
        device: `fit` counts it by their share of the whole batch.
        """
        part = current_part()
        if part is None:
            return super().compute_loss(x, y, y_pred, sample_weight, training=training)
        losses = [_summed(loss) for loss in self.losses]
        compiled = private.losses_of(self)
        if compiled is not None:
            losses.append(shared_loss(compiled, y, y_pred, sample_weight))
        losses = [loss for loss in losses if loss is not None]
        if not losses:
            raise ValueError("There is no loss to train by; give one to compile(loss=...).")
        total = tf.add_n(losses) if len(losses) > 1 else losses[0]
        return counted(total, part.share) if part.is_counted else total

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
        is_alone = private.strategy_of(self) is None and not tf.distribute.has_strategy()
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
        if not self.trainable_variables:
            raise ValueError("There is nothing to train: every weight of the model is frozen.")
        whole = self._whole(x, y, weight, parts=self._accumulate)
        scale = tf.convert_to_tensor(self.optimizer.scale_loss(1.0))
        loss, y_pred, gradients = self._gradients((x, y, weight), scale, whole)
        private.loss_tracker_of(self).update_state(loss, sample_weight=count_images(x))
        if self._norm is not None:
            self._norm.value.update_state(global_norm(gradients) / scale)
        with summed_already(self.optimizer):
            self.optimizer.apply(gradients, self.trainable_variables)
        logs: dict[str, Any] = self.compute_metrics(x, y, y_pred, sample_weight=weight)
        if self._norm is not None:
            logs["gradient_norm"] = self._norm.value.result()
        return logs

    def test_step(self, data: Any) -> dict[str, Any]:
        """Runs one evaluation step on the batch of one replica."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        whole = self._whole(x, y, weight)
        if whole is None:
            logs: dict[str, Any] = super().test_step(data)
            return logs
        y_pred = self(x, training=False)
        loss = self._share_of_loss(x, y, y_pred, weight, whole, training=False)
        (loss,) = sum_over_replicas([loss])
        private.loss_tracker_of(self).update_state(loss, sample_weight=count_images(x))
        logs = self.compute_metrics(x, y, y_pred, sample_weight=weight)
        return dict(logs)

    def make_train_function(self, force: bool = False) -> None:
        if self.train_function is not None and not force:
            return
        if self.optimizer is not None and self.built and not self.optimizer.built:
            # Inside a traced step some optimizers would lose what they start from.
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        super().make_train_function(force=force)
        run: Callable[[Any], dict[str, Any]] = self.train_function

        def checked(iterator: Any) -> Any:
            try:
                return run(iterator)
            except _FAILED as error:
                raise_clearly(error, self.distribute_strategy)
                raise

        self.train_function = checked

    def _exact_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if step.__name__ == "predict_step":
            return step
        ours = (ExactTrainer.train_step, ExactTrainer.test_step)
        is_ours = getattr(step, "__func__", None) in ours

        def exact(data: Any) -> Any:
            if is_ours:
                return reducible(step(data))
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            with part_of(self._whole(x, y, weight), x, is_counted=True):
                return reducible(step(data))

        return exact

    def _whole(self, x: Any, y: Any, weight: Any, *, parts: int = 1) -> Whole | None:
        """Returns what the batch of all replicas is counted by; None if this pass has all of it."""
        if parts == 1 and replicas() == 1:
            return None
        return measure_whole(private.losses_of(self), x, y, weight)

    def _gradients(
        self, data: tuple[Any, Any, Any], scale: tf.Tensor, whole: Whole | None
    ) -> tuple[tf.Tensor, Any, list[Any]]:
        """Returns the loss, this replica's predictions, and the gradients, over all replicas."""

        def ascend(data: Any, scale: tf.Tensor, whole: Any) -> list[Any]:
            # No state changes: the second pass then draws the same masks as the first.
            with keras.StatelessScope():
                return self._pass(data, scale, whole)[2]

        def descend(data: Any, scale: tf.Tensor, whole: Any, steps: list[Any]) -> Any:
            moved = [
                variable.value if step is None else variable.value + tf.cast(step, variable.dtype)
                for variable, step in zip(self.trainable_variables, steps, strict=True)
            ]
            mapping = list(zip(self.trainable_variables, moved, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                result = self._pass(data, scale, whole, sources=moved)
            for variable in self.non_trainable_variables:
                value = scope.get_current_value(variable)
                if value is not None:
                    variable.assign(value)
            return result

        if not self._sam_rho:
            loss, y_pred, gradients = self._compiled(self._pass)(data, scale, whole)
        else:
            upward = sum_over_replicas(self._compiled(ascend)(data, scale, whole))
            reach = self._sam_rho / (global_norm(upward) + _TINY * scale)
            steps = [None if g is None else tf.cast(reach, g.dtype) * g for g in upward]
            loss, y_pred, gradients = self._compiled(descend)(data, scale, whole, steps)
        loss, *gradients = sum_over_replicas([loss, *gradients])
        return loss, y_pred, gradients

    def _pass(
        self, data: Any, scale: tf.Tensor, whole: Whole | None, sources: list[Any] | None = None
    ) -> tuple[tf.Tensor, Any, list[Any]]:
        """Forward and backward: the loss, the predictions, the gradients of loss * scale."""

        def part(x: Any, y: Any, weight: Any) -> tuple[tf.Tensor, Any, list[Any]]:
            with tf.GradientTape() as tape:
                tape.watch(sources or [])
                y_pred = self(x, training=True)
                loss = self._share_of_loss(x, y, y_pred, weight, whole, training=True)
                scaled = loss * tf.cast(scale, loss.dtype)
            return loss, y_pred, tape.gradient(scaled, sources or self.trainable_variables)

        return in_parts(part, data, count=self._accumulate)

    def _share_of_loss(
        self, x: Any, y: Any, y_pred: Any, weight: Any, whole: Whole | None, *, training: bool
    ) -> tf.Tensor:
        """Returns what these images bring to the loss of the whole batch."""
        with part_of(whole, x) as part:
            loss = private.loss_of(
                self, x=x, y=y, y_pred=y_pred, sample_weight=weight, training=training
            )
        return loss if part is None else counted(loss * self._loss_factor, part.share)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self._is_xla:
            return function
        compiled: Callable[..., Any] = tf.function(function, jit_compile=True, autograph=False)
        return compiled

    def _computes_in_float16(self) -> bool:
        return any(layer.compute_dtype == "float16" for layer in private.layers_of(self))

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
        optimizers = [] if self.optimizer is None else parts_of(self.optimizer)
        if any(getattr(part, "gradient_accumulation_steps", None) for part in optimizers):
            raise ValueError(
                "The optimizer's gradient_accumulation_steps does not work with this model's "
                "training step; leave it out, and give compile(accumulate=...) instead."
            )
        overwrites = [getattr(part, "ema_overwrite_frequency", None) for part in optimizers]
        if strategy.num_replicas_in_sync > 1 and any(overwrites):
            raise ValueError(
                f"ema_overwrite_frequency={max(filter(None, overwrites))} does not work with "
                f"{strategy.num_replicas_in_sync} replicas; leave it None, and `fit` puts the "
                "averages in the weights' place at its end."
            )

    def _exact_build(self, iterator: Any, batch: Any) -> None:
        # Keras' own reduces the first batch over replicas, which fails with several workers.
        if private.strategy_of(self) is None and self._accumulate == 1:
            return
        if iterator is not None:
            for _, _, batches in iterator:
                batch = _of_first_replica(self, next(batches))
                break
        with self.distribute_strategy.scope():
            private.build_for(self, batch)
        is_overridden = type(self).compute_loss is not ExactTrainer.compute_loss
        if is_overridden and self.distribute_strategy.num_replicas_in_sync > 1:
            self._loss_factor = _probed_factor(self, batch)


def scope_of(model: keras.Model) -> Any:
    """Returns a scope in which variables lie where the model's do."""
    return model.distribute_strategy.scope()


def warn_of_keras_step(training: bool | None) -> None:
    """Warns where a layer is trained on several replicas in a model that Keras trains itself."""
    if not training or replicas() == 1:
        return
    model = private.called_layer()
    if isinstance(model, keras.Model) and not isinstance(model, ExactTrainer):
        warnings.warn(
            f"{type(model).__name__} {model.name!r} trains by Keras' own step on {replicas()} "
            "replicas: gradients are clipped before they are summed, and replicas with fewer "
            "images count too much. keras_vit.ExactModel(inputs, outputs), or "
            "keras_vit.ExactModel.from_model(model), trains what one device would.",
            stacklevel=2,
        )


def _probed_factor(model: ExactTrainer, data: Any) -> float:
    """Returns what the result of a model's own `compute_loss` is multiplied by under replicas.

    A loss object of Keras divides by their number, a function such as `keras.ops.mean` does not;
    so the loss of one batch is computed with and without them.

    Raises:
        ValueError: some of it is divided, and some is not.
    """
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

    def measure() -> float:
        with keras.StatelessScope():
            y_pred = model(x, training=False)
            with part_of(measure_whole(private.losses_of(model), x, y, weight), x):
                loss = private.loss_of(
                    model, x=x, y=y, y_pred=y_pred, sample_weight=weight, training=True
                )
        return float(loss)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # no strategy is entered there
        plain = thread.submit(measure).result()
    with model.distribute_strategy.scope():
        divided = measure()
    count = model.distribute_strategy.num_replicas_in_sync
    if math.isclose(divided, plain, rel_tol=1e-4, abs_tol=1e-12) or not math.isfinite(plain):
        return 1.0
    if math.isclose(divided * count, plain, rel_tol=1e-4):
        return float(count)
    raise ValueError(
        f"compute_loss of {type(model).__name__} adds what loss objects of Keras give, which they "
        f"divide by the {count} replicas, to what is not divided; take the mean of functions of "
        "keras.losses or keras.ops in both, or super().compute_loss."
    )


def _summed(loss: Any) -> Any:
    """Returns what `add_loss` or a regulariser gave as a scalar, as Keras adds it on one device."""
    is_float = keras.backend.is_float_dtype(loss.dtype)
    return keras.ops.sum(loss if is_float else keras.ops.cast(loss, keras.config.floatx()))


def _of_first_replica(model: keras.Model, batch: Any) -> Any:
    local = model.distribute_strategy.experimental_local_results
    return keras.tree.map_structure(lambda value: local(value)[0], batch)
