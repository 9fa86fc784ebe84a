"""What an optimizer does: one sum of gradients over replicas, and one kernel for each variable."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_vit.backend import private


def replicas() -> int:
    """Returns how many replicas train together."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else int(context.num_replicas_in_sync)


def keras_replicas() -> int:
    """Returns what Keras divides the losses of this context by."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def sum_over_replicas(values: Sequence[Any]) -> list[Any]:
    """Returns the tensors summed over all replicas; None stays None."""
    if replicas() == 1:
        return list(values)
    known = [value for value in values if value is not None]
    context = tf.distribute.get_replica_context()
    # Gradients too are summed: the loss of each replica is its share of the whole already.
    summed = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, known)) if known else iter(())
    return [None if value is None else next(summed) for value in values]


def parts_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns an optimizer and all that are inside it."""
    found: dict[int, keras.optimizers.Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting += [inner for value in vars(part).values() for inner in _optimizers(value)]
    return list(found.values())


def sum_in_apply(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes `optimizer.apply` sum the gradients over replicas first, and nothing inside it again.

    What an optimizer has inside, such as the parts of a `MultiOptimizer`, sums too where it is
    asked by itself.
    """
    for part in parts_of(optimizer):
        if not isinstance(vars(part).get("apply"), _SummingApply):
            private.replace_apply(part, _SummingApply(part))


@contextlib.contextmanager
def summed_already(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside this scope the optimizer, and what it has inside, take gradients as they are."""
    applies = [vars(part).get("apply") for part in parts_of(optimizer)]
    entered = [apply for apply in applies if isinstance(apply, _SummingApply)]
    for apply in entered:
        apply.enter(1)
    try:
        yield
    finally:
        for apply in entered:
            apply.enter(-1)


class _SummingApply:
    """Stands in an optimizer for its own `apply`."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = optimizer.apply
        # By replica, since the threads of a MirroredStrategy take turns in the middle of `apply`.
        self._depths: dict[int, int] = {}

    def __call__(self, grads: Any, trainable_variables: Any = None) -> Any:
        optimizer, grads = self._optimizer, list(grads)
        if not optimizer.built and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            _build(optimizer, trainable_variables)
        sum_in_apply(optimizer)  # a MultiOptimizer has all of its parts only once it is built
        if not self._depths.get(_replica(), 0):
            grads = sum_over_replicas(grads)
        with summed_already(optimizer):
            return self._own(grads, trainable_variables)

    def enter(self, change: int) -> None:
        """Counts the scopes of this replica that summed already."""
        self._depths[_replica()] = self._depths.get(_replica(), 0) + change


def momentum_step(
    variable: Any, memory: keras.Variable, gradient: Any, *, rate: Any, momentum: float
) -> bool:
    """Makes m = g + momentum * m and w = w - rate * m, if one kernel can, and returns whether.

    Args:
        variable: w, as a strategy gives it to an optimizer: this replica's.
        memory: m.
        gradient: g.
        rate: learning rate.
        momentum: share of the old m in the new.
    """
    if not _is_plain(variable, [memory], gradient):
        return False
    tf.raw_ops.ResourceApplyMomentum(
        var=variable.handle,
        accum=memory.value.handle,
        lr=tf.cast(rate, tf.float32),
        grad=gradient,
        momentum=momentum,
    )
    return True


def adam_step(
    variable: Any,
    memories: Sequence[keras.Variable],
    gradient: Any,
    *,
    rate: Any,
    betas: tuple[float, float],
    epsilon: float,
    step: Any,
) -> bool:
    """Makes a step of Adam, if one kernel can, and returns whether.

    Args:
        variable: what is trained, as a strategy gives it to an optimizer: this replica's.
        memories: averages of the gradient and of its square.
        gradient: of the variable.
        rate: learning rate.
        betas: share of the old average in the new, of each.
        epsilon: added to the root of the second.
        step: which step this is, from 1.
    """
    if not _is_plain(variable, memories, gradient):
        return False
    powers = [tf.pow(tf.constant(beta, tf.float32), tf.cast(step, tf.float32)) for beta in betas]
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=memories[0].value.handle,
        v=memories[1].value.handle,
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

    TensorFlow cannot make them within: what they start from would be of the first trace alone.
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
    """Returns the optimizers that an attribute is, or holds."""
    if isinstance(value, keras.optimizers.OptimizerMap):
        value = [value.default_optimizer, *value.values()]
    elif isinstance(value, Mapping):
        value = list(value.values())
    held = value if isinstance(value, list | tuple) else [value]
    return [inner for inner in held if isinstance(inner, keras.optimizers.Optimizer)]


def _is_plain(variable: Any, memories: Sequence[keras.Variable], gradient: Any) -> bool:
    """Whether all is dense float32; an embedding's gradient, for one, has only some rows."""
    arrays = [variable, gradient, *memories]
    return isinstance(gradient, tf.Tensor) and {
        keras.backend.standardize_dtype(array.dtype) for array in arrays
    } == {"float32"}
