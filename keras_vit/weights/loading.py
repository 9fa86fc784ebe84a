"""Assigns a checkpoint's arrays to a model's variables, each exactly once, and writes them."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from keras_vit import backend
from keras_vit.atomic import whole_file
from keras_vit.config import ARCHITECTURE, ASSUMED, FROM_SHAPES, InputShape, ViTConfig
from keras_vit.limits import naming, shown
from keras_vit.model import VisionTransformer
from keras_vit.weights.arrays import FLOATS
from keras_vit.weights.checkpoint import Checkpoint, open_checkpoint
from keras_vit.weights.layouts import Row, check_original, listed, original_rows
from keras_vit.weights.positions import CELLS, Method, check_method, resample_variable
from keras_vit.weights.sources import check_sha256

HEAD = ("head/", "representation/", "distillation_head/")
READERS = 2  # threads; reading and checking an array needs no lock of Python's
Values = dict[str, concurrent.futures.Future[np.ndarray]]  # by the variable's path
logger = logging.getLogger(__name__)


def save_npz(model: VisionTransformer, path: str | Path) -> Path:
    """Writes a model's weights under the published names and shapes, in float32.

    The file says what its arrays say, and otherwise means the original: a network of another GELU,
    epsilon or scaling of pixels is refused, and a grid that is not square. Who loads the file says
    dropout, the activation after the classifier and how images are resized. It appears whole or not
    at all.

    Example:
        >>> import tempfile
        >>> from keras_vit.config import ViTConfig
        >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=3)
        >>> path = save_npz(VisionTransformer(config), Path(tempfile.mkdtemp()) / "vit.npz")
        >>> np.load(path)["Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"].shape
        (8, 16)

    Args:
        model: the model to write.
        path: the file to write or replace; its name ends in .npz.

    Returns:
        The path.

    Raises:
        ValueError: the name does not end in .npz, or the layout has no room for the network; a
            .keras file has.
    """
    check_original(model.config)
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"The published layout is an .npz file. Received: {str(path)!r}.")
    variables = {variable.path: variable for variable in model.weights}
    with whole_file(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for row in original_rows(model.config):
            value = keras.ops.convert_to_numpy(variables[row.path]).astype(np.float32, copy=False)
            for name, array in zip(row.names, row.split(value), strict=True):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    return path


def load_weights(
    model: VisionTransformer,
    path: str | Path,
    *,
    positions: Method = "original",
    sha256: str | None = None,
) -> None:
    """Loads a checkpoint's weights into a model, position embeddings resampled to the model's grid.

    The file is read and checked whole before the first variable changes; after an error or an
    interrupt every variable is as it was. A model without classifier
    leaves the file's classifier aside. How images are resized and cropped stays what its config
    says; builders and `keras_vit.load` take that of the weights.

    Args:
        model: the model to fill.
        path: an .npz file in the published layout with older or newer Flax names, a .safetensors
            file of Hugging Face transformers or timm, or a .weights.h5 or .keras file.
        positions: how positions are resampled if the grids differ, see `resample_positions`.
        sha256: that of the file, in hexadecimal; compared before anything is read from it.

    Warns:
        UserWarning: a file of transformers or timm does not say its activation or epsilon, or the
            pixels' mean and deviation of a model that takes pixels, and neither did who made the
            model's config: its defaults are assumed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, has another SHA-256, or does not fit the model; all
            differences are listed. A file that says its activation, epsilon or pixels' mean and
            deviation must say the model's. Or `positions` is no way of resampling.
        TypeError: the model is not a `VisionTransformer`.
    """
    if not isinstance(model, VisionTransformer):
        raise TypeError(
            "weights.load_weights fills a VisionTransformer; give it the one inside your model. "
            f"Received: {type(model).__name__}."
        )
    check_method(positions)
    check_sha256(Path(path), sha256)
    checkpoint = open_checkpoint(path)
    rows = match(checkpoint, model.config)
    check_numbers(checkpoint, model.config)
    _check_variables(model, rows)
    if checkpoint.settings.assumed:  # another library's file, whose defaults are not ours
        warn_assumed(checkpoint, model.config, _left_open(model.config), stacklevel=3)
    with reading(checkpoint, model.config, rows=rows, positions=positions) as values:
        for value in values.values():
            value.result()
        with _restoring_after_error(model):
            assign(model, values, path=checkpoint.path)


def resize(
    model: VisionTransformer, input_shape: InputShape, *, positions: Method = "original"
) -> VisionTransformer:
    """Returns the same model for images of another size; the given one stays as it is.

    Position embeddings are resampled, of any kind; every other weight is copied.

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=3)
        >>> resize(VisionTransformer(config), (48, 64, 3)).config.grid
        (6, 8)

    Args:
        model: the model to start from.
        input_shape: (height, width, channels) wanted, in pixels; (None, None, channels) for images
            of any size that the patch divides: their positions are resampled in the graph.
        positions: how positions are resampled, see `resample_positions`; "original" for any size.

    Raises:
        ValueError: the size is not a multiple of the patch, the channels differ, or `positions` is
            no way of resampling.
    """
    old = model.config.told_by(getattr(model, "loss", None))
    if input_shape[2] != old.input_shape[2]:
        raise ValueError(
            f"A model for {old.input_shape[2]} channels cannot be resized to "
            f"input_shape={input_shape}; keep the number of channels."
        )
    config = old.resized(input_shape)
    check_method(positions, any_size=config.any_size)

    def resampled(path: str, variable: keras.Variable) -> Any:
        kind = _table_kind(path)
        if kind is None:
            return variable
        value = np.asarray(keras.ops.convert_to_numpy(variable))
        return resample_variable(kind, value, old.grid, config.grid, method=positions)

    resized = model.copy(config=config, convert=resampled)
    _log_grids(old.grid, config.grid, positions)
    return resized


@contextlib.contextmanager
def reading(
    checkpoint: Checkpoint, config: ViTConfig, *, rows: list[Row], positions: Method = "original"
) -> Iterator[Values]:
    """Reads the arrays of the matched rows in threads; a model can be built meanwhile.

    What was read is held once: variables take its memory over.
    """
    _log_grids(checkpoint.grid, config.grid, positions)
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        try:
            yield {
                row.path: readers.submit(_value, checkpoint, row, config, positions) for row in rows
            }
        except BaseException:
            readers.shutdown(wait=False, cancel_futures=True)
            raise


def assign(model: VisionTransformer, values: Values, *, path: Path) -> None:
    """Gives each value of the file at `path` to its variable; a head without value keeps its own.

    Raises:
        ValueError: an array is damaged, or another variable would be left without value.
    """
    variables = {variable.path: variable for variable in model.weights}
    missing = [name for name in variables if name not in values and not name.startswith(HEAD)]
    if missing:
        raise ValueError(f"{path} does not give the variables {listed(missing)}.")
    while values:
        name = next(iter(values))
        variables[name].assign(backend.from_numpy_without_copy(values.pop(name).result()))


def match(
    checkpoint: Checkpoint, config: ViTConfig, *, head: Literal["file", "new"] = "file"
) -> list[Row]:
    """Returns the rows that fill a model of this config, having held every array against them.

    Args:
        checkpoint: the opened file.
        config: the model's config.
        head: "new" leaves the classifier and representation layer of both sides aside.

    Raises:
        ValueError: arrays are missing, left over or of another shape; the message lists them.
    """
    check_architecture(checkpoint, config)
    rows = checkpoint.rows(config)
    if head == "new":
        rows = [row for row in rows if not row.path.startswith(HEAD)]
    known_names = {name for row in rows for name in row.names}
    prefixes = _ignored_prefixes(checkpoint, config, head)
    missing = known_names - set(checkpoint.arrays)
    extra = {name for name in set(checkpoint.arrays) - known_names if not name.startswith(prefixes)}
    for name in sorted(known_names - missing):
        dtype = checkpoint.arrays[name].dtype
        if dtype not in FLOATS:
            raise ValueError(
                f"{checkpoint.path}: array {shown(name)}{checkpoint.settings.names_note} is of "
                f"{dtype}; weights are of {', '.join(map(str, FLOATS))}."
            )
    mismatched = [
        f"{name} (expected {shape}, received {shown(checkpoint.arrays[name].shape)})"
        for row in rows
        for name, shape in zip(row.names, row.shapes, strict=True)
        if name not in missing and not _fits(checkpoint.arrays[name].shape, shape, row.path)
    ]
    differences = (("missing", missing), ("unexpected", extra), ("of another shape", mismatched))
    problems = [f"{kind}: {listed(names)}" for kind, names in differences if names]
    if problems:
        raise ValueError(
            f"{checkpoint.path} does not fit the model. Arrays{checkpoint.settings.names_note} "
            f"{'; '.join(problems)}."
        )
    _check_positions(checkpoint, rows, config)
    return rows


def check_architecture(checkpoint: Checkpoint, config: ViTConfig) -> None:
    """Raises a ValueError unless the file's sizes are the config's, of a network that it holds."""
    with naming(checkpoint.path):
        checkpoint.check(config)
    ours, theirs = vars(config), checkpoint.fields
    others = [
        f"its {name} is {shown(theirs[name])}, the model's is {ours[name]}"
        for name in ARCHITECTURE
        if name in theirs and theirs[name] != ours[name]
    ]
    if others:
        raise ValueError(f"{checkpoint.path} does not fit the model: {'; '.join(others)}.")


def check_numbers(checkpoint: Checkpoint, config: ViTConfig) -> None:
    """Raises a ValueError if the file's weights belong to other numbers than the config's.

    What the file does not say is not compared: then the config's word stands.
    """
    names = [
        *ASSUMED,
        *("rotary_period", "rotary_grid", "rotary_offset"),
        *(["pooling_heads"] if config.pooling == "map" else []),
    ]
    numbers = {name: checkpoint.fields[name] for name in names if name in checkpoint.fields}
    other = {name: v for name, v in numbers.items() if not _same(v, getattr(config, name))}
    if other:
        theirs = ", ".join(f"{name}={value!r}" for name, value in other.items())
        ours = ", ".join(f"{name}={getattr(config, name)!r}" for name in other)
        raise ValueError(
            f"{checkpoint.path} belongs to a model with {theirs}, and this one has {ours}: the "
            "same weights would compute something else. Build it by keras_vit.load, or from "
            f"dataclasses.replace(config, {theirs})."
        )


def warn_assumed(
    checkpoint: Checkpoint, config: ViTConfig, names: Iterable[str], *, stacklevel: int
) -> None:
    """Tells which of these fields of a model the file does not say, if any."""
    values = [
        f"{name}={getattr(config, name)!r}" for name in names if name not in checkpoint.fields
    ]
    if values:
        warnings.warn(
            f"{checkpoint.path} does not say what it was trained with; assumed "
            f"{', '.join(values)}. Where that is wrong, so is every number: "
            f"{checkpoint.settings.hint}.",
            stacklevel=stacklevel,
        )


def _left_open(config: ViTConfig) -> list[str]:
    """Returns what a model's numbers depend on, no array shows, and no caller gave."""
    rest = () if config.include_preprocessing else ("image_mean", "image_std")
    # A caller's value may equal the default, but only what was left open is the same object, which
    # dataclasses.replace keeps.
    left = (name for name in ASSUMED if getattr(config, name) is getattr(ViTConfig, name))
    return [name for name in left if name not in rest]


def _check_positions(checkpoint: Checkpoint, rows: list[Row], config: ViTConfig) -> None:
    for row in rows:
        kind = _table_kind(row.path)
        if kind is None:
            continue
        cells = CELLS[kind]
        count = checkpoint.arrays[row.names[0]].shape[1]
        first = row.shape[1] - math.prod(cells(*config.grid))  # before the cells'
        if count == math.prod(cells(*(checkpoint.grid or config.grid))) + first:
            continue
        if checkpoint.grid is None:
            raise ValueError(
                f"{checkpoint.path} holds {count} positions, not a square grid, and does not say "
                f"its height and width; the model's grid is {config.grid}. Build the model at the "
                "size that the file was trained at."
            )
        height, width = checkpoint.grid
        raise ValueError(
            f"{checkpoint.path} holds {count} positions, and says that its grid is "
            f"{height}x{width}; one of the two is damaged."
        )


def _check_variables(model: VisionTransformer, rows: list[Row]) -> None:
    variables = {variable.path: variable for variable in model.weights}
    for row in rows:
        variable = variables.get(row.path)
        takes = variable is not None and keras.backend.is_float_dtype(variable.dtype)
        if variable is None or not takes or tuple(variable.shape) != row.shape:
            raise ValueError(
                f"The model's variable {row.path!r} cannot be filled: it is missing, quantised or "
                "of another shape than its config says; fill the model as it was built, and "
                "change it afterwards."
            )


@contextlib.contextmanager
def _restoring_after_error(model: VisionTransformer) -> Iterator[None]:
    """Gives the variables their former values back if what is done inside fails."""
    # Only PyTorch, which assigns in place, copies for that: TensorFlow's copy shares the memory of
    # its variable, and JAX's values never change.
    keep = keras.ops.convert_to_tensor if keras.backend.backend() == "jax" else keras.ops.copy
    saved = [(variable, keep(variable)) for variable in model.weights]
    try:
        yield
    except BaseException:
        for variable, value in saved:
            variable.assign(value)
        raise


def _same(left: Any, right: Any) -> bool:
    """Whether two values of a field mean the same: up to rounding, for any number of channels."""
    if isinstance(left, str) or left is None or right is None:
        return bool(left == right)
    left, right = (
        values[:1] if (values == values[0]).all() else values
        for values in (np.ravel(left), np.ravel(right))
    )
    return left.shape == right.shape and np.allclose(left, right, rtol=1e-6, atol=0)


def _ignored_prefixes(
    checkpoint: Checkpoint, config: ViTConfig, head: Literal["file", "new"]
) -> tuple[str, ...]:
    """Returns the beginnings of array names that a model of this config may leave aside."""
    names = {*ARCHITECTURE, *FROM_SHAPES} & checkpoint.fields.keys()
    parts = {name: checkpoint.fields[name] for name in names}
    try:
        stored_config = dataclasses.replace(config, **parts)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path} does not fit the model: {error}") from error
    paths: tuple[str, ...] = HEAD if head == "new" or config.classes is None else ()
    paths += () if config.pooling == "map" else ("pooling/",)
    paths += ("pooling_norm/",) if config.pooling is None else ()
    rows = (row for row in checkpoint.rows(stored_config) if paths and row.path.startswith(paths))
    return tuple(name for row in rows for name in row.names)


def _table_kind(path: str) -> str | None:
    kind = path.rsplit("/", 1)[-1]
    return kind if kind in CELLS else None


def _fits(shape: tuple[int, ...], expected: tuple[int, ...], path: str) -> bool:
    if _table_kind(path) is not None and len(shape) == 3:
        return shape[::2] == expected[::2]  # the number of positions may differ: they are resampled
    return shape == expected


def _value(checkpoint: Checkpoint, row: Row, config: ViTConfig, positions: Method) -> np.ndarray:
    value = row.join(*(_finite(checkpoint, name) for name in row.names))
    # A table that is not square, of a file without grid, has as many places as the model's own.
    kind = _table_kind(row.path)
    if kind is None or checkpoint.grid in (None, config.grid):
        return value
    return resample_variable(kind, value, checkpoint.grid, config.grid, method=positions)


def _finite(checkpoint: Checkpoint, name: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        value = checkpoint.arrays[name].read().astype(np.float32, copy=False)
        # The sum shows any NaN or infinity in half the time; large numbers may make it one too.
        if np.isfinite(value.sum()) or np.isfinite(value).all():
            return value
    raise ValueError(
        f"{checkpoint.path}: array {shown(name)}{checkpoint.settings.names_note} holds a value "
        "that is not a finite number in float32; the file is damaged, or its training went wrong."
    )


def _log_grids(old: tuple[int, int] | None, new: tuple[int, int], positions: Method) -> None:
    if old is not None and old != new:
        logger.info(
            "Position embeddings resampled from a grid of %dx%d to %dx%d patches (%s).",
            *old,
            *new,
            positions,
        )
