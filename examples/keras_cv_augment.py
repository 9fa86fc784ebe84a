"""Trains on the digits with a pipeline of keras-cv's layers.

Run it as `python examples/keras_cv_augment.py [EPOCHS]`, after
`pip install keras-cv==0.9.0 scikit-learn`; it takes a minute on two CPU cores.
"""

import sys

import keras
import keras_cv
import tensorflow as tf

import keras_vit
from keras_vit.data import (
    Augmentation,
    Resizing,
    evaluation_batches,
    from_keras_cv,
    load_digits,
    train_batches,
)
from keras_vit.data.pipeline import steps_per_epoch

SIZE, BATCH_SIZE = (16, 16), 32

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
data = load_digits()
classes = len(data.labels)

# The layers are made once, outside of the function that `map` takes.
vary = from_keras_cv(
    [
        keras_cv.layers.RandAugment(value_range=(0, 255), augmentations_per_image=1, magnitude=0.2),
        keras_cv.layers.MixUp(alpha=0.2),
    ]
)
train = train_batches(
    data.train,
    resizing=Resizing(SIZE),
    batch_size=BATCH_SIZE,
    epochs=epochs,
    seed=0,
    augmentation=Augmentation(shift=0.1),
).map(lambda images, targets: vary(images, tf.one_hot(targets, classes)))
test = evaluation_batches(data.test, resizing=Resizing(SIZE), batch_size=128)

keras.utils.set_random_seed(0)
model = keras_vit.VisionTransformer(
    keras_vit.ViTConfig(
        input_shape=(*SIZE, 3),
        patch_size=4,
        hidden_dim=64,
        mlp_dim=128,
        num_heads=4,
        num_layers=4,
        classes=classes,
        include_preprocessing=True,
    )
)
model.compile(
    keras.optimizers.AdamW(1e-3),
    loss=keras.losses.CategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    train,
    epochs=epochs,
    steps_per_epoch=steps_per_epoch(data.train, batch_size=BATCH_SIZE),
    shuffle=False,  # it is shuffled
    verbose=0,
)
measured = model.evaluate(
    test.map(lambda images, targets: (images, tf.one_hot(targets, classes))),
    verbose=0,
    return_dict=True,
)
print(f"Of {len(data.test)} digits {measured['accuracy']:.1%} are read rightly.")
