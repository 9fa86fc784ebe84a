"""The names of timm and Hugging Face transformers, and the one set that all of them are renamed to.

That set is timm's (`vision_transformer.py`), every array of the network in one piece: what other
classes keep in parts is put side by side, and what they leave out is zeros.
"""

import dataclasses
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import numpy as np

from keras_vit.limits import shown
from keras_vit.weights.arrays import FLOATS, StoredArray
from keras_vit.weights.layouts import listed, renamed

Arrays = Mapping[str, StoredArray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchNames:
    """How some classes of a library name the arrays of a Vision Transformer.

    Attributes:
        library: whose settings lie beside the file.
        anchor: the patches' kernel, which all these classes have; what stands before it in a file,
            such as "vit.", is a prefix of every name of the encoder.
        rules: (regular expression, replacement), applied in this order, each to the result of
            those before it.
        left_aside: regular expression of the beginnings of names that inference does not use:
            decoders, mask tokens, text towers, and tables that the network computes itself.
    """

    library: Literal["timm", "transformers"]
    anchor: str
    rules: tuple[tuple[str, str], ...]
    left_aside: str


_BLOCK = r"^(blocks\.\d+)\."
_TABLE = "relative_position_bias_table"

# transformers' ViT, MSN, I-JEPA, MAE, DeiT, BEiT and data2vec; DINOv2 names the parts of a block as
# timm does, so that the rules of the others do not touch them.
_HUGGING_FACE_VIT = TorchNames(
    library="transformers",
    anchor="embeddings.patch_embeddings.projection.weight",
    rules=(
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.cls_token$", "cls_token"),
        (r"^embeddings\.distillation_token$", "dist_token"),
        (r"^embeddings\.register_tokens$", "reg_token"),
        (r"^embeddings\.position_embeddings$", "pos_embed"),
        (rf"^encoder\.relative_position_bias\.{_TABLE}$", f"rel_pos_bias.{_TABLE}"),
        (r"^encoder\.layer\.", "blocks."),
        (_BLOCK + r"layernorm_before\.", r"\1.norm1."),
        (_BLOCK + r"layernorm_after\.", r"\1.norm2."),
        (_BLOCK + r"attention\.attention\.(q|k|v)(uery|ey|alue)\.", r"\1.attn.\2."),
        (_BLOCK + r"attention\.attention\.relative_position_bias\.", r"\1.attn."),
        (_BLOCK + r"attention\.output\.dense\.", r"\1.attn.proj."),
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
    left_aside=r"decoder\.|embeddings\.mask_token$|.*\.relative_position_index$",
)

_HUGGING_FACE_DINOV3 = TorchNames(
    library="transformers",
    anchor="embeddings.patch_embeddings.weight",
    rules=(
        (r"^embeddings\.patch_embeddings\.", "patch_embed.proj."),
        (r"^embeddings\.cls_token$", "cls_token"),
        (r"^embeddings\.register_tokens$", "reg_token"),
        (r"^layer\.", "blocks."),
        (_BLOCK + r"attention\.(q|k|v)_proj\.", r"\1.attn.\2."),
        (_BLOCK + r"attention\.o_proj\.", r"\1.attn.proj."),
        (_BLOCK + r"layer_scale(\d)\.lambda1$", r"\1.ls\2.gamma"),
        (_BLOCK + r"mlp\.gate_proj\.", r"\1.mlp.gate."),
        (_BLOCK + r"mlp\.up_proj\.", r"\1.mlp.fc1."),
        (_BLOCK + r"mlp\.down_proj\.", r"\1.mlp.fc2."),
    ),
    left_aside=r"embeddings\.mask_token$",
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
    left_aside=r"text_model\.|text_projection\.|logit_(scale|bias)$|embeddings\.position_ids$",
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
    left_aside=r".*\.relative_position_index$",
)
FAMILIES = (_HUGGING_FACE_VIT, _HUGGING_FACE_DINOV3, _HUGGING_FACE_CLIP, _TIMM)


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


def check_features(names: Iterable[str]) -> None:
    """Raises a ValueError that says what arrays of these names need beyond the network.

    Example:
        >>> check_features(["patch_embed.proj.weight", "blocks.0.attn.qkv.weight"])
    """
    names = sorted(names)
    examples = {}
    for pattern, feature in _FEATURES:
        example = next(filter(re.compile(pattern).search, names), None)
        if example is not None:
            examples[feature] = example
    if not examples:
        return
    needs = [f"{feature} ({example})" for feature, example in examples.items()]
    *most, last = needs
    text = f"{', '.join(most)} and {last}" if most else last
    raise ValueError(
        f"The file needs {text}, which keras_vit does not read yet; it reads Vision Transformers "
        "of timm and Hugging Face transformers."
    )


def renamed_arrays(arrays: Arrays) -> tuple[TorchNames, dict[str, StoredArray]]:
    """Returns whose names the arrays have, and those of encoder and head under the one set.

    Raises:
        ValueError: the arrays are no library's, two mean the same, or parts do not fit each other.
    """
    check_features(arrays)
    for family in FAMILIES:
        anchor = re.compile(rf"(.*\.)?{re.escape(family.anchor)}")
        prefix = next((match[1] or "" for match in map(anchor.fullmatch, arrays) if match), None)
        if prefix is not None:
            _check_patches(arrays[f"{prefix}{family.anchor}"])
            names = {name: name.removeprefix(prefix) for name in arrays}
            used = [name for name in names if not re.match(family.left_aside, names[name])]
            pairs = ((_renamed(names[name], family), arrays[name]) for name in used)
            return family, _completed(renamed(pairs))
    raise ValueError(
        "The file does not hold a Vision Transformer of Hugging Face transformers or timm: its "
        f"arrays are {listed(arrays)}."
    )


def zeros(shape: tuple[int, ...]) -> StoredArray:
    """Returns an array of a file that has none: what the library leaves out."""
    return StoredArray(shape, np.dtype(np.float32), lambda: np.zeros(shape, np.float32))


def joined(parts: Iterable[StoredArray], *, axis: int = 0) -> StoredArray:
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


def _check_patches(kernel: StoredArray) -> None:
    if len(kernel.shape) == 2:
        raise ValueError(
            f"The file's patches are a linear layer of shape {shown(kernel.shape)}, for images of "
            "any size and grid (as in NaFlex), which keras_vit does not read yet."
        )


def _renamed(name: str, family: TorchNames) -> str:
    for pattern, replacement in family.rules:
        name = re.sub(pattern, replacement, name)
    return name


def _completed(arrays: dict[str, StoredArray]) -> dict[str, StoredArray]:
    """Puts the parts of a layer together, and adds zeros for what a class leaves out."""
    arrays = dict(arrays)
    for name, rank in (("cls_token", 3), ("pos_embed", 3)):
        array = arrays.get(name)
        if array is not None and 0 < len(array.shape) < rank:  # transformers' CLIP and SigLIP
            shape = (1,) * (rank - len(array.shape)) + array.shape
            arrays[name] = array.map(operator.methodcaller("reshape", shape), shape)
    _complete_biases(arrays)
    blocks = sorted({match[0] for match in map(re.compile(_BLOCK).match, arrays) if match})
    for block in blocks:
        _join(arrays, f"{block}attn.qkv.weight", [f"{block}attn.{part}.weight" for part in "qkv"])
        _join(arrays, f"{block}attn.qkv.bias", [f"{block}attn.{part}.bias" for part in "qkv"])
        for leaf in ("weight", "bias"):
            gated = [f"{block}mlp.{part}.{leaf}" for part in ("gate", "fc1")]
            _join(arrays, f"{block}mlp.fc1.{leaf}", gated)
    _share_bias(arrays, blocks)
    _split_pooling(arrays)
    return arrays


def _complete_biases(arrays: dict[str, StoredArray]) -> None:
    """Adds the biases that a class has in no block, or not at all, as zeros.

    A bias that only some blocks have is missing in the others: the file is damaged.
    """
    weights = [name for name in arrays if re.search(_BLOCK + r"attn\.(q|k|v|qkv)\.weight$", name)]
    biases = map(re.compile(_BLOCK + r"attn\.(q|k|v|qkv)\.bias$").match, arrays)
    present = {match[2] for match in biases if match}
    for name in weights:
        part, (rows, *_) = name.split(".")[-2], arrays[name].shape or (0,)
        if part != "qkv" and part not in present:
            arrays[f"{name.removesuffix('weight')}bias"] = zeros((rows,))
        if part == "qkv" and "qkv" not in present:
            start = name.removesuffix("qkv.weight")
            for each in sorted({"q", "k", "v"} - present):
                arrays[f"{start}{each}.bias"] = zeros((rows // 3,))
    # timm and CLIP: no bias where the tokens are normalised at once.
    if "norm_pre.weight" in arrays and "patch_embed.proj.bias" not in arrays:
        arrays["patch_embed.proj.bias"] = zeros(arrays["patch_embed.proj.weight"].shape[:1])
    if "projection.weight" in arrays and "projection.bias" not in arrays:
        arrays["projection.bias"] = zeros(arrays["projection.weight"].shape[:1])


def _join(arrays: dict[str, StoredArray], name: str, parts: list[str]) -> None:
    """Puts arrays together where all of them are there; otherwise they stay what they are."""
    if all(part in arrays for part in parts):
        whole = joined(arrays.pop(part) for part in parts)
        if name in arrays:
            raise ValueError(f"The file holds {shown(name)} whole and in parts.")
        arrays[name] = whole


def _share_bias(arrays: dict[str, StoredArray], blocks: list[str]) -> None:
    """Gives each block the relative position bias that BEiT's pre-training has for all of them."""
    shared = arrays.pop(f"rel_pos_bias.{_TABLE}", None)
    if shared is not None:
        pairs = ((f"{block}attn.{_TABLE}", shared) for block in blocks)
        arrays.update(renamed([*arrays.items(), *pairs]))


def _split_pooling(arrays: dict[str, StoredArray]) -> None:
    """Cuts the query out of the one product of transformers' attention pooling."""
    for leaf in ("weight", "bias"):
        whole = arrays.pop(f"attn_pool.qkv.{leaf}", None)
        if whole is not None and whole.shape:
            count, rest = whole.shape[0] // 3, whole.shape[1:]
            query, key_value = map(operator.itemgetter, (slice(count), slice(count, None)))
            arrays[f"attn_pool.q.{leaf}"] = whole.map(query, (count, *rest))
            arrays[f"attn_pool.kv.{leaf}"] = whole.map(key_value, (whole.shape[0] - count, *rest))


def blocks_with(arrays: Arrays, name: str) -> Iterator[str]:
    """Yields the names of an array of a block, in every block that has it."""
    yield from (each for each in arrays if re.fullmatch(_BLOCK + re.escape(name), each))
