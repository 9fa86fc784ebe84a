"""Puts a run on the Hugging Face Hub, by the Hub's own library."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from keras_vit import environment
from keras_vit.publishing import card
from keras_vit.training import Provenance, Run, run
from keras_vit.training.run import PROVENANCE
from keras_vit.weights.download import printable
from keras_vit.weights.sources import FOLDER_FILES, hub_parts

# What shows images, or names them; it is published on demand alone.
_WITH_IMAGES = (run.SPLITS, run.SAMPLE, run.RECONSTRUCTIONS, run.REPORT)
_LICENSE = re.compile(r"^license: .*$(\nlicense_name: .*$)?", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A run on the Hub.

    Attributes:
        address: "hf://owner/name", which `keras_vit.load` takes.
        url: of its page.
        commit: the commit that was made.
        files: the names of the files in it.
    """

    address: str
    url: str
    commit: str
    files: tuple[str, ...]


def push(
    path: str | os.PathLike[str],
    address: str,
    *,
    private: bool = False,
    license: str | None = None,
    images: bool = False,
) -> Published:
    """Uploads the files of a run to a repository on the Hub, in one commit.

    The repository is made if there is none. config.json names the folder of the images without the
    path to it. Files that the repository has beside those of the run stay as they are.

    Example:
        >>> push("photos-run", "hf://owner/photos").address  # doctest: +SKIP
        'hf://owner/photos'

    Args:
        path: the run directory.
        address: "hf://owner/name".
        private: whether a repository that is made is private.
        license: what the model card says, such as "apache-2.0"; None to leave it as it is.
        images: whether the files that show images of yours, or name their files, go along: the
            report, the sample, the reconstructions and the list of the splits.

    Raises:
        FileNotFoundError: there is no such run.
        ImportError: the Hub's library is not installed.
        OSError: nobody is logged in, or the Hub cannot be reached or refuses.
        ValueError: `path` is no run, `address` no address, or the repository holds another model.
    """
    repository, revision, file = hub_parts(address, suffixes=())
    if revision is not None or file is not None:
        raise ValueError(f"A run is pushed to hf://owner/name. Received: {address!r}.")
    opened = Run.load(path)  # whole, and loadable
    hub = _library(address)
    if hub.get_token() is None:
        raise PermissionError(
            "Nobody is logged in to the Hugging Face Hub; run hf auth login, or set HF_TOKEN to a "
            "token that may write (https://huggingface.co/settings/tokens)."
        )
    contents = _contents(opened, address, license=license, images=images)
    operations = [
        hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in contents.items()
    ]
    api = hub.HfApi()
    try:
        url = str(api.create_repo(repository, private=private or None, exist_ok=True))
        _check_repository(api.list_repo_files(repository), address)
        message = f"Run of keras-vit {opened.config.get('versions', {}).get('keras_vit', '')}"
        made = api.create_commit(repository, operations, commit_message=message.strip())
    except (hub.errors.HfHubHTTPError, OSError, RuntimeError) as error:
        first = error.__cause__ if isinstance(error, RuntimeError) else error
        reason = printable(str(first or error).strip().partition("\n")[0])
        raise OSError(
            f"{address} could not be written ({reason}); check the name, the token's rights and "
            "the network, and push again."
        ) from None
    return Published(address=address, url=url, commit=made.oid, files=tuple(contents))


def _library(address: str) -> Any:
    with environment.installed(f"{address} needs the library huggingface-hub", "huggingface-hub"):
        import huggingface_hub
    return huggingface_hub


def _check_repository(names: list[str], address: str) -> None:
    """Raises a ValueError where `keras_vit.load` would find another model than the run's."""
    first = FOLDER_FILES[: FOLDER_FILES.index(run.MODEL)]
    others = [name for name in first if name in names]
    if others:
        raise ValueError(
            f"{address} holds another model ({others[0]}), which would be loaded in place of the "
            "run; choose another name, or delete it there."
        )


def _contents(
    opened: Run, address: str, *, license: str | None, images: bool
) -> dict[str, Path | bytes]:
    """Returns the files by their names in the repository: a path, or the bytes of what differs."""
    left_out = () if images else _WITH_IMAGES
    if not (opened.path / run.CARD).is_file():
        card.write_card(opened)
    contents: dict[str, Path | bytes] = {}
    for name in run.FILES:
        place = opened.path / name
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        if name not in left_out:
            contents |= {
                each.relative_to(opened.path).as_posix(): each for each in files if each.is_file()
            }
    config = {**opened.config, "data": {**opened.config["data"]}}
    config["data"]["source"] = card.data_name(opened)
    if PROVENANCE in config:  # commands name folders, too
        config[PROVENANCE] = Provenance.from_dict(config[PROVENANCE]).public().to_dict()
    if not images:  # names of files
        config["data"]["damaged"] = []
        config["result"] = {**opened.config.get("result", {}), "replaced": []}
    contents[run.CONFIG] = f"{json.dumps(config, indent=2)}\n".encode()
    text = (opened.path / run.CARD).read_text(encoding="utf-8").replace(card.ADDRESS, address)
    if license is not None:
        text = _LICENSE.sub(f"license: {license}", text, count=1)
    contents[run.CARD] = text.encode()
    return contents
