"""Makes folders of small real image files in every format that is read."""

from pathlib import Path

import numpy as np
from PIL import Image

# File ending and Pillow's mode of the images of a class, in turn.
KINDS = (("jpg", "RGB"), ("png", "RGBA"), ("bmp", "L"), ("gif", "P"), ("jpeg", "L"), ("png", "LA"))


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


def damage(file: Path) -> Path:
    """Cuts a file in half."""
    contents = file.read_bytes()
    file.write_bytes(contents[: len(contents) // 2])
    return file
