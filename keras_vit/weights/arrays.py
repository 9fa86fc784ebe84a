"""Reads the named arrays of a checkpoint one by one, trusting nothing that the file declares."""

import dataclasses
import functools
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

import h5py
import ml_dtypes
import numpy as np
import safetensors

from keras_vit import backend

# What zipfile raises for a damaged archive: encrypted or unknown members are RuntimeErrors.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint: what it declares, and how to read it.

    Attributes:
        shape: the shape that it has once read.
        read: returns the array; nothing is allocated before this is called.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def map(
        self, change: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...]
    ) -> "StoredArray":
        """Returns an array of another shape that is changed as it is read."""
        return StoredArray(shape, lambda: change(self.read()))


def aligned_empty(
    shape: tuple[int, ...], dtype: np.dtype, *, order: Literal["C", "F"] = "C"
) -> np.ndarray:
    """Returns an array to be filled, in memory aligned so that the backend may take it over."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + backend.ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % backend.ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape, order=order)


def read_npz(path: Path) -> dict[str, StoredArray]:
    """Lists the arrays of an .npz file without reading their values.

    Raises:
        ValueError: the file is not a whole .npz archive, or an array is pickled or declares a shape
            that its bytes do not fill.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            return {info.filename[:-4]: _npz_array(path, archive, info) for info in members}
    except _UNREADABLE as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(
            f"{path} is not a whole .npz file ({error}); delete it and fetch it again."
        ) from error


def read_safetensors(path: Path) -> dict[str, StoredArray]:
    """Lists the arrays of a .safetensors file without reading their values.

    Raises:
        ValueError: the file is not a whole .safetensors file, or holds other than numbers.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(
            f"{path} is not a whole .safetensors file ({error}); delete it and fetch it again."
        ) from error

    def read(name: str) -> np.ndarray:
        with safetensors.safe_open(path, framework="numpy") as opened:
            return np.asarray(opened.get_tensor(name))

    return {name: StoredArray(s, functools.partial(read, name)) for name, s in shapes.items()}


def read_h5(path: Path, content: IO[bytes] | None = None) -> dict[str, StoredArray]:
    """Lists the arrays of a Keras .weights.h5 file without reading their values.

    Args:
        path: the file, named in errors.
        content: the HDF5 content, where it is only a part of that file.

    Raises:
        ValueError: the file is not a whole HDF5 file.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and node.dtype.kind in "fiuV":
            shapes[name] = tuple(node.shape)

    def read(name: str) -> np.ndarray:
        with h5py.File(content or path, "r") as opened:
            values = np.asarray(opened[name])
            # Keras marks the two raw bytes that HDF5 keeps a bfloat16 in.
            return values.view(ml_dtypes.bfloat16) if values.dtype.str == "|V2" else values

    try:
        with h5py.File(content or path, "r") as opened:
            opened.visititems(visit)
    except (OSError, RuntimeError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is not a whole HDF5 file ({error}).") from error
    return {name: StoredArray(s, functools.partial(read, name)) for name, s in shapes.items()}


@dataclasses.dataclass(frozen=True)
class _Member:
    """An array inside an .npz archive, held against what the archive says of it."""

    path: Path
    info: zipfile.ZipInfo
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype
    start: int  # bytes of the member before the values

    def read(self) -> np.ndarray:
        values = aligned_empty(self.shape, self.dtype, order=self.order)
        buffer = values.reshape(-1, order="A").view(np.uint8).data
        try:
            filled = self._read_stored(buffer) if self._is_stored else self._read_packed(buffer)
        except _UNREADABLE as error:
            raise ValueError(f"{self.path}: array {self.name!r} is damaged ({error}).") from error
        if filled != len(buffer):
            raise ValueError(
                f"{self.path}: array {self.name!r} ends after {filled} of {len(buffer)} bytes."
            )
        return values

    @property
    def name(self) -> str:
        return self.info.filename[: -len(".npy")]

    @property
    def _is_stored(self) -> bool:
        return self.info.compress_type == zipfile.ZIP_STORED

    def _read_stored(self, buffer: memoryview) -> int:
        """Reads straight into place, four times as fast as through zipfile."""
        with self.path.open("rb") as file:
            file.seek(self.info.header_offset)
            lengths = struct.unpack("<26xHH", file.read(30))  # of the name and of the extra field
            file.seek(sum(lengths), os.SEEK_CUR)
            crc = zlib.crc32(file.read(self.start))
            filled = file.readinto(buffer)
        if zlib.crc32(buffer, crc) != self.info.CRC:
            raise zipfile.BadZipFile("wrong CRC")
        return int(filled)

    def _read_packed(self, buffer: memoryview) -> int:
        with zipfile.ZipFile(self.path) as archive, archive.open(self.info) as member:
            member.read(self.start)
            content = member.read(len(buffer))
            buffer[: len(content)] = content
            member.read()  # the CRC is checked at the end of the member
        return len(content)


def _npz_array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredArray:
    name = info.filename[: -len(".npy")]
    shape, fortran, dtype, start = _npy_header(path, archive, info)
    if dtype.hasobject:
        raise ValueError(f"{path}: array {name!r} is pickled; keras_vit never unpickles weights.")
    # NumPy writes bfloat16, which it does not know, as two raw bytes.
    stored = np.dtype(ml_dtypes.bfloat16) if dtype.str in ("|V2", "<V2") else dtype
    if stored.kind not in "fiu" and stored != ml_dtypes.bfloat16:
        raise ValueError(f"{path}: array {name!r} holds {dtype}, not numbers.")
    size = math.prod(shape) * stored.itemsize
    if any(side < 0 for side in shape) or size != info.file_size - start:
        raise ValueError(
            f"{path}: array {name!r} declares shape {shape} of {stored}, {size} bytes, but holds "
            f"{info.file_size - start}; the file is damaged."
        )
    member = _Member(path, info, shape, "F" if fortran else "C", stored, start)
    return StoredArray(shape, member.read)


def _npy_header(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo
) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Returns an array's shape, order and dtype, and where its values start."""
    with archive.open(info) as member:
        try:
            version = np.lib.format.read_magic(member)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran, dtype = read(member)
        except (ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError) as error:
            raise ValueError(
                f"{path}: {info.filename!r} is not a NumPy array ({error})."
            ) from error
        return tuple(int(side) for side in shape), fortran, dtype, member.tell()
