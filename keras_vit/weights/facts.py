"""Reads off a checkpoint's arrays which model they belong to."""

import re
from typing import Any

from keras_vit.weights.companion import PUBLISHED
from keras_vit.weights.layouts import Arrays


def published_fields(arrays: Arrays) -> dict[str, Any]:
    """Returns the ViTConfig fields that the arrays of a published layout decide.

    The image's size is not among them: only the number of positions is known.

    Raises:
        ValueError: the arrays are not those of a Vision Transformer.
    """
    shapes = {name: array.shape for name, array in arrays.items()}
    try:
        query = shapes["Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"]
        hidden = shapes["Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"]
        kernel = shapes["embedding/kernel"]
        (hidden_dim, num_heads, _), (_, mlp_dim), (patch_size, _, _, _) = query, hidden, kernel
    except (KeyError, ValueError) as error:
        raise ValueError(
            "The file does not hold a Vision Transformer in the published layout: its arrays are "
            f"{listed(shapes)}."
        ) from error
    has_map = "MAPHead_0/probe" in shapes
    has_token = "cls" in shapes
    return {
        "patch_size": patch_size,
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim,
        "num_heads": num_heads,
        "num_layers": _count(shapes, r"Transformer/encoderblock_(\d+)/"),
        "classes": shapes["head/bias"][0] if "head/bias" in shapes else None,
        "pooling": "map" if has_map else "token" if has_token else "avg",
        "class_token": has_token,
        "representation_dim": shapes["pre_logits/bias"][0] if "pre_logits/bias" in shapes else None,
        "resnet_layers": _resnet_layers(shapes),
        **PUBLISHED,
        "antialias": False,  # tf.image.resize without it: vit_jax/input_pipeline.py
    }


def published_channels(arrays: Arrays) -> int:
    """Returns the channels of the images that a published layout reads."""
    root = arrays.get("conv_root/kernel", arrays["embedding/kernel"])
    return root.shape[2]


def listed(names: Any, limit: int = 10) -> str:
    """Returns the sorted names, cut after `limit` with the number left out."""
    names = sorted(names)
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f", ... and {rest} more" if rest > 0 else "")


def _resnet_layers(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    if "conv_root/kernel" not in shapes:
        return None
    stages = _count(shapes, r"block(\d+)/unit", first=1)
    return tuple(
        _count(shapes, rf"block{stage}/unit(\d+)/", first=1) for stage in range(1, stages + 1)
    )


def _count(names: Any, pattern: str, first: int = 0) -> int:
    """Returns how many numbers the pattern finds; a gap shows up later as missing arrays."""
    found = {int(match[1]) for match in map(re.compile(pattern).match, names) if match}
    return max(found, default=first - 1) + 1 - first
