"""The Vision Transformer: the whole network, a shape on each line; and exact Keras models.

Shapes: B images, H and W pixels, P patch_size, S stride of the stem, h and w the grid of patches, N
tokens (prefix tokens first, then patches), D hidden_dim, K width of a head, C classes.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras

from keras_vit import backend, layers, preprocessing
from keras_vit.backend.private import Functional, layers_of
from keras_vit.config import LINEAR, ViTConfig
from keras_vit.layers.block import run_blocks
from keras_vit.layers.dense import CHANGES, FROZEN, inner_state, restore_state, split_state
from keras_vit.layers.random import skip_initialization


@keras.saving.register_keras_serializable(package="keras_vit")
class ExactModel(backend.ExactTrainer, Functional):
    """A functional `keras.Model` that trains the same on one device and under any strategy.

    It is `keras.Model(inputs, outputs)` with another `compile` and `fit`: gradients are summed over
    replicas before they are clipped, replicas with fewer images count less, the loss is scaled if
    any layer computes in float16, XLA also compiles under a strategy, and `compile` takes
    `gradient_accumulation_steps`, `sam_rho` and `report_gradient_norm`. Subclass it for your own
    `train_step` or `compute_loss`. A model that is a class with a `call` takes `ExactTrainer` as
    its first base: `class Mine(keras_vit.ExactTrainer, keras.Model)`.

    Example:
        >>> import keras_vit
        >>> base = keras_vit.ViTTi16(weights=None, include_top=False, pooling="avg",
        ...                          input_shape=(32, 32, 3))
        >>> images = keras.Input((32, 32, 3))
        >>> model = ExactModel(images, keras.layers.Dense(5)(base(images)))
        >>> model.compile("adam", "mse", gradient_accumulation_steps=2)
        >>> model.output_shape
        (None, 5)

    Args:
        inputs: Keras tensors, in any structure.
        outputs: Keras tensors computed from them.
        name: name of the model.
    """

    @classmethod
    def from_model(cls, model: keras.Model) -> "ExactModel":
        """Returns an exact model with the layers of a functional or sequential one, not compiled.

        Example:
            >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            >>> ExactModel.from_model(model).layers[-1] is model.layers[-1]
            True

        Raises:
            TypeError: the model is neither functional nor sequential.
            ValueError: the model is not built, so its inputs are unknown.
        """
        if not isinstance(model, Functional | keras.Sequential):
            raise TypeError(
                "from_model takes a functional or sequential model; for a class with a call, make "
                "keras_vit.ExactTrainer its first base. "
                f"Received: {type(model).__name__}."
            )
        if not model.built:
            raise ValueError(
                f"The model {model.name!r} is not built; call it on a batch of images first, or "
                "give it a keras.Input."
            )
        if isinstance(model, keras.Sequential):
            inputs, outputs = model.inputs[0], model.outputs[0]
        else:  # `inputs` and `outputs` are flat lists, these have the structure
            inputs, outputs = model.input, model.output
        with backend.scope_of(model):
            return cls(inputs, outputs, name=model.name)

    def get_build_config(self) -> dict[str, Any]:
        # Keras' error prints it where this package is not imported; nothing reads it.
        note = "import keras_vit before keras.saving.load_model"
        return {**(super().get_build_config() or {}), "note": note}


@keras.saving.register_keras_serializable(package="keras_vit")
class VisionTransformer(ExactModel):
    """A Vision Transformer (arXiv 2010.11929) as a functional `keras.Model`.

    Example:
        >>> config = ViTConfig(input_shape=(32, 48, 3), patch_size=8, hidden_dim=32, mlp_dim=64,
        ...                    num_heads=2, num_layers=2, classes=5)
        >>> model = VisionTransformer(config)
        >>> model(keras.ops.zeros((1, 32, 48, 3))).shape
        TensorShape([1, 5])
        >>> model.features(keras.ops.zeros((1, 32, 48, 3)))["block_1"].shape
        TensorShape([1, 25, 32])

    Args:
        config: the sizes and parts of the network. With an `input_shape` of (None, None, channels)
            one graph takes images of any size that the patch divides.
        name: name of the model.
        dtype: dtype policy of its layers, e.g. "mixed_bfloat16"; None for the global policy.
            The classifier always computes in float32.

    Input shape: (B, H, W, channels) of `config.input_shape`, pixels 0..255 with
    `config.include_preprocessing`, otherwise what `preprocess_input` makes of them.
    Output shape: (B, C) with a classifier, (B, D) without, (B, N, ...) with `pooling=None`.
    """

    def __new__(cls, config: Any, *graph: Any, **kwargs: Any) -> Any:
        if graph:  # inputs and outputs: keras.models.clone_model makes a functional model so
            return ExactModel(config, *graph, **kwargs)
        return super().__new__(cls, config, **kwargs)

    def __init__(
        self,
        config: ViTConfig,
        *graph: Any,
        name: str | None = "vit",
        dtype: Any = None,
        trainable: bool = True,
        **unknown: Any,
    ) -> None:
        # Keras clones by inputs and outputs whatever takes any arguments, and makes a plain
        # `keras.Model` of anything else.
        if unknown:
            raise TypeError(
                f"VisionTransformer takes a config, name, dtype and trainable. Received: {unknown}."
            )
        policy = keras.dtype_policies.get(dtype).name
        images = keras.Input(config.input_shape, name="images", dtype="float32")
        super().__init__(images, _forward(config, policy, images), name=name)
        if not trainable:
            self.trainable = False  # as an argument Keras would not tell the layers
        self.config = config
        self._policy = policy
        # In a namespace Keras does not find them, and does not save their layers a second time.
        models = _split_at_blocks(self) if config.scan_blocks else None
        self._around_blocks = types.SimpleNamespace(models=models)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Computes the graph, with its blocks as one loop if `config.scan_blocks` says so."""
        if self._around_blocks.models is None:
            return super().call(inputs, training=training, mask=mask)
        before, after = self._around_blocks.models
        tokens, *cos_sin = keras.tree.flatten(before.call(inputs, training=training))
        rotary = {"cos_sin": cos_sin[0]} if cos_sin else {}
        tokens = run_blocks(self._blocks(), tokens, training=training, **rotary)  # (B, N, D)
        # Not as a layer, which would hold its input to the graph's number of tokens.
        return after.call(tokens, training=training)

    def preprocess_input(self, x: Any) -> Any:
        """Makes of pixels 0..255 what this model takes, with the mean and deviation of its config.

        A model that scales pixels itself (`include_preprocessing`) takes them as they are: they
        come back unscaled, as `keras.applications` does it.

        Args:
            x: images (..., channels) of any kind that `keras_vit.preprocess_input` takes.

        Returns:
            An array or tensor of the same kind and shape, float32.
        """
        config = self.config
        if config.include_preprocessing:
            return preprocessing.as_float32(x)
        return preprocessing.preprocess_input(x, mean=config.image_mean, std=config.image_std)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the intermediate results that `features` returns, in order."""
        rest = ("images", "rescaling", "patches", "positions", "rotary_embedding", "patch_dropout")
        return tuple(layer.name for layer in self.layers if layer.name not in rest)

    def features(
        self, images: Any, names: Iterable[str] | None = None, *, grid: bool = False
    ) -> dict[str, Any]:
        """Computes named intermediate results with this model's own weights.

        Example:
            >>> config = ViTConfig(input_shape=(32, 48, 3), patch_size=8, hidden_dim=32, mlp_dim=64,
            ...                    num_heads=2, num_layers=2, classes=5)
            >>> features = VisionTransformer(config).features(
            ...     keras.ops.zeros((1, 32, 48, 3)), ["block_1", "pooling"], grid=True)
            >>> features["block_1"].shape, features["pooling"].shape
            (TensorShape([1, 4, 6, 32]), TensorShape([1, 32]))

        Args:
            images: (B, H, W, channels), as the model takes them.
            names: which of `feature_names` to return: tokens (B, N, D) after "patch_encoder", each
                "block_0", "block_1", ... and "encoder_norm"; the vector (B, D) after "pooling" and
                "representation"; (B, C) after "head". None for all.
            grid: whether tokens come as (B, h, w, D), row by row, without those before the
                patches'.

        Raises:
            ValueError: a name is not one of `feature_names`.
        """
        features = dict(self.feature_extractor(names)(images))
        if not grid:
            return features
        sides = keras.ops.shape(images)[1:3] if self.config.any_size else self.config.image_size
        rows, columns = (side // self.config.stride for side in sides)
        for name, value in features.items():
            if len(value.shape) == 3:  # tokens (B, N, D)
                patches = value[:, self.config.num_prefix_tokens :]
                shape = (-1, rows, columns, value.shape[-1])
                features[name] = keras.ops.reshape(patches, shape)  # (B, h, w, D)
        return features

    def feature_extractor(self, names: Iterable[str] | None = None) -> ExactModel:
        """Returns a model from images to a dictionary of `features`, sharing this one's weights."""
        selected = tuple(self.feature_names if names is None else names)
        unknown = [name for name in selected if name not in self.feature_names]
        if unknown:
            raise ValueError(
                f"There is no feature {unknown[0]!r}; choose from {', '.join(self.feature_names)}."
            )
        return ExactModel(self.input, {name: self.get_layer(name).output for name in selected})

    def encode(self, tokens: Any, *, training: bool | None = None) -> Any:
        """Continues from the patch encoder's tokens (B, N, D) to the encoder's, (B, N, D).

        Raises:
            ValueError: the model is for images of any size: tokens alone do not say their grid.
        """
        _ = self.config.image_size
        if self.config.embedding_norm:
            tokens = self.get_layer("embedding_norm")(tokens)
        if self.config.scan_blocks:
            tokens = run_blocks(self._blocks(), tokens, training=training)
        else:
            for index, block in enumerate(self._blocks()):
                positions = position_layer(self.config, index)
                if positions is not None:
                    tokens = self.get_layer(positions)(tokens)
                tokens = block(tokens, training=training)
        return tokens if self.config.norm_after_pooling else self.get_layer("encoder_norm")(tokens)

    def _blocks(self) -> list[Any]:
        return [self.get_layer(f"block_{index}") for index in range(self.config.num_layers)]

    def copy(
        self,
        *,
        config: ViTConfig | None = None,
        dtype: Any = None,
        reinitialize: Iterable[str] = (),
        convert: Callable[[str, Any], Any] | None = None,
    ) -> "VisionTransformer":
        """Returns the same model with weights of its own, of another config or dtype if one wants.

        The copy has this model's class, name, weights, frozen weights, and LoRA and quantisation if
        it has them. It is not compiled, and it lies in the strategy's scope that this is called in.

        Example:
            >>> import dataclasses
            >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
            ...                    num_heads=2, num_layers=1, classes=3)
            >>> model = VisionTransformer(config)
            >>> model.copy(dtype="bfloat16").get_layer("block_0").dtype
            'bfloat16'
            >>> other = dataclasses.replace(config, classes=5)
            >>> model.copy(config=other, reinitialize=["head"]).output_shape
            (None, 5)

        Args:
            config: of the copy; None for this model's. Every weight must keep its shape.
            dtype: dtype policy of the copy's layers; None for this model's.
            reinitialize: names of layers whose weights are not copied but initialised anew; they
                may have other shapes, or be in one of the two models only.
            convert: makes of a weight's path in the model and its variable the value that the copy
                gets, for instance a resampled table; None for the value as it is.

        Raises:
            ValueError: weights of other layers than `reinitialize` have other paths or shapes by
                the config, or there is no layer of a name in `reinitialize`.
        """
        settings = self.get_config()
        settings["config"] = settings["config"] if config is None else config.to_dict()
        settings["dtype"] = settings["dtype"] if dtype is None else dtype
        new = tuple(reinitialize)
        frozen = settings.get(FROZEN, [])
        settings[FROZEN] = [path for path in frozen if path.split("/")[0] not in new]
        is_quantized = any("mode" in change for change in settings.get(CHANGES, {}).values())
        # A new kernel that is quantised must have values.
        with contextlib.nullcontext() if new or is_quantized else skip_initialization():
            copy = type(self).from_config(settings)
        for path, source, target in _pairs(self, copy, new=new, same_shapes=convert is None):
            assign_copy(target, source if convert is None else convert(path, source))
        return copy

    def get_config(self) -> dict[str, Any]:
        return {
            "config": self.config.told_by(getattr(self, "loss", None)).to_dict(),
            "name": self.name,
            "dtype": self._policy,
            "trainable": self.trainable,
            **inner_state(self, _scope(self)),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "VisionTransformer":
        arguments, inside = split_state(config)
        model = cls(**{**arguments, "config": ViTConfig.from_dict(config["config"])})
        restore_state(model, inside, _scope(model))
        return model


class Backbone(NamedTuple):
    """A Vision Transformer in a Keras model."""

    config: ViTConfig
    model: keras.Model  # whose layers its layers are


def backbones(model: keras.Model) -> list[Backbone]:
    """Returns the Vision Transformers that a model is or contains, however deep.

    Each is a `VisionTransformer`, or layers of one in a model over its tensors, such as
    `keras.Model(vit.input, Dense(1)(vit.get_layer("pooling").output))`.
    """
    found = []
    for inner in layers_of(model):
        if isinstance(inner, VisionTransformer):
            found.append(Backbone(inner.config, inner))
        elif isinstance(inner, keras.Model):
            said = (getattr(each, "model_config", None) for each in inner.layers)
            found += [Backbone(_left_of(config, inner), inner) for config in said if config]
    return found


def backbone_of(model: keras.Model) -> Backbone:
    """Returns the one Vision Transformer that a model is or contains.

    Raises:
        ValueError: the model contains none, or more than one.
    """
    found = backbones(model)
    if len(found) != 1:
        raise ValueError(
            f"The model {model.name!r} contains {len(found)} Vision Transformers of keras_vit, not "
            "one; give a model with exactly one, or the VisionTransformer itself."
        )
    return found[0]


def output_shape(model: keras.Model) -> tuple[Any, ...] | None:
    """Returns the shape of a model's output, None if that is not known or not one tensor."""
    shape = getattr(model, "output_shape", None)
    is_tensor = not isinstance(getattr(model, "output", None), dict | list | tuple)
    return shape if is_tensor and isinstance(shape, tuple) else None


def _left_of(config: ViTConfig, model: keras.Model) -> ViTConfig:
    """Returns the config of a model's layers, which may begin later or end earlier."""
    count = sum(isinstance(each, layers.TransformerBlock) for each in model.layers)
    has_scaling = any(isinstance(each, keras.layers.Rescaling) for each in model.layers)
    changed: Any = {"num_layers": count or config.num_layers, "include_preprocessing": has_scaling}
    return dataclasses.replace(config, **changed)


def _split_at_blocks(model: VisionTransformer) -> tuple[keras.Model, keras.Model]:
    """Returns what a model computes before its blocks, and after them, sharing its weights."""
    first, last = (model.get_layer(f"block_{i}") for i in (0, model.config.num_layers - 1))
    return keras.Model(model.input, first.input), keras.Model(last.output, model.output)


def position_layer(config: ViTConfig, block: int) -> str | None:
    """Returns the name of the layer that adds positions before a block; None for no such layer."""
    names = {"every_block": f"positions_{block}", "every_block_shared": "positions"}
    return names.get(config.position_placement)


def path_inside(model: VisionTransformer, path: str) -> str:
    """Returns a path of a model's layer or weight without the scope that the model was made in."""
    return path.removeprefix(_scope(model))


def _scope(model: VisionTransformer) -> str:
    return str(model.get_layer("patch_encoder").path.removesuffix("patch_encoder"))


def weights_by_path(model: VisionTransformer) -> dict[str, keras.Variable]:
    """Returns a model's weights by their paths in it, whatever scope it was made in."""
    return {path_inside(model, variable.path): variable for variable in model.weights}


def assign_copy(target: keras.Variable, value: Any) -> None:
    """Gives a variable the values of another, in memory of its own.

    JAX would share the other's array, and delete it for both when one of the models is trained.
    """
    target.assign(keras.ops.copy(value))


def _pairs(
    model: VisionTransformer, copy: VisionTransformer, *, new: tuple[str, ...], same_shapes: bool
) -> list[tuple[str, keras.Variable, keras.Variable]]:
    """Returns path, weight and the copy's weight, of every weight outside of the new layers."""
    unknown = set(new) - {layer.name for layer in (*model.layers, *copy.layers)}
    if unknown:
        raise ValueError(f"There is no layer {min(unknown)!r} to initialise anew in a copy.")
    sources, targets = (
        {k: v for k, v in weights_by_path(each).items() if k.split("/")[0] not in new}
        for each in (model, copy)
    )
    others = set(sources) ^ set(targets)
    if same_shapes:
        others |= {k for k in set(sources) - others if sources[k].shape != targets[k].shape}
    if others:
        raise ValueError(
            f"The weights of {model.name!r} do not fit the config of its copy: {min(others)!r} "
            f"{f'and {len(others) - 1} more differ' if len(others) > 1 else 'differs'}; keep the "
            "sizes and parts, name such layers in reinitialize, or, for another image size, use "
            "keras_vit.weights.resize."
        )
    return [(path, source, targets[path]) for path, source in sources.items()]


def _forward(config: ViTConfig, dtype: str, images: Any) -> Any:
    patches = _patches(config, dtype, images)  # (B, h, w, P*P*channels)
    tokens = _tokens(config, dtype, patches)  # (B, N, D)
    return _head(config, dtype, _encoder(config, dtype, tokens, patches))


def _patches(config: ViTConfig, dtype: str, images: Any) -> Any:
    """Cuts images, or what the stem makes of them, into patches (B, h, w, P*P*channels)."""
    x = images
    if config.include_preprocessing:
        # As (1, 1, channels), which Keras' layer leaves so in any of its data formats.
        scale, offset = (
            [[list(value)]] if isinstance(value, tuple) else value for value in config.rescaling
        )
        # In float32 whatever the policy, whose dtype would round the pixels before they are scaled.
        x = keras.layers.Rescaling(scale, offset=offset, dtype="float32", name="rescaling")(x)
    if config.resnet_layers is not None:
        stem = layers.ResNetStem(config.resnet_layers, dtype=dtype, name="stem")
        x = stem(x)  # (B, H/S, W/S, 64..)
    return layers.Patches(config.patch_size, dtype=dtype, name="patches")(x)


def _tokens(config: ViTConfig, dtype: str, patches: Any) -> Any:
    """Returns the tokens of the patches and those before them, (B, N, D)."""
    is_added_here = config.adds_positions and config.position_placement == "input"
    return layers.PatchEncoder(
        config.hidden_dim,
        class_token=config.class_token,
        dropout_rate=config.dropout_rate,
        position_embedding=config.position_embedding if is_added_here else None,
        num_registers=config.num_registers,
        distillation_token=config.distillation_token,
        position_grid=config.position_grid,
        model_config=config.to_dict(),
        dtype=dtype,
        name="patch_encoder",
    )(patches)  # (B, N, D)


def _encoder(config: ViTConfig, dtype: str, tokens: Any, patches: Any) -> Any:
    """Applies blocks to tokens (B, N, D), with the grid of patches (B, h, w, P*P*channels)."""
    x, rotary_input = _apply_patch_dropout(config, dtype, tokens, _rotary(config, patches))
    if config.embedding_norm:
        x = _norm(config, dtype, "embedding_norm")(x)
    shape_of = {"patches": patches} if config.any_size else {}
    rotary = None  # where blocks compute no rotary positions of their own
    if config.rotary_period is not None and not config.any_size:
        rotary = {"grid": config.grid, **_rotary_places(config)}
    position_layers = {}
    for index, drop_path_rate in enumerate(config.drop_path_rates()):
        positions = position_layer(config, index)
        if positions is not None:
            if positions not in position_layers:
                position_layers[positions] = _positions(config, dtype, positions)
            x = position_layers[positions](x, **shape_of)  # (B, N, D)
        x = layers.TransformerBlock(
            config.num_heads,
            config.mlp_dim,
            activation=config.activation,
            layer_norm_epsilon=config.layer_norm_epsilon,
            dropout_rate=config.dropout_rate,
            attention_dropout_rate=config.attention_dropout_rate,
            drop_path_rate=drop_path_rate,
            remat=config.remat,
            layer_scale=config.layer_scale,
            query_key_norm=config.query_key_norm,
            relative_grid=config.grid if config.position_embedding == "relative" else None,
            rotary=rotary,
            dtype=dtype,
            name=f"block_{index}",
        )(x, **rotary_input)  # (B, N, D)
    return x if config.norm_after_pooling else _norm(config, dtype, "encoder_norm")(x)  # (B, N, D)


def _norm(config: ViTConfig, dtype: str, name: str) -> keras.layers.Layer:
    return layers.LayerNormalization(epsilon=config.layer_norm_epsilon, dtype=dtype, name=name)


def _rotary_places(config: ViTConfig) -> dict[str, Any]:
    return {
        "period": config.rotary_period,
        "reference_grid": config.rotary_grid,
        "offset": config.rotary_offset,
    }


def _rotary(config: ViTConfig, patches: Any) -> dict[str, Any]:
    """Returns the rotary positions of any grid, or of patches that dropout leaves, for blocks."""
    if config.rotary_period is None or not (config.any_size or config.patch_dropout_rate):
        return {}
    layer = layers.RotaryEmbedding(
        config.hidden_dim // config.num_heads,
        num_prefix_tokens=config.num_prefix_tokens,
        dtype="float32",
        name="rotary_embedding",
        **_rotary_places(config),
    )
    return {"cos_sin": layer(patches)}  # (2, N, K)


def _apply_patch_dropout(
    config: ViTConfig, dtype: str, tokens: Any, rotary: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Returns tokens (B, N, D) and the blocks' rotary positions, in training of a part of them."""
    if not config.patch_dropout_rate:
        return tokens, rotary
    layer = layers.PatchDropout(
        config.patch_dropout_rate,
        num_prefix_tokens=config.num_prefix_tokens,
        dtype=dtype,
        name="patch_dropout",
    )
    if not rotary:
        return layer(tokens), rotary
    left, cos_sin = layer(tokens, **rotary)
    return left, {"cos_sin": cos_sin}


def _positions(config: ViTConfig, dtype: str, name: str) -> keras.layers.Layer:
    return layers.PositionEmbedding(
        config.position_embedding,
        grid=config.grid,
        num_prefix_tokens=config.num_prefix_tokens,
        num_registers=config.num_registers,
        dtype=dtype,
        name=name,
    )


def _head(config: ViTConfig, dtype: str, tokens: Any) -> Any:
    """Makes of tokens (B, N, D) what the model gives: one vector, a representation, logits."""
    x = _pool(config, dtype, tokens)  # (B, D), or (B, N, D) without pooling
    if config.representation_dim is not None:
        x = layers.TokenDense(
            config.representation_dim,
            activation=config.representation_activation,
            kernel_initializer="lecun_normal",
            dtype=dtype,
            name="representation",
        )(x)  # (B, representation_dim)
    if config.classes is None:
        return x
    x = _classifier(config.classes, "head")(x)  # (B, C)
    if config.distillation_token:
        second = layers.TokenPooling("token", token=1, dtype=dtype, name="distillation_pooling")
        y = _classifier(config.classes, "distillation_head")(second(tokens))  # (B, C)
        # DeiT predicts by the mean of both classifiers (arXiv 2012.12877).
        x = keras.layers.Average(dtype="float32", name="logits")([x, y])  # (B, C)
    if config.classifier_activation not in LINEAR:
        activation = config.classifier_activation
        x = keras.layers.Activation(activation, dtype="float32", name="classifier_activation")(x)
    return x


def _pool(config: ViTConfig, dtype: str, tokens: Any) -> Any:
    """Makes one vector (B, D) of tokens (B, N, D), or leaves them."""
    if config.pooling is None:
        return tokens
    if config.pooling == "map":
        x = layers.AttentionPooling(
            config.pooling_heads or config.num_heads,
            config.mlp_dim,
            activation=config.activation,
            layer_norm_epsilon=config.layer_norm_epsilon,
            dtype=dtype,
            name="pooling",
        )(tokens)
    else:
        x = layers.TokenPooling(
            config.pooling, num_prefix_tokens=config.num_prefix_tokens, dtype=dtype, name="pooling"
        )(tokens)
    return _norm(config, dtype, "pooling_norm")(x) if config.norm_after_pooling else x


def _classifier(classes: int, name: str) -> keras.layers.Layer:
    # In float32 whatever the policy: bfloat16 logits would round away small differences.
    # Zeros, as in the original: before training all classes are equally probable.
    return keras.layers.Dense(classes, kernel_initializer="zeros", dtype="float32", name=name)
