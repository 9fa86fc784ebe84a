"""Makes a folder of real photos, one folder for each class, as a phone and a disk would leave it.

The pictures are those that scikit-image and scikit-learn carry, cut into crops of several sizes:
JPEG files in all eight EXIF orientations, PNG files with transparency, of 16 bits, and grey, CMYK
JPEG files, WebP files, names with spaces and accents, and a few entries that are no image at all.

    pip install scikit-image scikit-learn pillow
    python examples/photos.py photos --count 30

Crops of one picture overlap, so a model that tells them apart has learnt the pictures, not the
classes: the folder is for trying commands, not for measuring models.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import skimage
import sklearn.datasets
from PIL import Image, ImageOps

# The class, a name as people write it, and the file of scikit-image or scikit-learn.
CLASSES = {
    "astronaut": "astronaut.png",
    "bricks": "brick.png",
    "café": "coffee.png",
    "cat": "chelsea.png",
    "coins": "coins.png",
    "deep field": "hubble_deep_field.jpg",
    "flower": "flower.jpg",
    "grass": "grass.png",
    "motorcycle": "motorcycle_left.png",
    "temple": "china.jpg",
}
SIZES = ((160, 120), (120, 160), (200, 200), (256, 144))  # (width, height) in pixels
_ORIENTATION = 0x0112
# How a viewer turns what is stored, for EXIF orientations 2 to 8; the inverse is stored here.
_INVERSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def main() -> None:
    """Makes the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--count", type=int, default=30, help="crops of each class (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the crops (default: 0)")
    arguments = parser.parse_args()
    write_photos(arguments.out, count=arguments.count, seed=arguments.seed)
    print(f"{len(CLASSES) * arguments.count} photos of {len(CLASSES)} classes in {arguments.out}")


def write_photos(out: Path, *, count: int, seed: int = 0) -> None:
    """Writes `count` crops of each class, and among them what is no image.

    Raises:
        FileExistsError: `out` exists.
    """
    out.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for name, file in CLASSES.items():
        (out / name).mkdir()
        picture = Image.open(_find(file)).convert("RGB")
        for number in range(count):
            crop = _crop(picture, SIZES[number % len(SIZES)], generator)
            _WRITERS[number % len(_WRITERS)](crop, out / name / f"{name} {number:03d}", number)
    _write_damage(out / next(iter(CLASSES)))


def _find(file: str) -> Path:
    folders = (
        Path(skimage.__file__).parent / "data",
        Path(sklearn.datasets.__file__).parent / "images",
    )
    return next(folder / file for folder in folders if (folder / file).is_file())


def _crop(
    picture: Image.Image, size: tuple[int, int], generator: np.random.Generator
) -> Image.Image:
    """Returns a part of the picture at a random place and scale, in the given size."""
    side = generator.uniform(0.45, 0.9) * min(picture.width / size[0], picture.height / size[1])
    width, height = int(side * size[0]), int(side * size[1])
    left = int(generator.integers(picture.width - width + 1))
    top = int(generator.integers(picture.height - height + 1))
    return picture.crop((left, top, left + width, top + height)).resize(size)


def _write_turned(crop: Image.Image, stem: Path, number: int) -> None:
    """Writes a JPEG file as a phone does: turned, with a note of how to turn it back."""
    orientation = number // len(_WRITERS) % 8 + 1
    stored = crop.transpose(_INVERSE[orientation]) if orientation > 1 else crop
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    stored.save(f"{stem}.jpg", quality=92, exif=exif)


def _write_transparent(crop: Image.Image, stem: Path, number: int) -> None:
    crop.putalpha(Image.linear_gradient("L").resize(crop.size))
    crop.save(f"{stem}.png")


def _write_16_bit(crop: Image.Image, stem: Path, number: int) -> None:
    grey = np.asarray(ImageOps.grayscale(crop), np.uint16) * 257
    Image.fromarray(grey).save(f"{stem}.png")


_WRITERS: tuple[Callable[[Image.Image, Path, int], None], ...] = (
    _write_turned,
    lambda crop, stem, number: crop.save(f"{stem}.JPG", quality=85, progressive=True),
    _write_turned,
    lambda crop, stem, number: crop.save(f"{stem}.webp", quality=90),
    _write_transparent,
    _write_turned,
    lambda crop, stem, number: crop.convert("CMYK").save(f"{stem}.jpeg", quality=92),
    _write_16_bit,
    lambda crop, stem, number: ImageOps.grayscale(crop).save(f"{stem}.png"),
)


def _write_damage(folder: Path) -> None:
    """Adds what is found among photos and is none: a broken link, nothing, half a file, a note."""
    (folder / "no bytes.jpg").touch()
    whole = next(folder.glob("*.jpg")).read_bytes()
    (folder / "half a photo.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "notes.jpg").write_text("not a photo")
    (folder / "broken link.jpg").symlink_to("gone.jpg")


if __name__ == "__main__":
    main()
