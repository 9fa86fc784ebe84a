"""The run directory: the result of one training, written whole or not at all."""

import contextlib
import dataclasses
import os
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import keras

from keras_vit import atomic, weights
from keras_vit.config import TRAINING, ViTConfig
from keras_vit.data import ImageData, load_data, resizing_of
from keras_vit.data.folder import read_splits
from keras_vit.data.source import composed
from keras_vit.layers.dense import CHANGES
from keras_vit.limits import FileError, is_line, read_json
from keras_vit.model import VisionTransformer
from keras_vit.variants import VARIANTS, parameter_count
from keras_vit.weights.catalog import BASE_URL, LICENCE, repositories, resolve
from keras_vit.weights.checkpoint import REGISTERED_NAME, keras_settings
from keras_vit.weights.positions import Method

PROVENANCE = "provenance"  # of config.json and settings.json; nothing in it decides the result
# The files of a run directory; what is not _TRAINED is written when the run is measured.
MODEL, CONFIG, LABELS, SPLITS = "model.keras", "config.json", "labels.txt", "splits.csv"
HISTORY, CURVES, SAMPLE, EVENTS = "history.csv", "curves.png", "sample.png", "tensorboard"
RECONSTRUCTIONS, ADAPTER = "reconstructions.png", "adapter.safetensors"
METRICS, CONFUSION, REPORT, CARD = "metrics.json", "confusion.png", "report.html", "README.md"
_TRAINED = (MODEL, CONFIG, LABELS, SPLITS, HISTORY, CURVES, SAMPLE, RECONSTRUCTIONS, ADAPTER)
TRACKERS = "trackers.json"  # of an unfinished training alone
MASKED_PATCHES = "masked-patches"  # the "objective" that config.json of `pretrain` says
FILES = (*_TRAINED, EVENTS, METRICS, CONFUSION, REPORT, CARD)

MAX_TEXT = 2**24  # bytes of a run's JSON file; one with 21,843 labels has about 1 MB
# A config that asks for more parameters than the file can hold is an attack.
_MAX_EXPANSION = 8
_LONGEST_REASON = 300  # characters
# The errors of Keras for a file that holds no model.
_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(OSError, RuntimeError, ImportError, zipfile.BadZipFile, zlib.error),
)
# What an error of writing to an unfinished training says.
UNFINISHED = {"kept": "the checkpoints are kept", "again": "resume"}
# What a sentence advises where something is in the way.
RESUME_OR_REPLACE = (
    "resume it (--resume), replace it (--overwrite) or choose another --out; in Python "
    'existing="resume" or "overwrite"'
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
        return resizing_of(self.model).size

    @property
    def has_classifier(self) -> bool:
        """Whether the model names classes; one of `pretrain` does not."""
        return self.config.get("objective") != MASKED_PATCHES

    @property
    def provenance(self) -> "Provenance":
        """The commands that trained the model, and the weights that it started from."""
        return Provenance.from_dict(self.config.get(PROVENANCE))

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
        if not directory.exists() and atomic.was_interrupted(unfinished_path(directory), directory):
            with lock(directory):
                atomic.restore(unfinished_path(directory), directory)
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
        labels = tuple(map(composed, config["labels"]))
        classes = model.output_shape[-1] if vit_config is None else vit_config.classes
        # A run of `pretrain` may have labels, but has no classifier.
        if len(labels) != classes and (vit_config is None or classes is not None):
            raise ValueError(
                f"{str(directory / CONFIG)!r} has {len(labels)} labels, and {MODEL} has {classes} "
                "classes; put back the files of one run."
            )
        return cls(path=directory, model=model, labels=labels, config=config)

    def data(self) -> ImageData:
        """Returns the images of the training, in the same splits.

        Raises:
            FileNotFoundError: images are missing.
            ImportError: the images are the digits, and scikit-learn is not installed.
            ValueError: the images were only in memory.
        """
        source = self.config["data"]["source"]
        if (self.path / SPLITS).is_file():
            return read_splits(self.path / SPLITS, root=source, labels=self.labels)
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
        otherwise it gets a new one, and a class token is pooled where `pretrain` took the average.

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
        if model.config.classes is None and config.class_token and config.pooling == "avg":
            config = dataclasses.replace(config, pooling="token")  # more accurate: docs/few.md
        heads = ["head", "distillation_head"] if config.distillation_token else ["head"]
        is_same = model.config.classes is not None and self.labels == tuple(map(composed, labels))
        return model.copy(config=config, reinitialize=[] if is_same else heads)


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
    """Reads a JSON file of a run; raises a ValueError for a damaged one."""
    try:
        return read_json(file, limit=MAX_TEXT, finite=False)
    except FileError as error:
        raise ValueError(
            f"{str(file)!r} is damaged: it is not one JSON object of at most {MAX_TEXT} bytes; put "
            "back the one that training wrote."
        ) from error


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns {"a": {"b": 1}, "c": {}} into {"a.b": 1, "c": {}}."""
    pairs: dict[str, Any] = {}
    for name, value in fields.items():
        inner = isinstance(value, dict) and value
        pairs |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return pairs


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return (path / MODEL).is_file() and (path / CONFIG).is_file()


def has_run_files(path: Path) -> bool:
    """Whether a directory holds a run, or what is left of one."""
    return is_run(path) or (path / HISTORY).is_file()


def check_free(out: Path, *, existing: Existing) -> None:
    """Raises a FileExistsError if a run at `out` would replace what it may not."""
    if out.is_mount():
        raise FileExistsError(
            f"A file system is mounted at {str(out)!r}, so that nothing can be renamed to it; give "
            "a folder inside it."
        )
    if not has_entries(out, FILES.__contains__, what="a run"):
        return
    if not is_run(out):
        raise FileExistsError(f"{str(out)!r} holds no whole run; choose another out (--out).")
    if existing != "overwrite":
        raise FileExistsError(f"{str(out)!r} already holds a run; {RESUME_OR_REPLACE}.")


def has_entries(folder: Path, is_own: Callable[[str], Any], *, what: str) -> bool:
    """Whether a folder is there and not empty; raises a FileExistsError for foreign entries."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise FileExistsError(f"{str(folder)!r} is not a folder; choose another out (--out).")
    names = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in names if not is_own(name)]
    if foreign:
        raise FileExistsError(
            f"{str(folder)!r} holds other things than {what} ({foreign[0]!r}); choose another out "
            "(--out)."
        )
    return bool(names)


def unfinished_path(out: Path, *, worker: int = 0) -> Path:
    """Returns the folder of an unfinished training, which is beside its run directory."""
    return out.with_name(f"{out.name}.unfinished" + (f"-{worker}" if worker else ""))


def lock(out: Path, *, worker: int = 0) -> contextlib.AbstractContextManager[None]:
    """Holds the lock of a run directory and of its unfinished folder, or says who does."""
    return atomic.lock(lock_of(out, worker), what=f"training to {str(out)!r}")


def lock_of(out: Path, worker: int) -> Path:
    """Returns the lock file of a run directory and of its unfinished folder."""
    folder = unfinished_path(out, worker=worker)
    return folder.with_name(f"{folder.name}.lock")


def _read_config(file: Path) -> dict[str, Any]:
    config = read_fields(file)
    labels, data = config.get("labels"), config.get("data")
    has_labels = isinstance(labels, list) and all(map(is_line, labels))
    has_source = isinstance(data, dict) and isinstance(data.get("source"), str)
    if not has_labels or not has_source or not isinstance(config.get("model"), dict):
        raise ValueError(
            f"{str(file)!r} does not say the labels, the data and the model of a run; put back the "
            "one that training wrote."
        )
    return config


def _check_same_run(directory: Path, config: dict[str, Any], vit_config: ViTConfig | None) -> None:
    recorded, fields = config["model"], vit_config.to_dict() if vit_config else {}
    # Fields of training alone may differ from the saved model: its outputs do not depend on them.
    for name in sorted(fields.keys() & recorded.keys() - {*TRAINING}):
        if fields[name] != recorded[name]:
            raise ValueError(
                f"{str(directory / CONFIG)!r} and {MODEL} are not of the same run: {name} is "
                f"{repr(recorded[name])[:40]} in one and {repr(fields[name])[:40]} in the other; "
                "put back the files of one run."
            )


def _vit_config(file: Path, settings: dict[str, Any]) -> ViTConfig | None:
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
    try:
        if config is None or config.nonstandard_fields or settings["config"].get(CHANGES):
            model = keras.saving.load_model(file, compile=False)
            compiled = settings.get("compile_config")
            # By which it is known what logits mean.
            model.loss = compiled.get("loss") if isinstance(compiled, dict) else None
            return model
        model = VisionTransformer.from_config(settings["config"])
        weights.load_weights(model, file)  # compares every array with the network
    except _UNREADABLE as error:
        raise _opening_error(file, error) from error
    return model


def _inner_configs(settings: Any) -> Iterator[dict[str, Any]]:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """What nobody can see in a model: how it was made, of what, and on what terms.

    Attributes:
        commands: the command lines of the training: the first, and those that resumed it otherwise.
        weights: what it started from, such as "Ti/16 imagenet21k"; None for random weights, and
            where it is not stated.
        licence: of these weights; None where it is not known.
        teacher: the model whose predictions it learnt; None for none.
        teacher_licence: of the teacher's weights; None where it is not known.
        restrictions: what these licences forbid or ask, in sentences; "" for nothing.
    """

    commands: tuple[str, ...] = ()
    weights: str | None = None
    licence: str | None = None
    teacher: str | None = None
    teacher_licence: str | None = None
    restrictions: str = ""

    @classmethod
    def of(
        cls,
        command: str,
        *,
        weights: str | None = None,
        model: str | None = None,
        teacher: str | None = None,
    ) -> Self:
        """Returns that of a training, with licences from the catalogues or earlier runs.

        Example:
            >>> Provenance.of("keras-vit train", weights="imagenet21k", model="Ti/16").licence
            'Apache-2.0'
            >>> Provenance.of("keras-vit train", weights="hf://timm/vit_base_patch16_224.mae").restrictions
            'No commercial use.'

        Args:
            command: the command line, of which the others are flags.
            weights: as of `--weights`.
            model: the variant that published weights are of; None for other weights.
            teacher: as of `--teacher`.
        """
        licence, forbids = _terms(weights, model)
        teacher_licence, also = _terms(teacher, None)
        name = f"{model} {weights}" if model and weights else _without_secrets(weights)
        return cls(
            commands=(command,),
            weights=name,
            licence=licence,
            teacher=_without_secrets(teacher),
            teacher_licence=teacher_licence,
            restrictions=" ".join(dict.fromkeys(filter(None, (forbids, also)))),
        )

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Self:
        """Reads it from config.json or settings.json; an empty one where there is none."""
        try:
            fields = read_fields(Path(file))
        except (OSError, ValueError):
            return cls()
        return cls.from_dict(fields.get(PROVENANCE))

    @classmethod
    def from_dict(cls, fields: Any) -> Self:
        """Returns what `to_dict` gave, and nothing of what is no such record."""
        if not isinstance(fields, dict):
            return cls()
        names = {field.name for field in dataclasses.fields(cls)} - {"commands"}
        texts = {name: x for name, x in fields.items() if name in names and isinstance(x, str)}
        commands = fields.get("commands")
        listed = commands if isinstance(commands, list) else []
        return cls(commands=tuple(one for one in listed if isinstance(one, str)), **texts)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain values that JSON can carry."""
        return {**dataclasses.asdict(self), "commands": list(self.commands)}

    def resumed(self, by: "Provenance") -> "Provenance":
        """Returns that of a training that another command resumes: its weights stay."""
        commands = tuple(dict.fromkeys((*self.commands, *by.commands)))
        return dataclasses.replace(self if self.commands else by, commands=commands)

    def public(self) -> "Provenance":
        """Returns what concerns others: no command, and of a file its name alone."""
        weights, teacher = (each and _short(each) for each in (self.weights, self.teacher))
        return dataclasses.replace(self, commands=(), weights=weights, teacher=teacher)


def _terms(weights: str | None, model: str | None) -> tuple[str | None, str]:
    """Returns the licence of weights, None where it is not known, and what it forbids."""
    if weights is None:
        return None, ""
    if Path(weights).is_dir():
        earlier = Provenance.read(Path(weights) / CONFIG)
        return earlier.licence, earlier.restrictions
    for row in repositories():
        address = row.address.partition("@")[0]
        if weights == address or weights.startswith((f"{address}@", f"{address}/")):
            return row.licence, row.restrictions
    if weights.startswith(BASE_URL):
        return LICENCE, ""
    try:
        return resolve(model or "", weights).licence, ""
    except ValueError:  # a file
        return None, ""


def _short(weights: str) -> str:
    model, _, rest = weights.partition(" ")
    if model in VARIANTS:
        return f"{model} {_short(rest)}"
    return weights if "://" in weights else Path(weights).name


def _without_secrets(weights: str | None) -> str | None:
    if weights is None or "://" not in weights:
        return weights
    parts = urllib.parse.urlsplit(weights)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
