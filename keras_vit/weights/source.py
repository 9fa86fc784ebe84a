"""Finds the file that a `weights` argument means: a path, URL, Hub repository or published name."""

import re
from pathlib import Path

from keras_vit.weights.catalog import resolve
from keras_vit.weights.checkpoint import SUFFIXES
from keras_vit.weights.download import fetch

HUB_FILES = ("config.json", "model.safetensors")


def locate(weights: str | Path, variant: str, *, image_size: int | None = None) -> Path:
    """Returns the local file for a builder's `weights`, downloading it if need be.

    Args:
        weights: a path, an http(s) URL, "hf://owner/name", or a name that
            `keras_vit.weights.resolve` knows.
        variant: a key of `keras_vit.VARIANTS`, to which a name belongs.
        image_size: side of the images in pixels, which a name's file is chosen by.

    Raises:
        ValueError: no published checkpoint has that name.
        OSError: the file cannot be fetched, or is not what was published.
        ImportError: the Hub's library is not installed.
    """
    if isinstance(weights, Path) or ("://" not in weights and weights.endswith(SUFFIXES)):
        return Path(weights)
    if re.match(r"https?://", weights):
        return fetch(weights)
    if weights.startswith("hf://"):
        return _hub_file(weights)
    row = resolve(variant, weights, image_size=image_size)
    return fetch(row.url, sha256=row.sha256)


def _hub_file(address: str) -> Path:
    """Fetches a model from the Hugging Face Hub; its config.json lands beside its weights."""
    parts = address.removeprefix("hf://").split("/")
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"A Hub address is hf://owner/name. Received: {address!r}.")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f'{address} needs the Hub\'s library: pip install "keras-vit[hub]".'
        ) from error
    try:
        paths = [huggingface_hub.hf_hub_download("/".join(parts), name) for name in HUB_FILES]
    except huggingface_hub.errors.EntryNotFoundError as error:
        raise FileNotFoundError(
            f"{address} has no {' and '.join(HUB_FILES)} ({error}); only safetensors are read."
        ) from error
    except (huggingface_hub.errors.HfHubHTTPError, OSError) as error:
        raise OSError(
            f"{address} could not be fetched ({error}); download its {' and '.join(HUB_FILES)} "
            "into one folder and pass the path of the second."
        ) from error
    return Path(paths[-1])
