"""The table of published variants, and how many parameters a config has.

Knows no framework: importing this module costs nothing.
"""

from collections.abc import Mapping
from typing import Any

from keras_vit.config import STEM_WIDTH, ViTConfig

# Sizes: name -> hidden_dim, mlp_dim, num_heads, num_layers.
SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "Ti": (192, 768, 3, 12),  # arXiv 2106.10270, Table 2
    "S": (384, 1536, 6, 12),  # arXiv 2106.10270, Table 2
    "B": (768, 3072, 12, 12),  # arXiv 2010.11929, Table 1
    "L": (1024, 4096, 16, 24),  # arXiv 2010.11929, Table 1
    "H": (1280, 5120, 16, 32),  # arXiv 2010.11929, Table 1
    "g": (1408, 6144, 16, 40),  # arXiv 2106.04560, Table 2
    "G": (1664, 8192, 16, 48),  # arXiv 2106.04560, Table 2
    "So400m": (1152, 4304, 16, 27),  # arXiv 2305.13035, Section 5: shaped for 400 M parameters
}


def _variant(size: str, patch_size: int, **fields: Any) -> ViTConfig:
    hidden_dim, mlp_dim, num_heads, num_layers = SIZES[size]
    return ViTConfig(
        patch_size=patch_size,
        hidden_dim=hidden_dim,
        mlp_dim=mlp_dim,
        num_heads=num_heads,
        num_layers=num_layers,
        **fields,
    )


def _map_variant(size: str, patch_size: int) -> ViTConfig:
    # The scaled-up models pool by attention, without a class token (arXiv 2106.04560, Section 3).
    return _variant(size, patch_size, pooling="map", class_token=False)


# The hybrids' stages: google-research/vision_transformer, vit_jax/configs/models.py.
VARIANTS: Mapping[str, ViTConfig] = {
    "Ti/16": _variant("Ti", 16),
    "S/16": _variant("S", 16),
    "S/32": _variant("S", 32),
    "B/8": _variant("B", 8),
    "B/16": _variant("B", 16),
    "B/32": _variant("B", 32),
    "L/16": _variant("L", 16),
    "L/32": _variant("L", 32),
    "H/14": _variant("H", 14),
    "g/14": _map_variant("g", 14),
    "G/14": _map_variant("G", 14),
    "So400m/14": _map_variant("So400m", 14),
    "R+Ti/16": _variant("Ti", 8, resnet_layers=()),
    "R26+S/32": _variant("S", 1, resnet_layers=(2, 2, 2, 2)),
    "R26+B/32": _variant("B", 1, resnet_layers=(2, 2, 2, 2)),
    "R50+B/16": _variant("B", 1, resnet_layers=(3, 4, 9)),
    "R50+L/32": _variant("L", 1, resnet_layers=(3, 4, 6, 3)),
}


def variant(name: str) -> ViTConfig:
    """Returns the config of a published variant.

    Example:
        >>> variant("L/32").num_layers
        24

    Raises:
        ValueError: the name is not in the table.
    """
    if name not in VARIANTS:
        raise ValueError(f"There is no variant {name!r}; the variants are {', '.join(VARIANTS)}.")
    return VARIANTS[name]


def parameter_count(config: ViTConfig) -> int:
    """Counts the trainable parameters of a config without building it.

    Example:
        >>> parameter_count(VARIANTS["B/16"])
        86567656
    """
    d, m = config.hidden_dim, config.mlp_dim
    first = 2 * m if config.activation == "swiglu" else m
    norm, mlp, attention = 2 * d, d * first + first + m * d + d, 4 * (d * d + d)
    count = _stem_parameter_count(config)
    count += config.patch_size**2 * config.patch_channels * d + d  # patch projection
    count += config.num_prefix_tokens * d + _position_parameter_count(config)
    block = norm + attention + norm + mlp
    block += 4 * d // config.num_heads * config.query_key_norm
    block += 2 * d * (config.layer_scale is not None)
    has_last_norm = not config.norm_after_pooling or config.pooling is not None
    width = config.pooled_dim
    last_norm = 2 * (width if config.norm_after_pooling else d) * has_last_norm
    count += config.num_layers * block + norm * config.embedding_norm + last_norm
    if config.pooling == "map":
        count += d + attention + norm + mlp
    if config.representation_dim is not None:
        count += width * config.representation_dim + config.representation_dim
        width = config.representation_dim
    if config.classes is not None:
        count += (width * config.classes + config.classes) * (1 + config.distillation_token)
    return count


def _position_parameter_count(config: ViTConfig) -> int:
    rows, columns = config.grid
    if config.position_embedding == "relative":
        offsets = (2 * rows - 1) * (2 * columns - 1) + 3 * (config.num_prefix_tokens > 0)
        return config.num_layers * offsets * config.num_heads
    count = config.num_prefix_tokens - config.num_registers  # before the patches, with a place
    halves = {
        "learned": 2 * (count + rows * columns),
        "learned_2d": 2 * count + rows + columns,
    }.get(str(config.position_embedding), 0)
    tables = config.num_layers if config.position_placement == "every_block" else 1
    return tables * halves * config.hidden_dim // 2


def _stem_parameter_count(config: ViTConfig) -> int:
    if config.resnet_layers is None:
        return 0
    count = 7 * 7 * config.input_shape[2] * STEM_WIDTH + 2 * STEM_WIDTH
    channels = STEM_WIDTH
    for stage, units in enumerate(config.resnet_layers):
        width = STEM_WIDTH * 2**stage
        out = 4 * width
        for unit in range(units):
            count += channels * width + 9 * width * width + width * out  # conv1, conv2, conv3
            count += 2 * width + 2 * width + 2 * out  # gn1, gn2, gn3
            if unit == 0:
                count += channels * out + 2 * out  # conv_proj, gn_proj
            channels = out
    return count
