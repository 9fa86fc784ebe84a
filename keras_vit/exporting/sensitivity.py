"""Measures what rounding each kernel to int8 costs, and chooses those that stay float32."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.exporting.clean import agreement
from keras_vit.exporting.clean.agreement import Check, Gate
from keras_vit.exporting.formats import MIN_ELEMENTS, Format
from keras_vit.exporting.rebuild import Exportable
from keras_vit.exporting.tflite import EdgeForward

ATTEMPTS = 4  # to write a file again with more kernels in float32
# Images to measure on, at least and at most, where that takes no more multiplications than so many.
COUNTS, WORK = (2, 8), 4e12
AIM = 0.8  # of a limit, as the errors of the parts do not quite add up to those of the whole
_LEVELS, _ONNX_LEVELS = 127, 64  # of half the range of a kernel's values; in products of ONNX


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


def measure(exportable: Exportable, row: Format, gate: Gate) -> list[Cost]:
    """Measures the cost of each kernel of the dense products.

    The errors of several kernels nearly add up, as they have little to do with each other. Of the
    gate the first images are taken.

    Raises:
        ValueError: the kernels have no names.
    """
    config = exportable.written_config
    if config is None:
        raise ValueError("Only the kernels of a network like the published ones have names.")
    products = sum(weight.path.endswith("/kernel") for weight in exportable.network.weights)
    work = products * config.num_tokens * exportable.parameter_bytes / 4
    images = gate.images[: int(np.clip(WORK / work, *COUNTS))]
    module = _Rounding(exportable, row, config=config, batch_size=len(images))

    def answer(place: int = -1) -> np.ndarray:
        module.chosen.assign(place)
        return agreement.centred(gate, np.asarray(module.call(images)[gate.outputs[0]]))

    plain = answer()
    return [
        Cost(kernel=kernel, error=float(np.mean(np.square(answer(place) - plain))), size=size)
        for place, (kernel, size) in enumerate(module.sizes.items())
    ]


def choose(costs: Sequence[Cost], *, share: float) -> tuple[str, ...]:
    """Returns the kernels to keep in float32, so that a share of the mean square error is left.

    It takes first what costs the most for its size, and gives back what later ones make up for.

    Example:
        >>> choose([Cost(kernel="a", error=6.0, size=4), Cost(kernel="b", error=3.0, size=1),
        ...         Cost(kernel="c", error=1.0, size=1)], share=0.5)
        ('a',)
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


def excess(checks: Iterable[Check]) -> float:
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
    """The forward pass, in which one kernel and its inputs are rounded.

    Attributes:
        chosen: the place of this kernel in `sizes`; -1 for none.
        sizes: the elements of each kernel that files of the format round.
    """

    def __init__(
        self, exportable: Exportable, row: Format, *, config: ViTConfig, batch_size: int
    ) -> None:
        super().__init__(exportable, config=config, batch_size=batch_size)
        self._row, self.chosen = row, tf.Variable(-1)
        rounds_images = row.runtime == "tflite" and row.products == "int8"
        self.sizes = {
            path: int(np.prod(value.shape))
            for path, value in self.arrays.items()
            if path.endswith("/kernel")
            and np.prod(value.shape) >= MIN_ELEMENTS
            and (len(value.shape) == 2 or rounds_images)
        }
        if row.runtime == "tflite":
            self._fold_norms()

    def _fold_norms(self) -> None:
        """Takes the factor of a normalisation into the next kernel, as TFLite's converter does."""
        for norm, path in (("attention_norm", "attention/qkv"), ("mlp_norm", "mlp/fc1")):
            for block in (f"block_{index}" for index in range(self.config.num_layers)):
                gamma, beta = (self.arrays[f"{block}/{norm}/{n}"] for n in ("gamma", "beta"))
                kernel = self.arrays[f"{block}/{path}/kernel"]
                bias = self.arrays[f"{block}/{path}/bias"]
                bias.assign_add(tf.linalg.matvec(kernel, beta, transpose_a=True))
                kernel.assign(kernel * gamma[:, None])
                gamma.assign(tf.ones_like(gamma))
                beta.assign(tf.zeros_like(beta))

    def product(self, multiply: Callable[[Any, Any], Any], x: Any, path: str) -> Any:
        kernel, kernels = self.arrays[f"{path}/kernel"], list(self.sizes)
        if f"{path}/kernel" in kernels:  # in one graph: operation by operation is slower
            x, kernel = tf.cond(
                self.chosen == kernels.index(f"{path}/kernel"),
                lambda: self._rounded(x, kernel),
                lambda: (x, tf.convert_to_tensor(kernel)),
            )
        return multiply(x, kernel)

    def _rounded(self, x: Any, kernel: Any) -> tuple[Any, Any]:
        rounds_inputs, is_onnx = self._row.products == "int8", self._row.runtime == "onnx"
        axes = list(range(len(kernel.shape) - 1))
        most = tf.reduce_max(tf.abs(kernel), axis=axes, keepdims=True)
        kernel = _round(kernel, most / (_ONNX_LEVELS if rounds_inputs and is_onnx else _LEVELS))
        if rounds_inputs:
            # One scale for all in ONNX Runtime, in LiteRT for each row, or image.
            rows = None if is_onnx else range(1, len(x.shape))
            low = tf.minimum(tf.reduce_min(x, axis=rows, keepdims=True), 0.0)
            high = tf.maximum(tf.reduce_max(x, axis=rows, keepdims=True), 0.0)
            x = _round(x, (high - low) / 255)
        return x, kernel


def _round(values: Any, scale: Any) -> Any:
    return tf.round(tf.math.divide_no_nan(values, scale)) * scale
