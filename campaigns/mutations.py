"""Damages bytes at random, as disks and networks do, and with extreme integers."""

import numpy as np

# Integers that overflow, wrap around or are too large, in each width.
_EXTREME = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
_HEAD = 512  # bytes at the front and at the end, where most formats have headers


def mutate(content: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    """Returns the content with one to three damages, and their description.

    Half of the damages are within the first and last 512 bytes.
    """
    damaged = bytearray(content)
    descriptions = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        descriptions.append(_DAMAGES[rng.integers(len(_DAMAGES))](damaged, rng))
    return bytes(damaged), ", ".join(descriptions)


def _place(content: bytearray, rng: np.random.Generator) -> int:
    if not content:
        return 0
    head = min(_HEAD, len(content))
    region = rng.integers(4)
    if region == 0:
        return int(rng.integers(head))
    if region == 1:
        return len(content) - 1 - int(rng.integers(head))
    return int(rng.integers(len(content)))


def _flip(content: bytearray, rng: np.random.Generator) -> str:
    place, bit = _place(content, rng), int(rng.integers(8))
    if content:
        content[place] ^= 1 << bit
    return f"bit {bit} of byte {place} flipped"


def _cut(content: bytearray, rng: np.random.Generator) -> str:
    place = _place(content, rng)
    del content[place:]
    return f"cut off at byte {place}"


def _remove(content: bytearray, rng: np.random.Generator) -> str:
    place, count = _place(content, rng), int(2 ** rng.uniform(0, 10))
    del content[place : place + count]
    return f"{count} bytes from {place} removed"


def _insert(content: bytearray, rng: np.random.Generator) -> str:
    place, count = _place(content, rng), int(2 ** rng.uniform(0, 10))
    content[place:place] = rng.bytes(count)
    return f"{count} random bytes inserted at {place}"


def _zero(content: bytearray, rng: np.random.Generator) -> str:
    place, count = _place(content, rng), int(2 ** rng.uniform(0, 13))
    end = min(place + count, len(content))
    content[place:end] = bytes(end - place)
    return f"bytes {place} to {end} zeroed"


def _overwrite(content: bytearray, rng: np.random.Generator) -> str:
    place, width = _place(content, rng), int(rng.choice([1, 2, 4, 8]))
    value = int(rng.choice(np.array(_EXTREME, object))) % 2 ** (8 * width)
    order = "little" if rng.integers(2) else "big"
    end = min(place + width, len(content))
    content[place:end] = value.to_bytes(width, order)[: end - place]
    return f"{value} in {width} bytes, {order}-endian, at {place}"


def _swap(content: bytearray, rng: np.random.Generator) -> str:
    count = int(2 ** rng.uniform(2, 10))
    if len(content) < 2 * count:
        return "nothing swapped"
    first, second = sorted(int(p) for p in rng.integers(0, len(content) - count, 2))
    if second - first < count:
        return "nothing swapped"
    one, other = content[first : first + count], content[second : second + count]
    content[first : first + count], content[second : second + count] = other, one
    return f"{count} bytes at {first} and {second} swapped"


def _repeat(content: bytearray, rng: np.random.Generator) -> str:
    place, count = _place(content, rng), int(2 ** rng.uniform(0, 12))
    content[place:place] = content[place : place + count]
    return f"{count} bytes at {place} repeated"


_DAMAGES = (_flip, _flip, _cut, _remove, _insert, _zero, _overwrite, _overwrite, _swap, _repeat)
