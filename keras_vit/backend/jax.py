"""JAX: attention that does not store its weights, GPU kernels in half precision, the step."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils

from keras_vit import environment
from keras_vit.backend import plain, private
from keras_vit.backend.plain import SAM_EPSILON, StepOptions

# `ExactTrainer` is a mixin; the type checker sees it as a model.
if TYPE_CHECKING:
    from keras import Model as _Model
else:
    _Model = object

environment.prefer_cublas()

_HALF = ("float16", "bfloat16")
# cuDNN's flash attention takes heads of a width that is a multiple of 8, up to 128.
_CUDNN_STEP, _CUDNN_WIDEST = 8, 128


def is_concrete(x: Any) -> bool:
    """Whether x has values now, and is not traced."""
    return not isinstance(x, keras.KerasTensor | jax.core.Tracer)


def values_of(variable: Any) -> np.ndarray:
    """Returns the present values, of which other processes may have parts; then all must ask."""
    value = variable.value
    if not (value.is_fully_addressable or value.is_fully_replicated):
        value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value)


def layer_norm(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Normalises x (..., D) over the last axis, in float32, then applies gamma and beta (D,)."""
    if len(x.shape) != 3 or not _has_kernels(x):
        return plain.layer_norm(x, gamma, beta, epsilon=epsilon)
    from keras_vit.backend import jax_kernels

    gamma, beta = map(keras.ops.convert_to_tensor, (gamma, beta))
    return jax_kernels.layer_norm(x, gamma, beta, epsilon)


def self_attention(qkv: Any, num_heads: int) -> Any:
    """Returns multi-head attention (B, N, D) of queries, keys and values (B, N, 3D).

    On NVIDIA GPUs in half precision this package's kernel computes it, or cuDNN's flash attention
    for heads of other widths.
    """
    size = qkv.shape[-1] // 3 // num_heads
    if not _has_kernels(qkv):
        # Of float16 JAX's own makes a product that CPUs and TPUs do not compile.
        if qkv.dtype == "float16":
            return plain.self_attention(qkv, num_heads)
        return _attend(qkv, num_heads, implementation="xla")
    from keras_vit.backend import jax_kernels

    if jax_kernels.head_parts(size):
        return jax_kernels.attention(qkv, num_heads)
    if size % _CUDNN_STEP or size > _CUDNN_WIDEST:
        return _attend(qkv, num_heads, implementation="xla")
    # JAX refuses to train cuDNN's with an odd number of tokens: one is added, and masked as a key.
    tokens = qkv.shape[1]
    even = jnp.pad(qkv, ((0, 0), (0, tokens % 2), (0, 0)))
    lengths = jnp.full((qkv.shape[0],), tokens, "int32") if tokens % 2 else None
    y = _attend(even, num_heads, implementation="cudnn", key_value_seq_lengths=lengths)
    return y[:, :tokens]


def _attend(qkv: Any, num_heads: int, **options: Any) -> Any:
    _, tokens, width = keras.ops.shape(qkv)
    x = keras.ops.reshape(qkv, (-1, tokens, 3, num_heads, width // 3 // num_heads))
    query, key, value = keras.ops.unstack(x, axis=2)  # (B, N, H, K) each
    x = jax.nn.dot_product_attention(query, key, value, **options)
    return keras.ops.reshape(x, (-1, tokens, width // 3))


def _has_kernels(x: Any) -> bool:
    """Whether x is in half precision on an NVIDIA GPU of Ampere or newer, which have bfloat16."""
    if isinstance(x, keras.KerasTensor) or x.dtype not in _HALF:
        return False
    device = jax.config.jax_default_device or jax.devices()[0]
    major = str(getattr(device, "compute_capability", "0")).partition(".")[0]
    # GPUs of other makers have a name in place of this number.
    return getattr(device, "platform", device) == "gpu" and major.isdigit() and int(major) >= 8


_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_NORM = "gradient_norm"
_Data = tuple[Any, Any, Any]  # inputs, targets, sample weights


class ExactTrainer(StepOptions, _Model):
    """Keras' own training step with the options of this package; a mixin, the base before a model.

    Arrays are global: whatever devices they lie on, the step is that of one device.

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
        >>> history = model.fit(jnp.ones((4, 3)), jnp.ones((4, 2)), verbose=0)
        >>> sorted(history.history)
        ['loss']
    """

    def compile(
        self,
        optimizer: Any = "rmsprop",
        *args: Any,
        accumulate: int = 1,
        sam_rho: float = 0.0,
        report_gradient_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        """Configures training, with the arguments of `keras.Model.compile` and a few more.

        Args:
            optimizer: any Keras optimizer; wrapped in a `LossScaleOptimizer` if layers compute in
                float16.
            args: of `keras.Model.compile`.
            accumulate: number of parts that a batch is split into. They run one after another, in
                the memory of one part, and their gradients are summed.
            sam_rho: radius of sharpness-aware minimisation (arXiv 2010.01412); 0 for none. A step
                takes twice the time.
            report_gradient_norm: whether the logs have "gradient_norm", the norm before clipping,
                mean over the epoch.
            kwargs: of `keras.Model.compile`.

        Raises:
            ValueError: an option is out of range.
        """
        self.check_options(accumulate, sam_rho)
        super().compile(self.scaled(optimizer), *args, **kwargs)
        self.keep_options(accumulate, sam_rho, report_gradient_norm)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        own = [] if self._norm is None else [self._norm.value]
        return [*super().metrics, *own]

    def get_metrics_result(self) -> dict[str, Any]:
        results = super().get_metrics_result()
        return {name: value for name, value in results.items() if name != _NORM}

    def train_step(self, state: Any, data: Any) -> tuple[dict[str, Any], Any]:
        """Runs one training step on a batch: returns the logs, and the state after it."""
        self.check_trainable()
        trainable, others, optimizer, metrics = state
        data = keras.utils.unpack_x_y_sample_weight(data)
        scale = self._scale(optimizer)
        point = trainable
        if self._sam_rho:
            # The other variables stay, so that the second pass draws the same masks.
            *_, gradients = self._pass(trainable, others, metrics, optimizer, data)
            length = self._sam_rho / (_global_norm(gradients) + SAM_EPSILON * scale)
            point = [
                value + (length * gradient).astype(value.dtype)
                for value, gradient in zip(trainable, gradients, strict=True)
            ]
        loss, y_pred, others, metrics, gradients = self._pass(
            point, others, metrics, optimizer, data
        )
        norm = _global_norm(gradients) / scale
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self._updated(metrics, loss, norm, y_pred, data)
        return logs, (trainable, others, optimizer, metrics)

    def _scale(self, optimizer: Any) -> Any:
        """Returns what the optimizer multiplies losses by."""
        mapping = list(zip(self.optimizer.variables, optimizer, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return jnp.asarray(self.optimizer.scale_loss(1.0), "float32")

    def _pass(self, point: Any, others: Any, metrics: Any, optimizer: Any, data: _Data) -> Any:
        """Runs forward and backward at a point: returns loss, predictions, states and gradients."""
        derive = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)

        def part(others: Any, metrics: Any, data: _Data) -> Any:
            (_, results), gradients = derive(
                point, others, metrics, *data, training=True, optimizer_variables=optimizer
            )
            return *results, gradients

        if self._accumulate == 1:
            return part(others, metrics, data)
        self._check_parts(data)
        return _in_parts(part, others, metrics, data, count=self._accumulate)

    def _check_parts(self, data: _Data) -> None:
        """Raises a ValueError for losses whose parts are not weighted by their images."""
        losses: list[Any] = []
        private.with_terms(private.losses_of(self), lambda loss, _: losses.append(loss))
        others = [
            type(loss).__name__
            for loss in losses
            if getattr(loss, "reduction", None) not in _MEANS
            or (hasattr(loss, "ignore_class") and loss.ignore_class is not None)
        ]
        if data[2] is not None or others:
            raise ValueError(
                f"accumulate={self._accumulate} on JAX takes losses that are means over images, "
                "without sample weights and ignore_class. Received: "
                f"{others[0] if others else 'sample weights'}; leave accumulate at 1."
            )

    def _updated(
        self, metrics: Any, loss: Any, norm: Any, y_pred: Any, data: _Data
    ) -> tuple[dict[str, Any], list[Any]]:
        """Returns the logs of a step, and the values of the metrics' variables after it."""
        x, y, weight = data
        count = len(jax.tree.leaves(x)[0])
        mapping = list(zip(self.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            private.loss_tracker_of(self).update_state(loss, sample_weight=count)
            logs = dict(self.compute_metrics(x, y, y_pred, weight))
            if self._norm is not None:
                self._norm.value.update_state(norm)
                logs[_NORM] = self._norm.value.result()
        values = ((variable, scope.get_current_value(variable)) for variable, _ in mapping)
        return logs, [variable.value if value is None else value for variable, value in values]


def _global_norm(gradients: list[Any]) -> Any:
    """Returns the norm of all gradients together, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype("float32"))) for g in gradients))


def _in_parts(
    part: Callable[..., Any], others: Any, metrics: Any, data: _Data, *, count: int
) -> Any:
    """Runs a pass over a batch in parts: returns what one pass returns.

    The parts have equally many images, except the first, which also has the remainder. Equal parts
    have images of all devices that the batch lies on.
    """
    size = len(jax.tree.leaves(data)[0])
    if size < count:
        raise ValueError(f"A batch of {size} images cannot be split into accumulate={count} parts.")
    length = size // count
    first = size - length * (count - 1)
    is_even = first == length
    if is_even:
        data = jax.tree.map(lambda v: _reordered(v, length, count), data)
    rest = jax.tree.map(lambda v: v[first:].reshape(count - 1, length, *v.shape[1:]), data)
    loss, begun, others, metrics, gradients = part(
        others, metrics, jax.tree.map(lambda v: v[:first], data)
    )

    def step(carry: Any, data: _Data) -> Any:
        others, metrics, loss, sums = carry
        own, y_pred, others, metrics, gradients = part(others, metrics, data)
        sums = jax.tree.map(lambda total, own: total + own * (length / size), sums, gradients)
        return (others, metrics, loss + own * (length / size), sums), y_pred

    sums = jax.tree.map(lambda gradient: gradient * (first / size), gradients)
    start = (others, metrics, loss * (first / size), sums)
    (others, metrics, loss, sums), ended = jax.lax.scan(step, start, rest)
    y_pred = jax.tree.map(
        lambda v, more: jnp.concatenate([v, more.reshape(-1, *more.shape[2:])]), begun, ended
    )
    if is_even:
        y_pred = jax.tree.map(lambda v: _reordered(v, count, length), y_pred)
    return loss, y_pred, others, metrics, sums


def _reordered(values: Any, rows: int, columns: int) -> Any:
    """Reads values that stand row by row column by column."""
    table = values.reshape(rows, columns, *values.shape[1:])
    return table.swapaxes(0, 1).reshape(values.shape)
