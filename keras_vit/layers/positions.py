"""How tokens know their place: tables added to them, or a bias of attention.

The kinds are those that arXiv 2010.11929, Appendix D.4, compares, and the fixed sines.
"""

from typing import Any

import keras
import numpy as np

from keras_vit.config import WIDTH_MULTIPLES
from keras_vit.layers.initialization import initializer

# From BERT, as the original says (vit_jax/models_vit.py, Encoder).
POSITION_STDDEV = 0.02
# google-research/big_vision, models/vit.py, posemb_sincos_2d.
TEMPERATURE = 10_000
TABLES = ("learned", "learned_2d", "sincos_2d")
# Rows of a bias that stand before the offsets': from a token without place to one with a place,
# back, and between two without (microsoft/unilm, beit/modeling_finetune.py, RelativePositionBias).
BIAS_PREFIX = 3


class PositionedLayer(keras.layers.Layer):
    """A layer that may have a table of position embeddings of its own."""

    def build_positions(
        self,
        kind: str | None,
        *,
        grid: tuple[int, int],
        hidden_dim: int,
        num_prefix_tokens: int,
        num_registers: int,
    ) -> None:
        """Adds the variables of the table.

        Args:
            kind: one of `TABLES`, or None for no table.
            grid: (height, width) in patches.
            hidden_dim: width D of a token.
            num_prefix_tokens: tokens before the patches'.
            num_registers: how many of them, the last ones, are registers, which have no place.

        Raises:
            ValueError: the width cannot be cut into the parts that the table is made of.
        """
        multiple = WIDTH_MULTIPLES.get(str(kind), 1)
        if hidden_dim % multiple:
            raise ValueError(
                f"Positions {kind!r} need tokens whose width is a multiple of {multiple}. "
                f"Received: {hidden_dim}."
            )
        self._kind, self._grid, self._width = kind, grid, hidden_dim
        self._registers = num_registers
        self._placed = placed = num_prefix_tokens - num_registers
        rows, columns = grid
        if kind == "learned":
            self.position_embedding = self._table("position_embedding", placed + rows * columns)
        if kind == "learned_2d":
            # The tokens before the patches have places of their own, as with "learned": the two
            # differ in nothing but the patches.
            if placed:
                self.position_prefix = self._table("position_prefix", placed)
            self.position_x = self._table("position_x", columns, hidden_dim // 2)
            self.position_y = self._table("position_y", rows, hidden_dim // 2)
        if kind == "sincos_2d":
            self._sines = sincos_table(grid, hidden_dim)

    def position_table(self) -> Any:
        """Returns the table (1, N, D); its rows of registers are zeros.

        Raises:
            ValueError: the layer has no table.
        """
        if self._kind is None:
            raise ValueError(f"The layer {self.name!r} has no position embeddings.")
        if self._kind == "learned" and not self._registers:
            return self.position_embedding
        first, patches = self._parts()
        dtype = keras.backend.standardize_dtype(patches.dtype)
        zeros = keras.ops.zeros((1, self._registers, self._width), dtype)
        return keras.ops.concatenate([keras.ops.cast(first, dtype), zeros, patches], axis=1)

    def _parts(self) -> tuple[Any, Any]:
        """Returns the rows of the tokens before the patches, but registers, and the patches'."""
        (rows, columns), width = self._grid, self._width
        nothing = np.zeros((1, self._placed, width), np.float32)
        if self._kind == "learned":
            table = keras.ops.convert_to_tensor(self.position_embedding)
            return table[:, : self._placed], table[:, self._placed :]
        if self._kind == "sincos_2d":
            return nothing, keras.ops.convert_to_tensor(self._sines)
        x = keras.ops.expand_dims(keras.ops.convert_to_tensor(self.position_x), 1)
        y = keras.ops.expand_dims(keras.ops.convert_to_tensor(self.position_y), 2)
        halves = [keras.ops.broadcast_to(each, (1, rows, columns, width // 2)) for each in (x, y)]
        patches = keras.ops.reshape(keras.ops.concatenate(halves, -1), (1, rows * columns, width))
        return self.position_prefix if self._placed else nothing, patches

    def _table(self, name: str, rows: int, width: int | None = None) -> Any:
        return self.add_weight(
            name=name,
            shape=(1, rows, width or self._width),
            initializer=initializer(keras.initializers.RandomNormal(stddev=POSITION_STDDEV)),
        )


@keras.saving.register_keras_serializable(package="keras_vit")
class PositionEmbedding(PositionedLayer):
    """Adds position embeddings to tokens; between blocks, `PatchEncoder` adds those of the input.

    Example:
        >>> PositionEmbedding("learned_2d", grid=(2, 3))(keras.ops.zeros((1, 7, 8))).shape
        TensorShape([1, 7, 8])

    Args:
        kind: "learned" for each token, "learned_2d" for each row and each column in halves of the
            width, or "sincos_2d", fixed: sines and cosines of column and row, zeros before them.
        grid: (height, width) in patches.
        num_prefix_tokens: tokens before the patches'.
        num_registers: how many of them, the last ones, are registers, which have no place.

    Input shape: (B, N, D). Output shape: the same.

    Raises:
        ValueError: there is no such kind, or the tokens are not as many as said.
    """

    def __init__(
        self,
        kind: str | None,
        *,
        grid: tuple[int, int],
        num_prefix_tokens: int = 1,
        num_registers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_kind(kind)
        self.kind = kind
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens
        self.num_registers = num_registers

    def build(self, input_shape: tuple[Any, ...]) -> None:
        (rows, columns), prefix = self.grid, self.num_prefix_tokens
        if input_shape[1] != prefix + rows * columns:
            raise ValueError(
                f"A grid of {rows}x{columns} patches after {prefix} other tokens makes "
                f"{prefix + rows * columns}. Received: {input_shape[1]} tokens."
            )
        self.build_positions(
            self.kind,
            grid=(rows, columns),
            hidden_dim=input_shape[-1],
            num_prefix_tokens=prefix,
            num_registers=self.num_registers,
        )

    def call(self, inputs: Any) -> Any:
        return inputs + keras.ops.cast(self.position_table(), inputs.dtype)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape


def check_kind(kind: str | None) -> None:
    """Raises a ValueError unless `kind` is one of `TABLES`."""
    if kind not in TABLES:
        raise ValueError(f"Position tables are {', '.join(TABLES)}. Received: {kind!r}.")


def sincos_table(grid: tuple[int, int], width: int) -> np.ndarray:
    """Returns the fixed table of a grid, (1, patches, width), as big_vision's models have it.

    Quarters of the width are sin(x), cos(x), sin(y), cos(y), each at frequencies that fall
    geometrically from 1 to 1 / 10000.
    """
    quarter = width // 4
    falling = TEMPERATURE ** (-np.arange(quarter) / max(quarter - 1, 1))
    y, x = (np.multiply.outer(place.ravel(), falling) for place in np.indices(grid))
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    return table[None].astype(np.float32)


def bias_rows(grid: tuple[int, int], num_prefix_tokens: int) -> int:
    """Returns how many values a relative bias has for each head."""
    return bool(num_prefix_tokens) * BIAS_PREFIX + (2 * grid[0] - 1) * (2 * grid[1] - 1)


def bias_index(grid: tuple[int, int], num_prefix_tokens: int) -> np.ndarray:
    """Returns which row of a relative bias stands between two tokens, (N, N), asking first.

    A row for each offset (rows, columns) from the asking patch to the asked one, the most negative
    first; before them the `BIAS_PREFIX`, if there are tokens before the patches.
    """
    places = np.indices(grid).reshape(2, -1)  # (2, patches)
    rows, columns = places[:, None, :] - places[:, :, None] + np.array(grid)[:, None, None] - 1
    between = rows * (2 * grid[1] - 1) + columns
    if not num_prefix_tokens:
        return np.asarray(between)
    count = num_prefix_tokens + len(between)
    index = np.empty((count, count), np.int64)
    index[:num_prefix_tokens], index[:, :num_prefix_tokens] = 0, 1
    index[:num_prefix_tokens, :num_prefix_tokens] = 2
    index[num_prefix_tokens:, num_prefix_tokens:] = between + BIAS_PREFIX
    return index
