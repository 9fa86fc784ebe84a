"""Reads off a checkpoint's arrays which model they belong to."""

import itertools
import re
from collections.abc import Iterable
from typing import Any

from keras_vit.config import shown
from keras_vit.weights.companion import PUBLISHED
from keras_vit.weights.layouts import Arrays

_ROOM = 130  # letters that a list of names takes in a message


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
        classes, width = (shapes.get(f"{name}/bias", (None,))[0] for name in ("head", "pre_logits"))
    except (KeyError, ValueError, IndexError):
        raise ValueError(
            "The file does not hold a Vision Transformer in the published layout: its arrays are "
            f"{listed(shapes)}."
        ) from None
    has_map = "MAPHead_0/probe" in shapes
    has_token = "cls" in shapes
    return {
        "patch_size": patch_size,
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim,
        "num_heads": num_heads,
        "num_layers": numbered(shapes, r"Transformer/encoderblock_(\d+)/"),
        "classes": classes,
        "pooling": "map" if has_map else "token" if has_token else "avg",
        "class_token": has_token,
        "representation_dim": width,
        "resnet_layers": _resnet_layers(shapes),
        **PUBLISHED,
        "antialias": False,  # tf.image.resize without it: vit_jax/input_pipeline.py
    }


def published_channels(arrays: Arrays) -> int:
    """Returns the channels of the images that a published layout reads."""
    shape = arrays.get("conv_root/kernel", arrays["embedding/kernel"]).shape
    if len(shape) != 4:
        raise ValueError(f"The file's first kernel has shape {shape}, not one of 4 sides.")
    return shape[2]


def listed(names: Iterable[str]) -> str:
    """Returns the sorted names, cut after two or three with the number left out."""
    names = sorted(names)
    texts = [name if name.isprintable() else shown(name) for name in names]
    texts = [text if len(text) <= _ROOM else f"{text[:_ROOM]}..." for text in texts]
    ends = itertools.accumulate(len(text) + 2 for text in texts)
    count = max(1, sum(end <= _ROOM for end in ends))
    rest = len(texts) - count
    return ", ".join(texts[:count]) + (f", ... and {rest} more" if rest > 0 else "")


def numbered(names: Iterable[str], pattern: str, *, first: int = 0) -> int:
    """Returns how many numbers the pattern finds in the names, which run on from `first`.

    Raises:
        ValueError: one is missing: the largest number alone would say how many there are.
    """
    found = {match[1] for match in map(re.compile(pattern, re.ASCII).match, names) if match}
    missing = next((n for n in itertools.count(first) if str(n) not in found), first)
    if len(found) > missing - first:
        raise ValueError(
            f"The file lacks the block or unit {missing}, and has {listed(found - {str(missing)})}."
        )
    return len(found)


def _resnet_layers(shapes: Iterable[str]) -> tuple[int, ...] | None:
    if "conv_root/kernel" not in shapes:
        return None
    stages = numbered(shapes, r"block(\d+)/unit", first=1)
    return tuple(
        numbered(shapes, rf"block{stage}/unit(\d+)/", first=1) for stage in range(1, stages + 1)
    )
