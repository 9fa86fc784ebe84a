"""The run directory: the result of one training, written whole or not at all."""

import contextlib
import dataclasses
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import keras

from keras_vit import atomic, weights
from keras_vit.config import TRAINING, ViTConfig
from keras_vit.data import ImageData, image_size_of, load_data, loading
from keras_vit.layers.dense import CHANGES
from keras_vit.limits import FileError, read_json
from keras_vit.model import VisionTransformer
from keras_vit.training.settings import MAX_TEXT, RESUME_OR_REPLACE
from keras_vit.variants import parameter_count
from keras_vit.weights.checkpoint import REGISTERED_NAME, keras_settings
from keras_vit.weights.positions import Method

# The files of a run directory; what is not _TRAINED is written when the run is measured.
MODEL, CONFIG, LABELS, SPLITS = "model.keras", "config.json", "labels.txt", "splits.csv"
HISTORY, CURVES, SAMPLE, EVENTS = "history.csv", "curves.png", "sample.png", "tensorboard"
RECONSTRUCTIONS, ADAPTER = "reconstructions.png", "adapter.safetensors"
METRICS, CONFUSION, REPORT, CARD = "metrics.json", "confusion.png", "report.html", "README.md"
_TRAINED = (MODEL, CONFIG, LABELS, SPLITS, HISTORY, CURVES, SAMPLE, RECONSTRUCTIONS, ADAPTER)
TRACKERS = "trackers.json"  # of an unfinished training alone
FILES = (*_TRAINED, EVENTS, METRICS, CONFUSION, REPORT, CARD)

# A config that asks for more parameters than the file can hold is an attack.
_MAX_EXPANSION = 8
_LONGEST_REASON = 300  # characters
# The errors of Keras for a file that holds no model.
_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(OSError, RuntimeError, ImportError, zipfile.BadZipFile, zlib.error),
)

# What to do if there is already a run or an unfinished training.
Existing = Literal["refuse", "overwrite", "resume"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A finished run.

    Attributes:
        path: the run directory.
        model: the model of the best epoch.
        labels: the name of each class, in the order of the model's outputs; for a run of
            `pretrain`, the labels of its images, if any.
        config: the content of config.json: model, recipe, data, seed, versions and result.
    """

    path: Path
    model: keras.Model
    labels: tuple[str, ...]
    config: dict[str, Any]

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the images that the model takes."""
        return image_size_of(self.model)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Opens a run directory.

        Example:
            >>> Run.load("no-such-run")
            Traceback (most recent call last):
            FileNotFoundError: There is no run directory 'no-such-run'; check the path.

        Raises:
            FileNotFoundError: there is no such directory.
            ValueError: the directory does not hold a run, a file is damaged, or the files are not
                of the same run.
        """
        directory = Path(path)
        if not directory.exists() and atomic.was_cut_off(unfinished_path(directory), directory):
            with hold(directory):
                restore(directory)
        if not directory.exists():
            raise FileNotFoundError(f"There is no run directory {str(path)!r}; check the path.")
        if not is_run(directory):
            raise ValueError(
                f"{str(path)!r} is not a run directory: it lacks {MODEL} or {CONFIG}; "
                "give the --out of a training."
            )
        config = _read_config(directory / CONFIG)
        settings = keras_settings(directory / MODEL, limit=MAX_TEXT)
        vit_config = _vit_config(directory / MODEL, settings)
        _check_same_run(directory, config, vit_config)  # before anything is built
        model = _build(directory / MODEL, settings, vit_config)
        if vit_config is None:
            _check_labels(directory, len(config["labels"]), model.output_shape[-1])
        return cls(path=directory, model=model, labels=tuple(config["labels"]), config=config)

    def data(self) -> ImageData:
        """Returns the images of the training, in the same splits.

        Raises:
            FileNotFoundError: images are missing.
            ImportError: the images are the digits, and scikit-learn is not installed.
            ValueError: the images were only in memory.
        """
        source = self.config["data"]["source"]
        if (self.path / SPLITS).is_file():
            return loading.read_splits(self.path / SPLITS, root=source, labels=self.labels)
        if source != "digits" and not source.startswith("tfds:"):
            raise ValueError(
                f"The images of the run {str(self.path)!r} were in memory and are gone; "
                "name a folder to evaluate on."
            )
        return load_data(source)

    def classifier(
        self,
        labels: Sequence[str],
        *,
        image_size: tuple[int, int] | None = None,
        positions: Method = "original",
    ) -> VisionTransformer:
        """Returns a copy of the run's model with a classifier for these labels, to train.

        The copy keeps the model's own classifier if the run of `train` has the same labels;
        otherwise it gets a fresh one.

        Args:
            labels: the name of each class.
            image_size: (height, width) in pixels; None for that of the run.
            positions: how position embeddings are resampled to the image size, see
                `keras_vit.weights.resample_positions`.

        Raises:
            ValueError: the run's model is not a `VisionTransformer`, or the image size is not a
                multiple of the patch size.
        """
        model = self.model
        if not isinstance(model, VisionTransformer):
            raise ValueError(
                f"A classifier is made of a VisionTransformer; the run {str(self.path)!r} holds a "
                f"{type(model).__name__}, give one that keras-vit made."
            )
        if image_size not in (None, self.image_size):
            model = weights.resize(model, (*image_size, 3), positions=positions)
        config = dataclasses.replace(model.config, classes=len(labels), classifier_activation=None)
        heads = ["head", "distillation_head"] if config.distillation_token else ["head"]
        # A run of `pretrain` may have labels, but has no classifier.
        has_same_head = model.config.classes is not None and self.labels == tuple(labels)
        return model.copy(config=config, fresh=[] if has_same_head else heads)


def open_model(path: str | os.PathLike[str]) -> keras.Model:
    """Opens a .keras file from any source, without running code in it.

    Example:
        >>> open_model("no-such.keras")
        Traceback (most recent call last):
        FileNotFoundError: There is no model file 'no-such.keras'; check the path.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a whole .keras file, asks for much more memory than it has
            bytes, or holds something that Keras does not know.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no model file {str(path)!r}; check the path.")
    settings = keras_settings(file, limit=MAX_TEXT)
    return _build(file, settings, _vit_config(file, settings))


def read_fields(file: Path) -> dict[str, Any]:
    """Reads a JSON file of a run.

    Raises:
        ValueError: the file is too large, damaged, or not one JSON object.
    """
    try:
        return read_json(file, limit=MAX_TEXT, finite=False)
    except FileError as error:
        raise ValueError(
            f"{str(file)!r} is damaged: it is not one JSON object of at most {MAX_TEXT} bytes; put "
            "back the one that training wrote."
        ) from error


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return (path / MODEL).is_file() and (path / CONFIG).is_file()


def has_run_files(path: Path) -> bool:
    """Whether a directory holds a run, or what is left of one."""
    return is_run(path) or (path / HISTORY).is_file()


def check_free(out: str | os.PathLike[str], *, existing: Existing) -> None:
    """Raises an error if a run at `out` would replace what it may not.

    Example:
        >>> check_free("new-run", existing="refuse")

    Raises:
        FileExistsError: `out` holds something that may not be replaced.
    """
    out = Path(out)
    if out.is_mount():
        raise FileExistsError(
            f"A file system is mounted at {str(out)!r}, so that nothing can be renamed to it; give "
            "a folder inside it."
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FileExistsError(f"{str(out)!r} is not a folder; choose another out (--out).")
    if not out.exists() or not any(out.iterdir()):
        return
    foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in FILES)
    if foreign or not is_run(out):
        raise FileExistsError(
            f"The folder {str(out)!r} holds other things than a run "
            f"({(foreign or ['no whole run'])[0]!r}); choose another out (--out)."
        )
    if existing != "overwrite":
        raise FileExistsError(f"{str(out)!r} already holds a run; {RESUME_OR_REPLACE}.")


def unfinished_path(out: Path, *, worker: int = 0) -> Path:
    """Returns the folder of an unfinished training, which is beside its run directory."""
    return out.with_name(f"{out.name}.unfinished" + (f"-{worker}" if worker else ""))


def hold(out: Path, *, worker: int = 0) -> contextlib.AbstractContextManager[None]:
    """Holds the lock of a run directory and of its unfinished folder.

    Raises:
        FileExistsError: another training holds it; the text says which process.
    """
    return atomic.hold(_lock(out, worker), what=f"training to {str(out)!r}")


def check_unheld(out: Path, *, worker: int = 0) -> None:
    """Raises a FileExistsError if another training to this run directory is running."""
    atomic.check_unheld(_lock(out, worker), what=f"training to {str(out)!r}")


def restore(out: Path) -> None:
    """Restores the old run if a training was killed while it replaced this run."""
    atomic.restore(unfinished_path(out), out)


def _lock(out: Path, worker: int) -> Path:
    folder = unfinished_path(out, worker=worker)
    return folder.with_name(f"{folder.name}.lock")


def _read_config(file: Path) -> dict[str, Any]:
    config = read_fields(file)
    labels, data = config.get("labels"), config.get("data")
    has_labels = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    has_source = isinstance(data, dict) and isinstance(data.get("source"), str)
    if not has_labels or not has_source:
        raise ValueError(
            f"{str(file)!r} does not say the labels and the data of a run; put back the one that "
            "training wrote."
        )
    return config


def _vit_config(file: Path, settings: dict[str, Any]) -> ViTConfig | None:
    """Returns the config of a plain Vision Transformer, None for another model.

    Raises:
        ValueError: a config is wrong, or a network inside the model has too many parameters for
            the size of the file.
    """
    try:
        for fields in _inner_configs(settings):
            count, size = parameter_count(ViTConfig.from_dict(fields)), file.stat().st_size
            if count > _MAX_EXPANSION * size:
                raise ValueError(
                    f"its {CONFIG} asks for {count} parameters, and the file has {size} bytes."
                )
        if settings.get("registered_name") == REGISTERED_NAME:
            return ViTConfig.from_dict(settings["config"]["config"])
    except (*_UNREADABLE, RecursionError) as error:
        raise _opening_error(file, error) from error
    return None


def _build(file: Path, settings: dict[str, Any], config: ViTConfig | None) -> keras.Model:
    """Builds the model of a file, or raises a ValueError if the file does not fit it."""
    try:
        if config is None or config.nonstandard_fields or settings["config"].get(CHANGES):
            return keras.saving.load_model(file, compile=False)
        model = VisionTransformer.from_config(settings["config"])
        weights.load(model, file)  # compares every array with the network
    except _UNREADABLE as error:
        raise _opening_error(file, error) from error
    return model


def _inner_configs(settings: Any) -> Iterator[dict[str, Any]]:
    """Yields the configs of our networks, at any depth."""
    if isinstance(settings, dict):
        if {"patch_size", "num_layers", "hidden_dim"} <= settings.keys():
            yield settings
        settings = list(settings.values())
    if isinstance(settings, list):
        for inner in settings:
            yield from _inner_configs(inner)


def _opening_error(file: Path, error: Exception) -> ValueError:
    """Returns an error with our own reason; those of libraries are long and cite their code."""
    reason = " ".join(str(error).split())
    if type(error) not in (ValueError, FileError) or len(reason) > _LONGEST_REASON:
        reason = f"it is damaged, or needs code that is not there ({type(error).__name__})."
    return ValueError(f"{str(file)!r} cannot be opened as a model: {reason}")


def _check_same_run(
    directory: Path, config: Mapping[str, Any], vit_config: ViTConfig | None
) -> None:
    """Compares the model and its classes in config.json with those in the model's file."""
    recorded, file = config.get("model"), str(directory / CONFIG)
    if not isinstance(recorded, dict):
        raise ValueError(f"{file!r} does not say the model of the run; put back the right one.")
    if vit_config is None:
        return
    fields = vit_config.to_dict()
    # Fields of training alone may differ from the saved model: its outputs do not depend on them.
    for name in sorted(fields.keys() & recorded.keys() - {*TRAINING}):
        if fields[name] != recorded[name]:
            raise ValueError(
                f"{file!r} and {MODEL} are not of the same run: {name} is "
                f"{repr(recorded[name])[:40]} in one and {repr(fields[name])[:40]} in the other; "
                "put back the files of one run."
            )
    if vit_config.classes is not None:
        _check_labels(directory, len(config["labels"]), vit_config.classes)


def _check_labels(directory: Path, labels: int, classes: int | None) -> None:
    if labels != classes:
        raise ValueError(
            f"{str(directory / CONFIG)!r} has {labels} labels, and {MODEL} has {classes} classes; "
            "put back the files of one run."
        )
