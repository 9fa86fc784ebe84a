"""The Transformer encoder block, with stochastic depth, and patch dropout before the first.

Shapes: B images, N tokens (prefix tokens first, then patches), D hidden_dim, M mlp_dim, K width of
a head.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit import backend
from keras_vit.backend import private
from keras_vit.layers.attention import MultiHeadSelfAttention, is_recording, record
from keras_vit.layers.dense import MLP, CompositeLayer, LayerNormalization
from keras_vit.layers.random import RandomLayer, draw_places, drop_samples, initializer


@keras.saving.register_keras_serializable(package="keras_vit")
class DropPath(RandomLayer):
    """Drops a residual branch for whole samples in training (stochastic depth, arXiv 1603.09382).

    What is kept is divided by `1 - rate`, so that the expectation stays.

    Example:
        >>> DropPath(0.5)(keras.ops.ones((2, 3, 4)), training=False).shape
        TensorShape([2, 3, 4])

    Args:
        rate: fraction of samples whose branch is dropped, in [0, 1).
        seed: integer seed of the masks; None for a random one.

    Raises:
        ValueError: the rate is outside [0, 1).
    """

    def __init__(self, rate: float, *, seed: int | None = None, **kwargs: Any) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"rate must lie in [0, 1). Received: rate={rate!r}.")
        super().__init__(is_random=rate > 0, seed=seed, **kwargs)
        self.rate = rate
        self.seed = seed

    def call(self, inputs: Any, training: bool | None = None, seed: Any = None) -> Any:
        """Drops with `seed`, drawn by `next_seed`; with a new one if it is None."""
        return drop_samples(inputs, self.rate, seed=self.seed_of_call(seed, training))

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape


@keras.saving.register_keras_serializable(package="keras_vit")
class PatchDropout(RandomLayer):
    """Leaves out a random part of each image's patch tokens in training (arXiv 2212.00794).

    Those that are left keep their order. Nothing is scaled.

    Example:
        >>> PatchDropout(0.5)(keras.ops.ones((2, 9, 4)), training=True).shape
        TensorShape([2, 5, 4])

    Args:
        rate: fraction of the patches that is left out, in [0, 1); one stays at least.
        num_prefix_tokens: tokens before the patches', which all stay.
        seed: integer seed of the draws; None for a random one.

    Input shape: (B, N, D). Output shape: the same, in training with fewer N. With the
    `cos_sin` (2, N, K) of `RotaryEmbedding`, a pair: the tokens, and the cosines and sines of those
    left, in training (2, B, N, K).

    Raises:
        ValueError: the rate is outside [0, 1).
    """

    def __init__(
        self, rate: float, *, num_prefix_tokens: int = 1, seed: int | None = None, **kwargs: Any
    ) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"rate must lie in [0, 1). Received: rate={rate!r}.")
        super().__init__(is_random=rate > 0, seed=seed, **kwargs)
        self.rate = rate
        self.num_prefix_tokens = num_prefix_tokens
        self.seed = seed

    def call(self, inputs: Any, cos_sin: Any = None, training: bool | None = None) -> Any:
        seed = self.next_seed(training)
        places = None if seed is None else self._places(inputs, seed)
        if places is not None:
            inputs = keras.ops.take_along_axis(inputs, places[..., None], axis=1)
        if cos_sin is None:
            return inputs
        return inputs, cos_sin if places is None else keras.ops.take(cos_sin, places, axis=1)

    def _places(self, tokens: Any, seed: Any) -> Any:
        """Draws which tokens (B, N, D) are left: their places (B, N), in rising order."""
        batch, count, _ = keras.ops.shape(tokens)
        prefix = self.num_prefix_tokens
        patches = count - prefix
        if isinstance(patches, int):
            left = max(round((1 - self.rate) * patches), 1)
        else:
            share = keras.ops.round((1 - self.rate) * keras.ops.cast(patches, "float32"))
            left = keras.ops.maximum(keras.ops.cast(share, "int32"), 1)
        places = prefix + draw_places(batch, left, of=patches, seed=seed)
        first = keras.ops.broadcast_to(
            keras.ops.arange(prefix, dtype=places.dtype), (batch, prefix)
        )
        return keras.ops.concatenate([first, places], axis=1)


@keras.saving.register_keras_serializable(package="keras_vit")
class TransformerBlock(CompositeLayer):
    """A pre-norm encoder block: attention, then MLP, each added to its input (arXiv 2010.11929).

    Example:
        >>> TransformerBlock(num_heads=2, mlp_dim=32)(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 5, 8])

    Args:
        num_heads: attention heads; divides the width D of the tokens.
        mlp_dim: width M of the MLP's hidden layer.
        activation: of the MLP, as there.
        layer_norm_epsilon: epsilon of the layer normalisations.
        dropout_rate: dropout after each dense layer except query, key and value.
        attention_dropout_rate: dropout on the attention weights.
        drop_path_rate: fraction of samples for which a branch is dropped in training.
        remat: whether training keeps only the block's input and recomputes the rest for the
            gradient (gradient checkpointing, arXiv 1604.06174): less memory, more time. On JAX also
            "dots", which keeps the results of products with weights, too.
        layer_scale: initial value of a learned factor for each channel of both branches (arXiv
            2103.17239); None for none.
        query_key_norm: whether queries and keys are normalised in each head.
        relative_grid: (height, width) in patches of a relative bias of attention, see
            `MultiHeadSelfAttention`; None for none.
        rotary: arguments of rotary positions, see there; None for none.
    """

    def __init__(
        self,
        num_heads: int,
        mlp_dim: int,
        *,
        activation: str = "gelu_tanh",
        layer_norm_epsilon: float = 1e-6,
        dropout_rate: float = 0.0,
        attention_dropout_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        remat: bool | str = False,
        layer_scale: float | None = None,
        query_key_norm: bool = False,
        relative_grid: tuple[int, int] | None = None,
        rotary: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.remat = remat
        self.layer_scale = layer_scale
        dtype = self.dtype_policy.name
        self.attention_norm = LayerNormalization(
            epsilon=layer_norm_epsilon, dtype=dtype, name="attention_norm"
        )
        self.attention = MultiHeadSelfAttention(
            num_heads,
            attention_dropout_rate=attention_dropout_rate,
            dropout_rate=dropout_rate,
            query_key_norm=query_key_norm,
            layer_norm_epsilon=layer_norm_epsilon,
            relative_grid=relative_grid,
            rotary=rotary,
            dtype=dtype,
            name="attention",
        )
        self.mlp_norm = LayerNormalization(epsilon=layer_norm_epsilon, dtype=dtype, name="mlp_norm")
        self.mlp = MLP(
            mlp_dim, activation=activation, dropout_rate=dropout_rate, dtype=dtype, name="mlp"
        )
        self.drop_path = DropPath(drop_path_rate, dtype=dtype)

    def build(self, input_shape: tuple[Any, ...]) -> None:
        # Keras quantises built layers alone: drop path has no weights, but is one of them.
        for layer in (self.attention_norm, self.attention, self.mlp_norm, self.mlp, self.drop_path):
            layer.build(input_shape)
        if self.layer_scale is not None:
            self.attention_scale, self.mlp_scale = (
                self.add_weight(
                    name=name,
                    shape=input_shape[-1:],
                    initializer=initializer(keras.initializers.Constant(self.layer_scale)),
                )
                for name in ("attention_scale", "mlp_scale")
            )
        self.restore_inside()

    def call(self, inputs: Any, training: bool | None = None, cos_sin: Any = None) -> Any:
        """Rotates queries and keys by the `cos_sin` (2, N, K) of `RotaryEmbedding`, if given.

        Where each image has its own, they are (2, B, N, K).
        """
        if training:
            backend.warn_of_keras_step()
        # Drawn here, so that a recomputed block drops the same units.
        seeds = self.next_seeds(training)
        if not (self.remat and training):
            return self.compute(inputs, seeds, cos_sin)
        # What is recomputed takes tensors alone: None is left out here, and put back inside.
        options = [*seeds, cos_sin]
        tensors = [option for option in options if option is not None]

        def forward(inputs: Any, *tensors: Any) -> Any:
            iterator = iter(tensors)
            *seeds, cos_sin = [None if option is None else next(iterator) for option in options]
            return self.compute(inputs, seeds, cos_sin)

        return backend.remat(forward, self.kept)(inputs, *tensors)

    @property
    def kept(self) -> str | None:
        """What recomputing keeps beside the block's input; None for nothing."""
        return self.remat if isinstance(self.remat, str) else None

    def next_seeds(self, training: bool | None) -> list[Any]:
        """Draws the seeds of one call, of each part and its drop path; None for what drops nothing.

        A part without a seed is not random, or it is not training.
        """
        parts = (self.attention, self.drop_path, self.mlp, self.drop_path)
        return [part.next_seed(training) for part in parts]

    def compute(self, inputs: Any, seeds: list[Any], cos_sin: Any, rate: Any = None) -> Any:
        """Computes the block with seeds of `next_seeds`, by `call` or in the place of others.

        Args:
            inputs: (B, N, D).
            seeds: two integers each, or None.
            cos_sin: as those of `call`.
            rate: of drop path; None for the block's own.
        """
        rate = self.drop_path.rate if rate is None else rate
        rotary = {} if cos_sin is None else {"cos_sin": cos_sin}
        tokens = self._add(
            self.attention, self.attention_norm, inputs, seeds[:2], rate, **rotary
        )  # (B, N, D)
        tokens = self._add(self.mlp, self.mlp_norm, tokens, seeds[2:], rate)  # (B, N, D)
        tokens = backend.flatten_batch(tokens)
        record(self, tokens)
        return tokens

    def _add(
        self,
        part: RandomLayer,
        norm: LayerNormalization,
        tokens: Any,
        seeds: list[Any],
        rate: Any,
        **turned: Any,
    ) -> Any:
        if self.layer_scale is not None:
            # Cast by hand: Keras does not cast in a recomputed block.
            scale = getattr(self, f"{part.name}_scale")
            turned["scale"] = keras.ops.cast(scale, tokens.dtype)
        if seeds[1] is None:  # the part's last product can add them
            return part(norm(tokens), seed=seeds[0], residual=tokens, **turned)
        branch = part(norm(tokens), seed=seeds[0], **turned)
        return tokens + drop_samples(branch, rate, seed=seeds[1])


def run_blocks(
    blocks: Sequence[TransformerBlock], tokens: Any, *, training: bool | None, cos_sin: Any = None
) -> Any:
    """Applies blocks of one config one after another to tokens (B, N, D).

    Blocks with weights of the same shapes become one loop over their weights, where this is traced
    on JAX and nothing is recorded. The numbers are the same.

    Args:
        blocks: which may differ in their weights and in the rate of drop path.
        tokens: (B, N, D).
        training: whether they drop.
        cos_sin: as those of a block's `call`.
    """
    if backend.scan_layers is None or backend.is_concrete(tokens) or is_recording():
        runs = [[block] for block in blocks]
    else:
        runs = [list(run) for _, run in itertools.groupby(blocks, _kind)]
    for run in runs:
        if len(run) == 1:
            tokens = run[0](tokens, training=training, cos_sin=cos_sin)
        else:
            tokens = _scan(run, tokens, training=training, cos_sin=cos_sin)
    return tokens  # (B, N, D)


def _kind(block: TransformerBlock) -> Any:
    """Returns what is equal for blocks that can be one loop."""
    inside = private.layers_of(block)
    if any(getattr(layer, "quantization_mode", None) for layer in inside):
        return id(block)  # float8 assigns to its variables, which a loop would lose
    return [(v.name, tuple(v.shape), v.dtype, v.trainable) for v in block.weights]


def _scan(
    blocks: list[TransformerBlock], tokens: Any, *, training: bool | None, cos_sin: Any
) -> Any:
    """Applies blocks of one kind to tokens (B, N, D), the first of them in the place of all."""
    # One body is traced for all, so what differs between blocks must be data: seeds and rates.
    first = blocks[0]
    columns = zip(*(block.next_seeds(training) for block in blocks), strict=True)
    # The rates differ between blocks of one loop, so that they are its data and no constants.
    rates = [np.float32(block.drop_path.rate) for block in blocks]
    rows = list(zip(zip(*map(_filled, columns), strict=True), rates, strict=True))

    def step(tokens: Any, row: Any) -> Any:
        seeds, rate = row
        return first.compute(tokens, list(seeds), cos_sin, rate=rate)

    if first.remat and training:
        step = backend.remat(step, first.kept)
    return backend.scan_layers(step, tokens, layers=blocks, rows=rows)


def _filled(seeds: Sequence[Any]) -> list[Any]:
    """Gives each block a seed, any, if some have one: the rate of the others is 0."""
    some = next((seed for seed in seeds if seed is not None), None)
    return [some if seed is None else seed for seed in seeds]
