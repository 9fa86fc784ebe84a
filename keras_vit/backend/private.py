"""All private names of Keras and TensorFlow that the package uses, each with its reason.

tests/test_backend_private.py checks that no other module uses one, and that installed versions
have them all. On other backends this module imports without TensorFlow.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import AutocastScope
from keras.src.models.functional import Functional
from keras.src.utils.python_utils import default as config_of_arguments

if keras.backend.backend() == "tensorflow":
    from tensorflow.python.eager import record

    is_taped: Callable[[], bool] = record.could_possibly_record

# The classes below are mixins; the type checker sees them with the base that they extend.
if TYPE_CHECKING:
    from keras import Model as _Model
    from keras.optimizers import Optimizer as _Optimizer
else:
    _Model = _Optimizer = object


_EXPORTER = "keras.src.export.onnx"
_CALL = "current_call_ctx"

# Of each owner, a module, class or kind of object, its private names: why public ones do not do.
PRIVATE_NAMES: dict[str, dict[str, str]] = {
    "keras.src.models.functional": {
        # keras.Model turns into it by a swap that fails with a second base.
        "Functional": "the base of ExactModel"
    },
    "keras.src.utils.python_utils": {
        "default": "marks a get_config that leaves the arguments of __init__ to Keras"
    },
    "keras.src.backend.common.global_state": {"get_global_attribute": "reads the current call"},
    "keras.src.backend.common.variables": {"AutocastScope": "variables as a layer casts them"},
    "the state of a call": {_CALL: "holds the current call"},
    "the context of a call": {"entry_layer": "the called model, to warn of Keras' own step"},
    _EXPORTER: {"export_onnx": "is on the stack while a graph is traced for tf2onnx"},
    "tensorflow.python.eager.record": {
        "could_possibly_record": "the dense forms keep a product where a gradient may be asked for"
    },
    "keras.Model": {
        "_flatten_layers": "all layers; Model.layers stops at layers made of others",
        "_distribute_strategy": "None without one; distribute_strategy has that of any scope",
        "_compile_loss": "the compiled losses; compute_loss returns only their sum",
        "_loss_tracker": "the mean that fit reports as its loss",
        "_compute_loss": "with `training` unless the model's own compute_loss does not take it",
        "_make_function": "compiles a step; train_step alone cannot wrap a user's own",
        "_maybe_symbolic_build": "builds before the first step; fails with several workers",
        "_symbolic_build": "builds a model, its losses and metrics for a batch",
        "_initial_epoch": "where BackupAndRestore resumes; the next fit would train less",
    },
    "CompileLoss": {
        "_flat_losses": "the compiled terms, each with its own denominator",
        "_user_loss": "one loss or several, before it is built",
        "_metrics": "those of the terms, which Keras weights by unknown batch sizes",
        "_y_pred_build_structure": "of predictions, to visit the terms before there are any",
    },
    "a tensor": {"_keras_mask": "the mask of a tensor, which weights its loss"},
    "keras.layers.Dense": {"_kernel": "as it is stored; Dense.kernel adds LoRA and unpacks it"},
    "keras.optimizers.Adam": {
        "_get_variable_index": "of a variable's state, which a strategy hides from identity",
        "_momentums": "averages of gradients, for the fused kernel",
        "_velocities": "averages of their squares, for the same",
        "_use_weight_decay": "whether exclude_from_weight_decay excluded a variable",
        "_apply_weight_decay": "decays all variables at one rate; here each has its own",
        "_all_reduce_sum_gradients": "sums gradients after clipping; here they are summed before",
    },
    # Used in a process of its own, which may import neither Keras nor this package.
    "a TFLite interpreter": {"_get_ops_details": "the operators of a file (clean/runners.py)"},
}

__all__ = ["PRIVATE_NAMES", "Functional", "config_of_arguments"]


def layers_of(layer: keras.layers.Layer, *, with_itself: bool = True) -> list[keras.layers.Layer]:
    """Returns all layers inside a layer or model, at any depth; a parent before its children."""
    layers: list[keras.layers.Layer] = layer._flatten_layers(include_self=with_itself)
    return layers


def called_layer() -> keras.layers.Layer | None:
    """Returns the outermost layer or model of the current call."""
    return getattr(global_state.get_global_attribute(_CALL), "entry_layer", None)


def cast_scope(layer: keras.layers.Layer) -> AutocastScope:
    """The scope in which a layer's variables have the dtype that it computes in."""
    return AutocastScope(layer.compute_dtype)


def is_traced_for_onnx() -> bool:
    """Whether `keras.Model.export` traces this graph for tf2onnx.

    It reads the stack, since Keras calls no method of this package first: any model may contain its
    layers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _EXPORTER:
            return True
        frame = frame.f_back
    return False


def mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras' layers gave a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def stored_kernel(dense: keras.layers.Dense) -> Any:
    """Returns the kernel of a dense layer as it is stored, or None."""
    return getattr(dense, "_kernel", None)


def strategy_of(model: keras.Model) -> Any:
    """Returns the strategy that a model was made under, or None."""
    return model._distribute_strategy


def losses_of(model: keras.Model) -> Any:
    """Returns the `CompileLoss` of a model, or None if no loss was compiled."""
    return model._compile_loss


def loss_tracker_of(model: keras.Model) -> keras.metrics.Mean:
    """Returns the metric that a compiled model reports as its loss."""
    return model._loss_tracker


def loss_of(model: keras.Model, **arguments: Any) -> Any:
    """Returns `model.compute_loss` of those arguments that it takes."""
    return model._compute_loss(**arguments)


def build_for(model: keras.Model, batch: Any) -> None:
    """Builds a model, its losses and its metrics for a batch."""
    model._symbolic_build(data_batch=batch)


def reset_initial_epoch(model: keras.Model) -> None:
    """Makes the next `fit` of a model start at its own `initial_epoch`."""
    model._initial_epoch = None


def may_have_terms(model: keras.Model, losses: Any) -> bool:
    """Whether a `CompileLoss` that is not built may get several terms."""
    if losses is None or losses.built:
        return False
    return keras.tree.is_nested(losses._user_loss) or len(getattr(model, "outputs", ())) != 1


def prediction_structure(losses: Any) -> Any:
    """Returns the structure of the predictions that a `CompileLoss` was built for."""
    return losses._y_pred_build_structure


def with_terms(losses: Any, wrap: Callable[[Any, int], Any]) -> Any:
    """Returns a copy of a built `CompileLoss`, with `wrap(loss, index)` for each of its terms.

    It updates no metric of a term: Keras' own weights by a batch size that is not always known.
    """
    copy = object.__new__(type(losses))  # Keras' objects refuse `copy.copy`
    terms = [
        term._replace(loss=wrap(term.loss, index)) for index, term in enumerate(losses._flat_losses)
    ]
    vars(copy).update({**vars(losses), "_flat_losses": terms, "_metrics": [None] * len(terms)})
    return copy


def index_of(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Returns the index of the state of a variable, as `update_step` receives the variable."""
    index: int = optimizer._get_variable_index(variable)
    return index


def averages_of(optimizer: keras.optimizers.Adam, index: int) -> Sequence[keras.Variable]:
    """Returns Adam's moving averages of a variable's gradient and of its square."""
    return optimizer._momentums[index], optimizer._velocities[index]


def is_decayed(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether the optimizer's weight decay applies to the variable."""
    return bool(optimizer._use_weight_decay(variable))


def replace_apply(optimizer: keras.optimizers.Optimizer, apply: Callable[..., Any]) -> None:
    """Replaces an optimizer's `apply` on the object, and stops its own sum over replicas.

    A subclass would change the class that it is saved under; its `__setattr__` would track the new
    attribute as state.
    """
    object.__setattr__(optimizer, "apply", apply)
    object.__setattr__(optimizer, "_all_reduce_sum_gradients", list)


class OwnWeightDecay(_Optimizer):
    """Leaves weight decay to `update_step`; a mixin, the base before an optimizer."""

    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing."""


class StepHooks(_Model):
    """Lets a subclass replace a step and the build before it; a mixin, before `keras.Model`."""

    def _exact_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns the function to compile for a step of training, evaluation or prediction."""
        return step

    def _exact_build(self, iterator: Any, batch: Any) -> None:
        """Builds the model before its first step, for an epoch's iterator or for a batch."""
        super()._maybe_symbolic_build(iterator=iterator, data_batch=batch)

    def _make_function(self, step_function: Callable[[Any], Any]) -> Any:
        return super()._make_function(self._exact_step(step_function))

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        self._exact_build(iterator, data_batch)
