"""From images to tokens: cutting patches, and encoding them.

Shapes: B images, H and W pixels, C channels, P patch_size, N tokens (prefix tokens first, then
patches), D hidden_dim.
"""

from typing import Any

import keras

from keras_vit import backend
from keras_vit.config import ViTConfig
from keras_vit.layers.dense import CompositeLayer, TokenDense
from keras_vit.layers.positions import PositionedLayer, check_kind, position_initializer
from keras_vit.layers.random import RandomLayer, dropout

# Learned tokens that may stand before the patches, in their order.
PREFIX = ("class_token", "distillation_token", "registers")


@keras.saving.register_keras_serializable(package="keras_vit")
class Patches(keras.layers.Layer):
    """Cuts images into a grid of square patches that do not overlap.

    Example:
        >>> Patches(16)(keras.ops.ones((2, 48, 32, 3))).shape
        TensorShape([2, 3, 2, 768])

    Args:
        patch_size: side P of a patch in pixels.

    Input shape: (B, H, W, C), H and W multiples of P, or unknown.
    Output shape: (B, H/P, W/P, P*P*C), pixels of a patch in row order, channels last.

    Raises:
        ValueError: the height or width is not a multiple of the patch.
    """

    def __init__(self, patch_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if patch_size < 1:
            raise ValueError(f"patch_size must be a positive integer. Received: {patch_size!r}.")
        self.patch_size = patch_size

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.compute_output_shape(input_shape)

    def call(self, inputs: Any) -> Any:
        self.compute_output_shape(inputs.shape)
        return backend.space_to_depth(inputs, self.patch_size)  # (B, H/P, W/P, P*P*C)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(input_shape) != 4 or input_shape[3] is None:
            raise ValueError(
                "Patches needs images of shape (batch, height, width, channels) with known "
                f"channels. Received: shape={tuple(input_shape)}."
            )
        batch, *sides, channels = input_shape
        size = self.patch_size
        if any(side is not None and side % size for side in sides):
            near = [None if side is None else max(side // size, 1) * size for side in sides]
            raise ValueError(
                f"The image's height and width must be multiples of patch_size={size}. "
                f"Received: height={sides[0]}, width={sides[1]}; resize the image, for instance to "
                f"{near[0]}x{near[1]}."
            )
        rows, columns = (None if side is None else side // size for side in sides)
        return (batch, rows, columns, size * size * channels)


@keras.saving.register_keras_serializable(package="keras_vit")
class PatchEncoder(CompositeLayer, RandomLayer, PositionedLayer):
    """Projects patches to tokens, puts learned tokens before them and adds position embeddings.

    Example:
        >>> PatchEncoder(8)(keras.ops.ones((2, 3, 2, 48))).shape
        TensorShape([2, 7, 8])

    Args:
        hidden_dim: width D of a token.
        class_token: whether a learned token stands before the patches (arXiv 2010.11929, Eq. 1).
        dropout_rate: dropout after the positions are added.
        position_embedding: "learned", "learned_2d" or "sincos_2d", see `PositionEmbedding`; None if
            the input gets none.
        num_registers: learned tokens without place after the class token (arXiv 2309.16588).
        distillation_token: whether a learned token stands after the class token, with a place of
            its own (arXiv 2012.12877).
        position_grid: (height, width) in patches that the table of positions is made for; each call
            resamples it to the input's grid, which may be unknown. None for the input's grid.
        model_config: what `ViTConfig.to_dict` gives of the model that the layer is made for, so
            that a model over its tensors is known by it; None for no such model.

    Input shape: (B, H/P, W/P, P*P*C), as `Patches` makes them.
    Output shape: (B, N, D), N = patches + the tokens before them; patches in row order.

    Raises:
        ValueError: there is no such kind of positions, or neither the input's grid nor
            `position_grid` is known.
    """

    def __init__(
        self,
        hidden_dim: int,
        *,
        class_token: bool = True,
        dropout_rate: float = 0.0,
        position_embedding: str | None = "learned",
        num_registers: int = 0,
        distillation_token: bool = False,
        position_grid: tuple[int, int] | None = None,
        model_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(is_random=dropout_rate > 0, **kwargs)
        if position_embedding is not None:
            check_kind(position_embedding)
        self.hidden_dim = hidden_dim
        self.dropout_rate = dropout_rate
        self.position_kind = position_embedding
        self.position_grid = position_grid
        self.num_registers = num_registers
        self.model_config = None if model_config is None else ViTConfig.from_dict(model_config)
        # The learned tokens before the patches, in their order, and how many each is.
        counts = (class_token, distillation_token, num_registers)
        self.prefix = tuple(zip(PREFIX, map(int, counts), strict=True))
        self.projection = TokenDense(
            hidden_dim,
            kernel_initializer="lecun_normal",
            dtype=self.dtype_policy.name,
            name="projection",
        )

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.compute_output_shape(input_shape)
        self.grid = tuple(input_shape[1:3])  # (height, width) in patches, None where unknown
        self.projection.build(input_shape)
        for name, count in self.prefix:
            if count:
                # Equal registers would stay equal; the original's class token starts at zero.
                random = position_initializer()
                weight = self.add_weight(
                    name=name,
                    shape=(1, count, self.hidden_dim),
                    initializer="zeros" if name == "class_token" else random,
                )
                setattr(self, name, weight)
        self.build_positions(
            self.position_kind,
            grid=self.position_grid or self.grid,
            hidden_dim=self.hidden_dim,
            num_prefix_tokens=sum(count for _, count in self.prefix),
            num_registers=self.num_registers,
            any_size=self.position_grid is not None,
        )
        self.restore_inside()

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        grid = None if self.position_grid is None else keras.ops.shape(inputs)[1:3]
        return self.assemble(self.embed(inputs), training=training, grid=grid)

    def embed(self, patches: Any) -> Any:
        """Projects patches (B, H/P, W/P, P*P*C) to their tokens (B, H/P * W/P, D), in row order."""
        tokens = self.projection(patches)  # (B, H/P, W/P, D)
        _, height, width, hidden_dim = tokens.shape
        if None in (height, width):
            return keras.ops.reshape(tokens, (keras.ops.shape(tokens)[0], -1, hidden_dim))
        return keras.ops.reshape(tokens, (-1, height * width, hidden_dim))

    def assemble(
        self, tokens: Any, *, training: bool | None, grid: tuple[Any, Any] | None = None
    ) -> Any:
        """Makes of the patches' tokens all of them (B, N, D): with learned ones and positions.

        `grid` is the patches', where the table of positions is resampled to it.
        """
        first = [getattr(self, name) for name, count in self.prefix if count]
        if first:
            batch = keras.ops.shape(tokens)[0]
            first = [
                keras.ops.broadcast_to(keras.ops.cast(each, tokens.dtype), (batch, *each.shape[1:]))
                for each in first
            ]
            tokens = keras.ops.concatenate([*first, tokens], axis=1)  # (B, N, D)
        if self.position_kind is not None:
            tokens = tokens + keras.ops.cast(self.position_table(grid), tokens.dtype)
        return dropout(tokens, self.dropout_rate, seed=self.next_seed(training))

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        is_grid = len(input_shape) == 4 and input_shape[3] is not None
        if not is_grid or (None in input_shape[1:3] and self.position_grid is None):
            raise ValueError(
                "PatchEncoder needs a grid of patches (batch, rows, columns, values), as Patches "
                "makes it, and position_grid if rows and columns are unknown. "
                f"Received: shape={tuple(input_shape)}."
            )
        batch, rows, columns, _ = input_shape
        if None in (rows, columns):
            return (batch, None, self.hidden_dim)
        return (batch, sum(count for _, count in self.prefix) + rows * columns, self.hidden_dim)
