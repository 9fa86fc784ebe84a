"""Trains models and keeps what comes of it in run directories. TensorFlow only."""

from keras_vit.training.finish import TrainingInterrupted
from keras_vit.training.masked_patches import MaskedPatchModel
from keras_vit.training.models import MODEL_NAMES, MODELS, model_config, pretrained_model
from keras_vit.training.progress import EpochDone, Event, StepDone
from keras_vit.training.recipe import RECIPES, Recipe
from keras_vit.training.run import Run, check_free, load_run, load_run_data
from keras_vit.training.train import default_config, default_recipe, train

__all__ = [
    "MODELS",
    "MODEL_NAMES",
    "RECIPES",
    "EpochDone",
    "Event",
    "MaskedPatchModel",
    "Recipe",
    "Run",
    "StepDone",
    "TrainingInterrupted",
    "check_free",
    "default_config",
    "default_recipe",
    "load_run",
    "load_run_data",
    "model_config",
    "pretrained_model",
    "train",
]
