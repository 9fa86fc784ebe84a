"""The Keras layers that a Vision Transformer is made of.

Letters in the shape comments: B batch, H and W height and width, C channels, P patch, N tokens,
D hidden width, K width of one attention head, M width of the MLP's hidden layer.
"""

from keras_vit.layers.attention import MultiHeadSelfAttention
from keras_vit.layers.block import DropPath, PatchDropout, TransformerBlock
from keras_vit.layers.dense import MLP, LayerNormalization, TokenDense
from keras_vit.layers.patches import PatchEncoder, Patches
from keras_vit.layers.pooling import AttentionPooling, TokenPooling
from keras_vit.layers.positions import PositionEmbedding, RotaryTurns
from keras_vit.layers.resnet import BottleneckUnit, ResNetStem, StdConv2D

__all__ = [
    "MLP",
    "AttentionPooling",
    "BottleneckUnit",
    "DropPath",
    "LayerNormalization",
    "MultiHeadSelfAttention",
    "PatchDropout",
    "PatchEncoder",
    "Patches",
    "PositionEmbedding",
    "ResNetStem",
    "RotaryTurns",
    "StdConv2D",
    "TokenDense",
    "TokenPooling",
    "TransformerBlock",
]
