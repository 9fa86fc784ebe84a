"""Draws configs of tiny models, every field among them."""

from typing import Any

from hypothesis import strategies as st

from keras_vit.config import ViTConfig


def _config(grid: tuple[int, int], *, heads: int, width: int, channels: int, **fields: Any) -> Any:
    has_token, distilled = fields.pop("has_token"), fields.pop("distilled")
    is_classifier = fields["pooling"] == "token" and fields["classes"] is not None
    if fields["position_embedding"] in (None, "relative"):
        fields["position_placement"] = "input"
    if fields["rotary_period"] is None:
        fields["rotary_grid"] = None
    if fields["rotary_grid"] is None:
        fields["rotary_offset"] = 0.0
    is_relative = fields["position_embedding"] == "relative"
    if is_relative or fields["position_placement"] != "input":
        fields["patch_dropout_rate"] = 0.0
    if fields["norm_after_pooling"]:
        distilled = False
    has_pooling_heads = fields.pop("has_pooling_heads") and fields["pooling"] == "map"
    return ViTConfig(
        input_shape=(grid[0] * 4, grid[1] * 4, channels),
        patch_size=4,
        num_heads=heads,
        hidden_dim=heads * width,
        class_token=fields["pooling"] in ("token", "token_avg") or has_token,
        pooling_heads=2 * heads if has_pooling_heads else None,
        distillation_token=distilled and is_classifier and fields["representation_dim"] is None,
        **fields,
    )


configs = st.builds(
    _config,
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    heads=st.integers(1, 3),
    width=st.sampled_from([4, 8]),
    channels=st.integers(1, 4),
    has_token=st.booleans(),
    distilled=st.booleans(),
    mlp_dim=st.integers(1, 9),
    num_layers=st.integers(1, 2),
    classes=st.none() | st.integers(1, 5),
    pooling=st.sampled_from(["token", "avg", "token_avg", "map", None]),
    representation_dim=st.none() | st.integers(1, 5),
    representation_activation=st.sampled_from(["tanh", None]),
    activation=st.sampled_from(["gelu_tanh", "gelu", "quick_gelu", "swiglu"]),
    dropout_rate=st.sampled_from([0.0, 0.1]),
    position_embedding=st.sampled_from(["learned", "learned_2d", "sincos_2d", "relative", None]),
    position_placement=st.sampled_from(["input", "every_block", "every_block_shared"]),
    num_registers=st.integers(0, 2),
    layer_scale=st.none() | st.just(0.1),
    query_key_norm=st.booleans(),
    embedding_norm=st.booleans(),
    norm_after_pooling=st.booleans(),
    has_pooling_heads=st.booleans(),
    rotary_period=st.none() | st.sampled_from([10.0, 100.0]),
    rotary_grid=st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4)),
    rotary_offset=st.sampled_from([0.0, 0.5]),
    patch_dropout_rate=st.sampled_from([0.0, 0.5]),
)
