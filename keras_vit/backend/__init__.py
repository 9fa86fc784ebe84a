"""What one Keras backend does better than `keras.ops`: one small file per backend.

A backend without a file of its own uses `plain`, which the tests hold the others to.
"""

import keras

if keras.backend.backend() == "tensorflow":
    from keras_vit.backend.tensorflow import (
        ACTIVATIONS,
        ALIGNMENT,
        adopt,
        dense,
        is_concrete,
        layer_norm,
        replica_id,
        self_attention,
        softmax,
        space_to_depth,
        uninitialized,
    )
    from keras_vit.backend.tensorflow_trainer import ExactTrainer, scope_of, warn_of_keras_step
    from keras_vit.backend.tensorflow_updates import adam_step, momentum_step
else:
    from keras_vit.backend.plain import (
        ACTIVATIONS,
        ALIGNMENT,
        ExactTrainer,
        adam_step,
        adopt,
        dense,
        is_concrete,
        layer_norm,
        momentum_step,
        replica_id,
        scope_of,
        self_attention,
        softmax,
        space_to_depth,
        uninitialized,
        warn_of_keras_step,
    )

    if keras.backend.backend() == "jax":
        from keras_vit.backend.jax import is_concrete, layer_norm, self_attention

__all__ = [
    "ACTIVATIONS",
    "ALIGNMENT",
    "ExactTrainer",
    "adam_step",
    "adopt",
    "dense",
    "is_concrete",
    "layer_norm",
    "momentum_step",
    "replica_id",
    "scope_of",
    "self_attention",
    "softmax",
    "space_to_depth",
    "uninitialized",
    "warn_of_keras_step",
]
