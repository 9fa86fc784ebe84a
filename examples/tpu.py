"""Fine-tunes on a TPU with tf.distribute; on JAX, the same model under keras.distribution.

    TPU_NAME=local python examples/tpu.py gs://bucket/photos gs://bucket/run
    KERAS_BACKEND=jax python examples/tpu.py photos run

The first needs TensorFlow for TPUs (pip install tensorflow-tpu), the second JAX for TPUs
(pip install "jax[tpu]"). Neither has been run on a TPU by us: it is the code path of the other
strategies, which the tests do run.
"""

import sys

import keras

import keras_vit


def with_tensorflow(folder: str, out: str) -> None:
    """One call: the strategy, XLA and the input are its part."""
    from keras_vit import data, training

    images = data.load_folder(folder)
    run = training.train(
        images,
        out=out,
        model=keras_vit.ViTB16(
            weights="imagenet21k", classes=len(images.labels), classifier_activation=None
        ),
        recipe=training.RECIPES["finetune-pets"],
        existing="resume",
        execution=training.Execution(strategy="tpu", precision="mixed_bfloat16"),
    )
    print(run.config["result"])


def with_jax(folder: str, out: str) -> None:
    """Keras' own `fit`: every device gets a part of each batch."""
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    keras.config.set_dtype_policy("mixed_bfloat16")
    batches = keras.utils.image_dataset_from_directory(
        folder, image_size=(384, 384), batch_size=512, label_mode="categorical"
    )
    classes = len(batches.class_names)
    model = keras_vit.ViTB16(
        weights="imagenet21k",
        classes=classes,
        input_shape=(384, 384, 3),
        classifier_activation=None,
    )
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
        keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(batches, epochs=10)
    model.save(f"{out}.keras")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    train = with_tensorflow if keras.backend.backend() == "tensorflow" else with_jax
    train(sys.argv[1], sys.argv[2])
