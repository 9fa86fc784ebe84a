"""What PyTorch libraries do not write into their files: what an architecture's name alone means.

Source: the registered functions of `timm/models/vision_transformer.py` and `deit.py` in
huggingface/pytorch-image-models (timm) 1.0.31, and the config classes of huggingface/transformers
5.23; tests/golden/timm_names.json lists timm's own values for every name that stands here.
"""

import dataclasses
import re
from collections.abc import Mapping

from keras_vit.config import Pooling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """What the names of some timm architectures mean.

    Attributes:
        names: a regular expression for the whole name.
        num_heads: attention heads.
        activation: timm's name of the activation.
        layer_norm_epsilon: of every layer normalisation.
    """

    names: str
    num_heads: int
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-6


TIMM_ARCHITECTURES = (
    Architecture(names=r"vit_tiny_patch16_(224|384)", num_heads=3),
    Architecture(names=r"vit_small_patch(8_224|(16|32)_(224|384))", num_heads=6),
    Architecture(names=r"vit_base_patch(8_224|(16|32)_(224|384))", num_heads=12),
    Architecture(names=r"vit_large_patch(14_224|(16|32)_(224|384))", num_heads=16),
    Architecture(names=r"vit_(huge|giant|gigantic)_patch14_224", num_heads=16),
    # I-JEPA's; the base one has 16 heads, not 12.
    Architecture(names=r"vit_(base|giant)_patch16_gap_224", num_heads=16),
    Architecture(names=r"vit_huge_patch(14_gap_224|16_gap_448)", num_heads=16),
    Architecture(names=r"deit_tiny_patch16_224", num_heads=3),
    Architecture(names=r"deit_small_patch16_224", num_heads=6),
    Architecture(names=r"deit_base_patch16_(224|384)", num_heads=12),
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
    Architecture(names=r"vit_xsmall_patch16_clip_224", num_heads=4, layer_norm_epsilon=1e-5),
    Architecture(names=r"vit_medium_patch(16|32)_clip_224", num_heads=8, layer_norm_epsilon=1e-5),
    Architecture(names=r"vit_betwixt_patch32_clip_224", num_heads=10, layer_norm_epsilon=1e-5),
    Architecture(
        names=r"vit_base_patch(32_clip_(224|256|384|448)|16_clip_(224|384))",
        num_heads=12,
        layer_norm_epsilon=1e-5,
    ),
    Architecture(names=r"vit_base_patch16_plus_clip_240", num_heads=14, layer_norm_epsilon=1e-5),
    Architecture(
        names=r"vit_(large|huge|giant|gigantic)_patch14_clip_(224|336|378)",
        num_heads=16,
        layer_norm_epsilon=1e-5,
    ),
    Architecture(
        names=r"vit_base_patch(16|32)_clip_quickgelu_224",
        num_heads=12,
        activation="quick_gelu",
        layer_norm_epsilon=1e-5,
    ),
    Architecture(
        names=r"vit_(large|huge|gigantic)_patch14_clip_quickgelu_(224|336|378)",
        num_heads=16,
        activation="quick_gelu",
        layer_norm_epsilon=1e-5,
    ),
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

# Their names of activations -> ours (timm's act_layer; transformers/activations.py, ACT2FN).
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}

# Names of timm's poolings -> ours; the others ("max", "avgmax", "prr") are not there.
POOLINGS: Mapping[str, Pooling | None] = {
    "token": "token",
    "avg": "avg",
    "map": "map",
    "": None,
}

# transformers' model types whose network is the published one, and the epsilon where config.json
# has none (configuration_vit.py, ..._vit_msn.py, ..._ijepa.py, ..._vit_mae.py).
HUGGING_FACE_EPSILONS = {"vit": 1e-12, "vit_msn": 1e-6, "ijepa": 1e-12, "vit_mae": 1e-12}


def find_architecture(name: str) -> Architecture | None:
    """Returns what a timm architecture's name means, None for one that is not in the table.

    Example:
        >>> find_architecture("vit_large_patch16_siglip_512").activation
        'gelu_tanh'
    """
    rows = (row for row in TIMM_ARCHITECTURES if re.fullmatch(row.names, name))
    return next(rows, None)
