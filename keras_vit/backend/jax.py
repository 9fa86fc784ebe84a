"""JAX: attention that does not store its weights, GPU kernels in half precision, the step.

Shapes: B images of the whole batch, N tokens, D hidden_dim, H heads, K = D / H.
"""

import functools
import warnings
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
from keras_vit.parallel import FullySharded

# `ExactTrainer` is a mixin; the type checker sees it as a model.
if TYPE_CHECKING:
    from keras import Model as _Model
else:
    _Model = object

environment.prefer_cublas()

# What takes the place of `plain`'s.
__all__ = ["ExactTrainer", "flatten_batch", "is_concrete", "layer_norm", "remat", "scan_layers",
           "self_attention", "values_of"]  # fmt: skip

_HALF = ("float16", "bfloat16")
# cuDNN's flash attention takes heads of a width that is a multiple of 8, up to 128.
_CUDNN_STEP, _CUDNN_WIDEST = 8, 128
# What hides a key: JAX's own numbers for cuDNN (jax/_src/cudnn/fused_attention_stablehlo.py).
_MASKS = {"float16": -(2.0**15), "bfloat16": -(2.0**41)}
# What remat may keep, by the name of its choice. Attention's own product is in a kernel, or has the
# batch among its dimensions.
_SAVEABLE = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
_BY_WEIGHTS = "mean_with_sample_weight"
_MEANS = ("sum_over_batch_size", "mean", _BY_WEIGHTS)
_NORM = "gradient_norm"
_Data = tuple[Any, Any, Any]  # inputs, targets, sample weights


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


def self_attention(qkv: Any, num_heads: int, *, bias: Any = None) -> Any:
    """Returns multi-head attention (B, N, D) of queries, keys and values (B, N, 3D).

    On NVIDIA GPUs in half precision this package's kernel computes it, or cuDNN's flash attention
    for heads of other widths and for a bias: neither stores the weights (B, H, N, N).

    Args:
        qkv: queries, keys and values, each by heads.
        num_heads: heads H.
        bias: added to the logits, (H, N, N), or None.
    """
    size = qkv.shape[-1] // 3 // num_heads
    if not _has_kernels(qkv):
        # Of float16 JAX's own makes a product that CPUs and TPUs do not compile.
        if qkv.dtype == "float16":
            return plain.self_attention(qkv, num_heads, bias=bias)
        return _attend(qkv, num_heads, bias)
    from keras_vit.backend import jax_kernels

    if bias is None and jax_kernels.head_parts(size):
        return jax_kernels.attention(qkv, num_heads)
    if size > _CUDNN_WIDEST:
        _warn_of_wide_heads(size)
        return _attend(qkv, num_heads, bias)
    return _attend_by_cudnn(qkv, num_heads, bias)


def _attend(qkv: Any, num_heads: int, bias: Any) -> Any:
    query, key, value = _heads(qkv, num_heads)
    bias = None if bias is None else bias[None]
    x = jax.nn.dot_product_attention(query, key, value, bias, implementation="xla")
    return x.reshape(*x.shape[:2], -1)


def _attend_by_cudnn(qkv: Any, num_heads: int, bias: Any) -> Any:
    """Computes attention by cuDNN, of an even number of tokens and of heads it takes."""
    query, key, value = _heads(qkv, num_heads)
    tokens, size = query.shape[1], query.shape[-1]
    # JAX refuses to train an odd number of tokens with a bias, and older ones without one too.
    # Zeros fill up what does not fit: columns of heads, which change no product, and one token,
    # masked as a key. The copy of (B, N, 3D) costs less than XLA's form, which writes and reads the
    # weights (B, H, N, N) in float32 and again for the gradient, wherever N > K.
    odd, columns = tokens % 2, -size % _CUDNN_STEP
    if odd or columns:
        sides = ((0, 0), (0, odd), (0, 0), (0, columns))
        query, key, value = (jnp.pad(x, sides) for x in (query, key, value))
    lengths = None
    if bias is not None:
        # The bias itself masks: not every cuDNN derives it beside a mask of its own.
        bias = jnp.pad(bias, ((0, 0), (0, odd), (0, 0)))
        mask = _MASKS[str(qkv.dtype)]
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, odd)), constant_values=mask)[None]
    elif odd:
        lengths = jnp.full((qkv.shape[0],), tokens, "int32")
    x = jax.nn.dot_product_attention(
        *(query, key, value, bias),
        # By the head's own width: cuDNN would take that of the padded columns.
        scale=size**-0.5,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return x[:, :tokens, :, :size].reshape(-1, tokens, num_heads * size)


def _heads(qkv: Any, num_heads: int) -> list[Any]:
    _, tokens, width = qkv.shape
    x = qkv.reshape(-1, tokens, 3, num_heads, width // 3 // num_heads)
    return [x[:, :, third] for third in range(3)]


@functools.cache
def _warn_of_wide_heads(size: int) -> None:
    """Warns once of each width of heads that no fused kernel takes."""
    warnings.warn(
        f"cuDNN's flash attention takes heads of up to {_CUDNN_WIDEST} columns; XLA computes those "
        f"of this model, of {size}, and stores their attention weights. More heads (num_heads) "
        "would be faster, and need less memory.",
        stacklevel=2,
    )


def flatten_batch(x: Any) -> Any:
    """Returns x (B, ...) divided among devices by its images, under `FullySharded`.

    Its weights are divided among the same devices. Left to itself XLA also divides tokens by their
    width, as a product's kernel is, and then gathers them all to divide them by images again.
    """
    shards = keras.distribution.distribution()
    if not isinstance(shards, FullySharded) or is_concrete(x):
        return x
    if x.shape[0] % shards.num_model_replicas:
        return x
    axes = (shards.batch_dim_name, *[None] * (len(x.shape) - 1))
    layout = keras.distribution.TensorLayout(axes, shards.device_mesh)
    return keras.distribution.distribute_tensor(x, layout)


def remat(function: Callable[..., Any], kept: str | None = None) -> Callable[..., Any]:
    """Returns a function of tensors that is computed again for its gradient.

    Args:
        function: takes tensors alone.
        kept: what is not computed again: "dots" for the products with weights; None for nothing.
    """
    recomputed: Callable[..., Any] = jax.checkpoint(function, policy=_SAVEABLE.get(kept or ""))
    return recomputed


def scan_layers(
    step: Callable[[Any, Any], Any], x: Any, *, layers: list[keras.layers.Layer], rows: list[Any]
) -> Any:
    """Runs alike layers one after another, of which one alone is traced and compiled.

    Args:
        step: computes the first layer on x, with one of the rows, in terms of its variables; the
            result has the shape and dtype of x.
        x: the input of the first layer.
        layers: those with the weights, whose order and shapes are the same.
        rows: what else differs between the layers, a structure of tensors for each.
    """

    def body(x: Any, row: Any) -> tuple[Any, None]:
        values, others = row
        mapping = list(zip(layers[0].weights, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return step(x, others), None

    # Cast before they are stacked, as each layer would do: the copy is smaller, the numbers equal.
    with private.cast_scope(layers[0]):
        columns = zip(*(layer.weights for layer in layers), strict=True)
        values = [jnp.stack([variable.value for variable in column]) for column in columns]
        others = jax.tree.map(lambda *parts: jnp.stack(parts), *rows)
        return jax.lax.scan(body, x, (values, others))[0]


def _has_kernels(x: Any) -> bool:
    """Whether x is in half precision on an NVIDIA GPU of Ampere or newer, which have bfloat16."""
    if isinstance(x, keras.KerasTensor) or x.dtype not in _HALF:
        return False
    device = jax.config.jax_default_device or jax.devices()[0]
    major = str(getattr(device, "compute_capability", "0")).partition(".")[0]
    # GPUs of other makers have a name in place of this number.
    return getattr(device, "platform", device) == "gpu" and major.isdigit() and int(major) >= 8


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
        >>> model.compile("sgd", "mse", gradient_accumulation_steps=2)
        >>> history = model.fit(jnp.ones((4, 3)), jnp.ones((4, 2)), verbose=0)
        >>> sorted(history.history)
        ['loss']
    """

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
        # What the optimizer multiplies losses by.
        mapping = list(zip(self.optimizer.variables, optimizer, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            scale = jnp.asarray(self.optimizer.scale_loss(1.0), "float32")
        point = trainable
        if self._sam_rho:
            # The other variables stay, so that the second pass draws the same masks.
            *_, gradients = self._pass(trainable, others, metrics, optimizer, data)
            # The loss scale is in the gradients and in their norm, and cancels.
            length = self._sam_rho / (_global_norm(gradients) + SAM_EPSILON * scale)
            point = [
                value + (length * gradient).astype(value.dtype)
                for value, gradient in zip(trainable, gradients, strict=True)
            ]
        loss, y_pred, others, metrics, gradients = self._pass(
            point, others, metrics, optimizer, data
        )
        norm = _global_norm(gradients) / scale
        # Clipping sees gradients of the whole batch: arrays are global, and XLA sums them itself.
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self._updated(metrics, loss, norm, y_pred, data)
        return logs, (trainable, others, optimizer, metrics)

    def _pass(self, point: Any, others: Any, metrics: Any, optimizer: Any, data: _Data) -> Any:
        """Runs forward and backward at a point: returns loss, predictions, states and gradients."""
        derive = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)

        def own(others: Any, metrics: Any, data: _Data) -> Any:
            (_, results), gradients = derive(
                point, others, metrics, *data, training=True, optimizer_variables=optimizer
            )
            return *results, gradients

        if self._accumulation_steps == 1:
            return own(others, metrics, data)
        self._check_losses(data)
        return _in_micro_batches(own, others, metrics, data, count=self._accumulation_steps)

    def _check_losses(self, data: _Data) -> None:
        # Micro-batches are averaged by their images, which is exact for means over images alone.
        losses: list[Any] = []
        private.with_terms(private.losses_of(self), lambda loss, _: losses.append(loss))
        others = [
            type(loss).__name__
            for loss in losses
            if getattr(loss, "reduction", None) not in _MEANS
            or (hasattr(loss, "ignore_class") and loss.ignore_class is not None)
        ]
        divides = [loss for loss in losses if getattr(loss, "reduction", None) == _BY_WEIGHTS]
        if (divides and data[2] is not None) or others:
            raise ValueError(
                f"gradient_accumulation_steps={self._accumulation_steps} on JAX takes losses that "
                "are means over images, not over sample weights or without ignore_class. Received: "
                f"{others[0] if others else _BY_WEIGHTS}; leave gradient_accumulation_steps at 1."
            )

    def _updated(
        self, metrics: Any, loss: Any, norm: Any, y_pred: Any, data: _Data
    ) -> tuple[dict[str, Any], list[Any]]:
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
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype("float32"))) for g in gradients))


def _in_micro_batches(
    run: Callable[..., Any], others: Any, metrics: Any, data: _Data, *, count: int
) -> Any:
    """Runs a pass over each micro-batch: returns what one pass returns.

    Micro-batches have equally many images, except the first, which also has the remainder. Equal
    ones have images of all devices that the batch lies on.
    """
    size = len(jax.tree.leaves(data)[0])
    if size < count:
        raise ValueError(f"A batch of {size} images cannot be split into {count} micro-batches.")
    length = size // count
    first = size - length * (count - 1)
    is_even = first == length
    if is_even:
        # A micro-batch takes each count-th image: so it has images of all devices, and none moves.
        data = jax.tree.map(lambda v: _reordered(v, length, count), data)
    rest = jax.tree.map(lambda v: v[first:].reshape(count - 1, length, *v.shape[1:]), data)
    loss, begun, others, metrics, gradients = run(
        others, metrics, jax.tree.map(lambda v: v[:first], data)
    )

    # A scan, not a Python loop: one compiled body, whose activations each turn overwrites.
    def step(carry: Any, data: _Data) -> Any:
        others, metrics, loss, sums = carry
        own, y_pred, others, metrics, gradients = run(others, metrics, data)
        # Each is of a micro-batch's own mean loss: shares of images make the batch's mean.
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
