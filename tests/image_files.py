"""Makes folders of small real image files in every format that is read."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from keras_vit.data import ImageData, Split
from keras_vit.data.source import SPLITS

# File ending and Pillow's mode of the images of a class, in turn.
KINDS = (("jpg", "RGB"), ("png", "RGBA"), ("bmp", "L"), ("gif", "P"), ("jpeg", "L"), ("png", "LA"))
# How a format with EXIF is saved.
SAVED: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95}, "PNG": {}, "WEBP": {"lossless": True}}


def write_image(file: Path, *, mode: str = "RGB", seed: int = 0, stripes: bool = False) -> Path:
    """Writes a noisy picture, dark or with bright stripes; size and format vary with the seed."""
    generator = np.random.default_rng(seed)
    height, width = (int(side) for side in generator.integers(20, 40, 2))
    pixels = generator.integers(0, 60, (height, width, 3), dtype=np.uint8)
    if stripes:
        pixels[:, ::4] += 180
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(file)
    return file


def write_classes(
    root: Path, *, count: int = 10, classes: tuple[str, ...] = ("plain", "striped")
) -> Path:
    """Writes a folder with one sub-folder per class; the second class has stripes."""
    for place, name in enumerate(classes):
        for index in range(count):
            ending, mode = KINDS[index % len(KINDS)]
            file = root / name / f"{index:03}.{ending}"
            write_image(file, mode=mode, seed=1000 * place + index, stripes=place == 1)
    return root


def in_memory(data: ImageData, *, side: int) -> ImageData:
    """The same images as pixels, square."""

    def load(split: Split) -> Split:
        read = (Image.open(io.BytesIO(Path(file).read_bytes())) for file in split.images)
        images = [np.asarray(image.convert("RGB").resize((side, side))) for image in read]
        return Split(images=np.stack(images), targets=split.targets)

    splits: dict[str, Any] = {name: load(data.split(name)) for name in SPLITS}
    return ImageData(source="memory", labels=data.labels, **splits)


def damage(file: Path) -> Path:
    """Cuts a file in half."""
    contents = file.read_bytes()
    file.write_bytes(contents[: len(contents) // 2])
    return file


def picture() -> np.ndarray:
    """Blocks of random colours, no two corners alike, higher than wide."""
    generator = np.random.default_rng(0)
    blocks = np.kron(generator.integers(0, 256, (7, 5, 3)), np.ones((8, 8, 1)))
    return blocks.astype(np.uint8)[:52, :36]


def photo(turn: int, form: str = "JPEG") -> bytes:
    """A file that says how the camera was held."""
    exif = Image.Exif()
    exif[0x010F] = "a maker"
    exif[0x0112] = turn
    stream = io.BytesIO()
    Image.fromarray(picture()).save(stream, form, exif=exif, **SAVED[form])
    return stream.getvalue()


def as_pillow(contents: bytes) -> np.ndarray:
    """The upright pixels that Pillow makes of a file."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(contents))).convert("RGB"))
