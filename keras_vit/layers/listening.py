"""Lets a caller hear what layers compute inside, in its own thread alone."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from keras_vit import backend

Heard = dict[keras.layers.Layer, list[Any]]

_heard: contextvars.ContextVar[Mapping[keras.layers.Layer, list[Any]] | None]
_heard = contextvars.ContextVar("heard", default=None)


@contextlib.contextmanager
def listening(*layers: keras.layers.Layer) -> Iterator[Heard]:
    """Inside this scope the given layers tell what they compute, each time they are called.

    Attention tells its weights (B, H, N, N), attention pooling its own (B, H, 1, N), a block its
    tokens (B, N, D). What is traced into a graph tells nothing, and neither layers nor graphs are
    changed: other threads may call the model meanwhile.

    Example:
        >>> from keras_vit.layers import MultiHeadSelfAttention
        >>> attention = MultiHeadSelfAttention(num_heads=2)
        >>> with listening(attention) as heard:
        ...     _ = attention(keras.ops.ones((1, 5, 8)))
        >>> heard[attention][0].shape
        TensorShape([1, 2, 5, 5])
    """
    heard: Heard = {layer: [] for layer in layers}
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


def is_heard(layer: keras.layers.Layer, x: Any) -> bool:
    """Whether somebody listens to a layer that now computes with x."""
    heard = _heard.get()
    return heard is not None and layer in heard and backend.is_concrete(x)


def tell(layer: keras.layers.Layer, value: Any) -> None:
    """Tells what a layer has computed to whoever listens."""
    heard = _heard.get()
    if heard is not None and is_heard(layer, value):
        heard[layer].append(value)
