"""What one Keras backend does better than `keras.ops`: one small file per backend.

A backend without a file of its own uses `plain`, which the tests hold the others to.
"""

import keras

if keras.backend.backend() == "tensorflow":
    from keras_vit.backend.tensorflow import ACTIVATIONS, dense, space_to_depth
else:
    from keras_vit.backend.plain import ACTIVATIONS, dense, space_to_depth

__all__ = ["ACTIVATIONS", "dense", "space_to_depth"]
