"""Finds the local file that a source means: a file, a folder, an address or a published name."""

import functools
import logging
import os
import queue
import re
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from keras_vit.weights.arrays import shard_places
from keras_vit.weights.catalog import resolve
from keras_vit.weights.checkpoint import SUFFIXES
from keras_vit.weights.checksums import SHARD_INDEX, check_one_file, check_sha256, checked_sha256
from keras_vit.weights.connection import InterruptedTransferError, Pace, open_url, plain, shown
from keras_vit.weights.download import (
    cached_path,
    fetch,
    fetch_from_hub,
    hub_parts,
    source_of,
)
from keras_vit.weights.torch_settings import SETTINGS_FILES

# What a folder or repository is looked through for, before any other file that can be read.
FOLDER_FILES = ("model.safetensors", f"model{SHARD_INDEX}", "model.keras")
_OF_TORCH = (".safetensors", SHARD_INDEX)  # with settings beside them
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_LOGGER = logging.getLogger("keras_vit.weights")


def find(source: str | os.PathLike[str], *, sha256: str | None = None) -> Path:
    """Returns the local file that a source means, downloading it if need be.

    Args:
        source: a file, a folder that holds one, an http(s) URL, or on the Hugging Face Hub
            "hf://owner/name", "hf://owner/name@revision" or "hf://owner/name@revision/file", where
            a slash of the revision is written %2F. All files of a model come from one commit.
        sha256: the SHA-256 of the file of weights, compared before anything is read from it; None
            for weights in shards, which are several files.

    Returns:
        The file of weights, or the index of its shards.

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
        text = shown(address) if "://" in address else address
        raise FileNotFoundError(
            f"There is no file or folder {text!r}; a source is one of these, a URL or "
            "hf://owner/name. Published names belong to builders, as in keras_vit.ViTB16(weights="
            '"imagenet21k").'
        )
    return _check_file(path, sha256)


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
        return _check_file(Path(weights), sha256)
    if not isinstance(weights, str) or "://" in weights:
        return find(weights, sha256=sha256)
    if weights.endswith(SUFFIXES):
        return _check_file(Path(weights), sha256)
    try:
        row = resolve(variant, weights, image_size=image_size)
    except ValueError:
        if Path(weights).exists():
            return find(weights, sha256=sha256)
        raise
    return fetch(row.url, sha256=sha256 or row.sha256)


REACH_SECONDS = 4.0
# Where the file of published weights would come from.
Place = Literal["cache", "mirror", "network"]


def reach(
    weights: str,
    variant: str,
    *,
    image_size: int | None = None,
    seconds: float = REACH_SECONDS,
) -> Place:
    """Returns where the file of a published name would come from, without downloading it.

    A file that is here is not asked for anywhere. Otherwise a server is asked for its first byte.

    Args:
        weights: a name that `keras_vit.weights.resolve` knows.
        variant: a key of `keras_vit.VARIANTS`, to which it belongs.
        image_size: as in `locate`.
        seconds: how long to wait for an answer.

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
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    # A thread that nobody waits for: to look up a host's address may take half a minute.
    threading.Thread(
        target=lambda: answers.put(_refusal(source, seconds)), name="keras_vit-reach", daemon=True
    ).start()
    try:
        refusal = answers.get(timeout=seconds)
    except queue.Empty:
        host = urllib.parse.urlsplit(source).netloc.rpartition("@")[2]
        refusal = f"{plain(host)}: no answer within {seconds:g} seconds"
    if refusal:
        raise ConnectionError(refusal)
    return "network" if source == url else "mirror"


def _refusal(url: str, seconds: float) -> str:
    """Asks for the first byte of a file; returns why it does not come, "" if it does."""
    pace, end = Pace(window=seconds, least=1), "_"  # the advice, which is taken off again
    try:
        with pace.watching():
            response, _ = open_url(
                url, {"Range": "bytes=0-0"}, advice=end, timeout=seconds, pace=pace
            )
            response.close()
    except InterruptedTransferError as error:
        host = urllib.parse.urlsplit(url).netloc.rpartition("@")[2]
        reason = re.sub(r"^\[Errno -?[0-9]+\] ", "", str(error))
        return f"{plain(host)}: {reason}"
    except (OSError, ValueError) as error:
        return str(error).removesuffix(f": {end}.").removesuffix(f": check the name, or {end}.")
    return ""


def _check_file(path: Path, sha256: str | None) -> Path:
    check_sha256(path, sha256)
    return path


def _folder_file(folder: Path) -> Path:
    """Returns the one checkpoint of a folder, or the index of its shards."""
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
    parts = [name for name in entries if name not in whole or name.endswith(".index.json")]
    reason = (
        f"its weights are in parts ({parts[0]}) without {FOLDER_FILES[1]}; fetch it, or save one"
        " file"
        if parts
        else (f"put one there whose name ends in {', '.join(SUFFIXES)}")
    )
    raise FileNotFoundError(f"The folder {str(folder)!r} holds no checkpoint: {reason}.")


def _url_file(url: str, sha256: str | None) -> Path:
    """Fetches a file with its shards; a PyTorch library's with the settings beside it."""
    check_one_file(cached_path(url).name, sha256)
    path = fetch(url, sha256=sha256)
    for name in _shards(path):
        fetch(_beside(url, name))
    for name in SETTINGS_FILES if path.name.endswith(_OF_TORCH) else ():
        address = _beside(url, name)
        try:
            fetch(address, progress=False)
        except FileNotFoundError:
            _LOGGER.info("There is no %s.", shown(address))
        except (OSError, ValueError) as error:
            if cached_path(address).exists():  # it would be read, and is not what it was
                raise
            _LOGGER.warning("%s was not fetched: %s", shown(address), error)
    return path


def _beside(url: str, name: str) -> str:
    """Returns the URL of another file of the same folder."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{name}"))


def _shards(path: Path) -> list[str]:
    """Returns the names of the files that an index names, none for another file."""
    return sorted(set(shard_places(path).values())) if path.name.endswith(SHARD_INDEX) else []


def _hub_file(address: str, sha256: str | None) -> Path:
    """Fetches a model from the Hugging Face Hub, all files of one commit; settings land beside."""
    repository, revision, file = hub_parts(address, suffixes=SUFFIXES)
    check_one_file(file or "", sha256)
    weights = file or FOLDER_FILES[0]
    folder = weights.rpartition("/")[0]
    get = functools.partial(fetch_from_hub, address, repository)
    beside = [f"{folder}/{name}".lstrip("/") for name in SETTINGS_FILES]
    # Of a run's model.keras the first of them, config.json, has the labels.
    beside = beside if weights.endswith(_OF_TORCH) else beside[: weights.endswith(".keras")]
    commit = revision
    if file is None:  # the small file first: it tells whether this is a model at all
        _, commit = get(beside.pop(0), revision=commit)
        path, commit = _hub_weights(address, get, commit, sha256)
        beside = beside if path.name.endswith(_OF_TORCH) else []
    else:
        path, commit = get(file, revision=commit, sha256=sha256)
    _LOGGER.info("%s is commit %s.", address, commit)
    for name in _shards(path):
        get(f"{folder}/{name}".lstrip("/"), revision=commit)
    for name in beside:
        try:
            get(name, revision=commit)
        except OSError as error:
            _LOGGER.info("%s", error)
    return path


def _hub_weights(
    address: str, get: Callable[..., tuple[Path, str]], commit: str | None, sha256: str | None
) -> tuple[Path, str]:
    """Returns a repository's file of weights, or the index of its shards, and the commit."""
    errors: list[OSError] = []
    for name in FOLDER_FILES:
        is_index = name.endswith(SHARD_INDEX)
        try:
            found = get(name, revision=commit, **({} if is_index else {"sha256": sha256}))
        except OSError as error:
            errors.append(error)
            continue
        if is_index:
            check_one_file(name, sha256)
        return found
    for failure in errors:  # without a network nobody says that a file is not there
        if not isinstance(failure, FileNotFoundError):
            raise failure
    raise FileNotFoundError(
        f"{address} has none of {', '.join(FOLDER_FILES)}; weights are read from "
        f"{', '.join(SUFFIXES)} files, one of them named as hf://owner/name/FILE."
    )
