"""Masked patch prediction: pre-training without labels, and pictures of the predictions.

Shapes: B images, H and W pixels, h and w the grid of patches, N tokens, D hidden_dim.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args

import keras
import numpy as np

from keras_vit import backend, figures
from keras_vit.config import ViTConfig
from keras_vit.data import Split, evaluation_batches
from keras_vit.layers import TokenDense
from keras_vit.layers.dense import inner_state, restore_state, split_state
from keras_vit.layers.random import ReplicaSeedGenerator
from keras_vit.limits import is_real
from keras_vit.model import VisionTransformer

Target = Literal["mean_color", "small_patch", "pixels"]

# Fractions of the corrupted patches that become the mask embedding, and the embedding of another
# patch of the image; the others are unchanged.
MASKED, SWAPPED = 0.8, 0.1

LEVELS = 8  # of a colour, in each channel: 3 bits
SMALL_SIDE = 4  # colours on each side of a "small_patch"

# Evaluation corrupts in the same way each time: which patches, how, and by which other patch.
EVALUATION_SEEDS = (1, 2, 3)


@keras.saving.register_keras_serializable(package="keras_vit")
class MaskedPatchModel(backend.ExactTrainer, keras.Model):
    """A Vision Transformer that learns to predict corrupted patches, without labels.

    `compile` it with an optimizer and `fit` it on images; it has its own loss, over the corrupted
    patches alone. Then `vit` is an ordinary model without classifier.

    Example:
        >>> import numpy as np
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, pooling="avg", class_token=False,
        ...                    include_preprocessing=True)
        >>> model = MaskedPatchModel(config)
        >>> model.compile("adam")
        >>> _ = model.fit(np.zeros((4, 16, 24, 3)), verbose=0)
        >>> model.vit.output_shape
        (None, 8)

    Args:
        config: the network; its classifier, pre-logits layer and distillation token are left out.
        target: what the model predicts: the "mean_color" of each patch, one of 512; the 4x4 colours
            of a "small_patch"; or all "pixels" in [-1, 1], by least squares.
        corruption: fraction of the patches of each image that is corrupted.
        seed: of the corruption; None for a random one.
        name: name of the model.
        dtype: dtype policy of its layers; predictions are float32.

    Raises:
        ValueError: the target is unknown or does not fit the patches, `corruption` is not above 0
            and at most 1, or the network drops patches.
    """

    def __init__(
        self,
        config: ViTConfig,
        *,
        target: Target = "mean_color",
        corruption: float = 0.5,
        seed: int | None = None,
        name: str | None = "masked_patches",
        dtype: Any = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, trainable=trainable)
        self.config = dataclasses.replace(
            config, classes=None, representation_dim=None, distillation_token=False
        )
        self.target, self.corruption, self.seed = target, corruption, seed
        self._policy = keras.dtype_policies.get(dtype).name
        _check(self.config, target=target, corruption=corruption)
        self.vit = VisionTransformer(self.config, dtype=self._policy)
        channels = config.input_shape[2]
        values = channels if target == "pixels" else LEVELS**channels
        units = _side(config, target) ** 2 * values
        self.predictor = TokenDense(units, dtype="float32", name="head")
        self.seeds = ReplicaSeedGenerator(seed)
        # Pixels are real numbers, which have no accuracy.
        self.accuracy = None if target == "pixels" else keras.metrics.Mean(name="accuracy")
        self.build()

    def build(self, input_shape: tuple[Any, ...] | None = None) -> None:
        self.mask_embedding = self.add_weight(
            name="mask_embedding", shape=(1, 1, self.config.hidden_dim), initializer="zeros"
        )
        self.predictor.build((None, None, self.config.hidden_dim))
        self.built = True

    def call(self, images: Any, training: bool | None = None) -> dict[str, Any]:
        """Returns "predictions" (B, patches, ...) and "corrupted" (B, patches), 0 or 1."""
        x = images
        for name in ("rescaling", "stem", "patches"):
            if any(layer.name == name for layer in self.vit.layers):
                x = self.vit.get_layer(name)(x)
        encoder = self.vit.get_layer("patch_encoder")
        seeds = EVALUATION_SEEDS if training is False else (self.seeds,) * 3
        tokens, corrupted = self._corrupt(encoder.embed(x), seeds)  # (B, patches, D)
        tokens = encoder.assemble(tokens, training=training)  # (B, N, D)
        tokens = self.vit.encode(tokens, training=training)
        patches = tokens[:, self.config.num_prefix_tokens :]
        return {"predictions": self.predictor(patches), "corrupted": corrupted}

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the mean loss of the corrupted patches; `y` is not used."""
        targets = patch_targets(x, self.config, self.target)
        predictions, weights = y_pred["predictions"], y_pred["corrupted"]
        if self.target == "pixels":
            loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
            return loss(targets, predictions, sample_weight=weights)
        colors = LEVELS ** self.config.input_shape[2]
        predictions = keras.ops.reshape(predictions, (-1, *targets.shape[1:], colors))
        weights = weights[..., None] * keras.ops.ones_like(targets, dtype="float32")
        is_correct = keras.ops.equal(keras.ops.argmax(predictions, axis=-1), targets)
        if self.accuracy is not None:
            self.accuracy.update_state(keras.ops.cast(is_correct, "float32"), sample_weight=weights)
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        return loss(targets, predictions, sample_weight=weights)

    def get_config(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "target": self.target,
            "corruption": self.corruption,
            "seed": self.seed,
            "name": self.name,
            "dtype": self._policy,
            "trainable": self.trainable,
            **inner_state(self, ""),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "MaskedPatchModel":
        arguments, inside = split_state(config)
        model = cls(**{**arguments, "config": ViTConfig.from_dict(config["config"])})
        restore_state(model, inside, "")
        return model

    def _corrupt(self, embedded: Any, seeds: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        """Returns embeddings (B, patches, D), some corrupted, and which: (B, patches), 0 or 1."""
        batch, count = keras.ops.shape(embedded)[0], embedded.shape[1]
        scores = keras.random.uniform((batch, count), seed=seeds[0])
        number = max(round(self.corruption * count), 1)
        # The lowest scores: exactly so many patches of each image, in a shape that is known.
        corrupted = scores <= keras.ops.sort(scores, axis=1)[:, number - 1 : number]
        action = keras.random.uniform((batch, count), seed=seeds[1])[..., None]
        step = keras.random.randint((batch, count), 1, max(count, 2), seed=seeds[2])
        # A step from 1 to count - 1 around the image never leads back to the patch itself.
        other = (keras.ops.arange(count) + step) % count
        swapped = keras.ops.take_along_axis(embedded, other[..., None], axis=1)
        mask = keras.ops.cast(self.mask_embedding, embedded.dtype)
        replacement = keras.ops.where(action < MASKED + SWAPPED, swapped, embedded)
        replacement = keras.ops.where(action < MASKED, mask, replacement)
        result = keras.ops.where(corrupted[..., None], replacement, embedded)
        return result, keras.ops.cast(corrupted, "float32")


def patch_targets(images: Any, config: ViTConfig, target: Target) -> Any:
    """Returns the targets of the patches, in row order.

    Args:
        images: (B, H, W, channels), as the model takes them.
        config: that of the model.
        target: as in `MaskedPatchModel`.

    Returns:
        (B, patches, colours) classes, with one colour or 4x4; or (B, patches, values) pixels.
    """
    x, (scale, offset) = keras.ops.cast(images, "float32"), config.rescaling
    if config.include_preprocessing:
        x = x / 127.5 - 1  # colours in [-1, 1]
    elif (scale, offset) != (1 / 127.5, -1):
        x = keras.ops.subtract(x, keras.ops.array(offset, "float32"))
        x = x / keras.ops.array(scale, "float32") / 127.5 - 1
    (rows, columns), side, channels = config.grid, _side(config, target), config.input_shape[2]
    area = config.stride // side
    x = keras.ops.reshape(x, (-1, rows, side, area, columns, side, area, channels))
    x = keras.ops.mean(x, axis=(3, 6))  # (B, h, side, w, side, channels)
    x = keras.ops.transpose(x, (0, 1, 3, 2, 4, 5))
    x = keras.ops.reshape(x, (-1, rows * columns, side * side, channels))
    if target == "pixels":
        return keras.ops.reshape(x, (-1, rows * columns, side * side * channels))
    levels = keras.ops.clip(keras.ops.floor((x + 1) / 2 * LEVELS), 0, LEVELS - 1)
    digits = [LEVELS ** (channels - 1 - channel) for channel in range(channels)]
    places = keras.ops.cast(keras.ops.array(digits), "float32")
    return keras.ops.cast(keras.ops.sum(levels * places, axis=-1), "int32")


def reconstruct(model: MaskedPatchModel, images: np.ndarray) -> dict[str, np.ndarray]:
    """Returns rows of pictures, pixels in [-1, 1]: of images that are corrupted as in evaluation.

    In place of the corrupted patches the second row has grey, even where the model gets another
    patch there, the third the predictions, the last the targets, as coarse as they are.

    Args:
        model: a masked patch model.
        images: (B, H, W, channels), as the model takes them.
    """
    config, to_numpy = model.config, keras.ops.convert_to_numpy
    outputs = model(images, training=False)
    predictions, corrupted = to_numpy(outputs["predictions"]), to_numpy(outputs["corrupted"])
    targets = to_numpy(patch_targets(images, config, model.target))
    if model.target != "pixels":
        colors = LEVELS ** config.input_shape[2]
        predictions = predictions.reshape(*targets.shape, colors).argmax(axis=-1)
    patches = to_numpy(patch_targets(images, config, "pixels"))
    patches = patches.reshape(*corrupted.shape, config.stride, config.stride, -1)
    is_corrupted = corrupted.astype(bool)[..., None, None, None]
    rows: dict[str, Any] = {
        "image": patches,
        "patches hidden": 0.0,
        "predicted": _target_pixels(predictions, model),
        f"target: {model.target.replace('_', ' ')}": _target_pixels(targets, model),
    }
    return {
        name: _image(np.where(is_corrupted, values, patches), config)
        for name, values in rows.items()
    }


def plot_reconstructions(model: MaskedPatchModel, split: Split, file: Path, *, count: int) -> None:
    """Draws the first images of a split: whole, with hidden patches, with predictions and targets.

    The model takes pixels 0..255.
    """
    count = min(count, len(split))
    batches = evaluation_batches(split, resizing=model.config.resizing(), batch_size=count)
    batch, _ = next(iter(batches))
    figures.plot_rows(reconstruct(model, batch.numpy())).savefig(file, dpi=120, format="png")


def _side(config: ViTConfig, target: Target) -> int:
    return {"mean_color": 1, "small_patch": SMALL_SIDE, "pixels": config.stride}[target]


def _check(config: ViTConfig, *, target: str, corruption: float) -> None:
    _ = config.image_size  # patches have their places in a known grid
    if target not in get_args(Target):
        raise ValueError(f"target must be one of {list(get_args(Target))}. Received: {target!r}.")
    if config.patch_dropout_rate:
        raise ValueError(
            "Masked patches are predicted at every place: set patch_dropout_rate to 0. Received: "
            f"patch_dropout_rate={config.patch_dropout_rate}."
        )
    if not is_real(corruption) or not 0 < corruption <= 1:
        raise ValueError(f"corruption must be above 0, at most 1. Received: {corruption!r}.")
    if target == "small_patch" and config.stride % SMALL_SIDE:
        raise ValueError(
            f'target="small_patch" needs patches whose side is a multiple of {SMALL_SIDE} pixels. '
            f"Received: {config.stride}."
        )
    if config.input_shape[2] > 3 and target != "pixels":
        raise ValueError(
            "Colours of 3 bits are for 1 to 3 channels; choose target='pixels'. Received: "
            f"{config.input_shape[2]} channels."
        )


def _target_pixels(targets: np.ndarray, model: MaskedPatchModel) -> np.ndarray:
    channels, stride = model.config.input_shape[2], model.config.stride
    if model.target != "pixels":
        places = LEVELS ** np.arange(channels - 1, -1, -1)
        levels = targets[..., None] // places % LEVELS  # (B, patches, colours, channels)
        targets = ((levels + 0.5) / LEVELS * 2 - 1).astype(np.float32)  # the middle of the level
    side = _side(model.config, model.target)
    squares = targets.reshape(*targets.shape[:2], side, side, channels)
    return squares.repeat(stride // side, axis=2).repeat(stride // side, axis=3)


def _image(patches: np.ndarray, config: ViTConfig) -> np.ndarray:
    x = patches.reshape(-1, *config.grid, *patches.shape[2:]).transpose(0, 1, 3, 2, 4, 5)
    return np.asarray(x.reshape(-1, *config.image_size, patches.shape[-1]), np.float32)
