"""The layout of the weights over devices under `keras.distribution.ModelParallel`."""

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
