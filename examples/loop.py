"""Trains the digits in a loop that you can read, and change: plain Keras and TensorFlow.

    python examples/loop.py [--epochs 200] [--seed 0]

It takes the package's layers, pipeline and optimizer, and has the same losses as
`keras-vit train --data digits`. What that has besides: resuming, several devices, accumulation,
mixed precision, early stopping, reports.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import data, optimizers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()
BATCH, RATE, CLASSES, SMOOTHING = 64, 2e-3, 10, 0.1
MIXING = 100  # any number: it gives MixUp another random stream than the pipeline has

digits = data.load_digits()  # 1,797 images of 8 x 8 pixels, in three splits
steps_per_epoch = len(digits.train) // BATCH  # what is left of an epoch is dropped
steps = arguments.epochs * steps_per_epoch

# A small Vision Transformer on 16 x 16 pixels: a convolution, 16 patches, 4 blocks, their average.
keras.utils.set_random_seed(arguments.seed)  # decides the random weights
model = keras_vit.VisionTransformer(
    keras_vit.ViTConfig(
        input_shape=(16, 16, 3),
        patch_size=1,
        resnet_layers=(),
        hidden_dim=64,
        mlp_dim=128,
        num_heads=4,
        num_layers=4,
        classes=CLASSES,
        pooling="avg",
        class_token=False,
        classifier_activation=None,
        include_preprocessing=True,  # pixels 0..255 in
    )
)

# AdamW: the rate rises for a tenth of the steps, then falls as a cosine. Kernels alone decay.
schedule = optimizers.WarmupDecay(RATE, steps=steps, warmup_steps=round(0.1 * steps))
optimizer = optimizers.AdamW(schedule, weight_decay=0.05, epsilon=1e-8, global_clipnorm=1.0)
others = [each for each in model.trainable_variables if not each.path.endswith("/kernel")]
optimizer.exclude_from_weight_decay(var_list=others)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.CategoricalCrossentropy(from_logits=True)


def smooth_and_mix(step: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Makes probabilities of the labels, and blends each image with another (MixUp)."""
    images, labels = batch
    targets = tf.one_hot(labels, CLASSES) * (1 - SMOOTHING) + SMOOTHING / CLASSES
    stream = tf.constant((arguments.seed, MIXING), tf.int64)
    seed = tf.random.experimental.stateless_fold_in(stream, step)
    mixed: tuple[tf.Tensor, tf.Tensor] = data.mix_batch(images, targets, alpha=0.2, seed=seed)
    return mixed


batches = data.train_batches(
    digits.train,
    resizing=data.Resizing((16, 16)),
    batch_size=BATCH,
    epochs=arguments.epochs,
    seed=arguments.seed,  # decides order and augmentation, each a function of seed and step
    augmentation=data.Augmentation(rotation=15, shift=0.1, zoom=0.15),
)
validation = data.evaluation_batches(
    digits.validation, resizing=data.Resizing((16, 16)), batch_size=128
)


@tf.function(autograph=False)
def train_step(images: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Takes one step; returns the loss of its images, (), before the step."""
    with tf.GradientTape() as tape:
        loss = loss_of(targets, model(images, training=True))
    variables = [each.value for each in model.trainable_variables]
    optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
    return loss


losses: list[float] = []
for images, targets in batches.enumerate().map(smooth_and_mix):
    losses.append(float(train_step(images, targets)))
    if len(losses) % steps_per_epoch == 0:
        right = [np.argmax(model.predict_on_batch(x), -1) == y.numpy() for x, y in validation]
        epoch, accuracy = len(losses) // steps_per_epoch, np.concatenate(right).mean()
        mean = np.mean(losses[-steps_per_epoch:])
        print(f"epoch {epoch}: loss {mean:.6f}, validation accuracy {accuracy:.2%}", flush=True)
model.save("digits.keras")
