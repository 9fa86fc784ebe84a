"""Operations and training steps that are faster or more exact on one Keras backend.

A backend without its own file uses `plain`; the tests compare the others with it.
"""

import keras

if keras.backend.backend() == "tensorflow":
    from keras_vit.backend.plain import by_images, remat, scan_layers
    from keras_vit.backend.tensorflow import (
        ACTIVATIONS,
        ALIGNMENT,
        adopt,
        dense,
        folds_scale,
        is_concrete,
        layer_norm,
        replica_id,
        self_attention,
        softmax,
        space_to_depth,
        uninitialized,
        values_of,
    )
    from keras_vit.backend.tensorflow_steps import adam_step, momentum_step
    from keras_vit.backend.tensorflow_trainer import (
        ExactTrainer,
        is_in_scope,
        scope_of,
        warn_of_keras_step,
    )
else:
    from keras_vit.backend.plain import (
        ACTIVATIONS,
        ALIGNMENT,
        ExactTrainer,
        adam_step,
        adopt,
        by_images,
        dense,
        folds_scale,
        is_concrete,
        is_in_scope,
        layer_norm,
        momentum_step,
        remat,
        replica_id,
        scan_layers,
        scope_of,
        self_attention,
        softmax,
        space_to_depth,
        uninitialized,
        values_of,
        warn_of_keras_step,
    )

    if keras.backend.backend() == "jax":
        from keras_vit.backend.jax import (
            ExactTrainer,
            by_images,
            is_concrete,
            layer_norm,
            remat,
            scan_layers,
            self_attention,
            values_of,
        )

__all__ = [
    "ACTIVATIONS",
    "ALIGNMENT",
    "ExactTrainer",
    "adam_step",
    "adopt",
    "by_images",
    "dense",
    "folds_scale",
    "is_concrete",
    "is_in_scope",
    "layer_norm",
    "momentum_step",
    "remat",
    "replica_id",
    "scan_layers",
    "scope_of",
    "self_attention",
    "softmax",
    "space_to_depth",
    "uninitialized",
    "values_of",
    "warn_of_keras_step",
]
