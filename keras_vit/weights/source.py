"""Finds the file that a source or a `weights` argument means: on the disk, at a URL, on the Hub."""

import logging
import os
import re
import urllib.parse
from pathlib import Path

from keras_vit.weights.catalog import resolve
from keras_vit.weights.checkpoint import SUFFIXES
from keras_vit.weights.download import fetch
from keras_vit.weights.torch_settings import CONFIG, PREPROCESSOR, SETTINGS_FILES

HUB_FILES = (CONFIG, "model.safetensors")
# What a folder is looked through for, before any other file that can be read.
FOLDER_FILES = ("model.safetensors", "model.keras")

_LOGGER = logging.getLogger("keras_vit.weights")


def find(source: str | os.PathLike[str]) -> Path:
    """Returns the local file that a source means, downloading it if need be.

    Args:
        source: a file, a folder that holds one, an http(s) URL, or "hf://owner/name".

    Raises:
        FileNotFoundError: there is no such file, or the folder holds none.
        ValueError: the folder holds several.
        OSError: the file cannot be fetched, or is not what was published.
        ImportError: the Hub's library is not installed.
    """
    address = os.fsdecode(source)
    if re.match(r"https?://", address):
        return _url_file(address)
    if address.startswith("hf://"):
        return _hub_file(address)
    path = Path(address)
    if path.is_dir():
        return _folder_file(path)
    if not path.exists():
        raise FileNotFoundError(
            f"There is no file or folder {address!r}; a source is one of these, a URL or "
            "hf://owner/name. Published names belong to builders, as in keras_vit.ViTB16(weights="
            '"imagenet21k").'
        )
    return path


def locate(weights: str | os.PathLike[str], variant: str, *, image_size: int | None = None) -> Path:
    """Returns the local file for a builder's `weights`, downloading it if need be.

    Args:
        weights: what `find` takes, or a name that `keras_vit.weights.resolve` knows.
        variant: a key of `keras_vit.VARIANTS`, to which a name belongs.
        image_size: side of the images in pixels, which a name's file is chosen by.

    Raises:
        ValueError: no published checkpoint has that name.
        OSError: the file cannot be fetched, or is not what was published.
        ImportError: the Hub's library is not installed.
    """
    if not isinstance(weights, str) or "://" in weights:
        return _existing(weights)
    if weights.endswith(SUFFIXES):
        return Path(weights)
    try:
        row = resolve(variant, weights, image_size=image_size)
    except ValueError:
        if Path(weights).exists():
            return find(weights)
        raise
    return fetch(row.url, sha256=row.sha256)


def _existing(weights: str | os.PathLike[str]) -> Path:
    path = Path(weights)
    is_address = isinstance(weights, str)
    return find(weights) if is_address or path.is_dir() else path


def _folder_file(folder: Path) -> Path:
    """Returns the one checkpoint of a folder."""
    entries = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    found = [name for name in FOLDER_FILES if name in entries]
    found = found or [name for name in entries if name.endswith(SUFFIXES)]
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise ValueError(
            f"The folder {str(folder)!r} holds several checkpoints ({', '.join(found)}); pass the "
            "path of one."
        )
    shards = [name for name in entries if name.endswith(".index.json")]
    reason = (
        f"its weights are in parts ({shards[0]}); save them as one file"
        if shards
        else (f"put one there whose name ends in {', '.join(SUFFIXES)}")
    )
    raise FileNotFoundError(f"The folder {str(folder)!r} holds no checkpoint: {reason}.")


def _url_file(url: str) -> Path:
    """Fetches a file; a PyTorch library's with the settings that stand beside it."""
    path = fetch(url)
    if path.name.endswith(".safetensors"):
        for name in SETTINGS_FILES:
            beside = urllib.parse.urlsplit(url)
            folder = beside.path.rsplit("/", 1)[0]
            address = urllib.parse.urlunsplit(beside._replace(path=f"{folder}/{name}"))
            try:
                fetch(address, progress=False)
            except FileNotFoundError:
                _LOGGER.info("There is no %s.", address)
            except (OSError, ValueError) as error:
                _LOGGER.warning("%s was not fetched: %s", address, error)
    return path


def _hub_file(address: str) -> Path:
    """Fetches a model from the Hugging Face Hub; its JSON files land beside its weights."""
    parts = address.removeprefix("hf://").split("/")
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"A Hub address is hf://owner/name. Received: {address!r}.")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f'{address} needs the Hub\'s library: pip install "keras-vit[hub]".'
        ) from error
    repository = "/".join(parts)
    try:
        paths = [huggingface_hub.hf_hub_download(repository, name) for name in HUB_FILES]
    except huggingface_hub.errors.EntryNotFoundError as error:
        raise FileNotFoundError(
            f"{address} has no {' and '.join(HUB_FILES)} ({error}); only safetensors are read."
        ) from error
    except (huggingface_hub.errors.HfHubHTTPError, OSError) as error:
        raise OSError(
            f"{address} could not be fetched ({error}); download its {' and '.join(HUB_FILES)} "
            "into one folder and pass the path of the second."
        ) from error
    try:
        huggingface_hub.hf_hub_download(repository, PREPROCESSOR)
    except (huggingface_hub.errors.HfHubHTTPError, OSError) as error:
        _LOGGER.info("%s has no %s, or it was not fetched: %s", address, PREPROCESSOR, error)
    return Path(paths[-1])
