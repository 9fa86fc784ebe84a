"""The layout of the weights over devices, for `keras.distribution`."""

from typing import Any

import keras

# The first product of each pair is split by columns, the second by rows, as in Megatron-LM (arXiv
# 1909.08053, Section 3): only the second needs a sum over devices.
_COLUMNS = ("attention/qkv", "mlp/fc1")
_ROWS = ("attention/out", "mlp/fc2")


def layout_map(
    mesh: keras.distribution.DeviceMesh, *, axis: str = "model"
) -> keras.distribution.LayoutMap:
    """Returns a layout that splits the wide kernels of each block over one axis of a mesh.

    Every device holds all other variables. It works on JAX; Keras on TensorFlow ignores it.

    Example:
        >>> import numpy as np
        >>> mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), np.array(["cpu:0"]))
        >>> layout_map(mesh)["block_0/mlp/fc1/kernel"].axes
        (None, 'model')

    Args:
        mesh: the devices.
        axis: name of the mesh axis to split over; its size divides `num_heads` and `mlp_dim`.

    Raises:
        ValueError: the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"The mesh has no axis {axis!r}; its axes are {list(mesh.axis_names)}.")
    layouts = keras.distribution.LayoutMap(mesh)
    for name in _COLUMNS:
        layouts[f".*block_[0-9]+/{name}/kernel"] = (None, axis)
        layouts[f".*block_[0-9]+/{name}/bias"] = (axis,)
    for name in _ROWS:
        layouts[f".*block_[0-9]+/{name}/kernel"] = (axis, None)
    return layouts


class FullySharded(keras.distribution.ModelParallel):
    """`ModelParallel` that also splits every variable over the devices that share the images.

    Weights, gradients and the optimizer's state lie on each device in part alone (FSDP, or ZeRO
    stage 3, arXiv 1910.02054); a layer's weights are gathered for its product. The widest
    dimension is split that the devices divide and that the layout map leaves whole; a variable
    without such a dimension lies on all devices. It works on JAX; Keras on TensorFlow ignores it.

    Example:
        >>> import numpy as np
        >>> mesh = keras.distribution.DeviceMesh((1,), ("batch",), np.array(["cpu:0"]))
        >>> shards = FullySharded(layout_map=keras.distribution.LayoutMap(mesh))
        >>> shards.get_variable_layout(keras.Variable(np.zeros((4, 8)))).axes
        (None, 'batch')

    Args:
        kwargs: of `keras.distribution.ModelParallel`: `layout_map` may be empty, or `layout_map`
            of this package for a mesh with two axes.
    """

    def get_variable_layout(self, variable: Any) -> keras.distribution.TensorLayout:
        layout = super().get_variable_layout(variable)
        # A layout may leave out the last dimensions.
        axes = [*layout.axes, *[None] * (len(variable.shape) - len(layout.axes))]
        places = [
            place
            for place, (size, axis) in enumerate(zip(variable.shape, axes, strict=True))
            if axis is None and size % self.num_model_replicas == 0
        ]
        # Integers are seeds and counts.
        is_float = keras.backend.is_float_dtype(variable.dtype)
        if self.batch_dim_name in axes or not places or not is_float:
            return layout
        axes[max(places, key=lambda place: variable.shape[place])] = self.batch_dim_name
        return keras.distribution.TensorLayout(axes, layout.device_mesh)
