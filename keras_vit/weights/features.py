"""Names what a checkpoint of another network needs that a VisionTransformer does not have."""

import re
from collections.abc import Iterable

# What an array's name stands for: the first of its names that is found is the example.
FEATURES = (
    (r"(^|\.)(norm_pre|pre_layrnorm)\.", "a normalisation of the embeddings (as in CLIP)"),
    (r"(^|\.)reg(ister)?_tokens?$", "register tokens in its library's names"),
    (r"(^|\.)dist(illation)?_token$", "a distillation token in its library's names"),
    (
        r"(ls1\.gamma|layer_scale1\.lambda1|\.gamma_1|\.lambda_1)$",
        "a scale for each channel of the residual branches (layer scale)",
    ),
    (r"relative_position_bias_table$", "BEiT's relative position bias"),
    (r"(^|\.)(fc_norm|pooler\.layernorm)\.", "a normalisation after pooling"),
    (r"attn\.(q|k)_norm\.", "the normalisation of queries and keys in its library's names"),
    (r"attn\.(q|v)_bias$", "attention whose keys have no bias"),
    (r"attention\.q_proj\.weight$", "DINOv3's attention and its rotary positions"),
    (r"self_attn\.q_proj\.weight$", "the layout of CLIP and SigLIP in transformers"),
    (r"(^|\.)visual_projection\.", "a projection of the pooled token (as in CLIP)"),
    (r"mlp\.weights_in\.|mlp\.w12\.|mlp\.fc1_g\.", "a gated MLP in its library's names"),
    (r"mlp\.c_fc\.", "the layout of TIPS"),
    (r"patch_embed\.backbone\.|embedder\.convolution\.", "a convolutional stem of another library"),
    (r"(^|\.)(self_attn|attn)\.(sub_?norm|norm)\.|mlp\.norm\.", "a normalisation inside blocks"),
    (r"attns?\.\d+\.|attn\.lambda_q1$", "several attentions in a block"),
)


def check_features(names: Iterable[str]) -> None:
    """Raises a ValueError that says what arrays of these names need beyond the network.

    Example:
        >>> check_features(["patch_embed.proj.weight", "blocks.0.attn.qkv.weight"])
    """
    names = sorted(names)
    found = {}
    for pattern, feature in FEATURES:
        example = next(filter(re.compile(pattern).search, names), None)
        if example is not None:
            found[feature] = example
    if not found:
        return
    needs = [f"{feature} ({example})" for feature, example in found.items()]
    *most, last = needs
    listed = f"{', '.join(most)} and {last}" if most else last
    raise ValueError(
        f"The file needs {listed}, which keras_vit does not read yet; it reads plain Vision "
        "Transformers of timm and Hugging Face transformers."
    )
