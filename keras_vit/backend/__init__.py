"""Operations and training steps that are faster or more exact on one Keras backend.

A backend without its own file uses `plain`, which has them all; the tests compare the others with
it.
"""

import keras

from keras_vit.backend import plain
from keras_vit.backend.plain import *  # noqa: F403

if keras.backend.backend() == "tensorflow":
    from keras_vit.backend.tensorflow import *  # noqa: F403
    from keras_vit.backend.tensorflow_steps import adam_step as adam_step
    from keras_vit.backend.tensorflow_steps import momentum_step as momentum_step
    from keras_vit.backend.tensorflow_trainer import *  # noqa: F403
elif keras.backend.backend() == "jax":
    from keras_vit.backend.jax import *  # noqa: F403

__all__ = plain.__all__
