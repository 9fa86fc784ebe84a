"""From images to tokens: cutting patches and encoding them."""

from typing import Any

import keras

from keras_vit import backend
from keras_vit.layers.dense import TokenDense
from keras_vit.layers.initialization import initializer
from keras_vit.layers.random import RandomLayer, dropout

# From BERT, as the original says (vit_jax/models_vit.py, Encoder).
POSITION_STDDEV = 0.02


@keras.saving.register_keras_serializable(package="keras_vit")
class Patches(keras.layers.Layer):
    """Cuts images into a grid of square patches that do not overlap.

    Example:
        >>> Patches(16)(keras.ops.ones((2, 48, 32, 3))).shape
        TensorShape([2, 3, 2, 768])

    Args:
        patch_size: side P of a patch in pixels.

    Input shape: (B, H, W, C), H and W multiples of P.
    Output shape: (B, H/P, W/P, P*P*C), pixels of a patch in row order, channels last.

    Raises:
        ValueError: the height or width is unknown or not a multiple of the patch.
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
        if len(input_shape) != 4 or any(side is None for side in input_shape[1:]):
            raise ValueError(
                "Patches needs images of shape (batch, height, width, channels) with known height, "
                f"width and channels. Received: shape={tuple(input_shape)}."
            )
        batch, height, width, channels = input_shape
        size = self.patch_size
        if height % size or width % size:
            raise ValueError(
                f"The image's height and width must be multiples of patch_size={size}. "
                f"Received: height={height}, width={width}; resize the image, for instance to "
                f"{max(height // size, 1) * size}x{max(width // size, 1) * size}."
            )
        return (batch, height // size, width // size, size * size * channels)


@keras.saving.register_keras_serializable(package="keras_vit")
class PatchEncoder(RandomLayer):
    """Projects patches to tokens, puts a class token before them and adds position embeddings.

    Example:
        >>> PatchEncoder(8)(keras.ops.ones((2, 3, 2, 48))).shape
        TensorShape([2, 7, 8])

    Args:
        hidden_dim: width D of a token.
        class_token: whether a learned token stands before the patches (arXiv 2010.11929, Eq. 1).
        dropout_rate: dropout after the positions are added.

    Input shape: (B, H/P, W/P, P*P*C), as `Patches` makes them.
    Output shape: (B, N, D), N = patches + 1 with a class token; patches in row order.
    """

    def __init__(
        self,
        hidden_dim: int,
        *,
        class_token: bool = True,
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(is_random=dropout_rate > 0, **kwargs)
        self.hidden_dim = hidden_dim
        self.dropout_rate = dropout_rate
        self.use_class_token = class_token
        self.projection = TokenDense(
            hidden_dim,
            kernel_initializer="lecun_normal",
            dtype=self.dtype_policy.name,
            name="projection",
        )

    def build(self, input_shape: tuple[Any, ...]) -> None:
        _, tokens, _ = self.compute_output_shape(input_shape)
        self.grid = tuple(input_shape[1:3])  # (height, width) in patches
        self.projection.build(input_shape)
        if self.use_class_token:
            self.class_token = self.add_weight(
                name="class_token", shape=(1, 1, self.hidden_dim), initializer="zeros"
            )
        self.position_embedding = self.add_weight(
            name="position_embedding",
            shape=(1, tokens, self.hidden_dim),
            initializer=initializer(keras.initializers.RandomNormal(stddev=POSITION_STDDEV)),
        )

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        tokens = self.projection(inputs)  # (B, H/P, W/P, D)
        _, height, width, hidden_dim = tokens.shape
        tokens = keras.ops.reshape(tokens, (-1, height * width, hidden_dim))  # (B, H/P * W/P, D)
        if self.use_class_token:
            batch = keras.ops.shape(tokens)[0]
            first = keras.ops.broadcast_to(
                keras.ops.cast(self.class_token, tokens.dtype), (batch, 1, hidden_dim)
            )
            tokens = keras.ops.concatenate([first, tokens], axis=1)  # (B, N, D)
        tokens = tokens + keras.ops.cast(self.position_embedding, tokens.dtype)
        return self.drop(tokens, training=training)

    def drop(self, tokens: Any, *, training: bool | None) -> Any:
        """Applies the dropout that comes after the positions."""
        return dropout(tokens, self.dropout_rate, seed=self.next_seed(training))

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(input_shape) != 4 or any(side is None for side in input_shape[1:]):
            raise ValueError(
                "PatchEncoder needs a grid of patches (batch, rows, columns, values), as Patches "
                f"makes it. Received: shape={tuple(input_shape)}."
            )
        batch, rows, columns, _ = input_shape
        return (batch, rows * columns + self.use_class_token, self.hidden_dim)
