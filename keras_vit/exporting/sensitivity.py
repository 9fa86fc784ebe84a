"""Measures what rounding each kernel to int8 costs, and chooses those that stay float32."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.exporting import onnx_rounding
from keras_vit.exporting.clean import agreement, messages
from keras_vit.exporting.rebuild import Exportable
from keras_vit.exporting.tflite import EdgeForward

FORMATS = ("onnx-int8", "onnx-int8-weights", "tflite-int8", "tflite-int8-weights")
# Images to measure on, at least and at most, where that takes no more multiplications than so many.
COUNTS, WORK = (2, 8), 4e12
AIM = 0.8  # of a limit, as the errors of the parts do not quite add up to those of the whole
_ATTEMPTS = 4
_LEVELS = {"onnx-int8": 64}  # of half the range of a kernel's values
_MOST_LEVELS = 127


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What rounding one kernel costs.

    Attributes:
        kernel: its path.
        error: the mean square error of the answers with this kernel alone rounded.
        size: its elements, of which each takes three bytes more in float32.
    """

    kernel: str
    error: float
    size: int


def measure(exportable: Exportable, request: messages.Request) -> list[Cost]:
    """Measures the cost of each kernel of the dense products.

    The errors of several kernels nearly add up, as they have little to do with each other.

    Args:
        exportable: a rebuilt model whose network is written by hand.
        request: the checks of a file of one of `FORMATS`; of its gate the first images are taken.

    Raises:
        ValueError: the request has no gate.
    """
    gate = request.gate
    if gate is None:
        raise ValueError(f"Without a gate there are no images to measure on: {request.format}.")
    module = _Rounding(exportable, request.format, images=gate.inputs["images"])
    plain = agreement.centred(gate, module.answer())
    costs = []
    for kernel, size in module.sizes.items():
        change = agreement.centred(gate, module.answer(kernel)) - plain
        costs.append(Cost(kernel=kernel, error=float(np.mean(np.square(change))), size=size))
    return costs


def choose(costs: Sequence[Cost], *, share: float) -> tuple[str, ...]:
    """Returns the kernels to keep in float32, so that a share of the mean square error is left.

    It takes first what costs the most for its size, and gives back what later ones make up for.

    Example:
        >>> choose([Cost(kernel="a", error=6.0, size=4), Cost(kernel="b", error=3.0, size=1),
        ...         Cost(kernel="c", error=1.0, size=1)], share=0.5)
        ('a',)

    Args:
        costs: from `measure`.
        share: 0..1.
    """
    left = sum(cost.error for cost in costs)
    most, kept = share * left, []
    for cost in sorted(costs, key=lambda each: each.error / each.size, reverse=True):
        if left <= most:
            break
        kept.append(cost)
        left -= cost.error
    for cost in sorted(kept, key=lambda each: each.error):
        if left + cost.error <= most:  # what came later makes up for it
            kept.remove(cost)
            left += cost.error
    return tuple(cost.kernel for cost in kept)


def attempts(exportable: Exportable, name: str) -> int:
    """Returns how often a format may be written again with more kernels in float32."""
    return _ATTEMPTS if name in FORMATS and exportable.written_config is not None else 0


def excess(checks: Iterable[messages.Check]) -> float:
    """Returns by how many times the worst failed check exceeds its limit; 1 if none failed.

    Infinite where no rounding is at fault: an answer that is no number, or a check of another kind.
    """
    worst = 1.0
    for check in checks:
        if check.passed:
            continue
        if not isinstance(check.measured, float) or not isinstance(check.limit, float):
            return float("inf")
        # Shares of images say only that it is too much.
        ratio = check.measured / check.limit if check.measured > check.limit else 1 / AIM
        worst = max(worst, ratio)
    return worst


class _Rounding(EdgeForward):
    """The forward pass, in which one kernel and its inputs are rounded at a time.

    Attributes:
        sizes: the elements of each kernel that files round.
    """

    def __init__(self, exportable: Exportable, name: str, *, images: np.ndarray) -> None:
        config = exportable.written_config
        if config is None:
            raise ValueError("Only the kernels of a network like the published ones have names.")
        runs = sum(weight.path.endswith("/kernel") for weight in exportable.network.weights)
        work = runs * config.num_tokens * exportable.parameter_bytes / 4
        self._images = images[: int(np.clip(WORK / work, *COUNTS))]
        super().__init__(exportable, config=config, batch_size=len(self._images))
        self._levels = _LEVELS.get(name, _MOST_LEVELS)
        self._rounds_inputs = not name.endswith("weights")
        self._axes: tuple[int, ...] | None = None if name.startswith("onnx") else (-1,)
        self.sizes = {
            path: int(np.prod(value.shape))
            for path, value in self._weights.items()
            if path.endswith("/kernel")
            and np.prod(value.shape) >= onnx_rounding.MIN_ELEMENTS
            and (len(value.shape) == 2 or name == "tflite-int8")
        }
        self._rounded = tf.Variable(-1)
        if name.startswith("tflite"):
            self._fold_norms(config.num_layers)

    def answer(self, kernel: str | None = None) -> np.ndarray:
        """Returns the answers with one kernel rounded, or none."""
        self._rounded.assign(-1 if kernel is None else list(self.sizes).index(kernel))
        answers = self.call(self._images)
        return np.asarray(answers["logits" if "logits" in answers else "features"])

    def _fold_norms(self, blocks: int) -> None:
        """Takes the factor of a normalisation into the next kernel, as TFLite's converter does."""
        for norm, path in (("attention_norm", "attention/qkv"), ("mlp_norm", "mlp/fc1")):
            for block in (f"block_{index}" for index in range(blocks)):
                gamma, beta = (self._weights[f"{block}/{norm}/{n}"] for n in ("gamma", "beta"))
                kernel = self._weights[f"{block}/{path}/kernel"]
                bias = self._weights[f"{block}/{path}/bias"]
                bias.assign_add(tf.linalg.matvec(kernel, beta, transpose_a=True))
                kernel.assign(kernel * gamma[:, None])
                gamma.assign(tf.ones_like(gamma))
                beta.assign(tf.zeros_like(beta))

    def _dense(self, x: Any, path: str) -> Any:
        kernel, bias = self._weights[f"{path}/kernel"], self._weights[f"{path}/bias"]
        rows, kernel = self._perhaps_rounded(tf.reshape(x, (-1, x.shape[-1])), path, self._axes)
        return tf.reshape(tf.matmul(rows, kernel) + bias, (*x.shape[:-1], kernel.shape[-1]))

    def _convolve(self, x: Any, path: str, *, stride: int, padding: str = "SAME") -> Any:
        x, kernel = self._perhaps_rounded(x, path, (1, 2, 3))
        return tf.nn.conv2d(x, kernel, stride, padding)

    def _perhaps_rounded(self, x: Any, path: str, axes: tuple[int, ...] | None) -> tuple[Any, Any]:
        """Returns the input and the kernel of a product, both rounded if it is this one's turn.

        Args:
            x: the input.
            path: of the product.
            axes: over which the input has one scale: all in ONNX Runtime, in LiteRT those of a
                row, or of an image.
        """
        kernel = self._weights[f"{path}/kernel"]
        if f"{path}/kernel" not in self.sizes:
            return x, kernel
        rounded: tuple[Any, Any] = tf.cond(
            self._rounded == list(self.sizes).index(f"{path}/kernel"),
            lambda: (self._round_input(x, axes), self._round_kernel(kernel)),
            lambda: (x, tf.convert_to_tensor(kernel)),
        )
        return rounded

    def _round_kernel(self, kernel: Any) -> Any:
        axes = list(range(len(kernel.shape) - 1))
        scale = tf.reduce_max(tf.abs(kernel), axis=axes, keepdims=True) / self._levels
        return tf.round(tf.math.divide_no_nan(kernel, scale)) * scale

    def _round_input(self, x: Any, axes: tuple[int, ...] | None) -> Any:
        if not self._rounds_inputs:
            return x
        low = tf.minimum(tf.reduce_min(x, axis=axes, keepdims=True), 0.0)
        high = tf.maximum(tf.reduce_max(x, axis=axes, keepdims=True), 0.0)
        scale = (high - low) / 255
        return tf.round(tf.math.divide_no_nan(x, scale)) * scale
