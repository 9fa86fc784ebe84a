"""Finds the file that a source or a `weights` argument means: on the disk, at a URL, on the Hub."""

import logging
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

from keras_vit.weights._checksums import check_sha256, checked_sha256
from keras_vit.weights._connection import plain, shown
from keras_vit.weights.catalog import resolve
from keras_vit.weights.checkpoint import SUFFIXES
from keras_vit.weights.download import cached_path, fetch, verify
from keras_vit.weights.torch_settings import SETTINGS_FILES

HUB_WEIGHTS = "model.safetensors"
# What a folder is looked through for, before any other file that can be read.
FOLDER_FILES = ("model.safetensors", "model.keras")

_LOGGER = logging.getLogger("keras_vit.weights")


def find(source: str | os.PathLike[str], *, sha256: str | None = None) -> Path:
    """Returns the local file that a source means, downloading it if need be.

    Args:
        source: a file, a folder that holds one, an http(s) URL, or on the Hugging Face Hub
            "hf://owner/name", "hf://owner/name@revision" or "hf://owner/name@revision/file", where
            a slash of the revision is written %2F. All files of a model come from one commit.
        sha256: the SHA-256 of the file of weights, compared before anything is read from it.

    Raises:
        FileNotFoundError: there is no such file, or the folder holds none.
        ValueError: the folder holds several, or the file has another SHA-256.
        OSError: the file cannot be fetched, or is not what was published.
        ImportError: the Hub's library is not installed.
    """
    address, sha256 = os.fsdecode(source), checked_sha256(sha256)
    if re.match(r"https?://", address, re.IGNORECASE):
        return _url_file(address, sha256)
    if address.startswith("hf://"):
        return _hub_file(address, sha256)
    path = Path(address)
    if path.is_dir():
        path = _folder_file(path)
    if not path.exists():
        said = shown(address) if "://" in address else address
        raise FileNotFoundError(
            f"There is no file or folder {said!r}; a source is one of these, a URL or "
            "hf://owner/name. Published names belong to builders, as in keras_vit.ViTB16(weights="
            '"imagenet21k").'
        )
    return _compared(path, sha256)


def locate(
    weights: str | os.PathLike[str],
    variant: str,
    *,
    image_size: int | None = None,
    sha256: str | None = None,
) -> Path:
    """Returns the local file for a builder's `weights`, downloading it if need be.

    Args:
        weights: what `find` takes, or a name that `keras_vit.weights.resolve` knows.
        variant: a key of `keras_vit.VARIANTS`, to which a name belongs.
        image_size: side of the images in pixels, which a name's file is chosen by.
        sha256: as in `find`.

    Raises:
        ValueError: no published checkpoint has that name, or the file has another SHA-256.
        OSError: the file cannot be fetched, or is not what was published.
        ImportError: the Hub's library is not installed.
    """
    sha256 = checked_sha256(sha256)
    if not isinstance(weights, str) and not Path(weights).is_dir():
        return _compared(Path(weights), sha256)
    if not isinstance(weights, str) or "://" in weights:
        return find(weights, sha256=sha256)
    if weights.endswith(SUFFIXES):
        return _compared(Path(weights), sha256)
    try:
        row = resolve(variant, weights, image_size=image_size)
    except ValueError:
        if Path(weights).exists():
            return find(weights, sha256=sha256)
        raise
    return fetch(row.url, sha256=sha256 or row.sha256)


def _compared(path: Path, sha256: str | None) -> Path:
    check_sha256(path, sha256)
    return path


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


def _url_file(url: str, sha256: str | None) -> Path:
    """Fetches a file; a PyTorch library's with the settings that stand beside it."""
    path = fetch(url, sha256=sha256)
    if path.name.endswith(".safetensors"):
        for name in SETTINGS_FILES:
            beside = urllib.parse.urlsplit(url)
            folder = beside.path.rsplit("/", 1)[0]
            address = urllib.parse.urlunsplit(beside._replace(path=f"{folder}/{name}"))
            try:
                fetch(address, progress=False)
            except FileNotFoundError:
                _LOGGER.info("There is no %s.", shown(address))
            except (OSError, ValueError) as error:
                if cached_path(address).exists():  # it would be read, and is not what it was
                    raise
                _LOGGER.warning("%s was not fetched: %s", shown(address), error)
    return path


def _hub_file(address: str, sha256: str | None) -> Path:
    """Fetches a model from the Hugging Face Hub, all files of one commit; settings land beside."""
    repository, revision, file = _hub_parts(address)
    weights = file or HUB_WEIGHTS
    folder = weights.rpartition("/")[0]
    beside = [f"{folder}/{name}".lstrip("/") for name in SETTINGS_FILES]
    beside = beside if weights.endswith(".safetensors") else []
    commit = revision
    if file is None:  # the small file first: it tells whether this is a model at all
        _, commit = _hub_download(address, repository, beside.pop(0), revision=commit)
    path, commit = _hub_download(address, repository, weights, revision=commit, sha256=sha256)
    _LOGGER.info("%s is commit %s.", address, commit)
    for name in beside:
        try:
            _hub_download(address, repository, name, revision=commit)
        except OSError as error:
            _LOGGER.info("%s", error)
    return path


def _hub_parts(address: str) -> tuple[str, str | None, str | None]:
    """Returns the repository, and the revision and the file where the address says them."""
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([^@/\s?#]+))?(?:/([^@\s?#]+))?", address)
    if found is None:
        raise ValueError(
            f"A Hub address is hf://owner/name. Received: {shown(address)!r}; after the name may "
            "come @revision, and then /file."
        )
    repository, revision, file = found.groups()
    if file is not None and (not file.endswith(SUFFIXES) or ".." in file.split("/")):
        raise ValueError(
            f"A file on the Hub that holds weights ends in {', '.join(SUFFIXES)}. "
            f"Received: {shown(address)!r}."
        )
    return repository, revision and urllib.parse.unquote(revision), file


def _hub_download(
    address: str,
    repository: str,
    name: str,
    *,
    revision: str | None,
    sha256: str | None = None,
) -> tuple[Path, str]:
    """Returns the local copy of one file of a repository, verified, and its commit.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it could not be fetched.
        ValueError: it is not what the Hub, an earlier use or the caller says.
    """
    hub = _hub_library(address)
    try:
        path = Path(hub.hf_hub_download(repository, name, revision=revision))
    except (hub.errors.HfHubHTTPError, OSError, ValueError, hub.errors.EntryNotFoundError) as error:
        is_local = isinstance(error, hub.errors.LocalEntryNotFoundError)  # for lack of a network
        if isinstance(error, hub.errors.EntryNotFoundError) and not is_local:
            raise FileNotFoundError(
                f"{address} has no {name}; weights are read from {', '.join(SUFFIXES)} files."
            ) from None
        reason = plain(str(error).partition("\n")[0])
        raise OSError(
            f"{address} could not be fetched ({reason}); download its {name} and what is beside it "
            "into one folder, and pass the path of the file of weights."
        ) from None
    # The Hub's library keeps snapshots/<commit>/<name>, a link to blobs/<ETag>; a large file's ETag
    # is its SHA-256 ("Understand caching" in its documentation).
    commit = path.parents[name.count("/")].name
    link = Path(path.readlink()) if path.is_symlink() else path
    is_sha256 = link.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", link.name)
    host = urllib.parse.urlsplit(hub.constants.ENDPOINT).netloc.rpartition("@")[2]
    verify(
        path,
        place=(f"hub+{host.replace(':', '_')}", *repository.split("/"), commit, *name.split("/")),
        sha256=sha256,
        stated=link.name if is_sha256 else "",
    )
    return path, commit


def _hub_library(address: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f'{address} needs the Hub\'s library: pip install "keras-vit[hub]".'
        ) from error
    return huggingface_hub
