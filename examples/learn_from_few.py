"""Learns from digits without labels, then from a few labels; then fine-tunes by few parameters.

Run it as `python examples/learn_from_few.py [EPOCHS]`; it takes minutes on two CPU cores, and
prints what `docs/explain.md` shows.
"""

import dataclasses
import sys
from typing import Any

import keras
import numpy as np

import keras_vit
from keras_vit.data import Split, load_digits, resize_image
from keras_vit.evaluation import few_shot
from keras_vit.training import MaskedPatchModel

SIZE = (16, 16)
BATCH_SIZE = 64
CLASSIFIER = {
    "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "metrics": ["accuracy"],
}
# Big_vision's 1,024 is meant for features of 768 numbers and more; these have 64.
REGULARIZATION = 1.0


def fit(
    model: keras.Model, split: Split, *, epochs: int, learning_rate: float, **compiled: Any
) -> None:
    """Trains a model on all images of a split: AdamW, warm-up, cosine decay."""
    images = np.asarray(resize_image(split.images, size=SIZE))
    steps = epochs * -(-len(images) // BATCH_SIZE)
    warmup = max(steps // 10, 1)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=learning_rate, warmup_steps=warmup
    )
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.05, global_clipnorm=1.0)
    model.compile(optimizer, **compiled)
    model.fit(images, split.targets, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)


def without_labels(epochs: int) -> None:
    """Compares few-shot accuracy of random features with that after masked patch prediction."""
    data = load_digits()
    config = keras_vit.ViTConfig(
        input_shape=(*SIZE, 3),
        patch_size=4,
        hidden_dim=64,
        mlp_dim=128,
        num_heads=4,
        num_layers=4,
        pooling="avg",
        class_token=False,
        include_preprocessing=True,
    )
    keras.utils.set_random_seed(0)
    model = MaskedPatchModel(config, target="mean_color", seed=0)
    for name in ("random initialisation", "masked patches"):
        if name == "masked patches":
            fit(model, data.train, epochs=epochs, learning_rate=1e-3)
        results = few_shot(
            model.vit,
            train=data.train,
            test=data.test,
            shots=(1, 5, 10, 25),
            regularization=REGULARIZATION,
        )
        found = ", ".join(f"{r.shots}: {r.mean:.1%} ± {r.spread:.1%}" for r in results)
        print(f"{name}; accuracy by shots: {found}", flush=True)


def few_parameters(epochs: int) -> None:
    """Compares LoRA with full fine-tuning of a model of 0 to 4 on 5 to 9."""
    data = load_digits()
    low, high, test = (
        part(split, first) for split, first in ((data.train, 0), (data.train, 5), (data.test, 5))
    )
    config = keras_vit.ViTConfig(
        input_shape=(*SIZE, 3),
        patch_size=4,
        hidden_dim=192,
        mlp_dim=768,
        num_heads=3,
        num_layers=4,
        classes=5,
        include_preprocessing=True,
    )
    keras.utils.set_random_seed(0)
    base = keras_vit.VisionTransformer(config)
    fit(base, low, epochs=epochs, learning_rate=1e-3, **CLASSIFIER)
    adapted = keras_vit.lora(base, rank=8, targets=("qkv", "out", "fc1"))
    fit(adapted, high, epochs=epochs, learning_rate=1e-2, **CLASSIFIER)
    fit(base, high, epochs=epochs, learning_rate=1e-3, **CLASSIFIER)
    images = np.asarray(resize_image(test.images, size=SIZE))
    for name, model in (("full fine-tuning", base), ("LoRA at rank 8", adapted)):
        trained = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
        accuracy = model.evaluate(images, test.targets, verbose=0, return_dict=True)["accuracy"]
        share = trained / keras_vit.parameter_count(config)
        print(f"{name}: {share:.1%} of the parameters trained, accuracy {accuracy:.1%}", flush=True)


def part(split: Split, first: int) -> Split:
    """Returns the images of five digits, counted from zero."""
    chosen = split.take(np.flatnonzero((split.targets >= first) & (split.targets < first + 5)))
    return dataclasses.replace(chosen, targets=chosen.targets - first)


if __name__ == "__main__":
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else None
    without_labels(epochs or 100)
    few_parameters(epochs or 40)
