"""A model from any source that a command takes, with the names of its classes."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_vit.model import VisionTransformer
from keras_vit.preprocessing import LABELLED, class_labels
from keras_vit.training import run
from keras_vit.training.run import Run, has_run_files, open_model
from keras_vit.weights import building, sources
from keras_vit.weights.checkpoint import SUFFIXES, Checkpoint, open_checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedModel:
    """A model from any source, with the names of its classes.

    Attributes:
        source: what it was opened from, as the caller wrote it.
        model: the model; it takes pixels 0..255.
        labels: the name of each class, "0", "1", ... where nobody says them; of a model without
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
        """Whether the model answers with scores of classes."""
        if self.exported:
            return bool(self.labels)
        is_vit = isinstance(self.model, VisionTransformer)
        return not is_vit or self.model.config.classes is not None

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
    checkpoint = None if file.name.endswith(".keras") else open_checkpoint(file)
    if checkpoint is None:
        model = open_model(file)
    else:
        asked = building.Request(classifier_activation=None, include_preprocessing=True)
        model = building.build(checkpoint, asked)
    names, states_labels = _class_names(checkpoint, model)
    return OpenedModel(
        source=address,
        model=model,
        labels=tuple(name for _, name in names),
        identifiers=tuple(identifier for identifier, _ in names),
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


def _class_names(
    checkpoint: Checkpoint | None, model: keras.Model
) -> tuple[tuple[tuple[str, str], ...], bool]:
    """Returns (identifier, name) of each class, and whether the file's settings say them.

    Where nobody says them, they are those of ImageNet, or numbers. A .keras file says none, and has
    no checkpoint here.
    """
    classes = model.output_shape[-1]
    is_backbone = isinstance(model, VisionTransformer) and model.config.classes is None
    if is_backbone or not isinstance(classes, int):
        return (), False
    if checkpoint is None:
        names = class_labels(classes) if classes in LABELLED else None
        states_labels = False
    else:
        names = checkpoint.class_names
        states_labels = bool(checkpoint.settings.labels) and names is not None
    return names or tuple((str(index), str(index)) for index in range(classes)), states_labels
