"""Optimizer steps: one sum of gradients over replicas, and one fused kernel per variable."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_vit.backend import private


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
    tensors = [value for value in values if value is not None]
    context = tf.distribute.get_replica_context()
    # A sum for gradients too: each replica's loss is its share of the whole.
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)) if tensors else iter(())
    return [None if value is None else next(sums) for value in values]


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
            grads = sum_over_replicas(grads)
        with without_sum(optimizer):
            return self._apply(grads, trainable_variables)

    def enter(self, change: int) -> None:
        """Counts the scopes of `without_sum` that this replica is in."""
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
    """Makes the variables of an optimizer once for all replicas, outside of a traced step.

    Inside a trace their initial values would be tensors of that trace alone.
    """

    def build(strategy: tf.distribute.Strategy) -> None:
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
    """Returns the optimizers that the value of an attribute is, or contains."""
    if isinstance(value, keras.optimizers.OptimizerMap):
        value = [value.default_optimizer, *value.values()]
    elif isinstance(value, Mapping):
        value = list(value.values())
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, keras.optimizers.Optimizer)]


def _is_dense_float32(variable: Any, gradient: Any, *state: keras.Variable) -> bool:
    """Whether all are float32, and the gradient is dense, unlike that of an embedding."""
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in (variable, gradient, *state)}
    return isinstance(gradient, tf.Tensor) and dtypes == {"float32"}
