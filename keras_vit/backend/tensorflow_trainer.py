"""A training step that is exact under every `tf.distribute` strategy, and that XLA can compile.

Keras clips gradients before it sums them over replicas, gives replicas with fewer images the same
weight, and disables XLA under a strategy. Here each replica computes the gradients of its share of
the loss, compiled by itself; then they are summed; then the optimizer takes its step without
another sum. tests/test_backend_trainer and tests/test_training_ways guard the private methods of
Keras that this overrides (backend/private).

Shapes: x, y and weights are structures of (B, ...), B images of one replica; losses are ().
"""

import concurrent.futures
import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from keras_vit.backend import private
from keras_vit.backend.plain import SAM_EPSILON, StepOptions
from keras_vit.backend.tensorflow_steps import (
    Totals,
    batch_totals,
    count_images,
    current_micro_batch,
    global_norm,
    in_micro_batches,
    micro_batch_loss,
    micro_batch_of,
    nested_optimizers,
    raise_clearly,
    reducible,
    replicas,
    sum_in_apply,
    sum_over_replicas,
    times_share,
    wants_xla,
    without_sum,
)

__all__ = ["ExactTrainer", "is_in_scope", "scope_of", "warn_of_keras_step"]

_STEP_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.InternalError, tf.errors.CancelledError)
_BATCH_SIZE = 32  # Keras' default


class ExactTrainer(StepOptions, private.StepHooks):
    """Makes the `fit` of a model exact; a mixin, the base before `keras.Model`.

    One device, `MirroredStrategy` and `MultiWorkerMirroredStrategy` train the same model;
    `TPUStrategy` runs the same code.

    Example:
        >>> class Mine(ExactTrainer, keras.Model):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dense = keras.layers.Dense(2)
        ...
        ...     def call(self, x):
        ...         return self.dense(x)
        >>> model = Mine()
        >>> model.compile("sgd", "mse", gradient_accumulation_steps=2)
        >>> history = model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
        >>> sorted(history.history)
        ['loss']
    """

    train_function: Any
    # Keras would compile the step of all replicas, which fails; `_compiled` takes one of them.
    _compiles_itself = True
    _jit_request: bool | Literal["auto"] = "auto"
    _is_xla = False
    _loss_factor = 1.0

    def check_options(self, options: dict[str, Any]) -> None:
        super().check_options(options)
        sam_rho = options["sam_rho"]
        if sam_rho and any(getattr(layer, "remat", False) for layer in private.layers_of(self)):
            # Remat takes gradients of the variables, in whose place SAM uses other tensors.
            raise ValueError(
                f"sam_rho={sam_rho} and remat=True do not go together: recomputed blocks would not "
                "be trained; choose one of them (sam_rho=0, or remat=False)."
            )

    def prepare_step(self, jit_compile: bool | Literal["auto"]) -> None:
        self._check_strategy()
        self._jit_request = jit_compile
        self._is_xla = wants_xla(jit_compile) and not self.run_eagerly
        if self.optimizer is not None and self.distribute_strategy.num_replicas_in_sync > 1:
            sum_in_apply(self.optimizer)

    def get_compile_config(self) -> dict[str, Any] | None:
        config = super().get_compile_config()
        return config and {**config, "jit_compile": self._jit_request}

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see `keras.Model.fit`."""
        try:
            return super().fit(*args, **kwargs)
        finally:
            # Keras would start the next `fit` at the epoch that this one was resumed at.
            private.reset_initial_epoch(self)

    def prepare(self, batches: Any) -> None:
        """Makes `train_function`, as `fit` does, for a loop of your own.

        Args:
            batches: the (distributed) data; under a strategy, and where gradients are
                accumulated, the first one builds the model and its loss, as `fit` does.
        """
        if private.strategy_of(self) is not None or self._accumulation_steps > 1:
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
        """Returns the compiled loss; see `keras.Model.compute_loss`.

        An override returns the mean loss of the images it receives, as on one device; `fit` weights
        it by their share of the whole batch.
        """
        micro_batch = current_micro_batch()
        if micro_batch is None:
            return super().compute_loss(x, y, y_pred, sample_weight, training=training)
        losses = [_scalar(loss) for loss in self.losses]
        compiled = private.losses_of(self)
        if compiled is not None:
            losses.append(micro_batch_loss(compiled, micro_batch, y, y_pred, sample_weight))
        losses = [loss for loss in losses if loss is not None]
        if not losses:
            raise ValueError("There is no loss to train by; give one to compile(loss=...).")
        total = tf.add_n(losses) if len(losses) > 1 else losses[0]
        if not micro_batch.is_weighted:
            return total
        terms = [tf.math.divide_no_nan(term, micro_batch.share) for term in micro_batch.terms]
        self._track_terms(terms, micro_batch.images)
        return times_share(total, micro_batch.share)

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
        has_strategy = private.strategy_of(self) is not None or tf.distribute.has_strategy()
        is_batch = isinstance(x, np.ndarray) and 0 < len(x) <= (batch_size or _BATCH_SIZE)
        if has_strategy or not (is_plain and is_batch):
            return super().predict(x, batch_size, verbose, steps, callbacks)
        # Keras would first build a tf.data pipeline: 0.2 s, the time of ViT-B for one image.
        is_double = x.dtype == np.float64
        return self.predict_on_batch(tf.constant(x, keras.config.floatx() if is_double else None))

    def reset_metrics(self) -> None:
        super().reset_metrics()
        if self._norm is not None:
            self._norm.value.reset_state()

    def train_step(self, data: Any) -> dict[str, Any]:
        """Runs one training step on the batch of one replica."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        totals = self._totals(x, y, weight, count=self._accumulation_steps)
        self.check_trainable()
        scale = tf.convert_to_tensor(self.optimizer.scale_loss(1.0))
        losses, y_pred, gradients = self._gradients((x, y, weight), scale, totals)
        self._track(losses, count_images(x))
        if self._norm is not None:
            # Gradients are of loss * scale, against underflow in float16; the norm is of the loss.
            self._norm.value.update_state(global_norm(gradients) / scale)
        # They are summed already: `apply` clips by the norm of the whole batch.
        with without_sum(self.optimizer):
            self.optimizer.apply(gradients, self.trainable_variables)
        logs: dict[str, Any] = self.compute_metrics(x, y, y_pred, sample_weight=weight)
        if self._norm is not None:
            logs["gradient_norm"] = self._norm.value.result()
        return logs

    def test_step(self, data: Any) -> dict[str, Any]:
        """Runs one evaluation step on the batch of one replica."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        totals = self._totals(x, y, weight)
        if totals is None:
            logs: dict[str, Any] = super().test_step(data)
            return logs
        y_pred = self(x, training=False)
        losses = self._share_of_losses(x, y, y_pred, weight, totals, training=False)
        (losses,) = sum_over_replicas([losses])
        self._track(losses, count_images(x))
        logs = self.compute_metrics(x, y, y_pred, sample_weight=weight)
        return dict(logs)

    def _track(self, losses: tf.Tensor, images: tf.Tensor) -> None:
        """Updates what is reported of the loss, and of its terms where there are several."""
        total, *terms = tf.unstack(losses)
        private.loss_tracker_of(self).update_state(total, sample_weight=images)
        self._track_terms(terms, images)

    def _track_terms(self, terms: list[tf.Tensor], images: tf.Tensor) -> None:
        compiled = private.losses_of(self)
        for metric, term in zip([] if compiled is None else compiled.metrics, terms, strict=False):
            metric.update_state(term, sample_weight=images)

    def make_train_function(self, force: bool = False) -> None:
        if self.train_function is not None and not force:
            return
        if self.optimizer is not None and self.built and not self.optimizer.built:
            # Inside a traced step some optimizers would lose their initial values.
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        super().make_train_function(force=force)
        run: Callable[[Any], dict[str, Any]] = self.train_function

        def run_clearly(iterator: Any) -> Any:
            try:
                return run(iterator)
            except _STEP_ERRORS as error:
                raise_clearly(error, self.distribute_strategy)
                raise

        self.train_function = run_clearly

    def _exact_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if step.__name__ == "predict_step":
            return step
        ours = (ExactTrainer.train_step, ExactTrainer.test_step)
        is_ours = getattr(step, "__func__", None) in ours

        def exact(data: Any) -> Any:
            if is_ours:
                return reducible(step(data))
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            with micro_batch_of(self._totals(x, y, weight), x, is_weighted=True):
                return reducible(step(data))

        return exact

    def _totals(self, x: Any, y: Any, weight: Any, *, count: int = 1) -> Totals | None:
        """Returns the totals of the batch over all replicas; None if one pass has all of one loss.

        Several terms are weighted by their images here on one device, too: Keras, which does not
        know the size of a batch in a graph, reports means over batches of all sizes.
        """
        compiled = private.losses_of(self)
        is_whole = count == 1 and replicas() == 1
        if is_whole and private.may_have_terms(self, compiled):
            private.build_for(self, (x, y, weight))
        if is_whole and (compiled is None or not compiled.metrics):
            return None
        return batch_totals(compiled, x, y, weight, is_whole=is_whole)

    def _gradients(
        self, data: tuple[Any, Any, Any], scale: tf.Tensor, totals: Totals | None
    ) -> tuple[tf.Tensor, Any, list[Any]]:
        run = self._compiled(self._pass)
        if not self._sam_rho:
            losses, y_pred, gradients, _ = run(data, scale, totals)
        else:
            point = [tf.convert_to_tensor(variable.value) for variable in self.trainable_variables]
            *_, gradients, _ = run(data, scale, totals, point)
            # Summed here, too: the ascent follows the whole batch, however many replicas share it.
            gradients = sum_over_replicas(gradients)
            # The gradients are of loss * scale, so the epsilon beside their norm is scaled as well.
            length = self._sam_rho / (global_norm(gradients) + SAM_EPSILON * scale)
            point = [
                value if gradient is None else value + tf.cast(length, value.dtype) * gradient
                for value, gradient in zip(point, gradients, strict=True)
            ]
            losses, y_pred, gradients, states = run(data, scale, totals, point)
            # States such as seeds change after this pass alone: a step draws one set of masks.
            for variable, value in zip(self._states(), states, strict=True):
                if value is not None:
                    variable.assign(value)
        # One all-reduce, outside of XLA. Losses are shares of the batch's, divided by its
        # denominators over all replicas: so a sum, and replicas with fewer images count less.
        losses, *gradients = sum_over_replicas([losses, *gradients])
        return losses, y_pred, gradients

    def _pass(
        self, data: Any, scale: tf.Tensor, totals: Totals | None, point: list[Any] | None = None
    ) -> tuple[tf.Tensor, Any, list[Any], list[Any]]:
        """Runs forward and backward: returns losses, predictions, gradients of loss * scale.

        With a point, tensors in the place of the weights, it changes nothing, and returns states.
        """

        def own(states: list[Any], x: Any, y: Any, weight: Any) -> Any:
            scope: Any = contextlib.nullcontext()
            if point is not None:
                pairs = [*zip(self.trainable_variables, point, strict=True)]
                pairs += zip(self._states(), states, strict=False)  # none in the first micro-batch
                scope = keras.StatelessScope([pair for pair in pairs if pair[1] is not None])
            with scope, tf.GradientTape() as tape:
                tape.watch(point or [])  # a tape watches variables alone by itself
                y_pred = self(x, training=True)
                losses = self._share_of_losses(x, y, y_pred, weight, totals, training=True)
                scaled = losses[0] * tf.cast(scale, losses.dtype)
            gradients = tape.gradient(scaled, point or self.trainable_variables)
            if point is not None:
                states = [scope.get_current_value(variable) for variable in self._states()]
            return losses, y_pred, gradients, states

        return in_micro_batches(own, data, count=self._accumulation_steps)

    def _states(self) -> list[keras.Variable]:
        """Returns what a pass may change: seeds, statistics, metrics in an own `compute_loss`."""
        return [*self.non_trainable_variables, *self.metrics_variables]

    def _share_of_losses(
        self, x: Any, y: Any, y_pred: Any, weight: Any, totals: Totals | None, *, training: bool
    ) -> tf.Tensor:
        """Returns the contribution of these images to the batch's loss and its terms, (1 + n,)."""
        with micro_batch_of(totals, x) as current:
            loss = private.loss_of(
                self, x=x, y=y, y_pred=y_pred, sample_weight=weight, training=training
            )
        if current is None:
            return loss[tf.newaxis]
        share = times_share(loss * self._loss_factor, current.share)
        return tf.stack([share, *(tf.cast(term, share.dtype) for term in current.terms)])

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self._is_xla:
            return function
        compiled: Callable[..., Any] = tf.function(function, jit_compile=True, autograph=False)
        return compiled

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
        optimizers = [] if self.optimizer is None else nested_optimizers(self.optimizer)
        if any(getattr(each, "gradient_accumulation_steps", None) for each in optimizers):
            raise ValueError(
                "The optimizer's gradient_accumulation_steps does not work with this model's "
                "training step; leave it out, and "
                "give compile(gradient_accumulation_steps=...) instead."
            )
        frequencies = [getattr(each, "ema_overwrite_frequency", None) for each in optimizers]
        if strategy.num_replicas_in_sync > 1 and any(frequencies):
            raise ValueError(
                f"ema_overwrite_frequency={max(filter(None, frequencies))} does not work with "
                f"{strategy.num_replicas_in_sync} replicas; leave it None, and `fit` replaces the "
                "weights by their averages at its end."
            )

    def _exact_build(self, iterator: Any, batch: Any) -> None:
        # Keras' own reduces the first batch over replicas, which fails with several workers.
        if private.strategy_of(self) is None and self._accumulation_steps == 1:
            return
        if iterator is not None:
            for _, _, batches in iterator:
                batch = _of_first_replica(self, next(batches))
                break
        with self.distribute_strategy.scope():
            private.build_for(self, batch)
        is_overridden = type(self).compute_loss is not ExactTrainer.compute_loss
        if is_overridden and self.distribute_strategy.num_replicas_in_sync > 1:
            self._loss_factor = _probe_loss_factor(self, batch)


def scope_of(model: keras.Model) -> Any:
    """Returns the scope in which the model's variables were made."""
    return model.distribute_strategy.scope()


def is_in_scope(model: keras.Model) -> bool:
    """Whether a model was created under the strategy of this scope."""
    # Not `distribute_strategy`: without a strategy of its own, a model takes that of any scope.
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    return private.strategy_of(model) is strategy


def warn_of_keras_step() -> None:
    """Warns if a layer is trained on several replicas by Keras' own training step."""
    if replicas() == 1:
        return
    model = private.called_layer()
    if isinstance(model, keras.Model) and not isinstance(model, ExactTrainer):
        warnings.warn(
            f"{type(model).__name__} {model.name!r} trains by Keras' own step on {replicas()} "
            "replicas: gradients are clipped before they are summed, and replicas with fewer "
            "images count too much. keras_vit.ExactModel(inputs, outputs), or "
            "keras_vit.ExactModel.from_model(model), trains as one device does.",
            stacklevel=2,
        )


def _probe_loss_factor(model: ExactTrainer, data: Any) -> float:
    """Returns what makes a model's own `compute_loss` the same under a strategy."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

    def compute() -> float:
        with keras.StatelessScope():
            y_pred = model(x, training=False)
            with micro_batch_of(batch_totals(private.losses_of(model), x, y, weight), x):
                loss = private.loss_of(
                    model, x=x, y=y, y_pred=y_pred, sample_weight=weight, training=True
                )
        return float(loss)

    # A Keras loss object divides by the number of replicas, a function such as `keras.ops.mean`
    # does not: the loss of one batch without and with the strategy tells which it is.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # no strategy is entered there
        plain = thread.submit(compute).result()
    with model.distribute_strategy.scope():
        divided = compute()
    count = model.distribute_strategy.num_replicas_in_sync
    if math.isclose(divided, plain, rel_tol=1e-4, abs_tol=1e-12) or not math.isfinite(plain):
        return 1.0
    if math.isclose(divided * count, plain, rel_tol=1e-4):
        return float(count)
    raise ValueError(
        f"compute_loss of {type(model).__name__} adds results of Keras loss objects, which divide "
        f"by the {count} replicas, to others, which are not divided; use means of functions of "
        "keras.losses or keras.ops for all of them, or super().compute_loss."
    )


def _scalar(loss: Any) -> Any:
    """Returns a loss of `add_loss` or a regulariser as a scalar, as Keras does on one device."""
    is_float = keras.backend.is_float_dtype(loss.dtype)
    return keras.ops.sum(loss if is_float else keras.ops.cast(loss, keras.config.floatx()))


def _of_first_replica(model: keras.Model, batch: Any) -> Any:
    local = model.distribute_strategy.experimental_local_results
    return keras.tree.map_structure(lambda value: local(value)[0], batch)
