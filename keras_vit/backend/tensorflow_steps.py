"""Pieces of a training step, apart from any model.

Shares of a loss, gradient accumulation, one sum over replicas, one kernel per variable.

Shapes: batches are structures of (B, ...), B images of one replica; losses and counts are ().
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_vit.backend import private

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
# TensorFlow's errors when two strategies gave their sums the same numbers.
_COLLISIONS = ("Shape mismatch in the collective instance", "is joining a group with size")


class Totals(NamedTuple):
    """The denominators of a loss over all replicas and micro-batches.

    Attributes:
        images: images in the batch, a float32 scalar.
        terms: the denominator of each term of the compiled loss, float32 of shape (terms,).
        is_whole: whether one pass of one replica has the whole batch.
    """

    images: tf.Tensor
    terms: tf.Tensor
    is_whole: bool = False


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The images that a loss is computed of: of one replica, and one accumulation step.

    Attributes:
        totals: of the batch.
        images: images in it, a float32 scalar.
        is_weighted: whether `compute_loss` multiplies the loss by `share` and tracks its terms, as
            in a user's own step, which knows of no micro-batches.
        terms: the contributions of these images to the terms of the batch's loss, scalars.
    """

    totals: Totals
    images: tf.Tensor
    is_weighted: bool = False
    terms: list[tf.Tensor] = dataclasses.field(default_factory=list)

    @property
    def share(self) -> tf.Tensor:
        """The fraction of the batch's images that are in it."""
        return self.images / self.totals.images


_current: contextvars.ContextVar[MicroBatch | None] = contextvars.ContextVar(
    "micro_batch", default=None
)


def count_images(x: Any) -> tf.Tensor:
    """Returns the number of images in a batch, float32."""
    return tf.cast(_batch_size(x), tf.float32)


def batch_totals(compiled: Any, x: Any, y: Any, weight: Any, *, is_whole: bool = False) -> Totals:
    """Returns the totals of the batch of which this replica has (x, y, weight).

    `compiled` is Keras' `CompileLoss`; where there is none, or it is not built, it has no terms.
    """
    denominators = [count_images(x)]
    if compiled is not None and compiled.built:
        # No denominator depends on the values of the predictions.
        structure = private.prediction_structure(compiled)
        y_pred = keras.tree.map_structure(lambda _: tf.zeros(()), structure)
        with keras.StatelessScope():  # Keras' loss updates metrics of its terms
            wrap = functools.partial(_DenominatorTerm, denominators=denominators)
            private.with_terms(compiled, wrap)(y, y_pred, weight)
    # As one vector, for one all-reduce: of so few numbers only the latency counts.
    (totals,) = sum_over_replicas([tf.stack(denominators)])
    return Totals(totals[0], totals[1:], is_whole)


@contextlib.contextmanager
def micro_batch_of(
    totals: Totals | None, x: Any, *, is_weighted: bool = False
) -> Iterator[MicroBatch | None]:
    """A scope in which losses are of the micro-batch `x`; of the whole batch without totals."""
    micro_batch = None if totals is None else MicroBatch(totals, count_images(x), is_weighted)
    token = _current.set(micro_batch)
    try:
        yield micro_batch
    finally:
        _current.reset(token)


def current_micro_batch() -> MicroBatch | None:
    """Returns the micro-batch that losses are of in this scope; None for a whole batch."""
    return _current.get()


def times_share(loss: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns loss * share, or 0 for no images, whose loss is NaN."""
    return tf.where(share > 0, loss * tf.cast(share, loss.dtype), 0.0)


def micro_batch_loss(
    compiled: Any, micro_batch: MicroBatch, y: Any, y_pred: Any, weight: Any
) -> Any:
    """Returns the compiled loss of a micro-batch, divided by the share of its images.

    Multiplied by that share and summed over micro-batches and replicas, it is the batch's loss. So
    are its terms, which are kept in the micro-batch.
    """
    wrap = functools.partial(_MicroBatchTerm, micro_batch=micro_batch)
    micro_batch.terms.clear()
    loss = private.with_terms(compiled, wrap)(y, y_pred, weight)
    return None if loss is None else loss * keras_replicas()


@dataclasses.dataclass
class _DenominatorTerm:
    """Stands for a term of the loss, and appends its denominator to a list."""

    loss: Any
    index: int
    denominators: list[tf.Tensor]

    def __call__(self, y_true: Any, y_pred: Any, weight: Any) -> tf.Tensor:
        self.denominators.append(_denominator(self.loss, y_true, weight))
        return tf.zeros(())


@dataclasses.dataclass
class _MicroBatchTerm:
    """Stands for a term of the loss: its share of the batch's, divided as `micro_batch_loss`'s."""

    loss: Any
    index: int
    micro_batch: MicroBatch

    def __call__(self, y_true: Any, y_pred: Any, weight: Any) -> Any:
        if private.mask_of(y_pred) is not None and not self.micro_batch.totals.is_whole:
            raise ValueError(
                "The predictions have a Keras mask, which does not work with several replicas or "
                "gradient accumulation; use one device and gradient_accumulation_steps=1, or "
                "sample weights in place of the mask."
            )
        value = self.loss(y_true, y_pred, weight)
        value = value * tf.cast(self._factor(y_true, y_pred, weight), value.dtype)
        share = self.micro_batch.share
        self.micro_batch.terms.append(times_share(value * keras_replicas(), share))
        return value

    def _factor(self, y_true: Any, y_pred: Any, weight: Any) -> tf.Tensor:
        images, totals = self.micro_batch.images, self.micro_batch.totals
        if getattr(self.loss, "reduction", None) not in _MEANS:
            # A sum has no denominator: only the share of images, which follows, is divided out.
            return totals.images / tf.maximum(images, 1.0) / keras_replicas()
        # The loss is a mean over `own`: times own / total it is these images' contribution. The
        # share of images, by which the caller multiplies the whole loss, is divided out beforehand.
        own = _denominator(self.loss, y_true, weight)
        factor = tf.math.divide_no_nan(own * totals.images, totals.terms[self.index] * images)
        if not self.loss.call(y_true, y_pred).shape.rank:  # Keras does not divide a scalar
            factor = factor / keras_replicas()
        return factor


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the norm of all gradients together, in float32, without those that are None."""
    # The cast: under a policy such as "bfloat16" the gradients have several dtypes.
    return tf.linalg.global_norm([tf.cast(g, tf.float32) for g in _without_none(gradients)])


def in_micro_batches(
    function: Callable[..., tuple[tf.Tensor, Any, list[Any], list[Any]]], batch: Any, *, count: int
) -> tuple[tf.Tensor, Any, list[Any], list[Any]]:
    """Runs a pass over each micro-batch, which takes the states of the one before.

    Returns summed losses, all predictions, summed gradients, and the last states. Micro-batches
    have equally many images, except the first, which also has the remainder.
    """
    if count == 1:
        return function([], *batch)
    size = _batch_size(batch)
    length = size // count
    first = size - length * (count - 1)
    # The first runs before the loop: it may be larger, and gives the loop's variables shapes.
    losses, y_pred, gradients, states = function([], *_slice(batch, 0, first))
    arrays = [
        tf.TensorArray(value.dtype, count - 1, element_shape=[None, *value.shape[1:]])
        for value in keras.tree.flatten(y_pred)
    ]

    def body(index: tf.Tensor, losses: tf.Tensor, arrays: Any, sums: Any, before: Any) -> Any:
        rows = _slice(batch, first + index * length, length)
        own, y_pred, parts, after = function(_with_none(before, states), *rows)
        flat = keras.tree.flatten(y_pred)
        arrays = [array.write(index, value) for array, value in zip(arrays, flat, strict=True)]
        # Summed, not averaged: the loss of a micro-batch is its share of the whole batch's.
        sums = [a + b for a, b in zip(sums, _without_none(parts), strict=True)]
        # TensorFlow would begin the next micro-batch meanwhile, in memory of its own.
        with tf.control_dependencies(sums):
            following = tf.identity(index + 1)
        return following, losses + own, arrays, sums, _without_none(after)

    sums = _without_none(gradients)
    with tf.control_dependencies(sums):
        begin = tf.identity(0)
    start = (begin, losses, arrays, sums, _without_none(states))
    # A loop of the graph, whose body is traced and compiled once for any number of micro-batches.
    _, losses, arrays, sums, last = tf.while_loop(lambda index, *_: index < count - 1, body, start)
    predictions = [
        tf.concat([value, *tf.unstack(array.stack(), count - 1)], axis=0)
        for value, array in zip(keras.tree.flatten(y_pred), arrays, strict=True)
    ]
    y_pred = keras.tree.pack_sequence_as(y_pred, predictions)
    return losses, y_pred, _with_none(sums, gradients), _with_none(last, states)


def raise_clearly(error: tf.errors.OpError, strategy: tf.distribute.Strategy) -> None:
    """Raises a ValueError in place of an error that the user of a strategy can correct."""
    # In one process only the failure of another replica cancels a step.
    is_one_process = isinstance(strategy, tf.distribute.MirroredStrategy)
    is_cancelled = isinstance(error, tf.errors.CancelledError) and is_one_process
    if is_cancelled or any(text in str(error) for text in _COLLISIONS):
        raise ValueError(
            "The sums over replicas do not fit together. Either another MirroredStrategy of this "
            "process has trained another model, and TensorFlow takes the sums of both for one: "
            "restart the process, and make one strategy for all its models. Or workers of a "
            "cluster train different models: start all of them with the same arguments."
        ) from error


def reducible(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs in which Keras finds its metrics, with the axis to reduce over for workers.

    An own step that returns `metric.result()` of the compiled metrics returns a dictionary inside.
    """
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= value if isinstance(value, dict) else {name: value}
    if isinstance(tf.distribute.get_strategy(), tf.distribute.MultiWorkerMirroredStrategy):
        return {name: tf.reshape(value, [1]) for name, value in flat.items()}
    return flat


def wants_xla(request: bool | str) -> bool:
    """Whether XLA compiles; for "auto", on GPUs."""
    if request != "auto":
        return bool(request)
    is_tpu = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    return bool(tf.config.list_physical_devices("GPU")) and not is_tpu


def _denominator(loss: Any, y_true: Any, weight: Any) -> tf.Tensor:
    """Returns the denominator of a term in Keras, up to a factor that all of a batch share.

    Source: keras/src/losses/loss.py, reduce_weighted_values.
    """
    first = keras.tree.flatten(y_true)[0]
    ignored = getattr(loss, "ignore_class", None)
    is_weighted = getattr(loss, "reduction", None) == "mean_with_sample_weight"
    weights = tf.cast(weight, tf.float32) if is_weighted and weight is not None else None
    if ignored is not None:
        valid = tf.cast(tf.not_equal(first, tf.cast(ignored, first.dtype)), tf.float32)
        if weights is not None:
            missing = max(valid.shape.rank - weights.shape.rank, 0)
            # Weights (B,) are of images: axes at the end let them weigh all values of one.
            valid = valid * weights[(..., *[tf.newaxis] * missing)]
        return tf.reduce_sum(valid)
    return tf.cast(tf.shape(first)[0], tf.float32) if weights is None else tf.reduce_sum(weights)


def _batch_size(batch: Any) -> tf.Tensor:
    return tf.shape(_without_none(keras.tree.flatten(batch))[0])[0]


def _slice(batch: Any, start: Any, count: Any) -> Any:

    def slice_rows(value: tf.Tensor | None) -> tf.Tensor | None:
        if value is None:
            return None
        begin = tf.concat([[start], tf.zeros(value.shape.rank - 1, tf.int32)], axis=0)
        rows = tf.slice(value, begin, tf.concat([[count], tf.shape(value)[1:]], axis=0))
        return tf.ensure_shape(rows, [None, *value.shape[1:]])

    return keras.tree.map_structure(slice_rows, batch)


def _without_none(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _with_none(values: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """Returns the values with None where it stands among the places."""
    rest = iter(values)
    return [None if place is None else next(rest) for place in places]


def replicas() -> int:
    """Returns the number of replicas in sync."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else int(context.num_replicas_in_sync)


def keras_replicas() -> int:
    """Returns the number by which Keras divides losses in this context."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def sum_over_replicas(values: Sequence[Any]) -> list[Any]:
    """Returns the tensors summed over all replicas; None stays None."""
    if replicas() == 1:
        return list(values)
    tensors = _without_none(values)
    context = tf.distribute.get_replica_context()
    # A sum for gradients too: each replica's loss is its share of the whole.
    sums = context.all_reduce(tf.distribute.ReduceOp.SUM, tensors) if tensors else ()
    return _with_none(sums, values)


def nested_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns an optimizer and all optimizers inside it."""
    optimizers: dict[int, keras.optimizers.Optimizer] = {}
    queue = [optimizer]
    while queue:
        each = queue.pop()
        if id(each) not in optimizers:
            optimizers[id(each)] = each
            queue += [inner for value in vars(each).values() for inner in _optimizers(value)]
    return list(optimizers.values())


def sum_in_apply(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes `apply` sum the gradients over replicas first, once.

    Inner optimizers, such as those of a `MultiOptimizer`, also sum if called by themselves.
    """
    for each in nested_optimizers(optimizer):
        if not isinstance(vars(each).get("apply"), _SummingApply):
            private.replace_apply(each, _SummingApply(each))


@contextlib.contextmanager
def without_sum(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """A scope in which the optimizer and those inside it do not sum gradients over replicas."""
    applies = [vars(each).get("apply") for each in nested_optimizers(optimizer)]
    summing = [apply for apply in applies if isinstance(apply, _SummingApply)]
    for apply in summing:
        apply.enter(1)
    try:
        yield
    finally:
        for apply in summing:
            apply.enter(-1)


class _SummingApply:
    """Replaces the `apply` of an optimizer by one that sums gradients first."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer
        self._apply = optimizer.apply
        # By replica, since the threads of a MirroredStrategy alternate in the middle of `apply`.
        self._depths: dict[int, int] = {}

    def __call__(self, grads: Any, trainable_variables: Any = None) -> Any:
        optimizer, grads = self._optimizer, list(grads)
        if not optimizer.built and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            _build(optimizer, trainable_variables)
        sum_in_apply(optimizer)  # a MultiOptimizer has all inner optimizers once it is built
        if not self._depths.get(_replica(), 0):
            # Before `apply` clips: the norm of a replica's share is not that of the sum.
            grads = sum_over_replicas(grads)
        # Inner optimizers get gradients that are summed already.
        with without_sum(optimizer):
            return self._apply(grads, trainable_variables)

    def enter(self, change: int) -> None:
        self._depths[_replica()] = self._depths.get(_replica(), 0) + change


def momentum_step(
    variable: Any, accumulator: keras.Variable, gradient: Any, *, rate: Any, momentum: float
) -> bool:
    """Makes a step of m = g + momentum * m, w = w - rate * m, if one kernel can; returns whether.

    Args:
        variable: w, this replica's.
        accumulator: m.
        gradient: g.
        rate: learning rate.
        momentum: factor of the old m in the new.
    """
    if not _is_dense_float32(variable, gradient, accumulator):
        return False
    tf.raw_ops.ResourceApplyMomentum(
        var=variable.handle,
        accum=accumulator.value.handle,
        lr=tf.cast(rate, tf.float32),
        grad=gradient,
        momentum=momentum,
    )
    return True


def adam_step(
    variable: Any,
    averages: Sequence[keras.Variable],
    gradient: Any,
    *,
    rate: Any,
    betas: tuple[float, float],
    epsilon: float,
    step: Any,
) -> bool:
    """Makes a step of Adam, if one kernel can, and returns whether.

    Args:
        variable: the trained variable, this replica's.
        averages: moving averages of the gradient and of its square.
        gradient: of the variable.
        rate: learning rate.
        betas: decay of each average.
        epsilon: added to the root of the second.
        step: number of this step, from 1.
    """
    if not _is_dense_float32(variable, gradient, *averages):
        return False
    # The kernel corrects the bias by beta^step, for which Keras' optimizer stores the step alone.
    powers = [tf.pow(tf.constant(beta, tf.float32), tf.cast(step, tf.float32)) for beta in betas]
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=averages[0].value.handle,
        v=averages[1].value.handle,
        beta1_power=powers[0],
        beta2_power=powers[1],
        lr=tf.cast(rate, tf.float32),
        beta1=betas[0],
        beta2=betas[1],
        epsilon=epsilon,
        grad=gradient,
    )
    return True


def _build(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> None:
    def build(strategy: tf.distribute.Strategy) -> None:
        # Inside of a trace their initial values would be tensors of that trace alone.
        with tf.init_scope(), strategy.scope():
            optimizer.build(variables)

    context = tf.distribute.get_replica_context()
    if context is None:
        optimizer.build(variables)
    else:
        context.merge_call(build)


def _replica() -> int:
    context = tf.distribute.get_replica_context()
    replica = None if context is None else context.replica_id_in_sync_group
    return replica if isinstance(replica, int) else 0  # one thread traces for all TPUs


def _optimizers(value: Any) -> list[keras.optimizers.Optimizer]:
    if isinstance(value, keras.optimizers.OptimizerMap):
        value = [value.default_optimizer, *value.values()]
    elif isinstance(value, Mapping):
        value = list(value.values())
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, keras.optimizers.Optimizer)]


def _is_dense_float32(variable: Any, gradient: Any, *state: keras.Variable) -> bool:
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in (variable, gradient, *state)}
    return isinstance(gradient, tf.Tensor) and dtypes == {"float32"}
