"""The models to train: the small ones of this module, and the published variants."""

import dataclasses
import os
from collections.abc import Mapping

from keras_vit.applications import BUILDERS
from keras_vit.config import ViTConfig
from keras_vit.model import VisionTransformer
from keras_vit.variants import VARIANTS
from keras_vit.weights import building
from keras_vit.weights.positions import Method

# The images of 8 by 8 pixels are doubled, so that augmentation blurs them less. The sizes were
# chosen on validation images.
_DIGITS = ViTConfig(
    input_shape=(16, 16, 3),
    patch_size=4,
    hidden_dim=64,
    mlp_dim=128,
    num_heads=4,
    num_layers=4,
    classes=10,
    pooling="avg",
    class_token=False,
)
# Models for few images, on a CPU.
MODELS: Mapping[str, ViTConfig] = {
    "digits": _DIGITS,
    # A convolution before the patches, as in the paper's hybrids, halves the errors: 5 instead of
    # 10 of 1,438 images, in four-fold cross-validation on the training and validation images.
    "digits-hybrid": dataclasses.replace(_DIGITS, resnet_layers=(), patch_size=1),
    # About half of Ti/16 in width and depth, on 64 by 64 pixels.
    "tiny": ViTConfig(
        input_shape=(64, 64, 3),
        patch_size=8,
        hidden_dim=128,
        mlp_dim=256,
        num_heads=4,
        num_layers=6,
        drop_path_rate=0.1,  # DeiT (arXiv 2012.12877, Table 9)
    ),
}
MODEL_NAMES = (*MODELS, *VARIANTS)


def model_config(
    name: str, *, image_size: tuple[int, int] | None = None, patch_size: int | None = None
) -> ViTConfig:
    """Returns the config of a model to train from scratch.

    Example:
        >>> model_config("tiny", image_size=(32, 48)).grid
        (4, 6)

    Args:
        name: one of `MODEL_NAMES`: "digits", "digits-hybrid", "tiny", or a published variant such
            as "Ti/16".
        image_size: (height, width) in pixels; None for the model's own.
        patch_size: side of a patch in pixels; None for the model's own.

    Raises:
        ValueError: the name is unknown, or the image size is not a multiple of the patch size.
    """
    _check_name(name, MODEL_NAMES)
    config = MODELS.get(name) or VARIANTS[name]
    return dataclasses.replace(
        config,
        input_shape=(*(image_size or config.image_size), 3),
        patch_size=patch_size or config.patch_size,
    )


def pretrained_model(
    name: str | None,
    *,
    weights: str | os.PathLike[str],
    classes: int,
    image_size: tuple[int, int] | None = None,
    positions: Method = "original",
    sha256: str | None = None,
) -> VisionTransformer:
    """Returns a model with the weights of a checkpoint, to fine-tune.

    Args:
        name: one of `keras_vit.VARIANTS`; None where the checkpoint says its own architecture.
        weights: a checkpoint file, or a name that the builders know, such as "imagenet21k"; without
            a name, what `keras_vit.load` takes.
        classes: number of classes; the classifier is fresh if the checkpoint has another number.
        image_size: (height, width) in pixels; None for the checkpoint's.
        positions: how position embeddings are resampled to the image size, see
            `keras_vit.weights.resample_positions`.
        sha256: of the checkpoint's file; None if it is unknown.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: the name is unknown, or the checkpoint does not fit the variant.
    """
    input_shape = None if image_size is None else (*image_size, 3)
    if name is None:
        return building.load(
            weights,
            classes=classes,
            input_shape=input_shape,
            classifier_activation=None,
            include_preprocessing=True,
            positions=positions,
            sha256=sha256,
        )
    _check_name(name, tuple(VARIANTS))
    model: VisionTransformer = BUILDERS[name](
        weights=os.fspath(weights),
        classes=classes,
        input_shape=input_shape,
        classifier_activation=None,
        positions=positions,
        sha256=sha256,
    )
    return model


def _check_name(name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ValueError(f"There is no model {name!r}; choose one of {', '.join(names)}.")
