"""`ExactModel`: a functional `keras.Model` whose training is exact."""

import keras

from keras_vit import backend
from keras_vit.backend.private import Functional


@keras.saving.register_keras_serializable(package="keras_vit")
class ExactModel(backend.ExactTrainer, Functional):
    """A functional `keras.Model` that trains the same on one device and under any strategy.

    It is `keras.Model(inputs, outputs)` with another `compile` and `fit`: gradients are summed over
    replicas before they are clipped, replicas with fewer images count less, the loss is scaled if
    any layer computes in float16, XLA also compiles under a strategy, and `compile` takes
    `accumulate`, `sam_rho` and `report_gradient_norm`. Subclass it for your own `train_step` or
    `compute_loss`. A model that is a class with a `call` takes `ExactTrainer` as its first base:
    `class Mine(keras_vit.ExactTrainer, keras.Model)`.

    Example:
        >>> import keras_vit
        >>> base = keras_vit.ViTTi16(weights=None, include_top=False, pooling="avg",
        ...                          input_shape=(32, 32, 3))
        >>> images = keras.Input((32, 32, 3))
        >>> model = ExactModel(images, keras.layers.Dense(5)(base(images)))
        >>> model.compile("adam", "mse", accumulate=2)
        >>> model.output_shape
        (None, 5)

    Args:
        inputs: Keras tensors, in any structure.
        outputs: Keras tensors computed from them.
        name: name of the model.
    """

    @classmethod
    def from_model(cls, model: keras.Model) -> "ExactModel":
        """Returns an exact model with the layers of a functional or sequential one, not compiled.

        Example:
            >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            >>> ExactModel.from_model(model).layers[-1] is model.layers[-1]
            True

        Raises:
            TypeError: the model is neither functional nor sequential.
            ValueError: the model is not built, so its inputs are unknown.
        """
        if not isinstance(model, Functional | keras.Sequential):
            raise TypeError(
                "from_model takes a functional or sequential model; for a class with a call, make "
                "keras_vit.ExactTrainer its first base. "
                f"Received: {type(model).__name__}."
            )
        if not model.built:
            raise ValueError(
                f"The model {model.name!r} is not built; call it on a batch of images first, or "
                "give it a keras.Input."
            )
        if isinstance(model, keras.Sequential):
            inputs, outputs = model.inputs[0], model.outputs[0]
        else:  # `inputs` and `outputs` are flat lists, these have the structure
            inputs, outputs = model.input, model.output
        with backend.scope_of(model):
            return cls(inputs, outputs, name=model.name)
