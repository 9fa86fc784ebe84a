"""Tests of keras_vit.training.recipes: each number, copied from its source a second time."""

import dataclasses
from typing import Any

import pytest

import keras_vit
from keras_vit.data import Augmentation
from keras_vit.training import RECIPES, Recipe

# What a recipe has unless a row below says otherwise: fields of Recipe, and of its augmentation.
# The last weights are kept: vit_jax/train.py, big_vision/train.py, facebookresearch/deit's main.py.
NOTHING = Recipe(steps=1, batch_size=1, learning_rate=1.0, keep="last")

# arXiv 2010.11929, Table 3 and its caption: "All models are trained with a batch size of 4096 and
# learning rate warmup of 10k steps. For ImageNet we found it beneficial to additionally apply
# gradient clipping at global norm 1. Training resolution is 224." Section 3.1: an MLP head.
# Issue 2 of google-research/vision_transformer: head bias -10, representation_size=768; issue 34:
# sigmoid cross-entropy. vit_jax/input_pipeline.py: area_range=(0.05, 1.0), flips.
PAPER: dict[str, Any] = {
    "batch_size": 4096,
    "image_size": (224, 224),
    "optimizer": "adamw",
    "warmup": 10_000,
    "crop": 0.05,
    "flip": True,
    "model": {"representation_dim": "hidden_dim"},
}
JFT: dict[str, Any] = {
    **PAPER,
    "decay": "linear",
    "weight_decay": 0.1,
    "gradient_norm": None,
    "loss": "sigmoid",
    "head_bias": -10.0,
    "dropout_rate": 0.0,
}

# arXiv 2010.11929, Table 4 and its caption: "cosine learning rate decay, a batch size of 512, no
# weight decay, and grad clipping at global norm 1. If not mentioned otherwise, fine-tuning
# resolution is 384." vit_jax/configs/common.py: warmup_steps = 500, optim_dtype = 'bfloat16',
# base_lr = 0.03; vit.py: 0.01 for b16 on cifar10. big_vision/configs/transfer.py: warm-up 100 for
# Pets and Flowers, rates 0.01 (CIFAR-100), 0.003 (Pets, Flowers).
TUNED: dict[str, Any] = {
    "batch_size": 512,
    "image_size": (384, 384),
    "optimizer": "momentum",
    "momentum": 0.9,
    "accumulator_dtype": "bfloat16",
    "warmup": 500,
    "weight_decay": 0.0,
    "crop": 0.05,
    "flip": True,
}
# Appendix B.1.1: "we fine-tuned at higher resolution: 512 for ViT-L/16 and 518 for ViT-H/14, and
# also used Polyak & Juditsky (1992) averaging with a factor of 0.9999".
LARGE = {**TUNED, "steps": 20_000, "learning_rate": 0.03, "average": 0.9999}
# "We use learning rate of 0.01 and train for 2500 steps"; "the pre-processing used in Kolesnikov
# et al. (2020)": "resize the image to a square, crop out a smaller random square, and randomly
# horizontally flip"; where that "destroys the label semantics [...] we omit flipping or cropping".
VTAB = {**TUNED, "steps": 2_500, "learning_rate": 0.01, "crop": 1.0}

# big_vision/configs/vit_i21k.py and vit_i1k.py: lr 0.001, wd 0.0001 (times no rate: 0.1 of ours),
# sigmoid_xent, MixUp of one share for a batch (big_vision/utils.py, get_mixup).
AUGREG: dict[str, Any] = {
    "epochs": 300,
    "batch_size": 4096,
    "image_size": (224, 224),
    "learning_rate": 0.001,
    "warmup": 10_000,
    "weight_decay": 0.1,
    "gradient_norm": 1.0,
    "loss": "sigmoid",
    "mix_per": "batch",
    "crop": 0.05,
    "flip": True,
}
MIXUP_DEF = {"none": 0.0, "light1": 0.0, "light2": 0.2, "medium1": 0.2}
MIXUP_DEF |= {"medium2": 0.5, "strong1": 0.5, "strong2": 0.8}
RANDAUG_DEF = {"none": (0, 0), "light1": (2, 0), "light2": (2, 10), "medium1": (2, 15)}
RANDAUG_DEF |= {"medium2": (2, 15), "strong1": (2, 20), "strong2": (2, 20)}

# facebookresearch/deit, main.py's defaults: --lr 5e-4 for 512 images, --warmup-epochs 5,
# --weight-decay 0.05, --clip-grad None, --smoothing 0.1, --mixup 0.8, --cutmix 1.0, --mixup-mode
# batch, --drop 0.0, --drop-path 0.1, --reprob 0.25, --aa rand-m9-mstd0.5-inc1, --opt-eps 1e-8.
DEIT: dict[str, Any] = {
    "optimizer": "adamw",
    "gradient_norm": None,
    "label_smoothing": 0.1,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mix_per": "batch",
    "dropout_rate": 0.0,
    "drop_path_rate": 0.1,
    "crop": 0.08,
    "flip": True,
    "randaugment_layers": 2,
    "randaugment_magnitude": 9,
    "erase": 0.25,
}
# README_revenge.md: --epochs 800 --batch 8 x 256 --opt fusedlamb --weight-decay 0.05
# --warmup-epochs 5 --smoothing 0.0 --reprob 0.0 --bce-loss; models_v2.py: init_values 1e-4.
# apex/optimizers/fused_lamb.py: max_grad_norm=1.0. The sum over 1,000 classes for their mean.
REVENGE: dict[str, Any] = {
    "epochs": 800,
    "batch_size": 2048,
    "optimizer": "lamb",
    "warmup": 5 / 800,
    "weight_decay": 0.05,
    "epsilon": pytest.approx(1e-5),
    "gradient_norm": 1000.0,
    "loss": "sigmoid",
    "mixup": 0.8,
    "cutmix": 1.0,
    "mix_per": "batch",
    "dropout_rate": 0.0,
    "model": {"layer_scale": 1e-4, "activation": "gelu"},
    "crop": 0.08,
    "flip": True,
}
# The same file: --epochs 20 --lr 1e-5 --weight-decay 0.1 --opt adamw --smoothing 0.1 --reprob 0.0
# --warmup-epochs 5, --min-lr at main.py's 1e-5, which is the rate itself.
REVENGE_TUNED: dict[str, Any] = {
    **DEIT,
    "epochs": 20,
    "batch_size": 512,
    "learning_rate": 1e-5,
    "warmup": 5 / 20,
    "decay": "constant",
    "weight_decay": 0.1,
    "erase": 0.0,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "vit-jft-b": {**JFT, "epochs": 7, "learning_rate": 8e-4},
    "vit-jft-l32": {**JFT, "epochs": 7, "learning_rate": 6e-4},
    "vit-jft-l16": {**JFT, "epochs": 7, "learning_rate": 4e-4},
    "vit-jft-h14": {**JFT, "epochs": 14, "learning_rate": 3e-4},
    "vit-jft-r50-l32": {**JFT, "epochs": 7, "learning_rate": 2e-4},
    "vit-imagenet21k": {
        **JFT,
        "epochs": 90,
        "learning_rate": 1e-3,
        "weight_decay": 0.03,
        "dropout_rate": 0.1,
    },
    "vit-imagenet": {
        **PAPER,
        "epochs": 300,
        "learning_rate": 3e-3,
        "weight_decay": 0.3,
        "dropout_rate": 0.1,
    },
    "finetune-imagenet": {**TUNED, "steps": 20_000, "learning_rate": 0.03},
    "finetune-imagenet-512": {**LARGE, "image_size": (512, 512)},
    "finetune-imagenet-518": {**LARGE, "image_size": (518, 518)},
    "finetune-cifar10": {**TUNED, "steps": 10_000, "learning_rate": 0.01},
    "finetune-cifar100": {**TUNED, "steps": 10_000, "learning_rate": 0.01},
    "finetune-pets": {**TUNED, "steps": 500, "learning_rate": 0.003, "warmup": 100},
    "finetune-flowers": {**TUNED, "steps": 500, "learning_rate": 0.003, "warmup": 100},
    "finetune-vtab": {**VTAB, "resize_small": 448 / 384},
    "finetune-vtab-spatial": {**VTAB, "flip": False},
    # vit_jax/configs/augreg.py
    "augreg-finetune": {
        **TUNED,
        "steps": 500,
        "learning_rate": 0.03,
        "warmup": 100,
        "dropout_rate": 0.0,
    },
    # big_vision/configs/vit_s16_i1k.py
    "plain-s16": {
        "epochs": 90,
        "batch_size": 1024,
        "image_size": (224, 224),
        "learning_rate": 0.001,
        "warmup": 10_000,
        "weight_decay": 0.1,
        "loss": "softmax",
        "mixup": 0.2,
        "mix_per": "batch",
        "crop": 0.05,
        "flip": True,
        "randaugment_layers": 2,
        "randaugment_magnitude": 10,
        "model": {
            "pooling": "avg",
            "class_token": False,
            "position_embedding": "sincos_2d",
            "representation_dim": "hidden_dim",
        },
    },
    "deit": {
        **DEIT,
        "epochs": 300,
        "batch_size": 1024,
        "image_size": (224, 224),
        "learning_rate": 5e-4 * 1024 / 512,
        "warmup": 5 / 300,
        "weight_decay": 0.05,
        "model": {"activation": "gelu"},
    },
    # README_deit.md: 2 x 8 x 32 images, --lr 5e-6 --weight-decay 1e-8 --epochs 30 --min-lr 5e-6
    "deit-384": {
        **DEIT,
        "epochs": 30,
        "batch_size": 512,
        "image_size": (384, 384),
        "learning_rate": 5e-6,
        "warmup": 5 / 30,
        "decay": "constant",
        "weight_decay": 1e-8,
    },
    **{
        f"deit3-{name}": {
            **REVENGE,
            "learning_rate": rate,
            "image_size": (side, side),
            "drop_path_rate": drop,
        }
        for name, rate, side, drop in [
            ("s16", 4e-3, 224, 0.05),
            ("b16", 3e-3, 192, 0.2),
            ("l16", 3e-3, 192, 0.45),
            ("h14", 3e-3, 160, 0.6),
        ]
    },
    **{
        f"deit3-{side}-{name}": {
            **REVENGE_TUNED,
            "image_size": (side, side),
            "drop_path_rate": drop,
        }
        for side, name, drop in [
            (224, "b16", 0.2),
            (224, "l16", 0.45),
            (224, "h14", 0.55),
            (384, "s16", 0.0),
            (384, "b16", 0.15),
            (384, "l16", 0.4),
        ]
    },
    **{
        f"{kind}-{level}": {
            **AUGREG,
            "head_bias": bias,
            "model": model,
            "mixup": MIXUP_DEF[level],
            "randaugment_layers": RANDAUG_DEF[level][0],
            "randaugment_magnitude": RANDAUG_DEF[level][1],
        }
        for kind, bias, model in [
            ("augreg", -10.0, {}),
            ("augreg-imagenet", -6.9, {"representation_dim": "hidden_dim"}),
        ]
        for level in MIXUP_DEF
    },
}
OURS = {"digits", "scratch", "fine-tune", "masked-patches"}


def differences(recipe: Recipe, row: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a recipe that are not as the row, or else the default, says."""
    wanted = {**dataclasses.asdict(NOTHING), "steps": None, **row}
    varied = {field: row.get(field, default) for field, default in vars(Augmentation()).items()}
    actual = {**dataclasses.asdict(recipe), **vars(recipe.augmentation)}
    for field in ("source", "augmentation"):
        del actual[field]
    return {field: value for field, value in actual.items() if value != {**wanted, **varied}[field]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_what_its_source_says(name: str) -> None:
    """Every field of it: what no line of the source speaks of has its default."""
    assert differences(RECIPES[name], PUBLISHED[name]) == {}


def test_a_wrong_number_would_be_seen() -> None:
    """The comparison above names a field that differs, of the recipe or of its augmentation."""
    recipe, row = RECIPES["plain-s16"], PUBLISHED["plain-s16"]

    assert differences(dataclasses.replace(recipe, sam_rho=0.1), row) == {"sam_rho": 0.1}
    assert differences(recipe, {**row, "crop": 0.08}) == {"crop": 0.05}
    assert differences(recipe, {**row, "epochs": 300}) == {"epochs": 90}


def test_every_published_recipe_is_held() -> None:
    """A row that nobody compares with its source does not come in."""
    assert set(RECIPES) == set(PUBLISHED) | OURS


def test_optimizers_are_the_sources() -> None:
    """Adam's averages and epsilon are those of optax and torch, not of Keras."""
    for name, recipe in RECIPES.items():
        assert recipe.betas == (0.9, 0.999)
        assert name in ("deit3-s16", "deit3-b16", "deit3-l16", "deit3-h14") or (
            recipe.epsilon == 1e-8
        )


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_model(name: str) -> None:
    """Its fields of ViTConfig fit a published variant of its image size."""
    recipe = RECIPES[name]
    side = (recipe.image_size or (224, 224))[0]
    variant = "H/14" if side % 16 else "B/16"
    config = dataclasses.replace(keras_vit.VARIANTS[variant], input_shape=(side, side, 3))

    assert recipe.config(config).grid == config.grid
