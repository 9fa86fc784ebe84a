"""The Keras layers that a Vision Transformer is made of.

Shapes in comments: B images, H and W pixels (with tokens H is heads), C channels, P patch_size, h
and w the grid of patches, N tokens, D hidden_dim, K width of a head, M mlp_dim.
"""

from keras_vit.layers.attention import MultiHeadSelfAttention
from keras_vit.layers.block import DropPath, PatchDropout, TransformerBlock
from keras_vit.layers.dense import MLP, LayerNormalization, TokenDense
from keras_vit.layers.patches import PatchEncoder, Patches
from keras_vit.layers.pooling import AttentionPooling, TokenPooling
from keras_vit.layers.positions import PositionEmbedding, RotaryEmbedding
from keras_vit.layers.resnet import BottleneckUnit, ResNetStem, StdConv2D

__all__ = ["MLP", "AttentionPooling", "BottleneckUnit", "DropPath", "LayerNormalization",
           "MultiHeadSelfAttention", "PatchDropout", "PatchEncoder", "Patches",
           "PositionEmbedding", "ResNetStem", "RotaryEmbedding", "StdConv2D", "TokenDense",
           "TokenPooling", "TransformerBlock"]  # fmt: skip
