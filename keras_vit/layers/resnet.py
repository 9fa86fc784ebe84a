"""The ResNet stem of the hybrids: standardised convolutions, group norms, bottleneck units.

Source: google-research/vision_transformer, vit_jax/models_resnet.py and models_vit.py.

Shapes: B images, H and W pixels; channels are the last axis.
"""

from typing import Any

import keras

from keras_vit.layers.random import initializer

GROUPS = 32
GROUP_NORM_EPSILON = 1e-6
# Added to the standard deviation, not to the variance.
STANDARDIZATION_EPSILON = 1e-5


@keras.saving.register_keras_serializable(package="keras_vit")
class StdConv2D(keras.layers.Layer):
    """A convolution without bias, padded "same", whose kernel is standardised (arXiv 1903.10520).

    Example:
        >>> StdConv2D(8, 3, strides=2)(keras.ops.ones((2, 16, 16, 3))).shape
        TensorShape([2, 8, 8, 8])

    Args:
        filters: output channels.
        kernel_size: side of the square kernel.
        strides: step in both directions.
    """

    def __init__(self, filters: int, kernel_size: int, *, strides: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters = filters
        self.kernel_size = kernel_size
        self.strides = strides

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.kernel = self.add_weight(
            name="kernel",
            shape=(self.kernel_size, self.kernel_size, input_shape[-1], self.filters),
            initializer=initializer("lecun_normal"),
        )

    def call(self, inputs: Any) -> Any:
        kernel = keras.ops.cast(self.kernel, "float32")  # statistics in float32
        kernel = kernel - keras.ops.mean(kernel, axis=(0, 1, 2))
        kernel = kernel / (keras.ops.std(kernel, axis=(0, 1, 2)) + STANDARDIZATION_EPSILON)
        kernel = keras.ops.cast(kernel, inputs.dtype)
        return keras.ops.conv(
            inputs, kernel, strides=self.strides, padding="same", data_format="channels_last"
        )

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        sides = (None if side is None else -(-side // self.strides) for side in input_shape[1:3])
        return (input_shape[0], *sides, self.filters)


@keras.saving.register_keras_serializable(package="keras_vit")
class BottleneckUnit(keras.layers.Layer):
    """1x1, 3x3 and 1x1 standardised convolutions around a shortcut, ReLU after the sum.

    Example:
        >>> BottleneckUnit(32, strides=2)(keras.ops.ones((2, 16, 16, 64))).shape
        TensorShape([2, 8, 8, 128])

    Args:
        filters: channels inside, a multiple of 32; the output has four times as many.
        strides: step of the 3x3 convolution.
    """

    def __init__(self, filters: int, *, strides: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        dtype = self.dtype_policy.name
        self.filters = filters
        self.strides = strides
        self.conv1 = StdConv2D(filters, 1, dtype=dtype, name="conv1")
        self.norm1 = _group_norm("norm1", dtype)
        self.conv2 = StdConv2D(filters, 3, strides=strides, dtype=dtype, name="conv2")
        self.norm2 = _group_norm("norm2", dtype)
        self.conv3 = StdConv2D(4 * filters, 1, dtype=dtype, name="conv3")
        # Zeros silence the branch: at first a unit is its shortcut.
        self.norm3 = _group_norm("norm3", dtype, gamma_initializer="zeros")

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.projects = input_shape[-1] != 4 * self.filters or self.strides != 1
        if self.projects:
            dtype = self.dtype_policy.name
            self.projection = StdConv2D(
                4 * self.filters, 1, strides=self.strides, dtype=dtype, name="projection"
            )
            self.projection_norm = _group_norm("projection_norm", dtype)
            self.projection.build(input_shape)
            self.projection_norm.build(self.projection.compute_output_shape(input_shape))
        shape = input_shape
        for conv, norm in self._branch():
            conv.build(shape)
            shape = conv.compute_output_shape(shape)
            norm.build(shape)

    def call(self, inputs: Any) -> Any:
        x = inputs
        for conv, norm in self._branch():
            x = norm(conv(x))
            if conv is not self.conv3:
                x = keras.ops.relu(x)
        shortcut = inputs
        if self.projects:
            shortcut = self.projection_norm(self.projection(inputs))
        return keras.ops.relu(shortcut + x)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*self.conv2.compute_output_shape(input_shape)[:3], 4 * self.filters)

    def _branch(self) -> tuple[tuple[StdConv2D, keras.layers.Layer], ...]:
        return ((self.conv1, self.norm1), (self.conv2, self.norm2), (self.conv3, self.norm3))


@keras.saving.register_keras_serializable(package="keras_vit")
class ResNetStem(keras.layers.Layer):
    """The ResNet before the patches of a hybrid: a root that divides by 4, then stages of units.

    Example:
        >>> ResNetStem((1, 1))(keras.ops.ones((1, 32, 32, 3))).shape
        TensorShape([1, 4, 4, 512])

    Args:
        layers: units in each stage; () for the root alone. Stages after the first halve the image.
    """

    def __init__(self, layers: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        dtype = self.dtype_policy.name
        self.layers = tuple(layers)
        self.root_conv = StdConv2D(64, 7, strides=2, dtype=dtype, name="root_conv")
        self.root_norm = _group_norm("root_norm", dtype)
        self.units = [
            BottleneckUnit(
                64 * 2**stage,
                strides=2 if stage > 0 and unit == 0 else 1,
                dtype=dtype,
                name=f"stage_{stage}_unit_{unit}",
            )
            for stage, units in enumerate(self.layers)
            for unit in range(units)
        ]

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.root_conv.build(input_shape)
        shape = self.root_conv.compute_output_shape(input_shape)
        self.root_norm.build(shape)
        shape = (shape[0], *(None if side is None else -(-side // 2) for side in shape[1:3]), 64)
        for unit in self.units:
            unit.build(shape)
            shape = unit.compute_output_shape(shape)

    def call(self, inputs: Any) -> Any:
        x = keras.ops.relu(self.root_norm(self.root_conv(inputs)))  # (B, H/2, W/2, 64)
        x = keras.ops.max_pool(x, 3, strides=2, padding="same", data_format="channels_last")
        for unit in self.units:
            x = unit(x)
        return x  # (B, H/4, W/4, 64) or (B, H/4/2^(stages-1), W/4/2^(stages-1), 256 * 2^(stages-1))

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        shape = self.root_conv.compute_output_shape(input_shape)
        shape = (shape[0], *(None if side is None else -(-side // 2) for side in shape[1:3]), 64)
        for unit in self.units:
            shape = unit.compute_output_shape(shape)
        return shape


def _group_norm(name: str, dtype: str, **kwargs: Any) -> keras.layers.Layer:
    return keras.layers.GroupNormalization(
        groups=GROUPS, epsilon=GROUP_NORM_EPSILON, dtype=dtype, name=name, **kwargs
    )
