"""Tests of keras_vit.training.recipes and recipe: numbers of the sources, and what they make."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from trainings import CONFIG, not_refused

import keras_vit
from keras_vit.data import Augmentation
from keras_vit.optimizers import LAMB, AdamW
from keras_vit.training import RECIPES, Recipe
from keras_vit.training.recipe import OptimizerName, Plan, make_optimizer

# What a recipe has unless a row below says otherwise: fields of Recipe, and of its augmentation.
# The last weights are kept: vit_jax/train.py, big_vision/train.py, facebookresearch/deit's main.py.
NOTHING = Recipe(steps=1, batch_size=1, learning_rate=1.0, keep="last")
OURS = {"digits", "scratch", "fine-tune", "masked-patches"}
Row = dict[str, Any]
SCRATCH = RECIPES["scratch"]
RANGE = "must lie between .* Received: "
WRONG: list[tuple[Row, str]] = [
    *(
        ({name: value}, f"{name} {RANGE}{name}={value}")
        for name, value in [
            *(("epochs", 0), ("batch_size", 0), ("learning_rate", -1.0), ("warmup", -1)),
            *(("learning_rate", float("nan")), ("average", 1.5), ("layer_decay", 0.0)),
            *(("weight_decay", -0.1), ("gradient_norm", 0.0), ("label_smoothing", 1.0)),
        ]
    ),
    *(
        ({name: value}, f"{name} must be one of .* Received: {name}='{value}'")
        for name, value in [
            *(("optimizer", "lion"), ("decay", "step"), ("loss", "hinge"), ("mix_per", "pair"))
        ]
    ),
    ({"steps": 3}, "either epochs or steps"),
    ({"epochs": None}, "either epochs or steps"),
    # Averages that never forget, and LAMB with rates for each layer.
    ({"betas": (0.9, 1.0)}, r"betas must be two numbers .*=\(0.9, 1.0\)"),
    ({"optimizer": "lamb", "layer_decay": 0.75}, r"LAMB .* takes no layer_decay"),
    *(
        ({"model": model}, text)
        for model, text in [
            ({"width": 3}, "no field 'width' that a recipe may set; choose from .*pooling"),
            ({"classes": 3}, "classes is decided by the data"),
            ({"input_shape": (8, 8, 3)}, "input_shape is decided by image_size .--image-size"),
            ({"drop_path_rate": 0.1}, "decided by the recipe's field of that name"),
            ({"class_token": "no"}, "class_token must be True or False. Received: 'no'"),
            (
                {"layer_scale": "small"},
                "layer_scale must be a number above 0 or None. Received: 'small'",
            ),
            ({"layer_norm_epsilon": None}, "must be above 0 and below 1. Received: None"),
            ({"attention_dropout_rate": True}, r"must be in \[0, 1\)\. Received: True"),
        ]
    ),
]
MODEL = dataclasses.replace(CONFIG, classes=3, dropout_rate=0.0)


def row(*rows: Row, **fields: Any) -> Row:
    return functools.reduce(dict.__or__, [*rows, fields])


# A crop of at least 5 per cent of the area: vit_jax/input_pipeline.py, area_range=(0.05, 1.0).
CROPPED = row(crop=0.05, flip=True)
# arXiv 2010.11929, Section 3.1: an MLP head; issue 2 of google-research/vision_transformer:
# representation_size=768.
HEAD = row(model={"representation_dim": "hidden_dim"})
# Table 3 and its caption: "All models are trained with a batch size of 4096 and learning rate
# warmup of 10k steps. For ImageNet we found it beneficial to additionally apply gradient clipping
# at global norm 1. Training resolution is 224."
LONG = row(CROPPED, batch_size=4096, image_size=(224, 224), warmup=10_000, optimizer="adamw")
# Issue 2: head bias -10; issue 34: sigmoid cross-entropy.
SIGMOID = row(LONG, HEAD, decay="linear", gradient_norm=None, loss="sigmoid", head_bias=-10.0)
JFT = row(SIGMOID, epochs=7, weight_decay=0.1, dropout_rate=0.0)

# arXiv 2010.11929, Table 4 and its caption: "cosine learning rate decay, a batch size of 512, no
# weight decay, and grad clipping at global norm 1. If not mentioned otherwise, fine-tuning
# resolution is 384." vit_jax/configs/common.py: warmup_steps = 500, optim_dtype = 'bfloat16',
# base_lr = 0.03; vit.py: 0.01 for b16 on cifar10. big_vision/configs/transfer.py: warm-up 100 for
# Pets and Flowers, rates 0.01 (CIFAR-100), 0.003 (Pets, Flowers).
MOMENTUM = row(optimizer="momentum", momentum=0.9, accumulator_dtype="bfloat16", weight_decay=0.0)
TUNED = row(CROPPED, MOMENTUM, batch_size=512, image_size=(384, 384), warmup=500)
IMAGENET = row(TUNED, steps=20_000, learning_rate=0.03)
CIFAR = row(TUNED, steps=10_000, learning_rate=0.01)
PETS = row(TUNED, steps=500, learning_rate=0.003, warmup=100)
# "We use learning rate of 0.01 and train for 2500 steps"; "the pre-processing used in Kolesnikov
# et al. (2020)": "resize the image to a square, crop out a smaller random square, and randomly
# horizontally flip"; where that "destroys the label semantics [...] we omit flipping or cropping".
VTAB = row(TUNED, steps=2_500, learning_rate=0.01, crop=1.0)

# big_vision/configs/vit_i21k.py and vit_i1k.py: lr 0.001, wd 0.0001 (times no rate: 0.1 of ours),
# sigmoid_xent, MixUp of one share for a batch (big_vision/utils.py, get_mixup).
BIG_VISION = row(LONG, learning_rate=0.001, weight_decay=0.1, gradient_norm=1.0, mix_per="batch")
AUGREG = row(BIG_VISION, epochs=300, loss="sigmoid")
# The same files: MIXUP_DEF, and layers and magnitude of RANDAUG_DEF.
AUGREG_LEVELS = {
    "none": (0.0, 0, 0),
    "light1": (0.0, 2, 0),
    "light2": (0.2, 2, 10),
    "medium1": (0.2, 2, 15),
    "medium2": (0.5, 2, 15),
    "strong1": (0.5, 2, 20),
    "strong2": (0.8, 2, 20),
}

# facebookresearch/deit, main.py's defaults: --lr 5e-4 for 512 images, --warmup-epochs 5,
# --weight-decay 0.05, --clip-grad None, --smoothing 0.1, --mixup 0.8, --cutmix 1.0, --mixup-mode
# batch, --drop 0.0, --drop-path 0.1, --reprob 0.25, --aa rand-m9-mstd0.5-inc1, --opt-eps 1e-8.
MIXED = row(mixup=0.8, cutmix=1.0, mix_per="batch", dropout_rate=0.0, crop=0.08, flip=True)
RAND_M9 = row(randaugment_layers=2, randaugment_magnitude=9)
DEIT = row(MIXED, RAND_M9, optimizer="adamw", gradient_norm=None, label_smoothing=0.1, erase=0.25)
# README_revenge.md: --epochs 800 --batch 8 x 256 --opt fusedlamb --weight-decay 0.05
# --warmup-epochs 5 --smoothing 0.0 --reprob 0.0 --bce-loss; models_v2.py: init_values 1e-4.
# apex/optimizers/fused_lamb.py: max_grad_norm=1.0. The sum over 1,000 classes for their mean.
FUSED_LAMB = row(optimizer="lamb", epsilon=pytest.approx(1e-5), gradient_norm=1000.0)
REVENGE = row(
    MIXED,
    FUSED_LAMB,
    row(epochs=800, batch_size=2048, warmup=5 / 800, weight_decay=0.05, loss="sigmoid"),
    model={"layer_scale": 1e-4, "activation": "gelu"},
)
# The same file: --epochs 20 --lr 1e-5 --weight-decay 0.1 --opt adamw --smoothing 0.1 --reprob 0.0
# --warmup-epochs 5, --min-lr at main.py's 1e-5, which is the rate itself.
REVENGE_TUNED = row(
    DEIT,
    row(epochs=20, batch_size=512, learning_rate=1e-5, warmup=5 / 20),
    row(decay="constant", weight_decay=0.1, erase=0.0),
)

PUBLISHED: dict[str, Row] = {
    "vit-jft-b": row(JFT, learning_rate=8e-4),
    "vit-jft-l32": row(JFT, learning_rate=6e-4),
    "vit-jft-l16": row(JFT, learning_rate=4e-4),
    "vit-jft-h14": row(JFT, epochs=14, learning_rate=3e-4),
    "vit-jft-r50-l32": row(JFT, learning_rate=2e-4),
    "vit-imagenet21k": row(
        SIGMOID, epochs=90, learning_rate=1e-3, weight_decay=0.03, dropout_rate=0.1
    ),
    "vit-imagenet": row(
        LONG, HEAD, epochs=300, learning_rate=3e-3, weight_decay=0.3, dropout_rate=0.1
    ),
    "finetune-imagenet": IMAGENET,
    # Appendix B.1.1: "we fine-tuned at higher resolution: 512 for ViT-L/16 and 518 for ViT-H/14,
    # and also used Polyak & Juditsky (1992) averaging with a factor of 0.9999".
    "finetune-imagenet-512": row(IMAGENET, image_size=(512, 512), average=0.9999),
    "finetune-imagenet-518": row(IMAGENET, image_size=(518, 518), average=0.9999),
    "finetune-cifar10": CIFAR,
    "finetune-cifar100": CIFAR,
    "finetune-pets": PETS,
    "finetune-flowers": PETS,
    "finetune-vtab": row(VTAB, resize_small=448 / 384),
    "finetune-vtab-spatial": row(VTAB, flip=False),
    # vit_jax/configs/augreg.py
    "augreg-finetune": row(TUNED, steps=500, learning_rate=0.03, warmup=100, dropout_rate=0.0),
    # big_vision/configs/vit_s16_i1k.py
    "plain-s16": row(
        BIG_VISION,
        row(epochs=90, batch_size=1024, loss="softmax", mixup=0.2),
        row(randaugment_layers=2, randaugment_magnitude=10),
        model={
            "pooling": "avg",
            "class_token": False,
            "position_embedding": "sincos_2d",
            "representation_dim": "hidden_dim",
        },
    ),
    "deit": row(
        DEIT,
        row(epochs=300, batch_size=1024, learning_rate=5e-4 * 1024 / 512),
        row(image_size=(224, 224), warmup=5 / 300, weight_decay=0.05, drop_path_rate=0.1),
        model={"activation": "gelu"},
    ),
    # README_deit.md: 2 x 8 x 32 images, --lr 5e-6 --weight-decay 1e-8 --epochs 30 --min-lr 5e-6
    "deit-384": row(
        DEIT,
        row(epochs=30, batch_size=512, learning_rate=5e-6, decay="constant"),
        row(image_size=(384, 384), warmup=5 / 30, weight_decay=1e-8, drop_path_rate=0.1),
    ),
}
for name, rate, side, drop in (
    ("s16", 4e-3, 224, 0.05),
    ("b16", 3e-3, 192, 0.2),
    ("l16", 3e-3, 192, 0.45),
    ("h14", 3e-3, 160, 0.6),
):
    fields = row(learning_rate=rate, image_size=(side, side), drop_path_rate=drop)
    PUBLISHED[f"deit3-{name}"] = row(REVENGE, fields)
for side, name, drop in (
    *((224, "b16", 0.2), (224, "l16", 0.45), (224, "h14", 0.55)),
    *((384, "s16", 0.0), (384, "b16", 0.15), (384, "l16", 0.4)),
):
    fields = row(image_size=(side, side), drop_path_rate=drop)
    PUBLISHED[f"deit3-{side}-{name}"] = row(REVENGE_TUNED, fields)
for name, (mixup, layers, magnitude) in AUGREG_LEVELS.items():
    fields = row(mixup=mixup, randaugment_layers=layers, randaugment_magnitude=magnitude)
    PUBLISHED[f"augreg-{name}"] = row(AUGREG, fields, head_bias=-10.0)
    PUBLISHED[f"augreg-imagenet-{name}"] = row(AUGREG, HEAD, fields, head_bias=-6.9)


def differences(recipe: Recipe, row: Row) -> Row:
    """Returns the fields of a recipe that are not as the row, or else the default, says."""
    wanted = {**dataclasses.asdict(NOTHING), "steps": None, **vars(Augmentation()), **row}
    actual = {**dataclasses.asdict(recipe), **vars(recipe.augmentation)}
    for field in ("source", "augmentation"):
        del actual[field]
    return {field: value for field, value in actual.items() if value != wanted[field]}


def test_recipes_are_what_their_sources_say() -> None:
    """Every field of each: what no line of the source speaks of has its default."""
    found = {name: differences(RECIPES[name], fields) for name, fields in PUBLISHED.items()}
    assert not {name: fields for name, fields in found.items() if fields}
    assert set(RECIPES) == set(PUBLISHED) | OURS


def test_a_wrong_number_would_be_seen() -> None:
    """The comparison above names a field that differs, of the recipe or of its augmentation."""
    recipe, fields = RECIPES["plain-s16"], PUBLISHED["plain-s16"]

    assert differences(dataclasses.replace(recipe, sam_rho=0.1), fields) == {"sam_rho": 0.1}
    assert differences(recipe, {**fields, "crop": 0.08}) == {"crop": 0.05}
    assert differences(recipe, {**fields, "epochs": 300}) == {"epochs": 90}


def test_every_recipe_can_be_used_and_looked_up() -> None:
    """A source, Adam's numbers of optax and torch, JSON, and a model of its image size.

    A mirrored 2 is no 2.
    """
    lamb = {f"deit3-{name}" for name in ("s16", "b16", "l16", "h14")}
    wrong = []
    for name, recipe in RECIPES.items():
        side = (recipe.image_size or (224, 224))[0]
        variant = keras_vit.VARIANTS["H/14" if side % 16 else "B/16"]
        config = dataclasses.replace(variant, input_shape=(side, side, 3))
        holds = {
            "source": "arXiv" in recipe.source,
            "betas": recipe.betas == (0.9, 0.999),
            "epsilon": name in lamb or recipe.epsilon == 1e-8,
            "JSON": Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe,
            "model": recipe.config(config).grid == config.grid,
        }
        wrong += [(name, what) for what, does in holds.items() if not does]
    assert not wrong
    assert not RECIPES["digits"].augmentation.flip


def test_recipes_that_mean_nothing_are_refused() -> None:
    """With what is allowed and what was received, when the recipe is made."""

    def make(fields: Row) -> Callable[[], object]:
        return lambda: dataclasses.replace(SCRATCH, **fields)

    assert not not_refused((make(fields), text) for fields, text in WRONG)


def test_a_plan_counts_steps() -> None:
    """Epochs are full batches; steps cut the last epoch short; few images are one batch."""
    by_epochs = Recipe(epochs=3, batch_size=64, learning_rate=1, warmup=0.1)
    by_steps = Recipe(steps=50, batch_size=64, learning_rate=1, warmup=7)

    assert by_epochs.plan(images=1259) == Plan(
        batch_size=64, steps_per_epoch=19, steps=57, warmup_steps=6
    )
    assert by_steps.plan(images=1259).epochs == 3
    assert by_steps.plan(images=1259).warmup_steps == 7
    assert by_epochs.plan(images=20) == Plan(
        batch_size=20, steps_per_epoch=1, steps=3, warmup_steps=0
    )


def test_a_recipe_makes_the_model_it_was_published_for() -> None:
    """Its fields of ViTConfig go over those of the variant, widths too; tuples survive JSON."""
    recipe = RECIPES["plain-s16"]
    config = recipe.config(keras_vit.VARIANTS["S/16"])

    assert (config.pooling, config.class_token) == ("avg", False)
    assert (config.position_embedding, config.representation_dim) == ("sincos_2d", 384)
    wider = dataclasses.replace(recipe, model={**recipe.model, "hidden_dim": 768})
    assert wider.config(keras_vit.VARIANTS["S/16"]).representation_dim == 768
    stages = dataclasses.replace(recipe, model={"resnet_layers": (3, 4, 9)})
    assert Recipe.from_dict(json.loads(json.dumps(stages.to_dict()))) == stages


@pytest.mark.parametrize(
    ("name", "kind", "kept"), [("adamw", AdamW, 1 - 0.01 * 0.5), ("lamb", LAMB, 1 - 0.01)]
)
def test_the_optimizer_has_the_numbers_of_the_recipe(
    name: OptimizerName, kind: type[Any], kept: float
) -> None:
    """Epsilon is that of optax and torch, not Keras' 1e-7, and averages and decay are as asked.

    The rate rises linearly and falls as a cosine; `tests/test_optimizers.py` has all of the
    original's. With gradients of zero, kernels shrink and biases, norms, token and positions stay.
    LAMB's step is as long as the rate says, whatever the decay.
    """
    model = keras_vit.VisionTransformer(MODEL)
    asked: dict[str, Any] = {"betas": (0.8, 0.95), "average": 0.99, "weight_decay": 0.5}
    recipe = dataclasses.replace(SCRATCH, optimizer=name, learning_rate=0.01, warmup=0.2, **asked)
    for warmup, before in ((0.0, 0.01), (0.2, 0.0)):
        rising = dataclasses.replace(recipe, epochs=None, steps=10, warmup=warmup)
        optimizer: Any = make_optimizer(rising, model=model, plan=rising.plan(images=1000))
        assert float(optimizer.learning_rate) == pytest.approx(before)
    assert type(optimizer) is kind
    assert (optimizer.epsilon, optimizer.beta_1, optimizer.beta_2) == (1e-8, 0.8, 0.95)
    assert (optimizer.weight_decay, optimizer.global_clipnorm) == (0.5, 1.0)
    assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.99)
    for step, rate in ((1, 0.005), (6, 0.005), (10, 0.0), (2, 0.01)):
        optimizer.iterations.assign(step)
        assert float(optimizer.learning_rate) == pytest.approx(rate, abs=1e-8)

    variables = model.trainable_variables
    for variable in variables:
        variable.assign(np.ones(variable.shape))
    optimizer.apply([np.zeros(v.shape, np.float32) for v in variables], variables)
    decayed = {v.path for v in variables if not np.all(np.asarray(v) == 1)}
    assert decayed == {v.path for v in variables if v.name == "kernel"}
    assert len(decayed) > 5
    assert np.asarray(model.get_layer("head").kernel) == pytest.approx(kept)
