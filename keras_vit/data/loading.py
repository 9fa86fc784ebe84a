"""Loads images by one word: the digits, a dataset of TensorFlow Datasets, a folder."""

import os
from collections.abc import Callable

from keras_vit.data import catalogued, digits, folder, source, unlabelled


def load_data(
    spec: str | os.PathLike[str],
    *,
    labelled: bool = True,
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> source.ImageData:
    """Loads images in three splits.

    Example:
        >>> load_data("digits").counts
        {'train': 1259, 'validation': 179, 'test': 359}

    Args:
        spec: "digits"; "tfds:NAME", such as "tfds:oxford_flowers102"; or the path of a folder. A
            folder called digits is "./digits".
        labelled: whether a folder must have class folders; if not, see `load_unlabelled_folder`.
        strict: whether a damaged image is an error, instead of being left out and counted.
        on_progress: called with (files looked at, files in all), for each split of a folder anew.

    Raises:
        FileNotFoundError: there is no such folder.
        ImportError: what "digits" or "tfds:NAME" needs is not installed.
        ValueError: there is no such dataset, or the images do not do, see `load_folder`.
    """
    if spec == "digits":
        return digits.load_digits()
    text = os.fspath(spec)
    if text.startswith(catalogued.PREFIX):
        return catalogued.load_tfds(text.removeprefix(catalogued.PREFIX), strict=strict)
    load = folder.load_folder if labelled else unlabelled.load_unlabelled_folder
    return load(spec, strict=strict, on_progress=on_progress)
