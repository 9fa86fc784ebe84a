"""Trains models and keeps what comes of it in run directories, on TensorFlow or JAX."""

from keras_vit.losses import SigmoidCrossEntropy
from keras_vit.optimizers import LAMB, AdamW, MomentumSGD, WarmupDecay, decayed_rates
from keras_vit.training.distillation import DistillationLoss, DistillationModel
from keras_vit.training.execution import Execution, is_first_worker
from keras_vit.training.loop import WorkerLostError
from keras_vit.training.masked_patches import MaskedPatchModel, Reconstructions, reconstruct
from keras_vit.training.models import (
    MODEL_NAMES,
    MODELS,
    model_config,
    pretrained_model,
)
from keras_vit.training.opened import OpenedModel, open_source
from keras_vit.training.outcome import TrainingInterrupted
from keras_vit.training.planning import TrainingPlan, plan
from keras_vit.training.progress import EpochDone, Event, PlanChanged, StepDone, TrainingDone
from keras_vit.training.provenance import Provenance
from keras_vit.training.recipe import Recipe
from keras_vit.training.recipes import RECIPES
from keras_vit.training.run import Run, has_run_files, open_model, read_fields
from keras_vit.training.trackers import TRACKERS, Trackers
from keras_vit.training.train import (
    check_free,
    default_config,
    default_pretrain_config,
    default_pretrain_recipe,
    default_recipe,
    pretrain,
    train,
)

__all__ = [
    "LAMB",
    "MODELS",
    "MODEL_NAMES",
    "RECIPES",
    "TRACKERS",
    "AdamW",
    "DistillationLoss",
    "DistillationModel",
    "EpochDone",
    "Event",
    "Execution",
    "MaskedPatchModel",
    "MomentumSGD",
    "OpenedModel",
    "PlanChanged",
    "Provenance",
    "Recipe",
    "Reconstructions",
    "Run",
    "SigmoidCrossEntropy",
    "StepDone",
    "Trackers",
    "TrainingDone",
    "TrainingInterrupted",
    "TrainingPlan",
    "WarmupDecay",
    "WorkerLostError",
    "check_free",
    "decayed_rates",
    "default_config",
    "default_pretrain_config",
    "default_pretrain_recipe",
    "default_recipe",
    "has_run_files",
    "is_first_worker",
    "model_config",
    "open_model",
    "open_source",
    "plan",
    "pretrain",
    "pretrained_model",
    "read_fields",
    "reconstruct",
    "train",
]
