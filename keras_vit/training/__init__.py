"""Trains models and keeps what comes of it in run directories, on TensorFlow or JAX."""

from keras_vit.optimizers import AdamW, MomentumSGD, WarmupDecay
from keras_vit.training.distillation import DistillationModel
from keras_vit.training.execution import Execution, is_first_worker
from keras_vit.training.loop import WorkerLostError
from keras_vit.training.masked_patches import MaskedPatchModel
from keras_vit.training.models import (
    MODEL_NAMES,
    MODELS,
    OpenedModel,
    model_config,
    open_source,
    pretrained_model,
)
from keras_vit.training.planning import TrainingPlan, plan
from keras_vit.training.progress import (
    EpochDone,
    Event,
    PlanChanged,
    StepDone,
    Trackers,
    TrainingDone,
)
from keras_vit.training.recipe import Recipe
from keras_vit.training.recipes import RECIPES
from keras_vit.training.run import Provenance, Run, has_run_files, open_model, read_fields
from keras_vit.training.train import (
    TrainingInterrupted,
    check_free,
    default_pretrain_recipe,
    default_recipe,
    pretrain,
    train,
)

__all__ = ["MODELS", "MODEL_NAMES", "RECIPES", "AdamW", "DistillationModel", "EpochDone", "Event",
           "Execution", "MaskedPatchModel", "MomentumSGD", "OpenedModel", "PlanChanged",
           "Provenance", "Recipe", "Run", "StepDone", "Trackers", "TrainingDone",
           "TrainingInterrupted", "TrainingPlan", "WarmupDecay", "WorkerLostError", "check_free",
           "default_pretrain_recipe", "default_recipe", "has_run_files", "is_first_worker",
           "model_config", "open_model", "open_source", "plan", "pretrain", "pretrained_model",
           "read_fields", "train"]  # fmt: skip
