"""Describes a Vision Transformer: `ViTConfig`.

Knows no framework: importing this module costs nothing.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from keras_vit.limits import LIMITS, MAX_SIDE, is_grid, is_number, is_whole, shown

Pooling = Literal["token", "avg", "token_avg", "max", "map"]
Activation = Literal["gelu_tanh", "gelu", "quick_gelu", "swiglu"]
PositionEmbedding = Literal["learned", "learned_2d", "sincos_2d", "relative"]
PositionPlacement = Literal["input", "every_block", "every_block_shared"]
# (height, width, channels) of images, integers; height and width are None for images of any size.
InputShape = tuple[Any, Any, int]

# A ResNet root halves twice (7x7/2 convolution, 3x3/2 max-pool) before any stage
# (google-research/vision_transformer, vit_jax/models_vit.py).
ROOT_STRIDE = 4
STEM_WIDTH = 64

# What the width of a token must be a multiple of, for position embeddings made of parts.
WIDTH_MULTIPLES = {"learned_2d": 2, "sincos_2d": 4}

# What the hand-written writers of checkpoints, ONNX and TFLite know: fields at any value, and some
# values of two more. A network with any other field changed is none of theirs, docs/variants.md.
WRITTEN = {
    *("input_shape", "position_grid", "patch_size", "hidden_dim", "mlp_dim", "num_heads"),
    *("num_layers", "classes"),
    *("class_token", "representation_dim", "resnet_layers", "layer_norm_epsilon"),
    *("dropout_rate", "attention_dropout_rate", "drop_path_rate", "patch_dropout_rate"),
    *("remat", "scan_blocks", "antialias"),
    *("classifier_activation", "include_preprocessing", "image_mean", "image_std"),
}
WRITTEN_VALUES: dict[str, tuple[Any, ...]] = {
    "activation": ("gelu_tanh", "gelu"),
    "pooling": ("token", "avg", "map", None),
}

_MAX_STAGES = 8
_MIN_STD = 1e-9  # in units of 1; the smallest in use is 1 / 255
_RATES = ("dropout_rate", "attention_dropout_rate", "drop_path_rate", "patch_dropout_rate")
_SWITCHES = (
    *("class_token", "scan_blocks", "antialias", "include_preprocessing", "query_key_norm"),
    *("distillation_token", "embedding_norm", "norm_after_pooling"),
)


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
        input_shape: (height, width, channels) of the images, in pixels; (None, None, channels) for
            images of any size that the patch divides, whose positions are resampled in the graph as
            `keras_vit.resize` does it.
        patch_size: side of a square patch, in pixels, or in cells of the ResNet stem's output.
        hidden_dim: width D of a token.
        mlp_dim: width M of the hidden layer in each MLP.
        num_heads: attention heads H; divides `hidden_dim`.
        num_layers: number of Transformer blocks.
        classes: size of the classifier; None for no classifier.
        pooling: how tokens become one vector: the class "token", the average ("avg") or the largest
            values ("max") of the patch tokens, class token and average side by side ("token_avg",
            2 D wide), multi-head attention pooling ("map"), or None to keep every token.
        class_token: whether a learned token stands before the patch tokens.
        representation_dim: width of a dense layer before the classifier (pre-logits), or None.
        representation_activation: activation of that layer: "tanh", the original's, or None for a
            linear projection, CLIP's.
        resnet_layers: units in each stage of the hybrids' ResNet stem; () for the root alone, None
            for no stem.
        activation: the GELU of the MLPs: "gelu_tanh" is the original's, "gelu" the exact form that
            other libraries use, "quick_gelu" x * sigmoid(1.702 x), OpenAI's (arXiv 1606.08415); or
            "swiglu", whose gate doubles the first kernel (arXiv 2002.05202).
        layer_norm_epsilon: epsilon of every layer normalisation; 1e-6 in the original.
        dropout_rate: dropout after the position embeddings and after each dense layer except query,
            key and value.
        attention_dropout_rate: dropout on the attention weights.
        drop_path_rate: stochastic depth of the last block; the blocks before rise to it from 0.
        patch_dropout_rate: fraction of the patch tokens of each image that training leaves out,
            after positions are added at the input (arXiv 2212.00794).
        remat: whether training keeps only the input of each block and recomputes the rest for the
            gradient: less memory, more time, the same numbers. "dots" (JAX) keeps products too.
        scan_blocks: whether JAX compiles one block, in a loop over the weights of all; the numbers
            are the same. Other backends, and what records attention, run them one by one.
        antialias: whether images are downscaled with anti-aliasing before they reach the model, in
            training, evaluation, prediction and exports; Google's published weights were not.
        classifier_activation: activation after the classifier, e.g. "softmax"; None for logits.
        include_preprocessing: whether the model takes pixels 0..255 and scales them itself.
        image_mean: what the pixels' mean was taken to be in training, in units of 1 (0..255 divided
            by 255), a number for each channel; equal numbers hold for any number of channels. The
            original's, 0.5, makes values in [-1, 1].
        image_std: what their deviation was taken to be: the network computes on
            (pixels / 255 - image_mean) / image_std.
        position_embedding: how tokens know their place (arXiv 2010.11929, Appendix D.4): "learned"
            for each (1-D, the original's), "learned_2d" for each row and column, "sincos_2d" fixed,
            "relative" as a learned bias of attention, or None.
        position_grid: (height, width) in patches that tables of positions are made for, if the size
            of the images is open; None if it is not: then `grid` follows from it.
        position_placement: where they are added: once at the "input", at the input of "every_block"
            with a table for each, or "every_block_shared" with one for all.
        num_registers: learned tokens without place that stand before the patch tokens and after
            the class token (arXiv 2309.16588).
        layer_scale: initial value of a factor for each channel of both branches (arXiv 2103.17239).
        query_key_norm: whether queries and keys are normalised in each head (arXiv 2302.05442).
        distillation_token: whether a second learned token, after the class token, has a second
            classifier, `distillation_head`; the model answers the mean of both (arXiv 2012.12877).
        embedding_norm: whether the first block's input is normalised, as CLIP's (arXiv 2103.00020).
        norm_after_pooling: whether the last normalisation follows the pooling instead of the last
            block, as in BEiT (arXiv 2106.08254); without pooling there is none then.
        pooling_heads: attention heads of pooling "map"; None for `num_heads`.
        rotary_period: the longest period of rotary position embeddings, which turn queries and keys
            by the place of their patch (arXiv 2104.09864), in each block; None for none.
        rotary_grid: (rows, columns) that places are counted in: each side of an image of any size
            has so many (arXiv 2303.11331). None for places from -1 to 1, times 2 pi (arXiv
            2508.10104).
        rotary_offset: the place of the first row and column; of `rotary_grid` alone.

    Raises:
        ValueError: a number is out of range, or the parts do not fit each other.
    """

    input_shape: InputShape = (224, 224, 3)
    patch_size: int = 16
    hidden_dim: int = 768
    mlp_dim: int = 3072
    num_heads: int = 12
    num_layers: int = 12
    classes: int | None = 1000
    pooling: Pooling | None = "token"
    class_token: bool = True
    representation_dim: int | None = None
    representation_activation: Literal["tanh"] | None = "tanh"
    resnet_layers: tuple[int, ...] | None = None
    activation: Activation = "gelu_tanh"
    layer_norm_epsilon: float = 1e-6
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    drop_path_rate: float = 0.0
    patch_dropout_rate: float = 0.0
    remat: bool | Literal["dots"] = False
    scan_blocks: bool = False
    antialias: bool = True
    classifier_activation: str | None = None
    include_preprocessing: bool = False
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    position_embedding: PositionEmbedding | None = "learned"
    position_grid: tuple[int, int] | None = None
    position_placement: PositionPlacement = "input"
    num_registers: int = 0
    layer_scale: float | None = None
    query_key_norm: bool = False
    distillation_token: bool = False
    embedding_norm: bool = False
    norm_after_pooling: bool = False
    pooling_heads: int | None = None
    rotary_period: float | None = None
    rotary_grid: tuple[int, int] | None = None
    rotary_offset: float = 0.0

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        self._check_image()
        self._check_pixels()
        self._check_positions()
        self._check_any_size()
        self._check_tokens()

    @property
    def stride(self) -> int:
        """Pixels between neighbouring tokens: the patch, times the ResNet stem's own stride."""
        return stride_of(self.patch_size, self.resnet_layers)

    @property
    def any_size(self) -> bool:
        """Whether images may be of any size that the patch divides."""
        return self.input_shape[0] is None

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the images, in pixels.

        Raises:
            ValueError: the model is for images of any size.
        """
        height, width, channels = self.input_shape
        if height is None or width is None:
            raise ValueError(
                "This needs a model for images of one size, and this model takes any; make one by "
                f"keras_vit.resize(model, (height, width, {channels})), which computes the same."
            )
        return height, width

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) in patches: of the image, or of the tables if its size is open."""
        if self.position_grid is not None:
            return self.position_grid
        height, width = self.image_size
        return height // self.stride, width // self.stride

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches': class token, distillation token, registers, in this order."""
        return self.class_token + self.distillation_token + self.num_registers

    @property
    def num_tokens(self) -> int:
        """Tokens N that the blocks see: those before the patches', and the patches'."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def num_placed_tokens(self) -> int:
        """Tokens before the patches' that have a place: all of these but registers."""
        return self.num_prefix_tokens - self.num_registers

    @property
    def pooled_dim(self) -> int:
        """Width of what pooling makes of the tokens, or of each token without pooling."""
        return self.hidden_dim * (2 if self.pooling == "token_avg" else 1)

    @property
    def adds_positions(self) -> bool:
        """Whether position embeddings are added to tokens, at the input or before blocks."""
        return self.position_embedding not in (None, "relative")

    @property
    def patch_channels(self) -> int:
        """Channels of what is cut into patches: the image's, or the ResNet stem's."""
        if self.resnet_layers is None:
            return self.input_shape[2]
        if not self.resnet_layers:
            return STEM_WIDTH
        return int(4 * STEM_WIDTH * 2 ** (len(self.resnet_layers) - 1))

    @property
    def rescaling(self) -> tuple[float | tuple[float, ...], float | tuple[float, ...]]:
        """(scale, offset) of pixels: the network computes on `pixels * scale + offset`.

        Numbers where they are the same for every channel, otherwise one for each channel.
        """
        pairs = zip(self.image_mean, self.image_std, strict=True)
        rows = [(1 / (255 * std), -mean / std) for mean, std in pairs]
        if len(set(rows)) == 1:
            return rows[0]
        scales, offsets = zip(*rows, strict=True)
        return scales, offsets

    @property
    def departures(self) -> tuple[str, ...]:
        """Fields in which the network departs from the published ones.

        The layouts of other libraries have no room for these, nor have the hand-written exports.
        """
        return tuple(
            field.name
            for field in dataclasses.fields(self)
            if field.name not in WRITTEN
            and getattr(self, field.name) not in WRITTEN_VALUES.get(field.name, (field.default,))
        )

    def drop_path_rates(self) -> tuple[float, ...]:
        """Returns each block's stochastic depth: 0 at the first, rising to `drop_path_rate`."""
        last = max(self.num_layers - 1, 1)
        return tuple(self.drop_path_rate * index / last for index in range(self.num_layers))

    def resized(self, input_shape: InputShape) -> "ViTConfig":
        """Returns the config for images of another size, or of any; its tables may need resampling.

        Example:
            >>> ViTConfig().resized((None, None, 3)).position_grid
            (14, 14)
        """
        is_open = isinstance(input_shape, tuple) and None in input_shape[:2]
        grid = self.grid if is_open else None
        return dataclasses.replace(self, input_shape=input_shape, position_grid=grid)

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
            ValueError: a field is not one of ViTConfig's, or has another type.
        """
        if not isinstance(fields, Mapping):
            raise ValueError(f"A ViTConfig is a dictionary of fields. Received: {shown(fields)}.")
        allowed = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - allowed)
        if unknown:
            raise ValueError(
                f"ViTConfig has no field {shown(unknown)}; help(keras_vit.ViTConfig) lists them."
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)

    def _check_numbers(self) -> None:
        for name, most in LIMITS.items():
            value, least = getattr(self, name), int(name != "num_registers")
            is_optional = name in ("classes", "representation_dim", "pooling_heads")
            fits = is_whole(value, least, most) or (is_optional and value is None)
            allowed = "a positive integer" if least else "a whole number from 0"
            self._require(fits, name, allowed + " or None" * is_optional + f", at most {most}")
        for name in _RATES:
            rate = getattr(self, name)
            self._require(is_number(rate) and 0 <= rate < 1, name, "in [0, 1)")
        for name in _SWITCHES:
            self._require(isinstance(getattr(self, name), bool), name, "True or False")
        epsilon, scale = self.layer_norm_epsilon, self.layer_scale
        fits = is_number(epsilon) and 0 < epsilon < 1
        self._require(fits, "layer_norm_epsilon", "above 0 and below 1")
        fits = scale is None or (is_number(scale) and scale > 0)
        self._require(fits, "layer_scale", "above 0, or None")
        divides = self.hidden_dim % self.num_heads == 0
        self._require(divides, "hidden_dim", f"a multiple of num_heads={self.num_heads}")

    def _check_choices(self) -> None:
        choices = {
            "pooling": [*get_args(Pooling), None],
            "representation_activation": ["tanh", None],
            "activation": list(get_args(Activation)),
            "remat": [True, False, "dots"],
            "position_embedding": [*get_args(PositionEmbedding), None],
            "position_placement": list(get_args(PositionPlacement)),
        }
        for name, values in choices.items():
            self._require(getattr(self, name) in values, name, f"one of {values}")
        fits = isinstance(self.classifier_activation, str | None)
        self._require(fits, "classifier_activation", "a name or None")
        if self.pooling in ("token", "token_avg") and not self.class_token:
            raise ValueError(
                f'pooling="{self.pooling}" needs class_token=True; without one use pooling="avg", '
                '"max" or "map".'
            )
        stages = () if self.resnet_layers is None else self.resnet_layers
        most = LIMITS["num_layers"]
        is_stages = isinstance(stages, tuple) and all(is_whole(n, 1, most) for n in stages)
        is_stages = is_stages and len(stages) <= _MAX_STAGES
        allowed = f"a tuple of positive integers or None, at most {_MAX_STAGES} up to {most}"
        self._require(is_stages, "resnet_layers", allowed)

    def _check_image(self) -> None:
        shape, stride = self.input_shape, self.stride
        is_shape = isinstance(shape, tuple) and len(shape) == 3
        sides = shape[2:] if is_shape and shape[:2] == (None, None) else shape
        is_shape = is_shape and all(is_whole(side, 1, MAX_SIDE) for side in sides)
        allowed = f"three positive integers (height, width, channels), at most {MAX_SIDE}, or "
        self._require(is_shape, "input_shape", allowed + "(None, None, channels)")
        if self.any_size:
            return
        if any(side % stride for side in self.image_size):
            near = tuple(max(round(side / stride), 1) * stride for side in self.image_size)
            raise ValueError(
                f"The image's height and width must be multiples of {stride}, the pixels between "
                f"two tokens. Received: input_shape={shape}; the nearest that fits is "
                f"{(*near, shape[2])}."
            )

    def _check_pixels(self) -> None:
        channels = self.input_shape[2]
        for name in ("image_mean", "image_std"):
            values = getattr(self, name)
            is_tuple = isinstance(values, tuple) and all(map(is_number, values))
            fits = is_tuple and (len(values) == channels or len(set(values)) == 1)
            allowed = f"a tuple of {channels} finite numbers, one for each channel"
            self._require(fits, name, allowed)
        self._require(len(self.image_mean) == len(self.image_std), "image_std", "as many as means")
        fits = min(self.image_std) >= _MIN_STD
        self._require(fits, "image_std", f"above 0, at least {_MIN_STD}")

    def _check_positions(self) -> None:
        kind = self.position_embedding
        multiple = WIDTH_MULTIPLES.get(str(kind), 1)
        if self.hidden_dim % multiple:
            raise ValueError(
                f'position_embedding="{kind}" needs a hidden_dim that is a multiple of {multiple}. '
                f"Received: hidden_dim={self.hidden_dim}."
            )
        self._check_rotary()
        self._check_patch_dropout()
        fits = not self.scan_blocks or self.position_placement == "input"
        self._require(fits, "scan_blocks", 'False unless position_placement="input"')
        if not self.adds_positions and self.position_placement != "input":
            raise ValueError(
                f"position_embedding={kind!r} adds nothing to tokens that could stand elsewhere; "
                'leave position_placement at "input". '
                f"Received: position_placement={self.position_placement!r}."
            )

    def _check_rotary(self) -> None:
        period, grid, offset = self.rotary_period, self.rotary_grid, self.rotary_offset
        fits = period is None or (is_number(period) and period > 1)
        self._require(fits, "rotary_period", "above 1, or None")
        fits = grid is None or is_grid(grid)
        self._require(fits, "rotary_grid", "two positive integers (rows, columns), or None")
        self._require(is_number(offset), "rotary_offset", "a finite number")
        if (grid is not None and period is None) or (offset and grid is None):
            raise ValueError(
                "rotary_grid needs rotary_period, and rotary_offset needs rotary_grid. Received: "
                f"rotary_period={period}, rotary_grid={grid}, rotary_offset={offset}."
            )
        size = self.hidden_dim // self.num_heads
        if period is not None and size % 4:
            raise ValueError(
                "Rotary positions need heads whose width is a multiple of 4. Received: "
                f"hidden_dim={self.hidden_dim}, num_heads={self.num_heads}, heads of {size}."
            )

    def _check_any_size(self) -> None:
        if not self.any_size:
            if self.position_grid is not None:
                raise ValueError(
                    "position_grid is for input_shape=(None, None, channels); change both by "
                    f"config.resized(input_shape). Received: input_shape={self.input_shape}, "
                    f"position_grid={shown(self.position_grid)}."
                )
            return
        allowed = "two positive integers (rows, columns) if the size of the images is open"
        self._require(is_grid(self.position_grid), "position_grid", allowed)
        parts = {
            'position_embedding="relative"': self.position_embedding == "relative",
            "a ResNet stem": self.resnet_layers is not None,
        }
        for part, is_there in parts.items():
            if is_there:
                raise ValueError(
                    f"A model with {part} takes images of one size. "
                    f"Received: input_shape={self.input_shape}; give their height and width."
                )

    def _check_patch_dropout(self) -> None:
        is_relative = self.position_embedding == "relative"
        if self.patch_dropout_rate and (is_relative or self.position_placement != "input"):
            raise ValueError(
                "patch_dropout_rate needs rotary positions or those that are added at the input, "
                "since blocks do not know which patches are left. Received: "
                f"patch_dropout_rate={self.patch_dropout_rate}, "
                f"position_embedding={self.position_embedding!r}, "
                f"position_placement={self.position_placement!r}."
            )

    def _check_tokens(self) -> None:
        if self.pooling_heads is not None and (
            self.pooling != "map" or self.hidden_dim % self.pooling_heads
        ):
            raise ValueError(
                'pooling_heads needs pooling="map" and divides hidden_dim. Received: '
                f"pooling_heads={self.pooling_heads}, pooling={self.pooling!r}, "
                f"hidden_dim={self.hidden_dim}."
            )
        is_classifier = self.pooling == "token" and self.classes is not None
        if self.distillation_token and self.norm_after_pooling:
            raise ValueError(
                "distillation_token=True needs norm_after_pooling=False: the last normalisation "
                "would follow the class token alone."
            )
        if self.distillation_token and (not is_classifier or self.representation_dim is not None):
            raise ValueError(
                "distillation_token=True needs class_token=True, classes, "
                'pooling="token" and no representation_dim. Received: '
                f"class_token={self.class_token}, classes={self.classes}, "
                f"pooling={self.pooling!r}, representation_dim={self.representation_dim}."
            )

    def _require(self, fits: bool, name: str, allowed: str) -> None:
        if not fits:
            raise ValueError(
                f"{name} must be {allowed}. Received: {name}={shown(getattr(self, name))}."
            )


def stride_of(patch_size: int, resnet_layers: tuple[int, ...] | None) -> int:
    """Returns the pixels between neighbouring tokens, see `ViTConfig.stride`."""
    if resnet_layers is None:
        return patch_size
    return int(patch_size * ROOT_STRIDE * 2 ** max(len(resnet_layers) - 1, 0))
