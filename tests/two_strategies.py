"""Trains models one after another in one process, each under a strategy of its own.

TensorFlow breaks off the sums of the second where model or devices differ from the first's.
Its argument is a list of (width of the model, devices of the strategy), as JSON.
"""

import json
import sys
from typing import Any

import numpy as np
import tensorflow as tf
from processes import make_devices

from keras_vit import VisionTransformer, ViTConfig


def _main(cases: list[tuple[int, int]]) -> None:
    make_devices(max(count for _, count in cases))
    for width, count in cases:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])
        with strategy.scope():
            sizes: dict[str, Any] = {
                "hidden_dim": width,
                "mlp_dim": 8,
                "num_heads": 2,
                "num_layers": 1,
            }
            config = ViTConfig(input_shape=(8, 8, 3), patch_size=4, classes=3, **sizes)
            model = VisionTransformer(config)
            model.compile("sgd", "mse")
        model.fit(np.zeros((8, 8, 8, 3)), np.zeros((8, 3)), batch_size=8, verbose=0)
        print("trained")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
