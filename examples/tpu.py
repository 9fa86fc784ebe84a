"""Fine-tunes on a TPU: on JAX over a mesh of its devices, or on TensorFlow with tf.distribute.

    KERAS_BACKEND=jax python examples/tpu.py photos run
    TPU_NAME=local python examples/tpu.py gs://bucket/photos gs://bucket/run

The first needs JAX for TPUs (pip install "jax[tpu]"), the second TensorFlow for TPUs
(pip install tensorflow-tpu). Neither has been run on a TPU by us: it is the code path of the other
devices, which the tests do run.
"""

import sys

import keras

import keras_vit
from keras_vit import data, training


def main(folder: str, out: str) -> None:
    """One call: the devices, XLA and the input are its part."""
    images = data.load_folder(folder)
    devices = {"strategy": "tpu"}
    if keras.backend.backend() == "jax":
        devices = {"mesh": f"data={len(keras.distribution.list_devices())}"}
    run = training.train(
        images,
        out=out,
        model=lambda: keras_vit.ViTB16(
            weights="imagenet21k", classes=len(images.labels), classifier_activation=None
        ),
        recipe=training.RECIPES["finetune-pets"],
        existing="resume",
        execution=training.Execution(precision="mixed_bfloat16", **devices),
    )
    print(run.config["result"])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
