"""Writes a model in the published .npz layout, so that JAX and timm load what was trained here."""

import zipfile
from pathlib import Path

import keras
import numpy as np

from keras_vit.atomic import whole_file
from keras_vit.model import VisionTransformer
from keras_vit.weights.companion import MARK, check_free, needs_companion, write_companion
from keras_vit.weights.layouts import check_published, original_rows


def save_npz(model: VisionTransformer, path: str | Path) -> Path:
    """Writes a model's weights under the published names and shapes, in float32.

    The layout has no room for the GELU's form, the epsilon, the pixels' mean and deviation or a
    grid that is not square: they go into a companion, `vit.json` beside `vit.npz`, which
    `keras_vit.load`, `keras_vit.weights.load` and the builders read. Who loads the file elsewhere
    must know them. Each of the two files appears whole or not at all.

    Example:
        >>> import tempfile
        >>> from keras_vit.config import ViTConfig
        >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=3)
        >>> path = save_npz(VisionTransformer(config), Path(tempfile.mkdtemp()) / "vit.npz")
        >>> np.load(path)["Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"].shape
        (8, 16)

    Args:
        model: the model to write.
        path: the file to write or replace; its name ends in .npz.

    Returns:
        The path.

    Raises:
        ValueError: the name does not end in .npz, or the layout has no room for the network.
        FileExistsError: a .json file of that name is there, and not `save_npz`'s.
    """
    check_published(model.config)
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"The published layout is an .npz file. Received: {str(path)!r}.")
    check_free(path)
    variables = {variable.path: variable for variable in model.weights}
    with whole_file(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        archive.comment = MARK if needs_companion(model.config) else b""
        for row in original_rows(model.config):
            value = keras.ops.convert_to_numpy(variables[row.path]).astype(np.float32, copy=False)
            for name, array in zip(row.names, row.split(value), strict=True):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    write_companion(path, model.config)
    return path
