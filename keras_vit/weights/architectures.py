"""What PyTorch libraries do not write into their files: what an architecture's name alone means.

Source: the registered functions of `timm/models/vision_transformer.py`, `deit.py`, `beit.py` and
`eva.py` in huggingface/pytorch-image-models (timm) 1.0.31, and the config classes of
huggingface/transformers 5.23; tests/golden/timm_names.json lists timm's own values for every name
that stands here.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from keras_vit.config import Pooling

# Which channels of a head rotary positions turn together: i and i + K/2 ("halves", ours), or 2 i
# and 2 i + 1. The first half of the pairs turns by the row (ours), or by the column.
RotaryLayout = Literal["halves", "neighbours", "neighbours_columns_first"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """What the names of some timm architectures mean.

    Attributes:
        names: a regular expression for the whole name.
        num_heads: attention heads.
        activation: timm's name of the activation; "silu" stands for the gated MLP.
        layer_norm_epsilon: of every layer normalisation.
        pooling_heads: heads of attention pooling, None for `num_heads`.
        rotary_period: see `ViTConfig`; None for no rotary positions.
        rotary_grid: the same.
        rotary_offset: the same.
        rotary_layout: which channels they turn together.
        pools_prefix: whether attention pooling looks at the tokens before the patches' too.
    """

    names: str
    num_heads: int
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-6
    pooling_heads: int | None = None
    rotary_period: float | None = None
    rotary_grid: tuple[int, int] | None = None
    rotary_offset: float = 0.0
    rotary_layout: RotaryLayout = "halves"
    pools_prefix: bool = False


def _clip(names: str, num_heads: int, activation: str = "gelu") -> Architecture:
    return Architecture(
        names=names, num_heads=num_heads, activation=activation, layer_norm_epsilon=1e-5
    )


def _dinov3(names: str, num_heads: int, activation: str = "gelu") -> Architecture:
    """Places from -1 to 1, halves turn together (timm's rope_type="dinov3")."""
    return Architecture(
        names=names,
        num_heads=num_heads,
        activation=activation,
        layer_norm_epsilon=1e-5,
        rotary_period=100.0,
    )


def _sbb_rope(names: str, num_heads: int) -> Architecture:
    return Architecture(
        names=names,
        num_heads=num_heads,
        rotary_period=10000.0,
        rotary_grid=(16, 16),
        rotary_layout="neighbours",
    )


def _perception_encoder(names: str, num_heads: int, side: int) -> Architecture:
    return Architecture(
        names=names,
        num_heads=num_heads,
        layer_norm_epsilon=1e-5,
        pooling_heads=8,
        rotary_period=10000.0,
        rotary_grid=(side, side),
        rotary_offset=1.0,
        rotary_layout="neighbours_columns_first",
        pools_prefix=True,
    )


TIMM_ARCHITECTURES = (
    Architecture(names=r"vit_tiny_patch16_(224|384)", num_heads=3),
    Architecture(names=r"vit_small_patch(8_224|(16|32)_(224|384))", num_heads=6),
    Architecture(names=r"vit_base_patch(8_224|(16|32)_(224|384))", num_heads=12),
    Architecture(names=r"vit_large_patch(14_224|(16|32)_(224|384))", num_heads=16),
    Architecture(names=r"vit_(huge|giant|gigantic)_patch14_224", num_heads=16),
    # I-JEPA's; the base one has 16 heads, not 12.
    Architecture(names=r"vit_(base|giant)_patch16_gap_224", num_heads=16),
    Architecture(names=r"vit_huge_patch(14_gap_224|16_gap_448)", num_heads=16),
    Architecture(names=r"vit_medium_patch16_gap_(240|256|384)", num_heads=8),
    Architecture(names=r"vit_betwixt_patch16_gap_256", num_heads=10),
    # DeiT, distilled or not, and DeiT III.
    Architecture(names=r"deit_tiny_(distilled_)?patch16_224", num_heads=3),
    Architecture(names=r"deit_small_(distilled_)?patch16_224", num_heads=6),
    Architecture(names=r"deit_base_(distilled_)?patch16_(224|384)", num_heads=12),
    Architecture(names=r"deit3_small_patch16_(224|384)", num_heads=6),
    Architecture(names=r"deit3_medium_patch16_224", num_heads=8),
    Architecture(names=r"deit3_base_patch16_(224|384)", num_heads=12),
    Architecture(names=r"deit3_(large_patch16_(224|384)|huge_patch14_224)", num_heads=16),
    Architecture(names=r"flexivit_small", num_heads=6),
    Architecture(names=r"flexivit_base", num_heads=12),
    Architecture(names=r"flexivit_large", num_heads=16),
    # DINOv2 with and without registers, and TIPSv2; the giant ones have a gated MLP.
    Architecture(names=r"vit_small_patch14_(reg4_)?dinov2", num_heads=6),
    Architecture(names=r"vit_base_patch14_((reg4_)?dinov2|reg1_tipsv2)", num_heads=12),
    Architecture(
        names=r"vit_(large_patch14_((reg4_)?dinov2|reg1_tipsv2)|so400m_patch14_reg1_tipsv2)",
        num_heads=16,
    ),
    Architecture(
        names=r"vit_giant_patch14_((reg4_)?dinov2|reg1_tipsv2)", num_heads=24, activation="silu"
    ),
    # SBB ("searching for better ViT baselines").
    Architecture(names=r"vit_wee_patch16_reg1_gap_256", num_heads=4),
    Architecture(names=r"vit_little_patch16_reg(1|4)_gap_256", num_heads=5),
    Architecture(
        names=r"vit_medium(_patch16_reg(1|4)_gap_256|d_patch16_reg4_gap_(256|384))", num_heads=8
    ),
    Architecture(names=r"vit_betwixt_patch16_reg(1_gap_256|4_gap_(256|384))", num_heads=10),
    Architecture(names=r"vit_base_patch16_reg4_gap_256", num_heads=12),
    Architecture(names=r"vit_so150m_patch16_reg4_gap_(256|384)", num_heads=14),
    Architecture(names=r"vit_so150m2_patch16_reg1_gap_(256|384|448)", num_heads=13),
    _sbb_rope(r"vit_mediumd?_patch16_rope_reg1_gap_256", 8),
    _sbb_rope(r"vit_betwixt_patch16_rope_reg4_gap_256", 10),
    _sbb_rope(r"vit_base_patch16_rope_reg1_gap_256", 12),
    # BEiT (`beit.py`).
    Architecture(names=r"beit_base_patch16_(224|384)|beitv2_base_patch16_224", num_heads=12),
    Architecture(names=r"beit_large_patch16_(224|384|512)|beitv2_large_patch16_224", num_heads=16),
    # DINOv3 and Perception Encoder (`eva.py`).
    _dinov3(r"vit_tiny_patch16_dinov3_qkvb", 3),
    _dinov3(r"vit_small_patch16_dinov3(_qkvb)?", 6),
    _dinov3(r"vit_small_plus_patch16_dinov3(_qkvb)?", 6, "silu"),
    _dinov3(r"vit_base_patch16_dinov3(_qkvb)?", 12),
    _dinov3(r"vit_large_patch16_dinov3(_qkvb)?", 16),
    _dinov3(r"vit_huge_plus_patch16_dinov3(_qkvb)?", 20, "silu"),
    _dinov3(r"vit_7b_patch16_dinov3", 32, "silu"),
    _perception_encoder(r"vit_pe_core_tiny_patch16_384", 3, 24),
    _perception_encoder(r"vit_pe_core_small_patch16_384", 6, 24),
    _perception_encoder(r"vit_pe_core_base_patch16_224", 12, 14),
    _perception_encoder(r"vit_pe_core_large_patch14_336", 16, 24),
    # SigLIP and SigLIP 2: tanh in some names, the exact form in others.
    Architecture(names=r"vit_base_patch16_siglip(_gap)?_(224|256|384|512)", num_heads=12),
    Architecture(names=r"vit_base_patch32_siglip(_gap)?_256", num_heads=12, activation="gelu_tanh"),
    Architecture(names=r"vit_large_patch16_siglip(_gap)?_(256|384)", num_heads=16),
    Architecture(
        names=r"vit_large_patch16_siglip(_gap)?_512", num_heads=16, activation="gelu_tanh"
    ),
    Architecture(names=r"vit_so400m_patch14_siglip(_gap)?_(224|378|384)", num_heads=16),
    Architecture(names=r"vit_so400m_patch14_siglip_gap_(448|896)", num_heads=16),
    Architecture(
        names=r"vit_so400m_patch16_siglip(_gap)?_(256|384|512)",
        num_heads=16,
        activation="gelu_tanh",
    ),
    Architecture(
        names=r"vit_giantopt_patch16_siglip(_gap)?_(256|384)",
        num_heads=16,
        activation="gelu_tanh",
    ),
    # CLIP; the weights that OpenAI, Meta and DFN trained with quick_gelu have names of their own.
    _clip(r"vit_xsmall_patch16_clip_224", 4),
    _clip(r"vit_medium_patch(16|32)_clip_224", 8),
    _clip(r"vit_betwixt_patch32_clip_224", 10),
    _clip(r"vit_base_patch(32_clip_(224|256|384|448)|16_clip_(224|384))", 12),
    _clip(r"vit_base_patch16_plus_clip_240", 14),
    _clip(r"vit_(large|huge|giant|gigantic)_patch14_clip_(224|336|378)", 16),
    _clip(r"vit_base_patch(16|32)_clip_quickgelu_224", 12, "quick_gelu"),
    _clip(r"vit_(large|huge|gigantic)_patch14_clip_quickgelu_(224|336|378)", 16, "quick_gelu"),
    Architecture(names=r"test_vit", num_heads=2),
)

# Arguments of timm's VisionTransformer, which config.json carries as `model_args`, that change
# nothing in inference or show in the arrays; with any other the network may be another one.
TIMM_ARGUMENTS = frozenset(
    (
        *("img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth"),
        *("num_heads", "mlp_ratio", "qkv_bias", "qk_norm", "proj_bias", "init_values"),
        *("class_token", "no_embed_class", "reg_tokens", "pre_norm", "final_norm", "fc_norm"),
        *("act_layer", "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate"),
        *("attn_drop_rate", "drop_path_rate", "weight_init", "fix_init", "strict_img_size"),
        *("dynamic_img_size", "dynamic_img_pad"),
    )
)

# Their names of activations -> ours (timm's act_layer; transformers/activations.py, ACT2FN); "silu"
# is our "swiglu" where the arrays have a gate, and refused where they have none.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "swiglu",
}

# Names of timm's poolings -> ours; the others ("max", "avgmax", "prr") are not there.
POOLINGS: Mapping[str, Pooling | None] = {
    "token": "token",
    "avg": "avg",
    "map": "map",
    "": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelType:
    """What a model type of transformers means where config.json is silent."""

    epsilon: float
    activation: str = "gelu"
    num_heads: int | None = None


# transformers' model types whose networks are read (configuration_vit.py, ..._vit_msn.py, ...); the
# part of a config.json that describes one of two towers may leave its heads out, no other.
HUGGING_FACE_TYPES = {
    "vit": ModelType(epsilon=1e-12),
    "vit_msn": ModelType(epsilon=1e-6),
    "ijepa": ModelType(epsilon=1e-12),
    "vit_mae": ModelType(epsilon=1e-12),
    "deit": ModelType(epsilon=1e-12),
    "beit": ModelType(epsilon=1e-12),
    "data2vec-vision": ModelType(epsilon=1e-12),
    "dinov2": ModelType(epsilon=1e-6),
    "dinov2_with_registers": ModelType(epsilon=1e-6),
    "dinov3_vit": ModelType(epsilon=1e-5),
    "clip_vision_model": ModelType(epsilon=1e-5, activation="quick_gelu", num_heads=12),
    "siglip_vision_model": ModelType(epsilon=1e-6, activation="gelu_pytorch_tanh", num_heads=12),
}

# Model types of an image and a text tower -> that of the image tower, `vision_config`.
TWO_TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}


def find_architecture(name: str) -> Architecture | None:
    """Returns what a timm architecture's name means, None for one that is not in the table.

    Example:
        >>> find_architecture("vit_large_patch16_siglip_512").activation
        'gelu_tanh'
    """
    rows = (row for row in TIMM_ARCHITECTURES if re.fullmatch(row.names, name))
    return next(rows, None)
