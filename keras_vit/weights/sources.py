"""Finds the local file that a user's `weights` means: a name, an address, a file or a folder."""

import functools
import logging
import os
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from keras_vit import environment
from keras_vit.weights.arrays import shard_places
from keras_vit.weights.catalog import resolve
from keras_vit.weights.checkpoint import SUFFIXES
from keras_vit.weights.download import (
    AGAIN,
    SHARD_INDEX,
    DamagedError,
    InterruptedTransferError,
    Session,
    cache_folder,
    cached_path,
    digest_of,
    fetch,
    printable,
    redact_url,
    source_of,
    verify,
)
from keras_vit.weights.torch_settings import SETTINGS_FILES

# What a folder or repository is looked through for, before any other file that can be read.
FOLDER_FILES = ("model.safetensors", f"model{SHARD_INDEX}", "model.keras")
Origin = Literal["cache", "mirror", "network"]
_OF_TORCH = (".safetensors", SHARD_INDEX)  # with settings beside them
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_LOGGER = logging.getLogger("keras_vit.weights")


def find(
    source: str | os.PathLike[str],
    *,
    variant: str | None = None,
    image_size: int | None = None,
    sha256: str | None = None,
) -> Path:
    """Returns the local file of weights, or the index of its shards, downloading it if need be.

    Args:
        source: a file, a folder that holds one, an http(s) URL, or on the Hugging Face Hub
            "hf://owner/name", "hf://owner/name@revision" or "hf://owner/name@revision/file", where
            a slash of the revision is written %2F. All files of a model come from one commit.
        variant: a key of `keras_vit.VARIANTS`, whose published names are sources too.
        image_size: side of the images in pixels, which a published name's file is chosen by.
        sha256: the SHA-256 of the file of weights, compared before anything is read from it; None
            for weights in shards, which are several files.

    Raises:
        FileNotFoundError: there is no such file, or the folder holds none.
        ValueError: no such name is published, the folder holds several files, or the file has
            another SHA-256.
        OSError: the file cannot be fetched, or is not what was published.
        ImportError: the Hub's library is not installed.
    """
    address, sha256 = os.fsdecode(source), checked_sha256(sha256)
    if re.match(r"https?://", address, re.IGNORECASE):
        return _url_file(address, sha256)
    if address.startswith("hf://"):
        return _hub_file(address, sha256)
    path = Path(address)
    may_be_name = isinstance(source, str) and not address.endswith(SUFFIXES)
    if variant is not None and may_be_name and "://" not in address:
        try:
            row = resolve(variant, address, image_size=image_size)
        except ValueError:
            if not path.exists():
                raise
        else:
            return fetch(row.url, sha256=sha256 or row.sha256)
    if path.is_dir():
        path = _folder_file(path)
    if not path.exists() and (variant is None or "://" in address):
        text = redact_url(address) if "://" in address else address
        raise FileNotFoundError(
            f"There is no file or folder {text!r}; a source is one of these, a URL or "
            "hf://owner/name. Published names belong to builders, as in keras_vit.ViTB16(weights="
            '"imagenet21k").'
        )
    check_sha256(path, sha256)
    return path


def resolve_origin(
    weights: str, variant: str, *, image_size: int | None = None, seconds: float = 4.0
) -> Origin:
    """Returns where the file of a published name would come from, without downloading it.

    A file that is here is not asked for anywhere. Otherwise a server is asked for its first byte.

    Raises:
        ConnectionError: the file cannot be reached; the text is the reason alone.
        ValueError: no published checkpoint has that name, or KERAS_VIT_MIRROR is no place.
    """
    url = resolve(variant, weights, image_size=image_size).url
    if cached_path(url).is_file():
        return "cache"
    source = source_of(url)
    if isinstance(source, Path):
        if not source.is_file():
            raise ConnectionError(f"there is no {source}")
        return "mirror"
    try:
        with Session() as session:
            session.open(source, {"Range": "bytes=0-0"}, timeout=seconds).close()
    except InterruptedTransferError as error:
        host = urllib.parse.urlsplit(source).netloc.rpartition("@")[2]
        raise ConnectionError(f"{printable(host)}: {error}") from None
    except FileNotFoundError as error:
        raise ConnectionError(str(error)) from None
    return "network" if source == url else "mirror"


def checked_sha256(sha256: str | None, *, name: str = "") -> str | None:
    """Returns a caller's SHA-256 in small letters; refuses what is none, or not of one file."""
    if sha256 is None:
        return None
    if not isinstance(sha256, str):
        kind = type(sha256).__name__
        raise TypeError(f"sha256 is a text of 64 hexadecimal digits, or None. Received: a {kind}.")
    if not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise ValueError(
            f"sha256 is 64 hexadecimal digits, as sha256sum prints them. Received: {sha256[:80]!r}."
        )
    if name.endswith(SHARD_INDEX):  # which says nothing of the bytes in shards
        raise ValueError(
            f"sha256 is of one file, and {name} names several: compare each with sha256sum and "
            "leave sha256 out, or save the weights as one file."
        )
    return sha256.lower()


def check_sha256(path: Path, sha256: str | None) -> None:
    """Compares a file with a caller's SHA-256; what is no file is left to its reader."""
    expected = checked_sha256(sha256, name=path.name)
    if expected and path.is_file() and (digest := digest_of(path)) != expected:
        raise ValueError(f"{path} has the SHA-256 {digest}, and {expected} was asked for: {AGAIN}.")


def hub_parts(address: str, *, suffixes: tuple[str, ...]) -> tuple[str, str | None, str | None]:
    """Returns the repository, and the revision and the file where a Hub address says them."""
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([^@/\s?#]+))?(?:/([^@\s?#]+))?", address)
    if match is None:
        raise ValueError(
            f"A Hub address is hf://owner/name. Received: {redact_url(address)!r}; after the name "
            "may come @revision, and then /file."
        )
    repository, revision, file = match.groups()
    if file is not None and (not file.endswith(suffixes) or ".." in file.split("/")):
        raise ValueError(
            f"A file on the Hub that holds weights ends in {', '.join(suffixes)}. "
            f"Received: {redact_url(address)!r}."
        )
    return repository, revision and urllib.parse.unquote(revision), file


def _folder_file(folder: Path) -> Path:
    entries = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    files = [name for name in FOLDER_FILES if name in entries]
    whole = [name for name in entries if not _SHARD.fullmatch(name)]
    files = files or [name for name in whole if name.endswith(SUFFIXES)]
    if len(files) == 1:
        return folder / files[0]
    if files:
        raise ValueError(
            f"The folder {str(folder)!r} holds several checkpoints ({', '.join(files)}); pass the "
            "path of one."
        )
    reason = f"put one there whose name ends in {', '.join(SUFFIXES)}"
    if parts := [name for name in entries if name not in whole or name.endswith(".index.json")]:
        reason = f"its weights are in parts ({parts[0]}) without {FOLDER_FILES[1]}; fetch it, or "
        reason += "save one file"
    raise FileNotFoundError(f"The folder {str(folder)!r} holds no checkpoint: {reason}.")


def _url_file(url: str, sha256: str | None) -> Path:
    checked_sha256(sha256, name=cached_path(url).name)
    path, parts = fetch(url, sha256=sha256), urllib.parse.urlsplit(url)
    folder = parts.path.rpartition("/")[0]
    _get_beside(
        path,
        lambda name: fetch(parts._replace(path=f"{folder}/{name}").geturl()),
        settings=SETTINGS_FILES if path.name.endswith(_OF_TORCH) else (),
    )
    return path


def _hub_file(address: str, sha256: str | None) -> Path:
    repository, commit, file = hub_parts(address, suffixes=SUFFIXES)
    checked_sha256(sha256, name=file or "")
    get = functools.partial(_fetch_from_hub, address, repository)
    if file is None:  # the small file first: it tells whether this is a model at all
        _, commit = get(SETTINGS_FILES[0], commit)
    errors: list[OSError] = []
    for name in (file,) if file else FOLDER_FILES:
        try:
            path, commit = get(name, commit, None if name.endswith(SHARD_INDEX) else sha256)
            break
        except OSError as error:
            errors.append(error)
    else:
        missing = FileNotFoundError(
            f"{address} has none of {', '.join(FOLDER_FILES)}; weights are read from "
            f"{', '.join(SUFFIXES)} files, one of them named as hf://owner/name/FILE."
        )
        # Without a network it is not known that a file is not there.
        others = [error for error in errors if file or not isinstance(error, FileNotFoundError)]
        raise [*others, missing][0]
    checked_sha256(sha256, name=name)
    _LOGGER.info("%s is commit %s.", address, commit)
    folder = name.rpartition("/")[0]
    # Of a run's model.keras the first of them, config.json, has the labels.
    settings = (
        SETTINGS_FILES if name.endswith(_OF_TORCH) else SETTINGS_FILES[: name.endswith(".keras")]
    )
    _get_beside(path, lambda name: get(f"{folder}/{name}".lstrip("/"), commit), settings=settings)
    return path


def _get_beside(path: Path, get: Callable[[str], object], *, settings: tuple[str, ...]) -> None:
    for name in sorted(set(shard_places(path).values())) if path.name.endswith(SHARD_INDEX) else ():
        get(name)
    for name in settings:
        try:
            get(name)
        except (OSError, DamagedError) as error:  # what some servers say of a file they have not
            _LOGGER.info("%s", error)


def _fetch_from_hub(
    address: str, repository: str, name: str, revision: str | None, sha256: str | None = None
) -> tuple[Path, str]:
    with environment.installed(f"{address} needs the library huggingface-hub", "huggingface-hub"):
        import huggingface_hub as hub
    try:
        path = Path(hub.hf_hub_download(repository, name, revision=revision))
    except (hub.errors.HfHubHTTPError, OSError, ValueError, hub.errors.EntryNotFoundError) as error:
        is_local = isinstance(error, hub.errors.LocalEntryNotFoundError)  # for lack of a network
        if isinstance(error, hub.errors.EntryNotFoundError) and not is_local:
            message = f"{address} has no {name}; check the name and the revision."
            raise FileNotFoundError(message) from None
        reason = printable(str(error).partition("\n")[0])
        raise OSError(
            f"{address} could not be fetched ({reason}); download its {name} and what is beside it "
            "into one folder, and pass the path of the file of weights."
        ) from None
    # The Hub's library keeps snapshots/<commit>/<name>, a link to blobs/<ETag>; a large file's ETag
    # is its SHA-256 ("Understand caching" in its documentation).
    commit = path.parents[name.count("/")].name
    blob = Path(path.readlink()).name if path.is_symlink() else ""
    host = urllib.parse.urlsplit(hub.constants.ENDPOINT).netloc.rpartition("@")[2]
    place = (f"hub+{host.replace(':', '_')}", *repository.split("/"), commit, *name.split("/"))
    stated = blob if re.fullmatch("[0-9a-f]{64}", blob) else ""
    try:
        verify(path, cache_folder().joinpath(*place), str(path), sha256=sha256, stated=stated)
    except DamagedError as error:
        raise ValueError(str(error)) from None
    return path, commit
