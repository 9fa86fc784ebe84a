"""The table of recipes, each with its source."""

from collections.abc import Mapping

from keras_vit.data import Augmentation
from keras_vit.training.recipe import Recipe

_PAPER = "arXiv 2010.11929"
_AUGREG = "arXiv 2106.10270"
_BIG_VISION = "google-research/big_vision, big_vision/configs"
_VIT_JAX = "google-research/vision_transformer, vit_jax/configs"

# AugReg's levels: MixUp's alpha, RandAugment's layers and magnitude
# (big_vision/configs/vit_i21k.py).
AUGREG_LEVELS: Mapping[str, tuple[float, int, int]] = {
    "none": (0.0, 0, 0),
    "light1": (0.0, 2, 0),
    "light2": (0.2, 2, 10),
    "medium1": (0.2, 2, 15),
    "medium2": (0.5, 2, 15),
    "strong1": (0.5, 2, 20),
    "strong2": (0.8, 2, 20),
}

# Inception's crop: from 5 per cent of the area on, as tf.image.sample_distorted_bounding_box has it
# in the original's input pipelines.
_CROPPED = Augmentation(crop=0.05, flip=True)


def _fine_tune(data: str, *, steps: int, learning_rate: float, warmup: int = 500) -> Recipe:
    """A row of the paper's Table 4; warm-up and clipping as in the original's code."""
    return Recipe(
        steps=steps,
        batch_size=512,
        image_size=(384, 384),
        optimizer="momentum",
        learning_rate=learning_rate,
        warmup=warmup,
        weight_decay=0.0,
        augmentation=_CROPPED,
        source=f"{_PAPER}, Table 4, {data}; {_VIT_JAX}/common.py",
    )


def _augreg(level: str) -> Recipe:
    mixup, layers, magnitude = AUGREG_LEVELS[level]
    return Recipe(
        epochs=300,
        batch_size=4096,
        image_size=(224, 224),
        learning_rate=1e-3,
        warmup=10_000,
        # big_vision's 1e-4 is not multiplied by the learning rate: 1e-4 = 1e-3 * 0.1.
        weight_decay=0.1,
        loss="sigmoid",
        head_bias=-10.0,
        mixup=mixup,
        augmentation=Augmentation(
            crop=0.05, flip=True, randaugment_layers=layers, randaugment_magnitude=magnitude
        ),
        source=f"{_AUGREG}, level {level}; {_BIG_VISION}/vit_i21k.py",
    )


RECIPES: Mapping[str, Recipe] = {
    # Learning rate, batch, epochs, augmentation and mixup were chosen by cross-validation within
    # the training and validation images. A mirrored 2 is no digit.
    "digits": Recipe(
        epochs=100,
        batch_size=32,
        learning_rate=1e-3,
        label_smoothing=0.1,
        mixup=0.2,
        augmentation=Augmentation(rotation=15, shift=0.1, zoom=0.15),
        source="weight decay and label smoothing: arXiv 2012.12877, Table 9",
    ),
    "scratch": Recipe(
        epochs=100,
        batch_size=64,
        learning_rate=1e-3,
        label_smoothing=0.1,
        augmentation=Augmentation(crop=0.35, flip=True),
        source="weight decay and label smoothing: arXiv 2012.12877, Table 9; learning rate and "
        f"gradient norm: {_PAPER}, Table 3",
    ),
    # The paper's fine-tuning, but with AdamW at a tenth of the rate from scratch.
    "fine-tune": Recipe(
        epochs=10,
        batch_size=64,
        learning_rate=1e-4,
        weight_decay=0.0,
        augmentation=Augmentation(crop=0.35, flip=True),
        source=f"no weight decay: {_PAPER}, Appendix B.1.1",
    ),
    # Without labels; colours are what is predicted, so they are left as they are.
    "masked-patches": Recipe(
        epochs=100,
        batch_size=64,
        learning_rate=1e-3,
        augmentation=Augmentation(crop=0.35, flip=True),
        source=f"batch and rate of our own; {_PAPER}, Appendix B.1.2, has Adam, 2e-4, batch 4096",
    ),
    "vit-imagenet21k": Recipe(
        epochs=90,
        batch_size=4096,
        image_size=(224, 224),
        learning_rate=1e-3,
        warmup=10_000,
        decay="linear",
        weight_decay=0.03,
        gradient_norm=None,
        loss="sigmoid",
        head_bias=-10.0,
        dropout_rate=0.1,
        augmentation=_CROPPED,
        source=f"{_PAPER}, Table 3; loss and bias: google-research/vision_transformer, issue 34",
    ),
    "vit-imagenet": Recipe(
        epochs=300,
        batch_size=4096,
        image_size=(224, 224),
        learning_rate=3e-3,
        warmup=10_000,
        weight_decay=0.3,
        dropout_rate=0.1,
        augmentation=_CROPPED,
        source=f"{_PAPER}, Table 3",
    ),
    "finetune-imagenet": _fine_tune("ImageNet", steps=20_000, learning_rate=0.03),
    "finetune-cifar10": _fine_tune("CIFAR-10", steps=10_000, learning_rate=0.01),
    "finetune-cifar100": _fine_tune("CIFAR-100", steps=10_000, learning_rate=0.01),
    "finetune-pets": _fine_tune("Pets", steps=500, learning_rate=0.01, warmup=100),
    "finetune-flowers": _fine_tune("Flowers", steps=500, learning_rate=0.01, warmup=100),
    "finetune-vtab": _fine_tune("VTAB", steps=2_500, learning_rate=0.01),
    **{f"augreg-{level}": _augreg(level) for level in AUGREG_LEVELS},
    "augreg-finetune": Recipe(
        steps=500,
        batch_size=512,
        image_size=(384, 384),
        optimizer="momentum",
        learning_rate=0.03,
        warmup=100,
        weight_decay=0.0,
        dropout_rate=0.0,
        augmentation=_CROPPED,
        source=f"{_AUGREG}; {_VIT_JAX}/augreg.py",
    ),
    "plain-s16": Recipe(
        epochs=90,
        batch_size=1024,
        image_size=(224, 224),
        learning_rate=1e-3,
        warmup=10_000,
        weight_decay=0.1,
        mixup=0.2,
        augmentation=Augmentation(
            crop=0.05, flip=True, randaugment_layers=2, randaugment_magnitude=10
        ),
        source=f"arXiv 2205.01580; {_BIG_VISION}/vit_s16_i1k.py",
    ),
}
