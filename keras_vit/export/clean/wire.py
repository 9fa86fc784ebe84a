"""Reads and writes protocol buffers by field number, without their compiled descriptions.

The encoding: https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Value = int | bytes


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yields (field number, value) of a message: integers as int, all else as bytes.

    Example:
        >>> list(fields(field(1, 300) + field(2, b"name")))
        [(1, 300), (2, b'name')]

    Raises:
        ValueError: the message ends too early or holds an unknown wire type.
    """
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        if kind == BYTES:
            size, position = _varint(message, position)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"A message has a field of wire type {kind}, which is not known.")
        if position + size > len(message):
            raise ValueError("A message ends in the middle of a field.")
        yield number, message[position : position + size]
        position += size


def submessages(message: bytes, *path: int) -> Iterator[bytes]:
    """Yields the bytes of every field that this path of field numbers leads to.

    Example:
        >>> list(submessages(field(1, field(2, b"a") + field(2, b"b")), 1, 2))
        [b'a', b'b']
    """
    first, *rest = path
    for number, value in fields(message):
        if number == first and isinstance(value, bytes):
            if rest:
                yield from submessages(value, *rest)
            else:
                yield value


def integer(message: bytes, number: int, default: int = 0) -> int:
    """Returns the last integer of a field, as protocol buffers do."""
    found = [value for key, value in fields(message) if key == number and isinstance(value, int)]
    return found[-1] if found else default


def mapping(message: bytes, number: int) -> dict[str, bytes]:
    """Reads a map<string, message> field."""
    entries = {}
    for entry in submessages(message, number):
        key = b"".join(submessages(entry, 1)).decode()
        entries[key] = b"".join(submessages(entry, 2))
    return entries


def varints(packed: bytes) -> list[int]:
    """Reads the integers of a packed field.

    Example:
        >>> varints(bytes([1, 172, 2]))
        [1, 300]
    """
    numbers, position = [], 0
    while position < len(packed):
        number, position = _varint(packed, position)
        numbers.append(number)
    return numbers


def signed(number: int) -> int:
    """Reads a varint as the signed 64-bit integer that int32 and int64 fields mean."""
    return number - (1 << 64) if number >= 1 << 63 else number


def field(number: int, value: Value) -> bytes:
    """Writes one field: an integer, or the bytes of a string or message."""
    if isinstance(value, int):
        return _encoded(number << 3 | VARINT) + _encoded(value)
    return _encoded(number << 3 | BYTES) + _encoded(len(value)) + value


def records(content: bytes) -> Iterator[bytes]:
    """Yields the records of a TFRecord file, whose checksums TensorFlow checks and this does not.

    Raises:
        ValueError: the file ends in the middle of a record.
    """
    position = 0
    while position < len(content):
        if position + 12 > len(content):
            raise ValueError("A TFRecord file ends in the middle of a record.")
        (size,) = struct.unpack_from("<Q", content, position)
        record = content[position + 12 : position + 12 + size]
        if len(record) < size:
            raise ValueError("A TFRecord file ends in the middle of a record.")
        yield record
        position += 12 + size + 4


def _varint(message: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while position < len(message):
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
    raise ValueError("A message ends in the middle of a number.")


def _encoded(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
