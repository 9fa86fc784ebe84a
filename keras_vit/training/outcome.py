"""Says what kind of training a run is of, and makes what it keeps out of the best model."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import keras

from keras_vit.adaptation import LoRAVisionTransformer, merge_lora, save_adapter
from keras_vit.data import Split
from keras_vit.model import VisionTransformer
from keras_vit.training import run
from keras_vit.training.assemble import Trained
from keras_vit.training.checkpoints import weights_hash
from keras_vit.training.distillation import DistillationModel
from keras_vit.training.masked_patches import MaskedPatchModel
from keras_vit.training.reconstructions import plot_reconstructions

CLASSIFICATION, MASKED_PATCHES, DISTILLATION = "classification", "masked-patches", "distillation"
# So many validation images are drawn with what is predicted of them.
SHOWN = 8


def architecture(model: Trained) -> dict[str, Any]:
    """Returns what config.json says of the network; of one built by hand its layers and a hash."""
    if not isinstance(model, VisionTransformer | DistillationModel | MaskedPatchModel):
        text = json.dumps(model.get_config(), sort_keys=True, default=str)
        return {
            "layers": [f"{type(layer).__name__} {layer.name}" for layer in model.layers],
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
    fields: dict[str, Any] = model.config.to_dict()
    return fields


def describe(model: Trained) -> dict[str, Any]:
    """Returns what config.json says of the kind of training; all of it decides the result."""
    trained = sum(int(variable.shape.num_elements()) for variable in model.trainable_variables)
    about: dict[str, Any] = {"objective": CLASSIFICATION, "trained_parameters": trained}
    if isinstance(model, MaskedPatchModel):
        about |= {"objective": MASKED_PATCHES}
        about |= {"target": model.target, "corruption": model.corruption}
    if isinstance(model, DistillationModel):
        about |= {"objective": DISTILLATION}
        about["distillation"] = {
            "kind": model.teaching.distillation,
            "temperature": model.teaching.temperature,
            "weight": model.weight,
            "teacher_sha256": weights_hash(model.teacher),
        }
        model = model.student
    if isinstance(model, LoRAVisionTransformer):
        about["lora"] = {"rank": model.rank, "targets": list(model.targets), "alpha": model.alpha}
    return about


def write_model(best: Path, folder: Path, *, validation: Split) -> VisionTransformer:
    """Writes the run's model and what else came of its kind of training.

    Args:
        best: the file of the best model, as it was trained.
        folder: where to write.
        validation: images to show reconstructions of.

    Returns:
        The run's model.
    """
    model = keras.saving.load_model(best, compile=False)
    kept = kept_model(model)
    if kept is model:
        shutil.copy2(best, folder / run.MODEL)
    else:
        kept.save(folder / run.MODEL)
    if isinstance(model, LoRAVisionTransformer):
        save_adapter(model, folder / run.ADAPTER)
    if isinstance(model, MaskedPatchModel):
        plot_reconstructions(model, validation, folder / run.RECONSTRUCTIONS, count=SHOWN)
    return kept


def read_model(best: Path) -> VisionTransformer:
    """Returns the run's model, where another worker writes it."""
    return kept_model(keras.saving.load_model(best, compile=False))


def kept_model(model: keras.Model) -> VisionTransformer:
    """Returns the plain model of what was trained: adapters merged, no prediction of patches."""
    if isinstance(model, LoRAVisionTransformer):
        return merge_lora(model)
    return model.vit if isinstance(model, MaskedPatchModel) else model
