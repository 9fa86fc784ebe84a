"""Compares a file on disk with what a server, a catalogue or an earlier use said of it."""

import base64
import functools
import hashlib
import zipfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

ARCHIVES = (".npz", ".zip", ".keras")

# CRC-32C (Castagnoli), reflected: RFC 3720, appendix B.4.
_POLYNOMIAL = 0x82F63B78
_LANES = 4096  # registers that NumPy advances side by side
_LANE_BYTES = 2048


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_stated(path: Path, *, stated: str) -> None:
    """Compares a file with a server's `x-goog-hash` header, "crc32c=<base64>,md5=<base64>".

    The MD5 is compared when the header holds one, otherwise the CRC-32C (Google sends it alone for
    objects that were uploaded in parts); an empty header states nothing.

    Raises:
        ValueError: the file differs from what the header states.
    """
    hashes = dict(item.strip().split("=", 1) for item in stated.split(",") if "=" in item)
    if "md5" in hashes:
        kind, received = "md5", _md5(path)
    elif "crc32c" in hashes:
        kind, received = "crc32c", crc32c(path).to_bytes(4, "big")
    else:
        return
    text = base64.b64encode(received).decode()
    if text != hashes[kind]:
        raise ValueError(f"the server states {kind}={hashes[kind]}, the bytes have {kind}={text}")


def check_archive(path: Path, *, name: str) -> None:
    """Reads every member of a zip archive and compares it with the archive's own CRC.

    Args:
        path: the file to read.
        name: the name it will have; a name without an archive's suffix is not read.

    Raises:
        ValueError: the file is not an archive, or a member is damaged.
    """
    if not name.endswith(ARCHIVES):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OSError) as error:
        with path.open("rb") as file:
            start = file.read(16)
        raise ValueError(f"not a whole zip archive ({error}), it begins with {start!r}") from error
    if damaged is not None:
        raise ValueError(f"the archive's member {damaged!r} does not have its own CRC")


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
                register = _over_one_stretch(register) ^ stretch
    return register ^ 0xFFFFFFFF


def _advance(
    registers: npt.NDArray[np.uint32], columns: npt.NDArray[np.uint16]
) -> npt.NDArray[np.uint32]:
    table = _table()
    for column in np.ascontiguousarray(columns):
        registers = table.take((registers ^ column) & 0xFFFF) ^ registers >> 16
    return registers


def _over_one_stretch(register: int) -> int:
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
