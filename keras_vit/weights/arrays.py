"""Reads the named arrays of a checkpoint one by one, trusting nothing that the file declares."""

import collections
import contextlib
import dataclasses
import io
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import safetensors

from keras_vit import backend
from keras_vit.limits import MAX_TEXT, FileError, check_file, parse_json, read_json, shown

# What a file may ask for: the largest published network with its optimizer's state has 2,000
# arrays. Trained weights deflate to nine tenths, to a third where bfloat16 values stand in float32;
# the heads of zeros among the published ones are a fifth of their file: a file that holds a
# twentieth of what it declares is no checkpoint. Below 16 MiB a bomb is harmless.
MAX_ARRAYS = 10_000
_MAX_RATIO = 20  # bytes declared for each byte of a packed file
_HARMLESS = 16 * 2**20  # bytes
_MAX_DIRECTORY = 2 * 2**20  # bytes; of a zip archive, 200 for each array
_BLOCK = 2**20  # bytes of an archive's array that are held twice

FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))

# The dtypes of https://huggingface.co/docs/safetensors whose values fill whole bytes.
_SAFETENSORS = {
    **{"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4"},
    **{"U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8"},
    **{"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn},
    **{"F8_E5M2": ml_dtypes.float8_e5m2},
}

# What an index may call a shard: a file beside it, by the name that every system takes.
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)


@contextlib.contextmanager
def parsing(path: Path, problem: str) -> Iterator[None]:
    """Makes a sentence of whatever a parser raises for a damaged file; it begins with a problem."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:  # zipfile, zlib, NumPy, HDF5 and safetensors raise many kinds
        reason = shown(re.sub(" at 0x[0-9a-f]+", "", str(error.__cause__ or error)))
        raise FileError(f"{problem} ({reason}); delete it and fetch it again.", path) from error


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint: what it declares, and how to read it.

    Attributes:
        shape: the shape that it has once read.
        dtype: of its values; only `FLOATS` are weights.
        read: returns the array; nothing is allocated before this is called.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    def map(
        self, change: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...]
    ) -> "StoredArray":
        """Returns an array of another shape that is changed as it is read."""
        return StoredArray(shape, self.dtype, lambda: change(self.read()))


def aligned_empty(
    shape: tuple[int, ...], dtype: np.dtype, *, order: Literal["C", "F"] = "C"
) -> np.ndarray:
    """Returns an array to be filled, in memory aligned so that the backend may take it over."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + backend.ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % backend.ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape, order=order)


def stored_array(
    path: Path,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    start: int,
    content: bytes | None = None,
) -> StoredArray:
    """Returns an array whose values lie in a file as they do in memory.

    Args:
        path: the file.
        name: of the array, for errors.
        shape: of the array.
        dtype: of its values.
        start: the byte at which they begin.
        content: of the part of the file in which they lie, unpacked; None where it is the file.
    """

    def read() -> np.ndarray:
        values = aligned_empty(shape, dtype)
        buffer = values.reshape(-1).view(np.uint8).data
        with (
            parsing(path, f"{path}: array {shown(name)} cannot be read"),
            path.open("rb") if content is None else io.BytesIO(content) as file,
        ):
            file.seek(start)
            if file.readinto(buffer) != len(buffer):
                raise EOFError("it is cut off")
        return values

    return StoredArray(shape, dtype, read)


def open_archive(path: Path) -> zipfile.ZipFile:
    """Opens a zip archive that holds each name once, and no more than its bytes can.

    Raises:
        FileError: it is damaged, or declares too much.
    """
    with parsing(path, f"{path} is not a whole {path.suffix} file"):
        with _Directory(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            _check_members(path, archive.infolist())
        return zipfile.ZipFile(path)


class _Directory(io.BufferedReader):
    """A zip archive's file, of which no more than a sensible directory is read at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        most = _MAX_DIRECTORY + 1
        content = super().read(most if size is None or size < 0 else min(size, most))
        if len(content) > _MAX_DIRECTORY:
            raise ValueError(f"its directory has more than {_MAX_DIRECTORY} bytes")
        return content


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    names = [info.filename for info in members]
    double = [name for name, count in collections.Counter(names).items() if count > 1]
    packed = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    odd = [info.filename for info in members if info.compress_type not in packed]
    declared_size, size = sum(info.file_size for info in members), path.stat().st_size
    if len(members) > MAX_ARRAYS:
        problem = f"holds {len(members)} files, and at most {MAX_ARRAYS} are read"
    elif double:
        problem = f"holds {shown(double[0])} twice, and only one of them can be meant"
    elif odd:
        problem = f"packs {shown(odd[0])} neither stored nor deflated; save it anew"
    elif declared_size > max(_HARMLESS, _MAX_RATIO * size):
        problem = (
            f"has {size} bytes and declares {declared_size}, more than {_MAX_RATIO} times as many, "
            "as no trained model does"
        )
    else:
        return
    raise FileError(f"{path} {problem}; it is not read.", path)


def read_npz(path: Path) -> dict[str, StoredArray]:
    """Lists the arrays of an .npz file without reading their values.

    Raises:
        FileError: the file is not a whole .npz archive, or an array is pickled or declares a shape
            that its bytes do not fill.
    """
    archive = open_archive(path)  # until the last of its arrays goes
    members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
    return {info.filename[:-4]: _npz_array(path, archive, info) for info in members}


def _npz_array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredArray:
    name = f"{path}: array {shown(info.filename[:-4])}"
    with parsing(path, f"{name} is not a NumPy array"), archive.open(info) as member:
        is_first = np.lib.format.read_magic(member) == (1, 0)
        read_header = (
            np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran, dtype = read_header(member)
        start = member.tell()
    if dtype.hasobject:
        raise FileError(f"{name} is pickled; keras_vit never unpickles weights.", path)
    # NumPy writes bfloat16, which it does not know, as two raw bytes.
    stored = np.dtype(ml_dtypes.bfloat16) if dtype.str in ("|V2", "<V2") else dtype
    if stored.kind not in "fiub" and stored != ml_dtypes.bfloat16:
        raise FileError(f"{name} holds {shown(str(dtype))}, not numbers.", path)
    fits = all(type(side) is int and side >= 0 for side in shape)
    if not fits or math.prod(shape) * stored.itemsize != info.file_size - start:
        raise FileError(
            f"{name} declares shape {shown(shape)} of {stored}, but its bytes are "
            f"{info.file_size - start}; the file is damaged.",
            path,
        )

    def read() -> np.ndarray:
        values = aligned_empty(shape, stored, order="F" if is_fortran else "C")
        buffer, end = values.reshape(-1, order="A").view(np.uint8).data, 0
        with parsing(path, f"{name} is damaged"), archive.open(info) as member:
            member.read(start)
            while content := member.read(min(_BLOCK, len(buffer) - end)):
                buffer[end : end + len(content)] = content
                end += len(content)
            member.read(1)  # the CRC is checked at the end of the member
            if end != len(buffer):
                raise EOFError(f"it ends after {end} of {len(buffer)} bytes")
        return values

    return StoredArray(shape, stored, read)


def read_safetensors(path: Path) -> dict[str, StoredArray]:
    """Lists the arrays of a .safetensors file without reading their values.

    Raises:
        FileError: the file is not a whole .safetensors file, or holds other than numbers.
    """
    arrays = {}
    with _open_safetensors(path) as (file, start):
        for name in file.offset_keys():  # without gap or overlap, as the library makes sure
            part = file.get_slice(name)
            shape, kind = tuple(part.get_shape()), part.get_dtype()
            if kind not in _SAFETENSORS:
                raise ValueError(f"array {shown(name)} is of {shown(kind)}")
            dtype = np.dtype(_SAFETENSORS[kind])
            arrays[name] = stored_array(path, name, shape, dtype, start=start)
            start += math.prod(shape) * dtype.itemsize
    return arrays


def safetensors_metadata(path: Path) -> dict[str, str]:
    """Returns what the writer of a .safetensors file says beside its arrays.

    Raises:
        FileError: the file is not a whole .safetensors file.
    """
    with _open_safetensors(path) as (file, _):
        return file.metadata() or {}


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[tuple[Any, int]]:
    with parsing(path, f"{path} is not a whole .safetensors file"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, MAX_TEXT))
        if length > MAX_TEXT:
            raise ValueError(f"it declares a header of {length} bytes; at most {MAX_TEXT} are read")
        with safetensors.safe_open(path, framework="np") as opened:
            # Of two arrays of one name the library keeps one.
            parse_json(header, path, inside=", in its header,")
            yield opened, 8 + length


def shard_places(index: Path) -> dict[str, str]:
    """Returns in which file beside it an index has each array.

    Raises:
        FileError: it is no index, or names other than .safetensors files beside it.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not 0 < len(places) <= MAX_ARRAYS:
        text = f"{index} has no weight_map of 1 to {MAX_ARRAYS} arrays; fetch it again."
        raise FileError(text, index)
    for name, file in places.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise FileError(
                f"{index} has array {shown(name)} in {shown(file)}, which is not the name of a "
                ".safetensors file beside it.",
                index,
            )
    return places


def read_shards(index: Path) -> dict[str, StoredArray]:
    """Lists the arrays of the .safetensors files that an index names, without reading their values.

    Raises:
        FileNotFoundError: files that it names are missing.
        FileError: a file is not whole, or lies elsewhere; index and files differ.
    """
    places, arrays = shard_places(index), {}
    files = {name: index.parent / name for name in sorted(set(places.values()))}
    if missing := [name for name, file in files.items() if not os.path.lexists(file)]:
        text = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        raise FileNotFoundError(f"{index} names files that are not beside it: {text}.")
    for place, file in files.items():
        check_file(file)
        folder = file.parent.resolve()
        blobs = [parent / "blobs" for parent in folder.parents]  # the Hub's cache links to them
        if file.resolve().parent not in (folder, *blobs):
            raise FileError(f"{file} is a link to another folder; put the file itself there.", file)
        for name, array in read_safetensors(file).items():
            if places.get(name) != place:
                text = f"{file} holds {shown(name)}, which {index} does not have there."
                raise FileError(text, file)
            arrays[name] = array
    for name in places.keys() - arrays.keys():
        text = f"{index} has {shown(name)} in {places[name]}, which does not hold it."
        raise FileError(text, index)
    return arrays
