"""Models by name or source: small ones, published variants, and whatever a command opens."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_vit.applications import BUILDERS
from keras_vit.config import ViTConfig, ending_of
from keras_vit.data.source import composed
from keras_vit.model import VisionTransformer
from keras_vit.preprocessing import LABELLED, class_labels
from keras_vit.training import run
from keras_vit.training.run import Run, has_run_files, open_model
from keras_vit.variants import VARIANTS
from keras_vit.weights import building, sources
from keras_vit.weights.checkpoint import SUFFIXES, open_checkpoint
from keras_vit.weights.positions import Method

# The images of 8 by 8 pixels are doubled, so that augmentation blurs them less. The sizes were
# chosen on validation images.
_DIGITS = ViTConfig(
    input_shape=(16, 16, 3), patch_size=4, hidden_dim=64, mlp_dim=128, num_heads=4, num_layers=4,
    classes=10, pooling="avg", class_token=False,
)  # fmt: skip
# Models for few images, on a CPU.
MODELS: Mapping[str, ViTConfig] = {
    "digits": _DIGITS,
    # A convolution before the patches, as in the paper's hybrids, halves the errors: 5 instead of
    # 10 of 1,438 images, in four-fold cross-validation on the training and validation images.
    "digits-hybrid": dataclasses.replace(_DIGITS, resnet_layers=(), patch_size=1),
    # About half of Ti/16 in width and depth, on 64 by 64 pixels.
    "tiny": ViTConfig(
        input_shape=(64, 64, 3), patch_size=8, hidden_dim=128, mlp_dim=256, num_heads=4,
        num_layers=6, drop_path_rate=0.1,  # DeiT (arXiv 2012.12877, Table 9)
    ),
}  # fmt: skip
MODEL_NAMES = (*MODELS, *VARIANTS)


def model_config(
    name: str, *, image_size: tuple[int, int] | None = None, patch_size: int | None = None
) -> ViTConfig:
    """Returns the config of a model to train from scratch.

    Example:
        >>> model_config("tiny", image_size=(32, 48)).grid
        (4, 6)

    Args:
        name: one of `MODEL_NAMES`: "digits", "digits-hybrid", "tiny", or a published variant such
            as "Ti/16".
        image_size: (height, width) in pixels; None for the model's own.
        patch_size: side of a patch in pixels; None for the model's own.

    Raises:
        ValueError: the name is unknown, or the image size is not a multiple of the patch size.
    """
    _check_name(name, MODEL_NAMES)
    config = MODELS.get(name) or VARIANTS[name]
    return dataclasses.replace(
        config,
        input_shape=(*(image_size or config.image_size), 3),
        patch_size=patch_size or config.patch_size,
    )


def pretrained_model(
    name: str | None,
    *,
    weights: str | os.PathLike[str],
    classes: int,
    image_size: tuple[int, int] | None = None,
    positions: Method = "original",
    sha256: str | None = None,
) -> VisionTransformer:
    """Returns a model with the weights of a checkpoint, to fine-tune.

    Args:
        name: one of `keras_vit.VARIANTS`; None where the checkpoint says its own architecture.
        weights: a checkpoint file, or a name that the builders know, such as "imagenet21k"; without
            a name, what `keras_vit.load` takes.
        classes: number of classes; the classifier is new if the checkpoint has another number.
        image_size: (height, width) in pixels; None for the checkpoint's.
        positions: how position embeddings are resampled to the image size, see
            `keras_vit.weights.resample_positions`.
        sha256: of the checkpoint's file; None if it is unknown.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: the name is unknown, or the checkpoint does not fit the variant.
    """
    options: dict[str, Any] = {
        "classes": classes,
        "input_shape": None if image_size is None else (*image_size, 3),
        "classifier_activation": None,
        "positions": positions,
        "sha256": sha256,
    }
    if name is None:
        return building.load(weights, include_preprocessing=True, **options)
    _check_name(name, tuple(VARIANTS))
    model: VisionTransformer = BUILDERS[name](weights=os.fspath(weights), **options)
    return model


def _check_name(name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ValueError(f"There is no model {name!r}; choose one of {', '.join(names)}.")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedModel:
    """A model from any source, with the names of its classes.

    Attributes:
        source: what it was opened from, as the caller wrote it.
        model: the model; it takes pixels 0..255.
        labels: the name of each class, "0", "1", ... where it is not stated; of a model without
            classifier those of its run's images, if any.
        identifiers: what folders of images may be called instead, such as "n02123045"; the same as
            `labels` where there is nothing else.
        states_labels: whether the source says the names itself, so that they are not assumed.
        run: the run that it is of, None for another source.
        recipe: the recipe of that run, as in its config.json; empty if it is not known.
        exported: whether it is an exported artefact, behind a model that only asks it.
    """

    source: str
    model: keras.Model
    labels: tuple[str, ...]
    identifiers: tuple[str, ...]
    states_labels: bool
    run: Run | None = None
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exported: bool = False

    @property
    def has_classifier(self) -> bool:
        """Whether the model answers with scores of classes, or with numbers."""
        return ending_of(self.model, loss="softmax").problem_type is not None

    def folder_labels(self, folders: Sequence[str]) -> tuple[str, ...]:
        """Returns what folders of images call the classes: `identifiers` where one has such a name.

        Raises:
            ValueError: a folder has the name of two classes.
        """
        has_identifiers = not set(folders).isdisjoint(self.identifiers)
        names = self.identifiers if has_identifiers else self.labels
        double = [name for name in folders if names.count(name) > 1]
        if double:
            raise ValueError(
                f"{self.source} has two classes {double[0]!r}; name the folders of images by their "
                "identifiers, such as n02123045, or give other images."
            )
        return names


def open_source(source: str | os.PathLike[str]) -> OpenedModel:
    """Opens the model of a run, or of what `keras_vit.load` takes, without running code in it.

    Example:
        >>> open_source("no-such-run")
        Traceback (most recent call last):
        FileNotFoundError: There is no run directory 'no-such-run'; check the path.

    Raises:
        OSError: there is no such run or file, or it cannot be fetched.
        ValueError: it is damaged, or holds another network.
    """
    address = os.fsdecode(source)
    if "://" not in address:
        path = Path(address)
        is_file = address.endswith(SUFFIXES) and not path.is_dir()
        if not path.exists() and is_file:
            raise FileNotFoundError(f"There is no model file {address!r}; check the path.")
        if not path.exists() or has_run_files(path):
            return _opened_run(address, Run.load(path))
    file = sources.find(address)
    if address.startswith("hf://") and file.name == run.MODEL and run.is_run(file.parent):
        # Its images are elsewhere, and nothing is written beside it.
        return dataclasses.replace(_opened_run(address, Run.load(file.parent)), run=None)
    names: tuple[tuple[str, str], ...] | None = None  # (identifier, name) of each class
    states_labels = False
    if file.name.endswith(".keras"):  # it says no names
        model = open_model(file)
        classes = model.output_shape[-1]
        names = class_labels(classes) if classes in LABELLED else None
    else:
        checkpoint = open_checkpoint(file)
        asked = building.Request(classifier_activation=None, include_preprocessing=True)
        model = building.build(checkpoint, asked)
        classes, names = model.output_shape[-1], checkpoint.class_names
        states_labels = bool(checkpoint.settings.labels) and names is not None
    if ending_of(model, loss="softmax").problem_type is None or not isinstance(classes, int):
        names, states_labels = (), False
    elif names is None:
        names = tuple((str(index), str(index)) for index in range(classes))
    return OpenedModel(
        source=address,
        model=model,
        labels=tuple(composed(name) for _, name in names),
        identifiers=tuple(composed(identifier) for identifier, _ in names),
        states_labels=states_labels,
    )


def _opened_run(source: str, opened: Run) -> OpenedModel:
    recipe = opened.config.get("recipe")
    return OpenedModel(
        source=source,
        model=opened.model,
        labels=opened.labels,
        identifiers=opened.labels,
        states_labels=True,
        run=opened,
        recipe=recipe if isinstance(recipe, dict) else {},
    )
