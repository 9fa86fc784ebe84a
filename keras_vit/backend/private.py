"""Every private name of Keras and TensorFlow that the package touches, and why it has to.

Nothing else in the package may touch one: tests/test_backend_private.py reads the sources for it,
and names what an upgrade has taken away. On other backends this imports without TensorFlow.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional
from keras.src.utils.python_utils import default as config_of_arguments

if keras.backend.backend() == "tensorflow":
    from tensorflow.python.eager import record

    is_taped: Callable[[], bool] = record.could_possibly_record

# Mixins; to the type checker they are what they become a part of.
if TYPE_CHECKING:
    from keras import Model as _Model
    from keras.optimizers import Optimizer as _Optimizer
else:
    _Model = _Optimizer = object


class Private(NamedTuple):
    """A private name.

    Attributes:
        owner: what has it: a module, a class, or a kind of object.
        name: what it is called there.
        why: what for, and what public names lack.
    """

    owner: str
    name: str
    why: str


_EXPORTER = "keras.src.export.onnx"
_CALL = "current_call_ctx"

PRIVATE_NAMES = (
    Private(
        "keras.src.models.functional",
        "Functional",
        "the base of ExactModel: keras.Model becomes it by a swap that fails with a second base",
    ),
    Private(
        "keras.src.utils.python_utils",
        "default",
        "marks a get_config that leaves the arguments of __init__ to Keras, as Layer's own does",
    ),
    Private(
        "keras.src.backend.common.global_state",
        "get_global_attribute",
        "reads which call is under way; no public name does",
    ),
    Private("the state of a call", _CALL, "holds the call that is under way"),
    Private(
        "the context of a call",
        "entry_layer",
        "the model that was called, to warn of Keras' own step",
    ),
    Private(
        _EXPORTER,
        "export_onnx",
        "is on the stack while a graph is traced for tf2onnx, which Keras says nowhere",
    ),
    Private(
        "tensorflow.python.eager.record",
        "could_possibly_record",
        "whether a gradient may be asked for: then the dense forms keep a product for it",
    ),
    Private(
        "keras.Model",
        "_flatten_layers",
        "all layers inside, at any depth; Model.layers has no part of a layer made of others",
    ),
    Private(
        "keras.Model",
        "_distribute_strategy",
        "the strategy a model was made under, or None; distribute_strategy of one that was made "
        "without is that of any scope",
    ),
    Private(
        "keras.Model", "_compile_loss", "the compiled losses; compute_loss gives only their sum"
    ),
    Private(
        "keras.Model", "_loss_tracker", "the mean that fit reports as its loss, for a step of ours"
    ),
    Private(
        "keras.Model",
        "_compute_loss",
        "compute_loss of a model, with training or, where an old one takes none, without",
    ),
    Private(
        "keras.Model",
        "_make_function",
        "what fit and evaluate compile a step with; train_step alone cannot wrap a user's own",
    ),
    Private(
        "keras.Model",
        "_maybe_symbolic_build",
        "builds before the first step; Keras' own fails with several workers",
    ),
    Private("keras.Model", "_symbolic_build", "builds a model, its losses and metrics for a batch"),
    Private(
        "keras.Model",
        "_initial_epoch",
        "where BackupAndRestore resumes; Keras keeps it for the next fit, which then trains less",
    ),
    Private(
        "CompileLoss",
        "_flat_losses",
        "the compiled terms one by one, each of which has its own denominator",
    ),
    Private(
        "CompileLoss",
        "_y_pred_build_structure",
        "the structure of the predictions, to walk the terms before there are any",
    ),
    Private("a tensor", "_keras_mask", "the mask of a tensor, which its loss is weighed by"),
    Private(
        "keras.layers.Dense",
        "_kernel",
        "the kernel as it is stored; Dense.kernel adds LoRA to it, and unpacks it",
    ),
    Private(
        "keras.optimizers.Adam",
        "_get_variable_index",
        "the place of a variable in the memories, which under a strategy is no matter of identity",
    ),
    Private(
        "keras.optimizers.Adam",
        "_momentums",
        "averages of gradients, for the kernel that has the whole step",
    ),
    Private("keras.optimizers.Adam", "_velocities", "averages of their squares, for the same"),
    Private(
        "keras.optimizers.Adam",
        "_use_weight_decay",
        "what exclude_from_weight_decay was told of a variable",
    ),
    Private(
        "keras.optimizers.Adam",
        "_apply_weight_decay",
        "decays all variables at once, which ours do one by one, each at its own rate",
    ),
    Private(
        "keras.optimizers.Adam",
        "_all_reduce_sum_gradients",
        "sums gradients over replicas after they are clipped; here they are summed before",
    ),
    # A file of its own process, which may import neither Keras nor this package.
    Private(
        "a TFLite interpreter",
        "_get_ops_details",
        "the operators of a TFLite file (exporting/clean/checker.py); the analyzer only prints",
    ),
)

__all__ = ["PRIVATE_NAMES", "Functional", "Private", "config_of_arguments"]


def layers_of(layer: keras.layers.Layer, *, with_itself: bool = True) -> list[keras.layers.Layer]:
    """Returns all layers inside a layer or model, at any depth; a parent before its children."""
    layers: list[keras.layers.Layer] = layer._flatten_layers(include_self=with_itself)
    return layers


def called_layer() -> keras.layers.Layer | None:
    """Returns the outermost layer or model of the call that is under way."""
    return getattr(global_state.get_global_attribute(_CALL), "entry_layer", None)


def is_traced_for_onnx() -> bool:
    """Whether `keras.Model.export` traces this graph for tf2onnx.

    Any model may have our layers inside, so no method of ours would be called before.
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
    """Returns the kernel of a dense layer as it is stored, None if it has only others."""
    return getattr(dense, "_kernel", None)


def strategy_of(model: keras.Model) -> Any:
    """Returns the strategy that a model was made under, None if there was none."""
    return model._distribute_strategy


def losses_of(model: keras.Model) -> Any:
    """Returns the `CompileLoss` of a compiled model, None if no loss was compiled."""
    return model._compile_loss


def loss_tracker_of(model: keras.Model) -> keras.metrics.Mean:
    """Returns the metric that is reported as the loss of a compiled model."""
    return model._loss_tracker


def loss_of(model: keras.Model, **arguments: Any) -> Any:
    """Returns what `model.compute_loss` does of the arguments that it takes."""
    return model._compute_loss(**arguments)


def build_for(model: keras.Model, batch: Any) -> None:
    """Builds a model, its losses and its metrics for a batch."""
    model._symbolic_build(data_batch=batch)


def forget_initial_epoch(model: keras.Model) -> None:
    """Makes the next `fit` of a model start where it is asked to."""
    model._initial_epoch = None


def prediction_structure(losses: Any) -> Any:
    """Returns the structure of the predictions that a `CompileLoss` was built for, of None."""
    return losses._y_pred_build_structure


def with_terms(losses: Any, wrap: Callable[[Any, int], Any]) -> Any:
    """Returns a copy of a `CompileLoss`.

    Args:
        losses: it, built.
        wrap: from the loss of a term and its place to what takes its place in the copy.
    """
    changed = object.__new__(type(losses))  # Keras' objects refuse `copy.copy`
    wrapped = [
        entry._replace(loss=wrap(entry.loss, place))
        for place, entry in enumerate(losses._flat_losses)
    ]
    vars(changed).update({**vars(losses), "_flat_losses": wrapped})
    return changed


def index_of(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Returns the place of a variable, as `update_step` is given it, in an optimizer's memories."""
    index: int = optimizer._get_variable_index(variable)
    return index


def averages_of(optimizer: keras.optimizers.Adam, index: int) -> Sequence[keras.Variable]:
    """Returns the averages of a variable's gradient and of its square."""
    return optimizer._momentums[index], optimizer._velocities[index]


def is_decayed(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether weight decay, if there is any, is for this variable too."""
    return bool(optimizer._use_weight_decay(variable))


def replace_apply(optimizer: keras.optimizers.Optimizer, apply: Callable[..., Any]) -> None:
    """Puts `apply` in the place of an optimizer's own, which sums no gradients from now on.

    On the object, not in a subclass: any optimizer keeps its class, and is saved under its name.
    Past its `__setattr__`, which looks for variables and for what checkpoints hold.
    """
    object.__setattr__(optimizer, "apply", apply)
    object.__setattr__(optimizer, "_all_reduce_sum_gradients", list)


class OwnWeightDecay(_Optimizer):
    """Put before an optimizer among the bases: Keras decays no weight, `update_step` does."""

    def _apply_weight_decay(self, variables: Any) -> None:
        """Nothing."""


class StepHooks(_Model):
    """Put before `keras.Model` among the bases: what Keras does around a step can be changed."""

    def _exact_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns what is compiled in place of a step of training, evaluation or prediction."""
        return step

    def _exact_build(self, iterator: Any, batch: Any) -> None:
        """Builds the model before its first step, for an epoch's iterator or for a batch."""
        super()._maybe_symbolic_build(iterator=iterator, data_batch=batch)

    def _make_function(self, step_function: Callable[[Any], Any]) -> Any:
        return super()._make_function(self._exact_step(step_function))

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        self._exact_build(iterator, data_batch)
