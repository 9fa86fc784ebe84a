"""Reads the named arrays of a checkpoint one by one, trusting nothing that the file declares."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from keras_vit import backend
from keras_vit.limits import shown

# What a file may ask for. A settings file with the 21,843 labels of ImageNet-21k has 2 MB; the
# largest published network with its optimizer's state has 2,000 arrays. Trained weights deflate to
# nine tenths, to a third where bfloat16 values stand in float32; the heads of zeros among the
# published ones are a fifth of their file: a file that holds a twentieth of what it declares is
# no checkpoint. Below 16 MiB a bomb is harmless.
MAX_TEXT = 3 * 2**20  # bytes of JSON
MAX_ARRAYS = 10_000
MAX_RATIO = 20  # bytes declared for each byte of a packed file
HARMLESS = 16 * 2**20  # bytes
_MAX_DIRECTORY = 2 * 2**20  # bytes; of a zip archive, 200 for each array
_MAX_RANK = 32

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

# What zipfile raises for a damaged archive: encrypted or unknown members are RuntimeErrors.
UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError),
    *(ValueError, OverflowError, MemoryError),
)
# What NumPy raises for a header that is none: it is parsed as a Python literal.
_NO_HEADER = (
    *(ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError, OverflowError),
    *(RecursionError, MemoryError, AttributeError, IndexError),
)
# Bytes that are read and checked at once. A reader waits for Python's lock before each block, up to
# 5 ms while a model is built meanwhile: with blocks of 1 MiB, ViT-L/16 loads 6 to 17 % slower.
_BLOCK = 16 * 2**20
_PACKED_BLOCK = 2**20  # bytes of a packed array that are held twice


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


@dataclasses.dataclass(frozen=True)
class Region:
    """An array whose values lie in a file, or in a part of it, as they do in memory."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    content: bytes | None = None

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def array(self) -> StoredArray:
        return StoredArray(self.shape, self.dtype, self.read)

    def read(self) -> np.ndarray:
        values = aligned_empty(self.shape, self.dtype)
        buffer = values.reshape(-1).view(np.uint8).data
        if self.content is not None:
            buffer[:] = memoryview(self.content)[self.start : self.end]
            return values
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                size = file.readinto(buffer)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read ({error.strerror}).") from error
        if size != len(buffer):
            raise ValueError(f"{self.path}: array {shown(self.name)} is cut off; fetch it again.")
        return values


def check_file(path: Path) -> None:
    """Raises an error unless the path is that of a file, no folder, pipe or device.

    Raises:
        FileNotFoundError: nothing is there, or a link to nothing.
        OSError: the system does not let us look.
        ValueError: something else is there.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {str(path)!r}; check the path.") from None
    except OSError as error:
        problem = error.strerror or "unknown"
        raise type(error)(f"{path} cannot be opened: {problem}; check its permissions.") from None
    raise ValueError(f"{path} is a folder, a pipe or a device; give the path of a file.")


def parse_json(content: bytes, *, name: str | Path) -> dict[str, Any]:
    """Returns the dictionary in a JSON text, whose numbers are finite and whose keys differ.

    Args:
        content: the text, in UTF-8.
        name: of the file, for errors.

    Raises:
        ValueError: it is too long, no JSON, or no dictionary.
    """
    if len(content) > MAX_TEXT:
        raise ValueError(f"{name} has {len(content)} bytes of text; at most {MAX_TEXT} are read.")
    try:
        settings = json.loads(
            content.decode(),
            parse_constant=_finite,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise ValueError(f"{name} is not usable JSON: it is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not a whole JSON file: byte {error.start} is not UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name} is not a whole JSON file ({error.msg} at character {error.pos})."
        ) from None
    except ValueError as error:
        raise ValueError(f"{name} is not usable JSON: {shown(str(error))}.") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{name} holds a {type(settings).__name__}, not a dictionary.")
    return settings


def read_json(path: Path) -> dict[str, Any]:
    """Returns the dictionary in a JSON file, see `parse_json`.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be opened.
        ValueError: it is no file, too long, no JSON, or no dictionary.
    """
    check_file(path)
    with path.open("rb") as file:
        return parse_json(file.read(MAX_TEXT + 1), name=path)


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens a zip archive that holds each name once, and no more than its bytes can.

    Raises:
        ValueError: it is damaged or declares too much, or what is done inside finds damage.
    """
    try:
        with _Directory(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            file.is_open = True
            _check_members(path, archive.infolist())
            yield archive
    except UNREADABLE as error:
        if str(path) in str(error):
            raise
        raise ValueError(
            f"{path} is not a whole {path.suffix} file ({shown(str(error))}); delete it and fetch "
            "it again."
        ) from error


def read_npz(path: Path) -> dict[str, StoredArray]:
    """Lists the arrays of an .npz file without reading their values.

    Raises:
        ValueError: the file is not a whole .npz archive, or an array is pickled or declares a shape
            that its bytes do not fill.
    """
    with open_archive(path) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
        return {info.filename[:-4]: _npz_array(path, archive, info) for info in members}


def read_safetensors(path: Path) -> dict[str, StoredArray]:
    """Lists the arrays of a .safetensors file without reading their values.

    Raises:
        ValueError: the file is not a whole .safetensors file, or holds other than numbers.
    """
    header, start = _safetensors_header(path)
    header.pop("__metadata__", None)
    regions = [_safetensors_region(path, name, entry, start) for name, entry in header.items()]
    end = start
    for region in sorted(regions, key=lambda region: (region.start, region.end)):
        if region.start != end:
            raise ValueError(
                f"{path}: array {shown(region.name)} does not begin where the one before it ends; "
                "the file is damaged."
            )
        end = region.end
    size = path.stat().st_size
    if end != size:
        raise ValueError(
            f"{path} is not a whole .safetensors file: it has {size} bytes, and its arrays end at "
            f"{end}; fetch it again."
        )
    return {region.name: region.array() for region in regions}


def shard_places(index: Path) -> dict[str, str]:
    """Returns in which file beside it an index has each array.

    Raises:
        ValueError: it is no index, or names other than .safetensors files beside it.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not 0 < len(places) <= MAX_ARRAYS:
        raise ValueError(f"{index} has no weight_map of 1 to {MAX_ARRAYS} arrays; fetch it again.")
    for name, file in places.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise ValueError(
                f"{index} has array {shown(name)} in {shown(file)}, which is not the name of a "
                ".safetensors file beside it."
            )
    return places


def read_shards(index: Path) -> dict[str, StoredArray]:
    """Lists the arrays of the .safetensors files that an index names, without reading their values.

    Raises:
        FileNotFoundError: files that it names are missing.
        ValueError: a file is not whole, or lies elsewhere; index and files differ.
    """
    places, arrays = shard_places(index), {}
    files = {name: index.parent / name for name in sorted(set(places.values()))}
    if missing := [name for name, file in files.items() if not os.path.lexists(file)]:
        text = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        raise FileNotFoundError(f"{index} names files that are not beside it: {text}.")
    for place, file in files.items():
        _check_beside(file)
        for name, array in read_safetensors(file).items():
            if places.get(name) != place:
                raise ValueError(f"{file} holds {shown(name)}, which {index} does not have there.")
            arrays[name] = array
    for name in places.keys() - arrays.keys():
        raise ValueError(f"{index} has {shown(name)} in {places[name]}, which does not hold it.")
    return arrays


def safetensors_metadata(path: Path) -> dict[str, Any]:
    """Returns what the writer of a .safetensors file says beside its arrays.

    Raises:
        ValueError: the file is not a whole .safetensors file.
    """
    metadata = _safetensors_header(path)[0].get("__metadata__", {})
    return metadata if isinstance(metadata, dict) else {}


def _check_beside(file: Path) -> None:
    """Raises an error for no file, or a link to another folder than those of the Hub's cache."""
    check_file(file)
    folder = file.parent.resolve()
    blobs = [parent / "blobs" for parent in folder.parents]  # snapshots/<commit> link to them
    if file.resolve().parent not in (folder, *blobs):
        raise ValueError(f"{file} is a link to another folder; put the file itself there.")


class _Directory(io.BufferedReader):
    """A zip archive's file, of which no more than a sensible directory is read at once."""

    is_open = False  # once the directory is read, members may be as long as it says

    def read(self, size: int | None = -1, /) -> bytes:
        if self.is_open:
            return super().read(size)
        limit = -1 if size is None else size
        most = _MAX_DIRECTORY + 1
        content = super().read(min(limit, most) if limit >= 0 else most)
        if len(content) == most:
            raise zipfile.BadZipFile(f"its directory has more than {_MAX_DIRECTORY} bytes")
        return content


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MAX_ARRAYS:
        raise ValueError(
            f"{path} holds {len(members)} files; an archive of at most {MAX_ARRAYS} is read."
        )
    names = [info.filename for info in members]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path} holds {shown(double)} twice; only one of them can be meant.")
    others = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    odd = [info.filename for info in members if info.compress_type not in others]
    if odd:
        raise ValueError(f"{path} packs {shown(odd[0])} neither stored nor deflated; save it anew.")
    declared_size, size = sum(info.file_size for info in members), path.stat().st_size
    if declared_size > max(HARMLESS, MAX_RATIO * size):
        raise ValueError(
            f"{path} has {size} bytes and declares {declared_size}, more than {MAX_RATIO} times as "
            "many, as no trained model does; it is not read."
        )


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header and where the values start."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_TEXT:
            raise ValueError(
                f"{path} is not a .safetensors file: it declares a header of {length} bytes, and "
                f"at most {MAX_TEXT} are read; fetch it again."
            )
        content = file.read(length)
    if len(content) != length or not content.startswith(b"{"):
        raise ValueError(f"{path} is not a whole .safetensors file; delete it and fetch it again.")
    return parse_json(content, name=f"The header of {path}"), 8 + length


def _safetensors_region(path: Path, name: str, entry: Any, start: int) -> Region:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        region = Region(path, name, tuple(shape), np.dtype(_SAFETENSORS[dtype]), start + begin)
        sound = len(entry) == 3 and _are_sizes([*shape, begin, end]) and len(shape) <= _MAX_RANK
        if sound and region.end == start + end:
            return region
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(
        f"{path}: array {shown(name)} is described by {shown(entry)}, which is no array of numbers "
        "that fills its bytes; the file is damaged."
    )


@dataclasses.dataclass(frozen=True)
class _Member:
    """An array inside an .npz archive, compared with the sizes that the archive declares."""

    path: Path
    info: zipfile.ZipInfo
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype
    start: int  # bytes of the member before the values

    def read(self) -> np.ndarray:
        values = aligned_empty(self.shape, self.dtype, order=self.order)
        buffer = values.reshape(-1, order="A").view(np.uint8).data
        is_stored = self.info.compress_type == zipfile.ZIP_STORED
        try:
            filled = self._read_stored(buffer) if is_stored else self._read_packed(buffer)
        except UNREADABLE as error:
            raise ValueError(
                f"{self.path}: array {shown(self.name)} is damaged ({shown(str(error))})."
            ) from error
        if filled != len(buffer):
            raise ValueError(
                f"{self.path}: array {shown(self.name)} ends after {filled} of {len(buffer)} bytes."
            )
        return values

    @property
    def name(self) -> str:
        return self.info.filename[: -len(".npy")]

    def _read_stored(self, buffer: memoryview) -> int:
        """Reads straight into place, four times as fast as through zipfile."""
        with self.path.open("rb") as file:
            file.seek(self.info.header_offset)
            lengths = struct.unpack("<26xHH", file.read(30))  # of the name and of the extra field
            file.seek(sum(lengths), os.SEEK_CUR)
            crc = zlib.crc32(file.read(self.start))
            size = 0
            while count := file.readinto(buffer[size : size + _BLOCK]):
                crc = zlib.crc32(buffer[size : size + count], crc)
                size += count
        if crc != self.info.CRC:
            raise zipfile.BadZipFile("wrong CRC")
        return size

    def _read_packed(self, buffer: memoryview) -> int:
        size = 0
        with zipfile.ZipFile(self.path) as archive, archive.open(self.info) as member:
            member.read(self.start)
            while content := member.read(min(_PACKED_BLOCK, len(buffer) - size)):
                buffer[size : size + len(content)] = content
                size += len(content)
            member.read(1)  # the CRC is checked at the end of the member
        return size


def _npz_array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredArray:
    name = info.filename[: -len(".npy")]
    shape, fortran, dtype, start = _npy_header(path, archive, info)
    if dtype.hasobject:
        raise ValueError(
            f"{path}: array {shown(name)} is pickled; keras_vit never unpickles weights."
        )
    # NumPy writes bfloat16, which it does not know, as two raw bytes.
    stored = np.dtype(ml_dtypes.bfloat16) if dtype.str in ("|V2", "<V2") else dtype
    if stored.kind not in "fiub" and stored != ml_dtypes.bfloat16:
        raise ValueError(f"{path}: array {shown(name)} holds {shown(str(dtype))}, not numbers.")
    fits = _are_sizes(shape) and len(shape) <= _MAX_RANK
    if not fits or math.prod(shape) * stored.itemsize != info.file_size - start:
        raise ValueError(
            f"{path}: array {shown(name)} declares shape {shown(shape)} of {stored}, but its bytes "
            f"are {info.file_size - start}; the file is damaged."
        )
    member = _Member(path, info, shape, "F" if fortran else "C", stored, start)
    return StoredArray(shape, stored, member.read)


def _npy_header(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo
) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Returns an array's shape, order and dtype, and where its values start."""
    with archive.open(info) as member:
        try:
            version = np.lib.format.read_magic(member)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran, dtype = read_header(member)
        except _NO_HEADER:
            raise ValueError(
                f"{path}: {shown(info.filename)} is not a NumPy array; the file is damaged."
            ) from None
        return shape, fortran, dtype, member.tell()


def _are_sizes(values: Iterable[object]) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text}, which is not a finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ValueError("it has a key twice")
    return items
