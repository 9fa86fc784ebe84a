"""The table of recipes, each with its source."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from keras_vit.data import Augmentation
from keras_vit.training.recipe import Recipe

_PAPER = "arXiv 2010.11929"
_AUGREG = "arXiv 2106.10270"
_DEIT = "arXiv 2012.12877; facebookresearch/deit"
_DEIT3 = "arXiv 2204.07118; facebookresearch/deit, README_revenge.md"
_BIG_VISION = "google-research/big_vision, big_vision/configs"
_TRANSFER = f"{_BIG_VISION}/transfer.py (B/32)"
_VIT_JAX = "google-research/vision_transformer, vit_jax/configs"
_ISSUES = "google-research/vision_transformer, issues"

# The papers do not say which variables decay. Here only kernels do, as in big_vision
# (big_vision/optax.py, wd_mults) and timm.

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

# Inception's crop, at least 5 per cent of the area: the default of
# tf.image.sample_distorted_bounding_box, which the original's input pipelines use.
_CROPPED = Augmentation(crop=0.05, flip=True)

# A dense layer with tanh before the classifier, as wide as a token: "an MLP with one hidden layer
# at pre-training time" (2010.11929, Section 3.1; its width: issue 124). AugReg has none.
_MLP_HEAD = {"representation_dim": "hidden_dim"}

# timm's "rand-m9-mstd0.5-inc1", as far as it is available here.
_RAND_M9 = Augmentation(crop=0.08, flip=True, randaugment_layers=2, randaugment_magnitude=9)
_RAND_M9_ERASED = dataclasses.replace(_RAND_M9, erase=0.25)
_NOT_TIMM = (
    "not as there: its RandAugment draws magnitudes around 9 and skips half of the operations, its "
    "crops are resized bicubically, its rates start at 1e-6 and change once an epoch"
)

# DeiT III's models: (rate, image, stochastic depth) of pre-training.
_DEIT3_PRETRAIN: Mapping[str, tuple[float, int, float]] = {
    "s16": (4e-3, 224, 0.05),
    "b16": (3e-3, 192, 0.2),
    "l16": (3e-3, 192, 0.45),
    "h14": (3e-3, 160, 0.6),
}
# Its fine-tuning: image and model, stochastic depth.
_DEIT3_FINETUNE: Mapping[tuple[int, str], float] = {
    (224, "b16"): 0.2,
    (224, "l16"): 0.45,
    (224, "h14"): 0.55,
    (384, "s16"): 0.0,
    (384, "b16"): 0.15,
    (384, "l16"): 0.4,
}
# Its binary cross-entropy is the mean over ImageNet's classes, ours the sum, so our gradients are
# larger by this factor. Epsilon and the limit of the gradients' norm are too.
_CLASSES = 1000

# The fields that our own recipes for files of images have in common, those of pre-training in the
# papers of ViT, and of it without softmax, those of their fine-tuning, and those that all recipes
# of DeiT and DeiT III have in common.
_own = functools.partial(Recipe, batch_size=64, augmentation=Augmentation(crop=0.35, flip=True))
_pretraining = functools.partial(
    Recipe, batch_size=4096, image_size=(224, 224), warmup=10_000, keep="last"
)
_sigmoid = functools.partial(
    _pretraining, decay="linear", gradient_norm=None, loss="sigmoid", head_bias=-10.0,
    model=_MLP_HEAD, augmentation=_CROPPED,
)  # fmt: skip
_finetuning = functools.partial(
    Recipe, batch_size=512, image_size=(384, 384), optimizer="momentum", weight_decay=0.0,
    keep="last", augmentation=_CROPPED,
)  # fmt: skip
_deit = functools.partial(
    Recipe, mixup=0.8, cutmix=1.0, mix_per="batch", dropout_rate=0.0, keep="last"
)


def _jft(models: str, epochs: int, learning_rate: float) -> Recipe:
    """Returns a row of the paper's Table 3 for JFT-300M; rows of pure ResNets are left out."""
    return _sigmoid(
        epochs=epochs,
        learning_rate=learning_rate,
        weight_decay=0.1,
        dropout_rate=0.0,
        source=f"{_PAPER}, Table 3, JFT-300M, {models}; loss: {_ISSUES} 34; the bias is that of "
        "ImageNet-21k (issue 2), JFT's is not published",
    )


def _fine_tune(
    data: str, steps: int, learning_rate: float, rate_from: str, *, warmup: int = 500, **others: Any
) -> Recipe:
    """Returns a row of the paper's Table 4, with one of the learning rates in the table."""
    warmup_from = f"{_VIT_JAX}/common.py" if warmup == 500 else f"{_BIG_VISION}/transfer.py"
    return _finetuning(
        steps=steps,
        learning_rate=learning_rate,
        warmup=warmup,
        source=f"{_PAPER}, Table 4, {data}; rate: {rate_from}; warm-up: {warmup_from}; bfloat16 "
        f"momentum: {_VIT_JAX}/common.py",
        **others,
    )


def _augreg(level: str, *, classes: str) -> Recipe:
    mixup, layers, magnitude = AUGREG_LEVELS[level]
    is_21k = classes == "ImageNet-21k"
    note = (
        "vit_i21k.py, but for its pool_type: the paper's models have a class token"
        if is_21k
        else "vit_i1k.py, whose MLP head (rep_size) the published weights do not have"
    )
    return _pretraining(
        epochs=300,
        learning_rate=1e-3,
        # big_vision's 1e-4 is not multiplied by the learning rate: 1e-4 = 1e-3 * 0.1.
        weight_decay=0.1,
        loss="sigmoid",
        head_bias=-10.0 if is_21k else -6.9,
        mixup=mixup,
        mix_per="batch",
        model={} if is_21k else _MLP_HEAD,
        augmentation=Augmentation(
            crop=0.05, flip=True, randaugment_layers=layers, randaugment_magnitude=magnitude
        ),
        source=f"{_AUGREG}, {classes}, level {level}; {_BIG_VISION}/{note}; Adam's first moment is "
        "bfloat16 there",
    )


def _deit3(name: str) -> Recipe:
    rate, side, drop_path = _DEIT3_PRETRAIN[name]
    return _deit(
        epochs=800,
        batch_size=2048,
        image_size=(side, side),
        optimizer="lamb",
        learning_rate=rate,
        warmup=5 / 800,
        epsilon=1e-8 * _CLASSES,
        gradient_norm=1.0 * _CLASSES,  # FusedLAMB's own
        loss="sigmoid",
        drop_path_rate=drop_path,
        model={"layer_scale": 1e-4, "activation": "gelu"},
        augmentation=Augmentation(crop=0.08, flip=True),
        source=f"{_DEIT3}, {name}; not here: 3-Augment and colour jitter, repeated augmentation, "
        "targets that are 1 for both of the mixed classes, patches alone with positions, "
        "a last rate of 1e-5",
    )


def _deit3_fine_tune(side: int, name: str) -> Recipe:
    return _deit(
        epochs=20,
        batch_size=512,
        image_size=(side, side),
        learning_rate=1e-5,
        warmup=5 / 20,
        decay="constant",  # its cosine falls to 1e-5, main.py's --min-lr
        weight_decay=0.1,
        gradient_norm=None,
        label_smoothing=0.1,
        drop_path_rate=_DEIT3_FINETUNE[side, name],
        augmentation=_RAND_M9,
        source=f"{_DEIT3}, fine-tuning of {name} at {side} pixels; {_NOT_TIMM}",
    )


RECIPES: Mapping[str, Recipe] = {
    # Chosen by cross-validation on the training and validation images: one run each, errors on two
    # of five folds (576 images); differences of two or three are chance. 100 epochs of batches of
    # 32: 9 errors with a class token, 8 without. Batches of 64: 7. With 200 epochs, this recipe: 4.
    # Two thirds of the augmentation: 7; four thirds: 6. Without mixup: 6 after 100 epochs, 7 after
    # 160, 10 for a model twice as wide. The last epoch is kept, because the best one on 179 images
    # is best by chance: once it was epoch 126 of 200, with 7 errors on the test images. There are
    # no flips, because a mirrored 2 is not a digit.
    "digits": Recipe(
        epochs=200,
        batch_size=64,
        learning_rate=2e-3,
        label_smoothing=0.1,
        mixup=0.2,
        keep="last",
        augmentation=Augmentation(rotation=15, shift=0.1, zoom=0.15),
        source="weight decay and label smoothing: arXiv 2012.12877, Table 9",
    ),
    "scratch": _own(
        epochs=100,
        learning_rate=1e-3,
        label_smoothing=0.1,
        patience=30,
        source="weight decay and label smoothing: arXiv 2012.12877, Table 9; learning rate and "
        f"gradient norm: {_PAPER}, Table 3; batch, length, patience and crop of our own",
    ),
    # The paper's fine-tuning, but with AdamW at a tenth of the rate from scratch.
    "fine-tune": _own(
        epochs=10,
        learning_rate=1e-4,
        weight_decay=0.0,
        patience=5,
        source=f"no weight decay: {_PAPER}, Table 4; all else of our own",
    ),
    # For training without labels. Its targets are colours, so nothing changes the colours.
    "masked-patches": _own(
        epochs=100,
        learning_rate=1e-3,
        source=f"batch and rate of our own; {_PAPER}, Appendix B.1.2, has Adam, 2e-4, batch 4096",
    ),
    "vit-jft-b": _jft("ViT-B and R50+ViT-B", 7, 8e-4),
    "vit-jft-l32": _jft("ViT-L/32", 7, 6e-4),
    "vit-jft-l16": _jft("ViT-L/16 and R50+ViT-L/16, which it trains for 7 or 14 epochs", 7, 4e-4),
    "vit-jft-h14": _jft("ViT-H/14", 14, 3e-4),
    "vit-jft-r50-l32": _jft("R50+ViT-L/32", 7, 2e-4),
    "vit-imagenet21k": _sigmoid(
        epochs=90,
        learning_rate=1e-3,
        weight_decay=0.03,
        dropout_rate=0.1,
        source=f"{_PAPER}, Table 3, which trains ViT-L for 30 or 90 epochs; bias, end of the rate "
        f"and MLP head: {_ISSUES} 2 and 124; loss: issue 34",
    ),
    "vit-imagenet": _pretraining(
        epochs=300,
        learning_rate=3e-3,
        weight_decay=0.3,
        dropout_rate=0.1,
        model=_MLP_HEAD,
        augmentation=_CROPPED,
        source=f"{_PAPER}, Table 3 and Section 3.1; the loss is not published, softmax is ours",
    ),
    "finetune-imagenet": _fine_tune("ImageNet", 20_000, 0.03, f"{_VIT_JAX}/common.py"),
    **{
        f"finetune-imagenet-{side}": _fine_tune(
            f"ImageNet, {model} of Table 2 (Appendix B.1.1: {side} pixels, Polyak averaging by "
            "0.9999)",
            20_000,
            0.03,
            f"{_VIT_JAX}/common.py",
            image_size=(side, side),
            average=0.9999,
        )
        for side, model in ((512, "ViT-L/16"), (518, "ViT-H/14"))
    },
    "finetune-cifar10": _fine_tune("CIFAR-10", 10_000, 0.01, f"{_VIT_JAX}/vit.py (b16)"),
    "finetune-cifar100": _fine_tune("CIFAR-100", 10_000, 0.01, _TRANSFER),
    "finetune-pets": _fine_tune("Pets", 500, 0.003, _TRANSFER, warmup=100),
    "finetune-flowers": _fine_tune("Flowers", 500, 0.003, _TRANSFER, warmup=100),
    # "The pre-processing used in Kolesnikov et al." (B.1.1), arXiv 1912.11370, Section 3.3: a
    # random square of a larger one and flips, except for tasks where they change the label.
    "finetune-vtab": _fine_tune(
        "VTAB (pre-processing: arXiv 1912.11370, Section 3.3, which resizes to a square first)",
        2_500,
        0.01,
        "the same",
        augmentation=Augmentation(resize_small=448 / 384, flip=True),
    ),
    "finetune-vtab-spatial": _fine_tune(
        "VTAB, tasks of places, counts and directions (arXiv 1912.11370, Section 3.3: no flips or "
        "crops that change the label)",
        2_500,
        0.01,
        "the same",
        augmentation=Augmentation(),
    ),
    **{f"augreg-{level}": _augreg(level, classes="ImageNet-21k") for level in AUGREG_LEVELS},
    **{f"augreg-imagenet-{level}": _augreg(level, classes="ImageNet") for level in AUGREG_LEVELS},
    "augreg-finetune": _finetuning(
        steps=500,
        learning_rate=0.03,
        warmup=100,
        dropout_rate=0.0,
        source=f"{_AUGREG}; {_VIT_JAX}/augreg.py",
    ),
    "plain-s16": _pretraining(
        epochs=90,
        batch_size=1024,
        learning_rate=1e-3,
        weight_decay=0.1,  # 1e-4 = 1e-3 * 0.1, as AugReg's
        mixup=0.2,
        mix_per="batch",
        model={
            "pooling": "avg",
            "class_token": False,
            "position_embedding": "sincos_2d",
            **_MLP_HEAD,
        },
        augmentation=Augmentation(
            crop=0.05, flip=True, randaugment_layers=2, randaugment_magnitude=10
        ),
        source=f"arXiv 2205.01580; {_BIG_VISION}/vit_s16_i1k.py; Adam's first moment is bfloat16 "
        "there",
    ),
    "deit": _deit(
        epochs=300,
        batch_size=1024,
        image_size=(224, 224),
        learning_rate=1e-3,  # 5e-4 * 1024 / 512
        warmup=5 / 300,
        weight_decay=0.05,
        gradient_norm=None,
        label_smoothing=0.1,
        drop_path_rate=0.1,
        model={"activation": "gelu"},
        augmentation=_RAND_M9_ERASED,
        source=f"{_DEIT}, main.py; not here: repeated augmentation, a last rate of 1e-5, normal "
        f"noise where pixels are erased; {_NOT_TIMM}",
    ),
    "deit-384": _deit(
        epochs=30,
        batch_size=512,
        image_size=(384, 384),
        learning_rate=5e-6,  # 5e-6 * 512 / 512
        warmup=5 / 30,
        decay="constant",  # its cosine falls to 5e-6, --min-lr
        weight_decay=1e-8,
        gradient_norm=None,
        label_smoothing=0.1,
        drop_path_rate=0.1,
        augmentation=_RAND_M9_ERASED,
        source=f"{_DEIT}, README_deit.md; not here: repeated augmentation; {_NOT_TIMM}",
    ),
    **{f"deit3-{name}": _deit3(name) for name in _DEIT3_PRETRAIN},
    **{f"deit3-{side}-{name}": _deit3_fine_tune(side, name) for side, name in _DEIT3_FINETUNE},
}
