"""Compares a file on disk with the checksum of a server, a catalogue or an earlier use."""

import base64
import functools
import hashlib
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

# How the name of a list of .safetensors files ends that hold one model's arrays between them.
SHARD_INDEX = ".safetensors.index.json"
LARGEST_JSON = 2**24  # bytes; a config.json with the names of 21,843 classes has 1.5 million

# What an archive may unpack to: weights hardly deflate, but heads of zeros do, a thousandfold.
UNPACKED_RATIO, UNPACKED_FREE = 20, 2**26
_START = 512  # bytes that tell what a file is
_MARKS = (
    (rb"\s*<(!doctype html|html|head|body)", "a web page"),
    (rb"\s*<(\?xml|[a-z]+[ >])", "an XML text"),
    (rb"version https://git-lfs", "a Git LFS pointer"),
    (rb"\x1f\x8b", "gzip data"),
    (rb'\s*(\{\s*["}]|\[)', "a JSON text"),
    (rb"PK\x03\x04", "a zip archive"),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (rb"\x80[\x02-\x05]", "a pickle"),
)

# CRC-32C (Castagnoli), reflected: RFC 3720, appendix B.4.
_POLYNOMIAL = 0x82F63B78
_LANES = 4096  # registers that NumPy advances side by side
_LANE_BYTES = 2048


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be read: {error.strerror}.") from None


def checked_sha256(sha256: str | None) -> str | None:
    """Returns a SHA-256 that a caller gave, in small letters.

    Raises:
        ValueError: it is not 64 hexadecimal digits.
        TypeError: it is no text.
    """
    if sha256 is None:
        return None
    if not isinstance(sha256, str):
        kind = type(sha256).__name__
        raise TypeError(f"sha256 is a text of 64 hexadecimal digits, or None. Received: a {kind}.")
    if not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise ValueError(
            f"sha256 is 64 hexadecimal digits, as sha256sum prints them. Received: {sha256[:80]!r}."
        )
    return sha256.lower()


def check_sha256(path: Path, sha256: str | None) -> None:
    """Compares a local file with the SHA-256 that a caller gave, None for nothing.

    What is not there, or no file, is left to its reader to refuse.

    Raises:
        ValueError: the file has another one.
    """
    expected = checked_sha256(sha256)
    if expected is None or not path.is_file():
        return
    check_one_file(path.name, expected)
    if (digest := digest_of(path)) != expected:
        raise ValueError(
            f"{path} has the SHA-256 {digest}, and {expected} was asked for: it is damaged or "
            "another file, get it from its publisher again."
        )


def check_one_file(name: str, sha256: str | None) -> None:
    """Raises a ValueError for a SHA-256 of weights in shards: their index says none of their bytes.

    Args:
        name: of the file of weights, or of the index.
        sha256: what the caller gave, None for nothing.
    """
    if sha256 is not None and name.endswith(SHARD_INDEX):
        raise ValueError(
            f"sha256 is of one file, and {name} names several: compare each with sha256sum and "
            "leave sha256 out, or save the weights as one file."
        )


def check_stated(path: Path, *, stated: str) -> None:
    """Compares a file with a server's `x-goog-hash` header, "crc32c=<base64>,md5=<base64>".

    The MD5 is compared when the header holds one, otherwise the CRC-32C (Google sends it alone for
    objects that were uploaded in parts); an empty header states nothing.

    Raises:
        ValueError: the file differs from what the header states.
    """
    hashes = dict(item.strip().split("=", 1) for item in stated.split(",") if "=" in item)
    if "md5" in hashes:
        kind, digest = "md5", _md5(path)
    elif "crc32c" in hashes:
        kind, digest = "crc32c", crc32c(path).to_bytes(4, "big")
    else:
        return
    text = base64.b64encode(digest).decode()
    if text != hashes[kind]:
        raise ValueError(f"the server states {kind}={hashes[kind]}, the bytes have {kind}={text}")


def check_structure(path: Path, *, name: str) -> None:
    """Holds a file against the format of its name: its beginning, its length, an archive's CRCs.

    Args:
        path: the file to read.
        name: the name it will have. Of a suffix that is not known, all but web pages, Git LFS
            pointers and empty files pass.

    Raises:
        ValueError: the file is of another format, or not whole.
    """
    suffix = structured(name)
    if suffix is not None:
        try:
            _STRUCTURES[suffix](path)
        except (ValueError, KeyError, TypeError, OSError, struct.error, RecursionError) as error:
            raise ValueError(str(error)) from error
    elif description := junk(path, name=name):
        raise ValueError(f"it is {description}")


def structured(name: str) -> str | None:
    """Returns the suffix of a name by whose format a cut file is known, None for another name."""
    return next((suffix for suffix in _STRUCTURES if name.endswith(suffix)), None)


def junk(path: Path, *, name: str) -> str | None:
    """Returns what a file is that a name does not promise, in words; None where that is not clear.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "vit.npz"
        >>> _ = path.write_bytes(b"<!DOCTYPE html>")
        >>> junk(path, name="vit.npz")
        'a web page'
    """
    start = _start(path)
    if not start:
        return "an empty file"
    suffix = structured(name)
    # The length of a header and its beginning, whatever else that length looks like.
    if suffix == ".safetensors" and re.match(rb".{6}\0\0\{", start, re.DOTALL):
        return None
    marks = _MARKS if suffix is not None else _MARKS[:3]
    kind = next((words for mark, words in marks if re.match(mark, start, re.IGNORECASE)), None)
    return None if kind == _PROMISES.get(suffix or "") else kind


def _check_zip(path: Path) -> None:
    """Reads every member and compares it with the archive's own CRC."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            unpacked_size = sum(member.file_size for member in members)
            if unpacked_size > UNPACKED_FREE + UNPACKED_RATIO * path.stat().st_size:
                raise ValueError(f"{path.stat().st_size:,} bytes unpack to {unpacked_size:,}")
            packings = {member.compress_type for member in members}
            if not packings <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                raise ValueError("a member is packed otherwise than stored or deflated")
            _check_ends(path, len(archive.comment))
            damaged_member = archive.testzip()
    except _ZIP_ERRORS as error:
        text = f"{error}"[:80]
        raise ValueError(
            f"not a whole zip archive ({text}), it begins with {_start(path)[:16]!r}"
        ) from error
    if damaged_member is not None:
        raise ValueError(f"the archive's member {damaged_member[:80]!r} does not have its own CRC")


def _check_safetensors(path: Path) -> None:
    """Compares the length with what the header says; of the values there is no checksum."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_JSON):
            begin = _start(path)[:16]
            raise ValueError(f"not a whole safetensors file, it begins with {begin!r}")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected_size = 8 + length + max(ends, default=0)
    if size != expected_size:
        raise ValueError(
            f"a safetensors file of {expected_size:,} bytes of which {size:,} are here"
        )


def _check_hdf5(path: Path) -> None:
    """Compares the length with the end that the superblock states.

    Source: HDF5 File Format Specification 3.0, II.A. Only with offsets of 8 bytes, as h5py writes.
    """
    start, size = _start(path), path.stat().st_size
    if not start.startswith(b"\x89HDF\r\n\x1a\n"):
        raise ValueError(f"not an HDF5 file, it begins with {start[:16]!r}")
    version = start[8] if len(start) > 8 else 255
    offset_bytes, place = {0: (13, 40), 1: (13, 44), 2: (9, 28), 3: (9, 28)}.get(version, (0, 0))
    if not place or len(start) < place + 8 or start[offset_bytes] != 8:
        raise ValueError("an HDF5 file whose superblock is damaged or of an unknown version")
    end = int.from_bytes(start[place : place + 8], "little")
    if end > size:
        raise ValueError(f"an HDF5 file of {end:,} bytes of which {size:,} are here")


def _check_json(path: Path) -> None:
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{path.stat().st_size:,} bytes are too many for a JSON file")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON, it begins with {_start(path)[:16]!r}") from error
    if not isinstance(content, dict):
        raise ValueError("JSON, but no object of names and values")


_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,
    ValueError,
    OverflowError,
    OSError,
)
_STRUCTURES: dict[str, Callable[[Path], None]] = {
    ".npz": _check_zip,
    ".zip": _check_zip,
    ".keras": _check_zip,
    ".safetensors": _check_safetensors,
    ".h5": _check_hdf5,
    ".hdf5": _check_hdf5,
    ".json": _check_json,
}
_PROMISES = {
    **dict.fromkeys((".npz", ".zip", ".keras"), "a zip archive"),
    **dict.fromkeys((".h5", ".hdf5"), "an HDF5 file"),
    ".json": "a JSON text",
}


def crc32c(path: Path) -> int:
    """Returns the CRC-32C of a file, in NumPy.

    The register after a stretch of bytes is a linear function of the register before it and of the
    bytes: so many stretches are read side by side, and then joined in order.
    """
    register = 0xFFFFFFFF
    head = path.stat().st_size % _LANE_BYTES
    with path.open("rb") as file:
        for byte in file.read(head):
            register = _over_bits(register & 0xFF ^ byte, 8) ^ register >> 8
        while block := file.read(_LANES * _LANE_BYTES):
            stretches = np.frombuffer(block, "<u2").reshape(-1, _LANE_BYTES // 2)
            for stretch in _advance(np.zeros(len(stretches), np.uint32), stretches.T).tolist():
                register = _advance_stretch(register) ^ stretch
    return register ^ 0xFFFFFFFF


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_START).removeprefix(b"\xef\xbb\xbf")


def _check_ends(path: Path, comment: int) -> None:
    """Refuses what `zipfile` skips: bytes before the first member and after the archive's end."""
    with path.open("rb") as file:
        first = file.read(2)
        file.seek(-22 - comment, os.SEEK_END)
        last = file.read(4)
    if (first, last) != (b"PK", b"PK\x05\x06"):
        raise ValueError("other bytes before or after it")


def _advance(
    registers: npt.NDArray[np.uint32], columns: npt.NDArray[np.uint16]
) -> npt.NDArray[np.uint32]:
    table = _table()
    for column in np.ascontiguousarray(columns):
        registers = table.take((registers ^ column) & 0xFFFF) ^ registers >> 16
    return registers


def _advance_stretch(register: int) -> int:
    first, second, third, fourth = _stretch_tables()
    return (
        first[register & 0xFF]
        ^ second[register >> 8 & 0xFF]
        ^ third[register >> 16 & 0xFF]
        ^ fourth[register >> 24]
    )


def _over_bits(register: int, bits: int) -> int:
    for _ in range(bits):
        register = register >> 1 ^ (register & 1) * _POLYNOMIAL
    return register


@functools.cache
def _table() -> npt.NDArray[np.uint32]:
    return np.array([_over_bits(value, 16) for value in range(2**16)], np.uint32)


@functools.cache
def _stretch_tables() -> list[list[int]]:
    # What one stretch of zero bytes makes of each byte of the register.
    registers = (
        np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
    ).reshape(-1)
    zeros = np.zeros((_LANE_BYTES // 2, 1), np.uint16)
    tables: list[list[int]] = _advance(registers, zeros).reshape(4, 256).tolist()
    return tables


def _md5(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()
