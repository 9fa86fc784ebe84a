"""The names of timm and Hugging Face transformers: of their networks, and of their arrays.

What they do not write into their files an architecture's name alone means. Source: the registered
functions of `timm/models/vision_transformer.py`, `deit.py`, `beit.py` and `eva.py` in
huggingface/pytorch-image-models (timm) 1.0.31, and the config classes of huggingface/transformers
5.23; tests/golden/timm_names.json lists timm's own values for every name that stands here.

The arrays of all of them are renamed to one set, timm's (`vision_transformer.py`), every array of
the network in one piece: what other classes keep in parts is put side by side, and what they leave
out is zeros.
"""

import dataclasses
import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from keras_vit.config import Pooling
from keras_vit.limits import shown
from keras_vit.weights.arrays import FLOATS, StoredArray
from keras_vit.weights.layouts import Arrays, check_one_network, listed, renamed

# Which channels of a head rotary positions turn together: i and i + K/2 ("halves", ours), or 2 i
# and 2 i + 1. The first half of the pairs turns by the row (ours), or by the column.
RotaryLayout = Literal["halves", "neighbours", "neighbours_columns_first"]


@dataclasses.dataclass(frozen=True)
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


# CLIP's, DINOv3's (places from -1 to 1: timm's rope_type="dinov3"), SBB's with rotary positions,
# and Perception Encoder's.
_CLIP: dict[str, Any] = {"layer_norm_epsilon": 1e-5}
_DINOV3: dict[str, Any] = {"layer_norm_epsilon": 1e-5, "rotary_period": 100.0}
_SBB_ROPE: dict[str, Any] = {"rotary_period": 10000.0, "rotary_layout": "neighbours"}
_PE: dict[str, Any] = {
    **{"layer_norm_epsilon": 1e-5, "pooling_heads": 8, "pools_prefix": True, "rotary_offset": 1.0},
    **{"rotary_period": 10000.0, "rotary_layout": "neighbours_columns_first"},
}

TIMM_ARCHITECTURES = (
    Architecture(r"vit_tiny_patch16_(224|384)", 3),
    Architecture(r"vit_small_patch(8_224|(16|32)_(224|384))", 6),
    Architecture(r"vit_base_patch(8_224|(16|32)_(224|384))", 12),
    Architecture(r"vit_large_patch(14_224|(16|32)_(224|384))", 16),
    Architecture(r"vit_(huge|giant|gigantic)_patch14_224", 16),
    # I-JEPA's; the base one has 16 heads, not 12.
    Architecture(r"vit_(base|giant)_patch16_gap_224", 16),
    Architecture(r"vit_huge_patch(14_gap_224|16_gap_448)", 16),
    Architecture(r"vit_medium_patch16_gap_(240|256|384)", 8),
    Architecture(r"vit_betwixt_patch16_gap_256", 10),
    # DeiT, distilled or not, and DeiT III.
    Architecture(r"deit_tiny_(distilled_)?patch16_224", 3),
    Architecture(r"deit_small_(distilled_)?patch16_224", 6),
    Architecture(r"deit_base_(distilled_)?patch16_(224|384)", 12),
    Architecture(r"deit3_small_patch16_(224|384)", 6),
    Architecture(r"deit3_medium_patch16_224", 8),
    Architecture(r"deit3_base_patch16_(224|384)", 12),
    Architecture(r"deit3_(large_patch16_(224|384)|huge_patch14_224)", 16),
    Architecture(r"flexivit_small", 6),
    Architecture(r"flexivit_base", 12),
    Architecture(r"flexivit_large", 16),
    # DINOv2 with and without registers, and TIPSv2; the giant ones have a gated MLP.
    Architecture(r"vit_small_patch14_(reg4_)?dinov2", 6),
    Architecture(r"vit_base_patch14_((reg4_)?dinov2|reg1_tipsv2)", 12),
    Architecture(
        r"vit_(large_patch14_((reg4_)?dinov2|reg1_tipsv2)|so400m_patch14_reg1_tipsv2)", 16
    ),
    Architecture(r"vit_giant_patch14_((reg4_)?dinov2|reg1_tipsv2)", 24, "silu"),
    # SBB ("searching for better ViT baselines").
    Architecture(r"vit_wee_patch16_reg1_gap_256", 4),
    Architecture(r"vit_little_patch16_reg(1|4)_gap_256", 5),
    Architecture(r"vit_medium(_patch16_reg(1|4)_gap_256|d_patch16_reg4_gap_(256|384))", 8),
    Architecture(r"vit_betwixt_patch16_reg(1_gap_256|4_gap_(256|384))", 10),
    Architecture(r"vit_base_patch16_reg4_gap_256", 12),
    Architecture(r"vit_so150m_patch16_reg4_gap_(256|384)", 14),
    Architecture(r"vit_so150m2_patch16_reg1_gap_(256|384|448)", 13),
    Architecture(r"vit_mediumd?_patch16_rope_reg1_gap_256", 8, rotary_grid=(16, 16), **_SBB_ROPE),
    Architecture(r"vit_betwixt_patch16_rope_reg4_gap_256", 10, rotary_grid=(16, 16), **_SBB_ROPE),
    Architecture(r"vit_base_patch16_rope_reg1_gap_256", 12, rotary_grid=(16, 16), **_SBB_ROPE),
    # BEiT (`beit.py`).
    Architecture(r"beit_base_patch16_(224|384)|beitv2_base_patch16_224", 12),
    Architecture(r"beit_large_patch16_(224|384|512)|beitv2_large_patch16_224", 16),
    # DINOv3 and Perception Encoder (`eva.py`).
    Architecture(r"vit_tiny_patch16_dinov3_qkvb", 3, **_DINOV3),
    Architecture(r"vit_small_patch16_dinov3(_qkvb)?", 6, **_DINOV3),
    Architecture(r"vit_small_plus_patch16_dinov3(_qkvb)?", 6, "silu", **_DINOV3),
    Architecture(r"vit_base_patch16_dinov3(_qkvb)?", 12, **_DINOV3),
    Architecture(r"vit_large_patch16_dinov3(_qkvb)?", 16, **_DINOV3),
    Architecture(r"vit_huge_plus_patch16_dinov3(_qkvb)?", 20, "silu", **_DINOV3),
    Architecture(r"vit_7b_patch16_dinov3", 32, "silu", **_DINOV3),
    Architecture(r"vit_pe_core_tiny_patch16_384", 3, rotary_grid=(24, 24), **_PE),
    Architecture(r"vit_pe_core_small_patch16_384", 6, rotary_grid=(24, 24), **_PE),
    Architecture(r"vit_pe_core_base_patch16_224", 12, rotary_grid=(14, 14), **_PE),
    Architecture(r"vit_pe_core_large_patch14_336", 16, rotary_grid=(24, 24), **_PE),
    # SigLIP and SigLIP 2: tanh in some names, the exact form in others.
    Architecture(r"vit_base_patch16_siglip(_gap)?_(224|256|384|512)", 12),
    Architecture(r"vit_base_patch32_siglip(_gap)?_256", 12, "gelu_tanh"),
    Architecture(r"vit_large_patch16_siglip(_gap)?_(256|384)", 16),
    Architecture(r"vit_large_patch16_siglip(_gap)?_512", 16, "gelu_tanh"),
    Architecture(r"vit_so400m_patch14_siglip(_gap)?_(224|378|384)", 16),
    Architecture(r"vit_so400m_patch14_siglip_gap_(448|896)", 16),
    Architecture(r"vit_so400m_patch16_siglip(_gap)?_(256|384|512)", 16, "gelu_tanh"),
    Architecture(r"vit_giantopt_patch16_siglip(_gap)?_(256|384)", 16, "gelu_tanh"),
    # CLIP; the weights that OpenAI, Meta and DFN trained with quick_gelu have names of their own.
    Architecture(r"vit_xsmall_patch16_clip_224", 4, **_CLIP),
    Architecture(r"vit_medium_patch(16|32)_clip_224", 8, **_CLIP),
    Architecture(r"vit_betwixt_patch32_clip_224", 10, **_CLIP),
    Architecture(r"vit_base_patch(32_clip_(224|256|384|448)|16_clip_(224|384))", 12, **_CLIP),
    Architecture(r"vit_base_patch16_plus_clip_240", 14, **_CLIP),
    Architecture(r"vit_(large|huge|giant|gigantic)_patch14_clip_(224|336|378)", 16, **_CLIP),
    Architecture(r"vit_base_patch(16|32)_clip_quickgelu_224", 12, "quick_gelu", **_CLIP),
    Architecture(
        r"vit_(large|huge|gigantic)_patch14_clip_quickgelu_(224|336|378)", 16, "quick_gelu", **_CLIP
    ),
    Architecture(r"test_vit", 2),
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
POOLINGS: Mapping[str, Pooling | None] = {"token": "token", "avg": "avg", "map": "map", "": None}


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchNames:
    """How some classes of a library name the arrays of a Vision Transformer.

    Attributes:
        library: whose settings lie beside the file.
        anchor: the patches' kernel, which all these classes have; what stands before it in a file,
            such as "vit.", is a prefix of every name of the encoder.
        rules: (regular expression, replacement), applied in this order, each to the result of
            those before it.
        ignored: regular expression of the beginnings of names that inference does not use:
            decoders, mask tokens, text towers, and tables that the network computes itself.
    """

    library: Literal["timm", "transformers"]
    anchor: str
    rules: tuple[tuple[str, str], ...]
    ignored: str


_BLOCK = r"^(blocks\.\d+)\."
_TABLE = "relative_position_bias_table"

# transformers' ViT, MSN, I-JEPA, MAE, DeiT, BEiT, data2vec and DINOv3, in files and as version 5
# calls its modules; DINOv2 names the parts of a block as timm does, so that the rules of the others
# do not touch them.
_HUGGING_FACE_VIT = TorchNames(
    library="transformers",
    anchor="embeddings.patch_embeddings.projection.weight",
    rules=(
        (r"^embeddings\.patch_embeddings\.(projection\.)?", "patch_embed.proj."),
        (r"^embeddings\.cls_token$", "cls_token"),
        (r"^embeddings\.distillation_token$", "dist_token"),
        (r"^embeddings\.register_tokens$", "reg_token"),
        (r"^embeddings\.position_embeddings$", "pos_embed"),
        (rf"^(encoder\.relative|shared)_position_bias\.{_TABLE}$", f"rel_pos_bias.{_TABLE}"),
        (r"^(encoder\.layer|layers|(model\.)?layer)\.", "blocks."),
        (_BLOCK + r"layernorm_before\.", r"\1.norm1."),
        (_BLOCK + r"layernorm_after\.", r"\1.norm2."),
        (_BLOCK + r"attention\.attention\.(q|k|v)(uery|ey|alue)\.", r"\1.attn.\2."),
        (_BLOCK + r"(attention\.attention\.)?relative_position_bias\.", r"\1.attn."),
        (_BLOCK + r"attention\.output\.dense\.", r"\1.attn.proj."),
        (_BLOCK + r"attention\.(q|k|v)_proj\.", r"\1.attn.\2."),
        (_BLOCK + r"attention\.o_proj\.", r"\1.attn.proj."),
        (_BLOCK + r"mlp\.gate_proj\.", r"\1.mlp.gate."),
        (_BLOCK + r"mlp\.up_proj\.", r"\1.mlp.fc1."),
        (_BLOCK + r"mlp\.down_proj\.", r"\1.mlp.fc2."),
        (_BLOCK + r"layer_scale(\d)\.lambda1$", r"\1.ls\2.gamma"),
        (_BLOCK + r"lambda_(\d)$", r"\1.ls\2.gamma"),
        (_BLOCK + r"(intermediate\.dense|mlp\.weights_in)\.", r"\1.mlp.fc1."),
        (_BLOCK + r"(output\.dense|mlp\.weights_out)\.", r"\1.mlp.fc2."),
        (r"^layernorm\.", "norm."),
        (r"^pooler\.layernorm\.", "fc_norm."),
        (r"^pooler\.dense\.", "pre_logits.fc."),
        (r"^(cls_)?classifier\.", "head."),
        (r"^distillation_classifier\.", "head_dist."),
    ),
    ignored=r"decoder\.|embeddings\.mask_token$|.*\.relative_position_index$",
)

_HUGGING_FACE_DINOV3 = dataclasses.replace(
    _HUGGING_FACE_VIT, anchor="embeddings.patch_embeddings.weight"
)

# transformers' CLIP and SigLIP, an image tower alone or beside a text tower.
_HUGGING_FACE_CLIP = TorchNames(
    library="transformers",
    anchor="embeddings.patch_embedding.weight",
    rules=(
        (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
        (r"^embeddings\.class_embedding$", "cls_token"),
        (r"^embeddings\.position_embedding\.weight$", "pos_embed"),
        (r"^pre_layrnorm\.", "norm_pre."),
        (r"^encoder\.layers\.", "blocks."),
        (_BLOCK + r"layer_norm(\d)\.", r"\1.norm\2."),
        (_BLOCK + r"self_attn\.(q|k|v)_proj\.", r"\1.attn.\2."),
        (_BLOCK + r"self_attn\.out_proj\.", r"\1.attn.proj."),
        (r"^post_layernorm\.", "norm."),
        (r"^visual_projection\.", "projection."),
        (r"^head\.probe$", "attn_pool.latent"),
        (r"^head\.attention\.in_proj_", "attn_pool.qkv."),
        (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
        (r"^head\.layernorm\.", "attn_pool.norm."),
        (r"^head\.mlp\.", "attn_pool.mlp."),
    ),
    ignored=r"text_model\.|text_projection\.|logit_(scale|bias)$|embeddings\.position_ids$",
)

# timm's VisionTransformer, VisionTransformerDistilled, Eva and Beit.
_TIMM = TorchNames(
    library="timm",
    anchor="patch_embed.proj.weight",
    rules=(
        (_BLOCK + r"gamma_(\d)$", r"\1.ls\2.gamma"),
        (_BLOCK + r"attn\.(q|v)_bias$", r"\1.attn.\2.bias"),
        (_BLOCK + r"attn\.(q|k|v)_proj\.", r"\1.attn.\2."),
        (_BLOCK + r"mlp\.fc1_g\.", r"\1.mlp.gate."),
        (_BLOCK + r"mlp\.fc1_x\.", r"\1.mlp.fc1."),
    ),
    ignored=r".*\.relative_position_index$",
)
FAMILIES = (_HUGGING_FACE_VIT, _HUGGING_FACE_DINOV3, _HUGGING_FACE_CLIP, _TIMM)

# What torch.compile, FSDP and activation checkpointing put into names around parts of a model (what
# is around all of it is a prefix), and what AveragedModel counts (torch/optim/swa_utils.py).
_WRAPPERS = re.compile(r"(?<=\.)(_orig_mod|_(fsdp|checkpoint)_wrapped_module)\.")
_COUNTER = re.compile(r"(.*\.)?n_averaged")

# What an array's name stands for: the first matching name is the example.
_FEATURES = (
    (r"attn\.(q|k)_norm\.", "the normalisation of queries and keys in its library's names"),
    (r"patch_generator\.", "RADIO's patches, cut from images of any size"),
    (r"(^|\.)embeds\.", "NaFlex's patches of images of any size"),
    (
        r"(rms_norm\d?|(patch_embed|patchifier)\.norm)\.",
        "AIMv2's normalisation by the root mean square",
    ),
    (r"patch_embed\.backbone\.|embedder\.convolution\.", "a convolutional stem of another library"),
    (
        r"(^|\.)(self_attn|attn)\.(sub_?norm|norm)\.|mlp\.norm\.",
        "a normalisation inside attention or MLP (as in EVA-02)",
    ),
    (r"attn\.gate\.", "a gate of the attention's output"),
    (r"attns?\.\d+\.|attn\.lambda_q1$", "several attentions in a block"),
)


def find_architecture(name: str) -> Architecture | None:
    """Returns what a timm architecture's name means, None for one that is not in the table."""
    rows = (row for row in TIMM_ARCHITECTURES if re.fullmatch(row.names, name))
    return next(rows, None)


def check_features(names: Iterable[str]) -> None:
    """Raises a ValueError that says what arrays of these names need beyond the network."""
    names = sorted(names)
    examples = {text: list(filter(re.compile(each).search, names)) for each, text in _FEATURES}
    needs = [f"{feature} ({example[0]})" for feature, example in examples.items() if example]
    if needs:
        raise ValueError(
            f"The file needs {' and '.join(needs)}, which keras_vit does not read yet; it reads "
            "Vision Transformers of timm and Hugging Face transformers."
        )


def renamed_arrays(arrays: Arrays) -> tuple[TorchNames, dict[str, StoredArray]]:
    """Returns whose names the arrays have, and those of encoder and head under the one set.

    Raises:
        ValueError: the arrays are no library's, of several networks, two mean the same, or parts do
            not fit each other.
    """
    pairs = ((_WRAPPERS.sub("", name), array) for name, array in arrays.items())
    arrays = renamed(pair for pair in pairs if not _COUNTER.fullmatch(pair[0]))
    check_features(arrays)
    networks = {prefix: family for family in FAMILIES for prefix in _prefixes(arrays, family)}
    check_one_network(networks)
    if not networks:
        raise ValueError(
            "The file does not hold a Vision Transformer of Hugging Face transformers or timm: its "
            f"arrays are {listed(arrays) or 'none'}."
        )
    [(prefix, family)] = networks.items()
    kernel = arrays[f"{prefix}{family.anchor}"].shape
    if len(kernel) == 2:
        raise ValueError(
            f"The file's patches are a linear layer of shape {shown(kernel)}, for images of any "
            "size and grid (as in NaFlex), which keras_vit does not read yet."
        )
    # A classifier stands beside the encoder, below a part of the prefix alone.
    names = {name: _below(name, prefix) for name in arrays}
    used = [name for name in names if not re.match(family.ignored, names[name])]
    pairs = ((_renamed(names[name], family), arrays[name]) for name in used)
    return family, _completed(renamed(pairs))


def zeros(shape: tuple[int, ...]) -> StoredArray:
    """Returns an array of a file that has none: what the library leaves out."""
    return StoredArray(shape, np.dtype(np.float32), lambda: np.zeros(shape, np.float32))


def concatenate(parts: Iterable[StoredArray], *, axis: int = 0) -> StoredArray:
    """Returns one array of several, side by side along an axis.

    Raises:
        ValueError: they differ in another axis.
    """
    parts = tuple(parts)
    shapes = [part.shape for part in parts]
    rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if len(rest) > 1 or not all(len(shape) > axis for shape in shapes):
        raise ValueError(
            "The file's arrays of one layer do not fit each other: their shapes are "
            f"{', '.join(map(shown, shapes))}."
        )
    first = shapes[0]
    shape = (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])
    others = [part.dtype for part in parts if part.dtype not in FLOATS]

    def read() -> np.ndarray:
        return np.concatenate([part.read().astype(np.float32, copy=False) for part in parts], axis)

    return StoredArray(shape, others[0] if others else np.dtype(np.float32), read)


def _prefixes(names: Iterable[str], family: TorchNames) -> Iterator[str]:
    for name in names:
        prefix = name.removesuffix(family.anchor)
        if prefix != name and (not prefix or prefix.endswith(".")):
            yield prefix


def _below(name: str, prefix: str) -> str:
    """Takes off the parts of a name that it shares with a prefix."""
    parts = name.split(".")
    shared = itertools.accumulate(map(operator.eq, parts, prefix.split(".")), operator.and_)
    return ".".join(parts[sum(shared) :])


def _renamed(name: str, family: TorchNames) -> str:
    for pattern, replacement in family.rules:
        name = re.sub(pattern, replacement, name)
    return name


def _completed(arrays: dict[str, StoredArray]) -> dict[str, StoredArray]:
    """Puts the parts of a layer together, and adds zeros for what a class leaves out."""
    arrays = dict(arrays)
    for name in ("cls_token", "pos_embed"):
        array = arrays.get(name)
        if array is not None and 0 < len(array.shape) < 3:  # transformers' CLIP and SigLIP
            shape = (1,) * (3 - len(array.shape)) + array.shape
            arrays[name] = array.map(operator.methodcaller("reshape", shape), shape)
    _complete_biases(arrays)
    blocks = sorted({match[0] for match in map(re.compile(_BLOCK).match, arrays) if match})
    for block in blocks:
        for leaf in ("weight", "bias"):
            parts = [f"{block}attn.{part}.{leaf}" for part in "qkv"]
            _join(arrays, f"{block}attn.qkv.{leaf}", parts)
            gated = [f"{block}mlp.{part}.{leaf}" for part in ("gate", "fc1")]
            _join(arrays, f"{block}mlp.fc1.{leaf}", gated)
    # BEiT's pre-training has one relative position bias for all blocks.
    shared = arrays.pop(f"rel_pos_bias.{_TABLE}", None)
    if shared is not None:
        pairs = ((f"{block}attn.{_TABLE}", shared) for block in blocks)
        arrays = renamed([*arrays.items(), *pairs])
    # transformers' attention pooling has its three products in one.
    for leaf in ("weight", "bias"):
        whole = arrays.pop(f"attn_pool.qkv.{leaf}", None)
        if whole is not None and whole.shape:
            count, rest = whole.shape[0] // 3, whole.shape[1:]
            query, key_value = map(operator.itemgetter, (slice(count), slice(count, None)))
            arrays[f"attn_pool.q.{leaf}"] = whole.map(query, (count, *rest))
            arrays[f"attn_pool.kv.{leaf}"] = whole.map(key_value, (whole.shape[0] - count, *rest))
    return arrays


def _complete_biases(arrays: dict[str, StoredArray]) -> None:
    weights = [name for name in arrays if re.search(_BLOCK + r"attn\.(q|k|v|qkv)\.weight$", name)]
    biases = map(re.compile(_BLOCK + r"attn\.(q|k|v|qkv)\.bias$").match, arrays)
    present = {match[2] for match in biases if match}
    for name in weights:
        part, (rows, *_) = name.split(".")[-2], arrays[name].shape or (0,)
        # A class without a bias has it in no block: if some blocks have one, the file is damaged.
        if part != "qkv" and part not in present:
            arrays[f"{name.removesuffix('weight')}bias"] = zeros((rows,))
        if part == "qkv" and "qkv" not in present:
            start = name.removesuffix("qkv.weight")
            for each in sorted({"q", "k", "v"} - present):
                arrays[f"{start}{each}.bias"] = zeros((rows // 3,))
    # timm and CLIP: no bias where the tokens are normalised at once.
    for shows, layer in (("norm_pre", "patch_embed.proj"), ("projection", "projection")):
        if f"{shows}.weight" in arrays and f"{layer}.bias" not in arrays:
            arrays[f"{layer}.bias"] = zeros(arrays[f"{layer}.weight"].shape[:1])


def _join(arrays: dict[str, StoredArray], name: str, parts: list[str]) -> None:
    """Puts arrays together where all of them are there; otherwise they stay what they are."""
    if all(part in arrays for part in parts):
        whole = concatenate(arrays.pop(part) for part in parts)
        if name in arrays:
            raise ValueError(f"The file holds {shown(name)} whole and in parts.")
        arrays[name] = whole


def blocks_with(arrays: Arrays, name: str) -> Iterator[str]:
    """Yields the names of an array of a block, in every block that has it."""
    yield from (each for each in arrays if re.fullmatch(_BLOCK + re.escape(name), each))
