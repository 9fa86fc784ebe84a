"""Describes a Vision Transformer: `ViTConfig`, the table of variants, their parameter counts.

Knows no framework: importing this module costs nothing.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

Pooling = Literal["token", "avg", "map"]
Activation = Literal["gelu_tanh", "gelu"]

# A ResNet root halves twice (7x7/2 convolution, 3x3/2 max-pool) before any stage
# (google-research/vision_transformer, vit_jax/models_vit.py).
ROOT_STRIDE = 4
STEM_WIDTH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that decides the shape and the numbers of a Vision Transformer.

    Example:
        >>> config = ViTConfig(input_shape=(96, 64, 3), patch_size=8, hidden_dim=64, mlp_dim=128,
        ...                    num_heads=4, num_layers=2, classes=10)
        >>> config.grid
        (12, 8)
        >>> ViTConfig.from_dict(config.to_dict()) == config
        True

    Attributes:
        input_shape: (height, width, channels) of the images, in pixels.
        patch_size: side of a square patch, in pixels, or in cells of the ResNet stem's output.
        hidden_dim: width D of a token.
        mlp_dim: width M of the hidden layer in each MLP.
        num_heads: attention heads H; divides `hidden_dim`.
        num_layers: number of Transformer blocks.
        classes: size of the classifier; None for no classifier.
        pooling: how tokens become one vector: the class "token", the average ("avg") of the patch
            tokens, multi-head attention pooling ("map"), or None to keep every token.
        class_token: whether a learned token stands before the patch tokens.
        representation_dim: width of a dense layer with tanh before the classifier (pre-logits);
            None for none.
        resnet_layers: units in each stage of the hybrids' ResNet stem; () for the root alone, None
            for no stem.
        activation: the GELU of the MLPs: "gelu_tanh" is the original's, "gelu" the exact form that
            other libraries use.
        layer_norm_epsilon: epsilon of every layer normalisation; 1e-6 in the original.
        dropout_rate: dropout after the position embeddings and after each dense layer except query,
            key and value.
        attention_dropout_rate: dropout on the attention weights.
        drop_path_rate: stochastic depth of the last block; the blocks before rise to it from 0.
        remat: whether training keeps only the input of each block and computes the rest anew for
            the gradient: less memory, more time, the same numbers.
        classifier_activation: activation after the classifier, e.g. "softmax"; None for logits.
        include_preprocessing: whether the model takes pixels 0..255 and scales them to [-1, 1].

    Raises:
        ValueError: a number is out of range, or the parts do not fit each other.
    """

    input_shape: tuple[int, int, int] = (224, 224, 3)
    patch_size: int = 16
    hidden_dim: int = 768
    mlp_dim: int = 3072
    num_heads: int = 12
    num_layers: int = 12
    classes: int | None = 1000
    pooling: Pooling | None = "token"
    class_token: bool = True
    representation_dim: int | None = None
    resnet_layers: tuple[int, ...] | None = None
    activation: Activation = "gelu_tanh"
    layer_norm_epsilon: float = 1e-6
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    drop_path_rate: float = 0.0
    remat: bool = False
    classifier_activation: str | None = None
    include_preprocessing: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        self._check_image()

    @property
    def stride(self) -> int:
        """Pixels between neighbouring tokens: the patch, times the ResNet stem's own stride."""
        if self.resnet_layers is None:
            return self.patch_size
        return int(self.patch_size * ROOT_STRIDE * 2 ** max(len(self.resnet_layers) - 1, 0))

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of the image in patches."""
        height, width, _ = self.input_shape
        return height // self.stride, width // self.stride

    @property
    def num_tokens(self) -> int:
        """Tokens N that the blocks see: the patches, and the class token if there is one."""
        return self.grid[0] * self.grid[1] + self.class_token

    @property
    def patch_channels(self) -> int:
        """Channels of what is cut into patches: the image's, or the ResNet stem's."""
        if self.resnet_layers is None:
            return self.input_shape[2]
        if not self.resnet_layers:
            return STEM_WIDTH
        return int(4 * STEM_WIDTH * 2 ** (len(self.resnet_layers) - 1))

    def drop_path_rates(self) -> tuple[float, ...]:
        """Returns each block's stochastic depth: 0 at the first, rising to `drop_path_rate`."""
        last = max(self.num_layers - 1, 1)
        return tuple(self.drop_path_rate * index / last for index in range(self.num_layers))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values that JSON can carry."""
        fields = dataclasses.asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ViTConfig":
        """Rebuilds a config from `to_dict`.

        Raises:
            ValueError: a field is not one of ViTConfig's.
        """
        allowed = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - allowed)
        if unknown:
            raise ValueError(f"ViTConfig has no field {unknown}; its fields are {sorted(allowed)}.")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)

    def _check_numbers(self) -> None:
        for name in ("patch_size", "hidden_dim", "mlp_dim", "num_heads", "num_layers"):
            self._require(_is_count(getattr(self, name)), name, "a positive integer")
        for name in ("classes", "representation_dim"):
            value = getattr(self, name)
            self._require(value is None or _is_count(value), name, "a positive integer or None")
        for name in ("dropout_rate", "attention_dropout_rate", "drop_path_rate"):
            self._require(0 <= getattr(self, name) < 1, name, "in [0, 1)")
        self._require(self.layer_norm_epsilon > 0, "layer_norm_epsilon", "above 0")
        divides = self.hidden_dim % self.num_heads == 0
        self._require(divides, "hidden_dim", f"a multiple of num_heads={self.num_heads}")

    def _check_choices(self) -> None:
        poolings, activations = [*get_args(Pooling), None], list(get_args(Activation))
        self._require(self.pooling in poolings, "pooling", f"one of {poolings}")
        self._require(self.activation in activations, "activation", f"one of {activations}")
        if self.pooling == "token" and not self.class_token:
            raise ValueError(
                'pooling="token" needs class_token=True; without one use pooling="avg" or "map".'
            )
        stages = () if self.resnet_layers is None else self.resnet_layers
        is_stages = isinstance(stages, tuple) and all(map(_is_count, stages))
        self._require(is_stages, "resnet_layers", "a tuple of positive integers or None")

    def _check_image(self) -> None:
        shape, stride = self.input_shape, self.stride
        is_shape = isinstance(shape, tuple) and len(shape) == 3 and all(map(_is_count, shape))
        self._require(is_shape, "input_shape", "three positive integers (height, width, channels)")
        if shape[0] % stride or shape[1] % stride:
            near = tuple(max(round(side / stride), 1) * stride for side in shape[:2])
            raise ValueError(
                f"The image's height and width must be multiples of {stride}, the pixels between "
                f"two tokens. Received: input_shape={shape}; the nearest that fits is "
                f"{(*near, shape[2])}."
            )

    def _require(self, fits: bool, name: str, allowed: str) -> None:
        if not fits:
            raise ValueError(f"{name} must be {allowed}. Received: {name}={getattr(self, name)!r}.")


def parameter_count(config: ViTConfig) -> int:
    """Counts the trainable parameters of a config without building it.

    Example:
        >>> parameter_count(VARIANTS["B/16"])
        86567656
    """
    d, m = config.hidden_dim, config.mlp_dim
    norm, mlp, attention = 2 * d, d * m + m + m * d + d, 4 * (d * d + d)
    count = _stem_parameter_count(config)
    count += config.patch_size**2 * config.patch_channels * d + d  # patch projection
    count += config.num_tokens * d + config.class_token * d  # positions, class token
    count += config.num_layers * (norm + attention + norm + mlp) + norm
    if config.pooling == "map":
        count += d + attention + norm + mlp
    if config.representation_dim is not None:
        count += d * config.representation_dim + config.representation_dim
        d = config.representation_dim
    if config.classes is not None:
        count += d * config.classes + config.classes
    return count


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


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# Sizes: name -> hidden_dim, mlp_dim, num_heads, num_layers.
SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "Ti": (192, 768, 3, 12),  # arXiv 2106.10270, Table 2
    "S": (384, 1536, 6, 12),  # arXiv 2106.10270, Table 2
    "B": (768, 3072, 12, 12),  # arXiv 2010.11929, Table 1
    "L": (1024, 4096, 16, 24),  # arXiv 2010.11929, Table 1
    "H": (1280, 5120, 16, 32),  # arXiv 2010.11929, Table 1
    "g": (1408, 6144, 16, 40),  # arXiv 2106.04560, Table 2
    "G": (1664, 8192, 16, 48),  # arXiv 2106.04560, Table 2
    "So400m": (
        1152,
        4304,
        16,
        27,
    ),  # arXiv 2305.13035, Section 5 (shape-optimised for 400 M parameters)
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
