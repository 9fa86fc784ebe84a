"""Looks inside a model: attention, relevance, positions, filters, and pictures of them."""

from keras_vit.explain.attention import (
    attention_rollout,
    attention_weights,
    class_relevance,
    embedding_filters,
    mean_attention_distance,
    pooling_attention,
    position_similarity,
    token_similarity,
)
from keras_vit.explain.page import write_explanation
from keras_vit.figures import (
    Filters,
    plot_attention_distance,
    plot_filters,
    plot_heads,
    plot_heatmap,
    plot_position_similarity,
)

__all__ = ["Filters", "attention_rollout", "attention_weights", "class_relevance",
           "embedding_filters", "mean_attention_distance", "plot_attention_distance",
           "plot_filters", "plot_heads", "plot_heatmap", "plot_position_similarity",
           "pooling_attention", "position_similarity", "token_similarity",
           "write_explanation"]  # fmt: skip
