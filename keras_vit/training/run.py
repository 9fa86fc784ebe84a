"""The run directory: everything that one training leaves behind, there whole or not at all."""

import contextlib
import dataclasses
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import keras

from keras_vit import atomic, weights
from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, load_data, loading
from keras_vit.layers.dense import CHANGES
from keras_vit.model import VisionTransformer
from keras_vit.variants import parameter_count
from keras_vit.weights.checkpoint import REGISTERED_NAME

# What a run directory may hold, in the order of writing; the last two are evaluation's.
MODEL, CONFIG, LABELS, SPLITS = "model.keras", "config.json", "labels.txt", "splits.csv"
HISTORY, CURVES, SAMPLE = "history.csv", "curves.png", "sample.png"
RECONSTRUCTIONS, ADAPTER = "reconstructions.png", "adapter.safetensors"
METRICS, CONFUSION, EVENTS = "metrics.json", "confusion.png", "tensorboard"
_TRAINED = (MODEL, CONFIG, LABELS, SPLITS, HISTORY, CURVES, SAMPLE, RECONSTRUCTIONS, ADAPTER)
FILES = (*_TRAINED, EVENTS, METRICS, CONFUSION)

# Bytes of a text file that are read; a run's config.json with 21,843 labels has one of them.
MAX_TEXT = 2**24
# Keras stores members as they are; what is packed may grow by this at most.
_UNPACKED = 8
_LONGEST_REASON = 300  # characters
# What Keras raises for a file that it cannot make a model of.
_UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    OSError,
    RuntimeError,
    ImportError,
    zipfile.BadZipFile,
    zlib.error,
)
# What may differ between how a model is trained and how it is kept: no number depends on it.
_TRAINING_ONLY = ("dropout_rate", "attention_dropout_rate", "drop_path_rate", "remat")

# What to do where a run or an unfinished training is already.
Existing = Literal["refuse", "overwrite", "resume"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A finished run.

    Attributes:
        path: the run directory.
        model: the model of the best epoch.
        labels: the name of each class, in the order of the model's outputs; of a run without
            labels, of what the images show, or none.
        config: what made the run: model, recipe, data, seed, versions, and its result.
    """

    path: Path
    model: keras.Model
    labels: tuple[str, ...]
    config: dict[str, Any]

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels that the model takes."""
        return tuple(self.model.input_shape[1:3])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Opens a run directory.

        Example:
            >>> Run.load("no-such-run")
            Traceback (most recent call last):
            FileNotFoundError: There is no run directory 'no-such-run'; check the path.

        Raises:
            FileNotFoundError: there is no such directory.
            ValueError: the directory does not hold a run, one of its files is damaged, or they
                are not of the same run.
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
        settings = _model_settings(directory / MODEL)
        own = _network(directory / MODEL, settings)
        _check_same_run(directory, config, own)  # before anything is built
        model = _build(directory / MODEL, settings, own)
        if own is None:
            _check_labels(directory, len(config["labels"]), model.output_shape[-1])
        return cls(path=directory, model=model, labels=tuple(config["labels"]), config=config)

    def data(self) -> ImageData:
        """Returns the images that the run was made of, in the splits that it was made with.

        Raises:
            FileNotFoundError: images have gone.
            ImportError: the run is one of the digits, and scikit-learn is not installed.
            ValueError: the images were in memory alone.
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
        self, labels: Sequence[str], *, image_size: tuple[int, int] | None = None
    ) -> VisionTransformer:
        """Makes a classifier of the run's model, of `pretrain` or of `train`, to be trained on.

        It keeps its classifier if the run's labels are the same; otherwise it gets a fresh one.

        Args:
            labels: the name of each class.
            image_size: (height, width) in pixels; None for the run's.

        Raises:
            ValueError: the run's model is no `VisionTransformer`, or the image is not a multiple of
                its patch.
        """
        model = self.model
        if not isinstance(model, VisionTransformer):
            raise ValueError(
                f"A classifier is made of a VisionTransformer; the run {str(self.path)!r} holds a "
                f"{type(model).__name__}, give one that keras-vit made."
            )
        if image_size not in (None, self.image_size):
            model = weights.resize(model, (*image_size, 3))
        config = dataclasses.replace(model.config, classes=len(labels), classifier_activation=None)
        heads = ["head", "distillation_head"] if config.distillation_token else ["head"]
        # A run of `pretrain` has labels too, and no classifier.
        is_kept = model.config.classes is not None and self.labels == tuple(labels)
        return model.copy(config=config, fresh=[] if is_kept else heads)


def open_model(path: str | os.PathLike[str]) -> keras.Model:
    """Opens a .keras file that may come from anywhere; code in it is never run.

    Example:
        >>> open_model("no-such.keras")
        Traceback (most recent call last):
        FileNotFoundError: There is no model file 'no-such.keras'; check the path.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a whole .keras file, asks for more memory than its bytes account for,
            or holds something that Keras does not know.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no model file {str(path)!r}; check the path.")
    settings = _model_settings(file)
    return _build(file, settings, _network(file, settings))


def read_fields(file: Path) -> dict[str, Any]:
    """Reads a JSON file of a run.

    Raises:
        ValueError: it is too large, damaged, or not one JSON object.
    """
    if file.stat().st_size > MAX_TEXT:
        raise ValueError(f"{str(file)!r} is larger than {MAX_TEXT} bytes; it is not a run's.")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(
            f"{str(file)!r} is damaged: it is not one JSON object; put back the one that training "
            "wrote."
        )
    return fields


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return (path / MODEL).is_file() and (path / CONFIG).is_file()


def check_free(out: str | os.PathLike[str], *, existing: Existing) -> None:
    """Raises an error unless a run may be written to `out` without losing anything.

    Example:
        >>> check_free("new-run", existing="refuse")

    Raises:
        FileExistsError: something is there that may not be replaced.
    """
    out = Path(out)
    if out.is_mount():
        raise FileExistsError(
            f"A file system is mounted at {str(out)!r}, so that nothing can be renamed to it; give "
            "a folder inside it."
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FileExistsError(f"{str(out)!r} is not a folder; choose another place for the run.")
    if not out.exists() or not any(out.iterdir()):
        return
    foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in FILES)
    if foreign or not is_run(out):
        found = foreign[0] if foreign else "no whole run"
        raise FileExistsError(
            f"The folder {str(out)!r} holds other things than a run ({found!r}); "
            "choose another place for the run."
        )
    if existing != "overwrite":
        raise FileExistsError(
            f"{str(out)!r} already holds a run; choose another place, or ask to overwrite it."
        )


def unfinished_path(out: Path, *, worker: int = 0) -> Path:
    """Returns the folder beside a run directory in which a worker trains towards it."""
    return out.with_name(f"{out.name}.unfinished" + (f"-{worker}" if worker else ""))


def hold(out: Path, *, worker: int = 0) -> contextlib.AbstractContextManager[None]:
    """Keeps every other training away from a run directory and its unfinished folder.

    Raises:
        FileExistsError: another one is at work there; the text says who.
    """
    return atomic.hold(_lock(out, worker), what=_what(out))


def check_unheld(out: Path, *, worker: int = 0) -> None:
    """Raises a FileExistsError if a training to this run directory is at work."""
    atomic.check_unheld(_lock(out, worker), what=_what(out))


def restore(out: Path) -> None:
    """Puts back the run that was there before one that was killed while it took its place."""
    atomic.restore(unfinished_path(out), out)


def _lock(out: Path, worker: int) -> Path:
    folder = unfinished_path(out, worker=worker)
    return folder.with_name(f"{folder.name}.lock")


def _what(out: Path) -> str:
    return f"training to {str(out)!r}"


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


def _model_settings(file: Path) -> dict[str, Any]:
    """Returns what a .keras file says of its model; no member may be much larger than the file."""
    most = _UNPACKED * file.stat().st_size + MAX_TEXT
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            names = [member.filename for member in members]
            text = archive.getinfo(CONFIG)
            if size > most or text.file_size > MAX_TEXT or len(set(names)) < len(names):
                raise ValueError("its members are too large, or several have one name")
            settings = json.loads(archive.read(text))
    except (*_UNREADABLE, RecursionError) as error:
        reason = error if type(error) is ValueError else "it is cut off, or something else"
        raise ValueError(f"{str(file)!r} is not a whole .keras file: {reason}.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{str(file)!r} is not a whole .keras file: its {CONFIG} is no object.")
    return settings


def _network(file: Path, settings: dict[str, Any]) -> ViTConfig | None:
    """Returns the config of a plain Vision Transformer, None for another model.

    Raises:
        ValueError: it is no config; or that of any network inside asks for more than the file has.
    """
    try:
        for fields in _configs(settings):
            count, size = parameter_count(ViTConfig.from_dict(fields)), file.stat().st_size
            if count > _UNPACKED * size:
                raise ValueError(f"its {CONFIG} asks for {count} parameters, of {size} bytes.")
        if settings.get("registered_name") == REGISTERED_NAME:
            return ViTConfig.from_dict(settings["config"]["config"])
    except (*_UNREADABLE, RecursionError) as error:
        raise _unopened(file, error) from error
    return None


def _build(file: Path, settings: dict[str, Any], config: ViTConfig | None) -> keras.Model:
    """Makes the model of a file whose settings and network are known.

    Raises:
        ValueError: Keras or the network does not take what the file holds.
    """
    try:
        if config is None or config.departures or settings["config"].get(CHANGES):
            return keras.saving.load_model(file, compile=False)
        model = VisionTransformer.from_config(settings["config"])
        weights.load(model, file)  # holds every array against the network
    except _UNREADABLE as error:
        raise _unopened(file, error) from error
    return model


def _configs(settings: Any) -> Iterator[dict[str, Any]]:
    """The configs of networks of ours, at any depth."""
    if isinstance(settings, dict):
        if {"patch_size", "num_layers", "hidden_dim"} <= settings.keys():
            yield settings
        settings = list(settings.values())
    if isinstance(settings, list):
        for inner in settings:
            yield from _configs(inner)


def _unopened(file: Path, error: Exception) -> ValueError:
    """A sentence with a reason of ours; what others say is long, and speaks of their own code."""
    reason = " ".join(str(error).split())
    if type(error) is not ValueError or len(reason) > _LONGEST_REASON:
        reason = f"it is damaged, or needs code that is not there ({type(error).__name__})."
    return ValueError(f"{str(file)!r} cannot be opened as a model: {reason}")


def _check_same_run(directory: Path, config: Mapping[str, Any], own: ViTConfig | None) -> None:
    """Holds what a run's files say of the model and its classes against each other."""
    said, file = config.get("model"), str(directory / CONFIG)
    if not isinstance(said, dict):
        raise ValueError(f"{file!r} does not say the model of the run; put back the right one.")
    if own is None:
        return
    fields = own.to_dict()
    known = fields.keys() & said.keys() - {*_TRAINING_ONLY}
    others = sorted(name for name in known if fields[name] != said[name])
    if others:
        name = others[0]
        raise ValueError(
            f"{file!r} and {MODEL} are not of the same run: {name} is {repr(said[name])[:40]} in "
            f"one and {repr(fields[name])[:40]} in the other; put back the files of one run."
        )
    if own.classes is not None:
        _check_labels(directory, len(config["labels"]), own.classes)


def _check_labels(directory: Path, labels: int, classes: int | None) -> None:
    if labels != classes:
        raise ValueError(
            f"{str(directory / CONFIG)!r} has {labels} labels, and {MODEL} has {classes} classes; "
            "put back the files of one run."
        )
