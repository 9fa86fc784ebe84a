"""Describes a Vision Transformer: `ViTConfig`.

Knows no framework: importing this module costs nothing.
"""

import dataclasses
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from keras_vit import limits
from keras_vit.limits import Allowed, is_grid, is_number, shown

Pooling = Literal["token", "avg", "token_avg", "max", "map"]
Activation = Literal["gelu_tanh", "gelu", "quick_gelu", "swiglu"]
PositionEmbedding = Literal["learned", "learned_2d", "sincos_2d", "relative"]
PositionPlacement = Literal["input", "every_block", "every_block_shared"]
# transformers' names for what outputs mean, and the activations that say it and that do not.
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
Interpolation = Literal["bilinear", "bicubic", "lanczos"]
CropMode = Literal["squash", "center"]
CropOffset = Literal["round", "floor"]
PROBLEM_TYPES: Mapping[str | None, ProblemType] = {
    "softmax": "single_label_classification",
    "sigmoid": "multi_label_classification",
}
ACTIVATIONS = {problem_type: activation for activation, problem_type in PROBLEM_TYPES.items()}
LINEAR, LOGITS = (None, "linear"), (None, "linear", "log_softmax")
# What a loss trains, by its name or a word in it; the first that fits.
TRAINED_BY: Mapping[str, ProblemType] = {
    **dict.fromkeys(("binary", "bce", "sigmoid"), "multi_label_classification"),
    **dict.fromkeys(("categorical", "kld", "softmax"), "single_label_classification"),
    **dict.fromkeys(
        ("mean", "mse", "mae", "mape", "msle", "huber", "cosh", "poisson"), "regression"
    ),
}
# (height, width, channels) of images, integers; height and width are None for images of any size.
InputShape = tuple[Any, Any, int]

# A ResNet root halves twice (7x7/2 convolution, 3x3/2 max-pool) before any stage
# (google-research/vision_transformer, vit_jax/models_vit.py).
ROOT_STRIDE = 4
STEM_WIDTH = 64

# What the width of a token must be a multiple of, for position embeddings made of parts.
WIDTH_MULTIPLES = {"learned_2d": 2, "sincos_2d": 4}

_MIN_STD = 1e-9  # in units of 1; the smallest in use is 1 / 255
_warned: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models of which something was assumed


# What a field means to a checkpoint. The original's layout and the writers of ONNX and TFLite hold
# the default alone of an "extension" and of an "own", and any value of the others, unless the field
# says otherwise.
Role = Literal[
    "architecture",  # the same in a file and the model that it fills
    "shape",  # the shapes of arrays say it
    "assumed",  # no array shows it; the published value where it is not stated
    "training",  # matters in training alone
    "input",  # what goes in and comes out: the caller's
    "extension",  # beyond the published network; a layout without room for it says nothing
    "own",  # beyond it, and in files of Keras alone
]


def _field(
    default: Any,
    role: Role,
    allowed: Allowed | None = None,
    *,
    published: tuple[Any, ...] | None = None,
    written: Any = (),
) -> Any:
    """Makes a field of `ViTConfig`; its default is that of the original's B/16.

    The original's own layout holds the values `published`, None for those of the role; the writers
    of ONNX and TFLite know also those `written`, None for all.
    """
    if published is None and role in ("extension", "own"):
        published = (default,)
    metadata = {"allowed": allowed, "role": role, "published": published, "written": written}
    return dataclasses.field(default=default, metadata=metadata)


_RATE = Allowed(lambda value: is_number(value) and 0 <= value < 1, "in [0, 1)")
_SWITCH = Allowed(lambda value: isinstance(value, bool), "True or False")
_NUMBER = Allowed(is_number, "a finite number")
_PART = Allowed(lambda value: is_number(value) and 0.01 <= value <= 1, "from 0.01 to 1")
_EPSILON = Allowed(lambda value: is_number(value) and 0 < value < 1, "above 0 and below 1")
_GRID = limits.or_none(Allowed(is_grid, "two positive integers (rows, columns)"))
_NAME = Allowed(lambda value: isinstance(value, str | None), "a name or None")


class Resizing(NamedTuple):
    """How images become those that a model takes; but for `size`, the fields of its `ViTConfig`.

    Example:
        >>> ViTConfig(crop_pct=0.875, crop_mode="center").resizing()[3:]
        (0.875, 'center', 'round')

    Attributes:
        size: (height, width) in pixels.
    """

    size: tuple[int, int]
    antialias: bool = True
    interpolation: Interpolation = "bilinear"
    crop_pct: float = 1.0
    crop_mode: CropMode = "squash"
    crop_offset: CropOffset = "round"

    @property
    def uncropped(self) -> "Resizing":
        """The same for what has been cropped: all of it is seen."""
        return Resizing(*self[:3])


RESIZING = Resizing._fields[1:]


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
        interpolation: the filter: "bilinear", "bicubic" or "lanczos"; Pillow's, with anti-aliasing.
        crop_pct: the fraction of each side of the resized image that is seen, in its middle.
        crop_mode: "squash" stretches images to one size; "center" keeps their aspect, and of the
            long side the middle is seen. Both are timm's, with its `crop_pct`.
        crop_offset: where a middle between two pixels begins: "round" to even, as in timm, or
            "floor", as in transformers.
        classifier_activation: activation after the classifier, e.g. "softmax"; None for logits.
        problem_type: what the outputs mean: classes that exclude each other, independent classes,
            or numbers. None for what the activation says: the first for softmax and logits, the
            second for sigmoid, and numbers for any other and for a single logit.
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

    input_shape: InputShape = _field((224, 224, 3), "input", limits.SHAPE)
    patch_size: int = _field(16, "architecture", limits.whole(4096))
    hidden_dim: int = _field(768, "architecture", limits.whole(2**17))
    mlp_dim: int = _field(3072, "architecture", limits.whole(2**20))
    num_heads: int = _field(12, "architecture", limits.whole(limits.MAX_HEADS))
    num_layers: int = _field(12, "architecture", limits.whole(limits.MAX_LAYERS))
    classes: int | None = _field(1000, "shape", limits.or_none(limits.whole(10**8)))
    pooling: Pooling | None = _field(
        "token", "shape", limits.one_of(Pooling, None, elsewhere='; "cls" is "token"'),
        published=("token", "avg", "map", None),
    )  # fmt: skip
    class_token: bool = _field(True, "shape", _SWITCH)
    representation_dim: int | None = _field(None, "shape", limits.or_none(limits.whole(2**17)))
    representation_activation: Literal["tanh"] | None = _field(
        "tanh", "extension", limits.one_of(Literal["tanh"], None), written=(None,)
    )
    resnet_layers: tuple[int, ...] | None = _field(None, "architecture", limits.STAGES)
    activation: Activation = _field(
        "".join(("gelu_", "tanh")),  # an object that is no caller's equal text
        "assumed",
        limits.one_of(Activation),
        published=("gelu_tanh", "gelu"),
        written=("quick_gelu",),
    )
    layer_norm_epsilon: float = _field(1e-6, "assumed", _EPSILON)
    dropout_rate: float = _field(0.0, "training", _RATE)
    attention_dropout_rate: float = _field(0.0, "training", _RATE)
    drop_path_rate: float = _field(0.0, "training", _RATE)
    patch_dropout_rate: float = _field(0.0, "training", _RATE)
    remat: bool | Literal["dots"] = _field(
        False, "training", limits.one_of(Literal[True, False, "dots"])
    )
    scan_blocks: bool = _field(False, "training", _SWITCH)
    antialias: bool = _field(True, "input", _SWITCH)
    interpolation: Interpolation = _field("bilinear", "input", limits.one_of(Interpolation))
    crop_pct: float = _field(1.0, "input", _PART)
    crop_mode: CropMode = _field("squash", "input", limits.one_of(CropMode))
    crop_offset: CropOffset = _field("round", "input", limits.one_of(CropOffset))
    classifier_activation: str | None = _field(None, "input", _NAME)
    problem_type: ProblemType | None = _field(None, "input", limits.one_of(ProblemType, None))
    include_preprocessing: bool = _field(False, "input", _SWITCH)
    image_mean: tuple[float, ...] = _field((0.5, 0.5, 0.5), "assumed")
    image_std: tuple[float, ...] = _field((0.5, 0.5, 0.5), "assumed")
    position_embedding: PositionEmbedding | None = _field(
        "learned",
        "extension",
        limits.one_of(PositionEmbedding, None),
        written=("learned_2d", "sincos_2d", None),
    )
    position_grid: tuple[int, int] | None = _field(None, "input")
    position_placement: PositionPlacement = _field("input", "own", limits.one_of(PositionPlacement))
    num_registers: int = _field(0, "extension", limits.whole(2**12, least=0), written=None)
    layer_scale: float | None = _field(
        None, "extension", limits.or_none(limits.above(0)), written=None
    )
    query_key_norm: bool = _field(False, "own", _SWITCH)
    distillation_token: bool = _field(False, "extension", _SWITCH)
    embedding_norm: bool = _field(False, "extension", _SWITCH, written=None)
    norm_after_pooling: bool = _field(False, "extension", _SWITCH, written=None)
    pooling_heads: int | None = _field(None, "extension", limits.or_none(limits.whole(2**12)))
    rotary_period: float | None = _field(None, "extension", limits.or_none(limits.above(1)))
    rotary_grid: tuple[int, int] | None = _field(None, "extension", _GRID)
    rotary_offset: float = _field(0.0, "extension", _NUMBER)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            allowed = field.metadata.get("allowed")
            if allowed is not None:
                self._require(allowed.fits(getattr(self, field.name)), field.name, allowed.text)
        divides = self.hidden_dim % self.num_heads == 0
        self._require(divides, "hidden_dim", f"a multiple of num_heads={self.num_heads}")
        if self.pooling in ("token", "token_avg") and not self.class_token:
            raise ValueError(
                f'pooling="{self.pooling}" needs class_token=True; without one use pooling="avg", '
                '"max" or "map".'
            )
        own, activation = self._problem_type_of_activation(), self.classifier_activation
        fits = activation in LINEAR or self.problem_type in (None, "regression", own)
        text = f'None, {own!r} or "regression" with classifier_activation={activation!r}'
        self._require(fits, "problem_type", text)
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

    def resizing(self, size: tuple[int, int] | None = None) -> Resizing:
        """Returns how images become those of a size for this model; None for its own."""
        return Resizing(size or self.image_size, *(getattr(self, name) for name in RESIZING))

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
    def pooled_dim(self) -> int:
        """Width of what pooling makes of the tokens, or of each token without pooling."""
        return self.hidden_dim * (2 if self.pooling == "token_avg" else 1)

    @property
    def resolved_problem_type(self) -> ProblemType | None:
        """What the outputs mean, by `problem_type` or the activation; None without classifier."""
        own = self.problem_type or self._problem_type_of_activation()
        return None if self.classes is None else own

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
    def nonstandard_fields(self) -> tuple[str, ...]:
        """Fields in which the network departs from the published ones.

        The original's layouts have no room for these; other writers know some of them.
        """
        return self._beyond("published")

    @property
    def unwritten_fields(self) -> tuple[str, ...]:
        """Fields for which the writers of ONNX and TFLite cannot write the network by hand.

        Example:
            >>> ViTConfig(num_registers=4, activation="swiglu").unwritten_fields
            ('activation',)
        """
        return self._beyond("published", "written")

    def _beyond(self, *names: str) -> tuple[str, ...]:
        fields = []
        for field in dataclasses.fields(self):
            held = [field.metadata.get(name, (field.default,)) for name in names]
            if not any(values is None or getattr(self, field.name) in values for values in held):
                fields.append(field.name)
        return tuple(fields)

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

    def with_activation(self, name: str | None, said: ProblemType | None = None) -> "ViTConfig":
        """Returns the config with another activation; what logits mean stays, or is as said."""
        said = said or self.resolved_problem_type
        changed = dataclasses.replace(self, classifier_activation=name, problem_type=None)
        is_said = name not in LINEAR or changed.resolved_problem_type == said
        return changed if is_said else dataclasses.replace(changed, problem_type=said)

    def told_by(self, loss: Any) -> "ViTConfig":
        """Returns the config with what only a model's loss says of its logits."""
        name = self.classifier_activation
        is_open = self.problem_type is None and name in LINEAR and self.classes
        said = _trained_by(loss) if is_open else None
        return self.with_activation(name, said) if said else self

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
        unknown = sorted(set(fields) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(
                f"ViTConfig has no field {shown(unknown)}; help(keras_vit.ViTConfig) lists them."
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)

    def _problem_type_of_activation(self) -> ProblemType:
        is_logit = self.classifier_activation in LOGITS and self.classes != 1
        other: ProblemType = "single_label_classification" if is_logit else "regression"
        return PROBLEM_TYPES.get(self.classifier_activation, other)

    def _check_image(self) -> None:
        shape, stride = self.input_shape, self.stride
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
        self._require(min(self.image_std) >= _MIN_STD, "image_std", f"at least {_MIN_STD}")

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


def _fields_of(role: Role) -> tuple[str, ...]:
    fields = dataclasses.fields(ViTConfig)
    return tuple(field.name for field in fields if field.metadata["role"] == role)


ARCHITECTURE, FROM_SHAPES = _fields_of("architecture"), _fields_of("shape")
ASSUMED, EXTENSIONS = _fields_of("assumed"), _fields_of("extension")
TRAINING = _fields_of("training")


class Ending(NamedTuple):
    """What the outputs (B, C) of a model mean.

    Attributes:
        problem_type: as of `ViTConfig`; None for features.
        is_probabilities: whether they are the probabilities of classes, not the logits.
    """

    problem_type: ProblemType | None
    is_probabilities: bool = False

    @property
    def activation(self) -> str | None:
        """What makes probabilities of logits: "softmax" or "sigmoid"; None without classes."""
        return None if self.problem_type is None else ACTIVATIONS.get(self.problem_type)

    @property
    def output(self) -> str:
        """The name of the outputs: "logits", "probabilities", "features" or "values"."""
        if self.activation is None:
            return "features" if self.problem_type is None else "values"
        return "probabilities" if self.is_probabilities else "logits"


def ending_of(model: Any, *, loss: Any = None) -> Ending:
    """Returns what the outputs of a Keras model mean.

    The config of a `VisionTransformer` says it. Another model ends as its last layer does. If these
    do not say what logits mean, the loss does: the given one, or the compiled one.

    Warns:
        UserWarning: nothing says it; what is assumed. Once for each model.
    """
    last, loss = model, loss or getattr(model, "loss", None)
    while not isinstance(config := getattr(last, "config", None), ViTConfig):
        if not hasattr(last, "layers"):
            break
        last = last_operation(last)
    else:
        said = config.told_by(loss).resolved_problem_type
        return Ending(said, said == PROBLEM_TYPES.get(config.classifier_activation, ""))
    activation = activation_of(last)
    if type(last).__module__.startswith("keras_vit."):  # tokens, or what pools them
        return Ending(None)
    if activation in PROBLEM_TYPES:
        return Ending(PROBLEM_TYPES[activation], is_probabilities=True)
    if activation not in LOGITS:
        return Ending("regression")
    said = _trained_by(activation if activation == "log_softmax" else loss)
    return Ending(said or _assumed(model))


def last_operation(model: Any) -> Any:
    """Returns the last layer or operation of a model that changes something; None without any."""
    for last in reversed(getattr(model, "operations", model.layers)):
        is_plain = type(last).__name__ in ("Identity", "Activation")
        if not is_plain or activation_of(last) not in LINEAR:
            return last
    return None


def activation_of(layer: Any) -> str | None:
    """Returns the name of the activation that a layer ends in or is; None for none."""
    activation = getattr(layer, "activation", layer)
    own = {"Softmax": "softmax", "Sigmoid": "sigmoid", "LogSoftmax": "log_softmax"}
    return getattr(activation, "__name__", own.get(type(activation).__name__))


def _trained_by(loss: Any) -> ProblemType | None:
    """Returns what a model's only loss trains; a file has it as a dictionary."""
    if isinstance(loss, dict) and "class_name" not in loss:  # by the names of outputs
        loss = list(loss.values())
    if isinstance(loss, list | tuple):
        loss = loss[0] if len(loss) == 1 else None
    if isinstance(loss, dict):
        loss = loss.get("config" if loss.get("class_name") == "function" else "class_name")
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    name = str(name).replace("_", "").lower()
    return next((said for word, said in TRAINED_BY.items() if word in name), None)


def _assumed(model: Any) -> ProblemType:
    is_one = getattr(model, "output_shape", (None,))[-1] == 1
    if model not in _warned:
        what = "a number" if is_one else "logits of classes that exclude each other"
        warnings.warn(
            f"{model.name!r} does not say what its outputs mean; they are taken for {what}. "
            "End it in Activation('softmax') or 'sigmoid', or compile it with its loss.",
            stacklevel=3,
        )
        _warned.add(model)
    return "regression" if is_one else "single_label_classification"
