"""The record beside exported files: written at the export, compared with them at any time later."""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from keras_vit import __version__
from keras_vit.exporting import formats
from keras_vit.exporting.formats import FORMATS, RECORD
from keras_vit.limits import FileError, check_file, parse_json

if TYPE_CHECKING:
    from keras_vit.exporting.clean.agreement import Check
    from keras_vit.exporting.clean.checker import Report
    from keras_vit.exporting.rebuild import Description

SELF = "record_sha256"
_NO_SHA256 = 64 * "0"
_PACKAGES = {"tensorflow", "keras", "numpy", "tf2onnx", "ai-edge-litert"}.union(
    *(row.packages for row in FORMATS.values())
)
_LARGEST_RECORD = 2**27  # bytes
_EXTRAS = sorted({row.extras for row in FORMATS.values()} - {""})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artefact:
    """One exported artefact.

    Attributes:
        format: one of `FORMATS`.
        path: the version directory of a SavedModel, otherwise the file.
        bytes: its size on the disk.
        checks: the results of the checks.
        float32_layers: kernels that stayed float32, as the file with all in int8 failed.
    """

    format: str
    path: Path
    bytes: int
    checks: "tuple[Check, ...]" = dataclasses.field(repr=False)  # in a notebook, many lines
    float32_layers: tuple[str, ...] = ()


def write_record(
    folder: Path,
    extras: str,
    about: "Description",
    artefacts: Sequence[Artefact],
    reports: "Mapping[str, Report]",
    *,
    images: str,
) -> None:
    """Writes the record of a version's folder, into its `extras`.

    `reports` are those of the formats that were verified, on `images`.
    """
    versions = {"keras-vit": __version__}
    for package in sorted(_PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    for report in reports.values():
        versions |= report.runtime
    record = {
        "verified": bool(reports),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "images": images,
        "description": about.to_dict(),
        "artefacts": {each.format: str(each.path.relative_to(folder)) for each in artefacts},
        "float32": {
            each.format: list(each.float32_layers) for each in artefacts if each.float32_layers
        },
        "files": {
            str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": sha256(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        },
        "checks": {each.format: list(map(dataclasses.asdict, each.checks)) for each in artefacts},
        SELF: _NO_SHA256,
    }
    text = json.dumps(record, indent=1) + "\n"
    text = text.replace(_NO_SHA256, _text_sha256(text))
    (folder / extras / RECORD).write_text(text, encoding="utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found of one artefact.

    Attributes:
        format: one of `FORMATS`.
        path: the file, or the folder of a SavedModel.
        bytes: its size.
        is_whole: whether every file is as it was exported.
    """

    format: str
    path: Path
    bytes: int
    is_whole: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found of one version, the files that were written together.

    Attributes:
        folder: that of the version.
        made: when it was exported, and by which version; "" if unknown.
        verdicts: of each artefact.
        faults: a sentence for each fault.
    """

    folder: Path
    made: str
    verdicts: tuple[Verdict, ...]
    faults: tuple[str, ...]


def find_versions(path: Path) -> list[Path]:
    """Returns the version folders of an export, or the one that a path is in.

    Raises:
        FileNotFoundError: there is nothing exported.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no {str(path)!r}; check the path.")
    if path.is_file():
        inner = path.parent
        return [inner.parent if inner.name in _EXTRAS else inner]
    if formats.is_version(path) or path.absolute().name.isdecimal():
        return [path]
    versions = formats.version_folders(path)
    if not versions:
        raise FileNotFoundError(
            f"{str(path)!r} holds nothing that keras-vit export wrote; give its --out, one of the "
            "versions in it, or a file."
        )
    return versions


def record_file(folder: Path) -> Path:
    """Returns where the record of a version is; in a SavedModel the server looks past it."""
    places = [folder / extras / RECORD for extras in _EXTRAS]
    return next((place for place in places if place.is_file()), folder / RECORD)


def read_record(folder: Path) -> dict[str, Any]:
    """Reads the record of a version.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not as it was written.
    """
    file, again = record_file(folder), "export the model again"
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {RECORD}, which says what its files are; {again}."
        )
    is_whole = False
    with contextlib.suppress(FileError):
        check_file(file)
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_RECORD + 1)
        fields = parse_json(content, file, limit=_LARGEST_RECORD, finite=False)
        text = content.decode()
        if found := re.search(rf'"{SELF}": "([0-9a-f]{{64}})"', text):
            start, end = found.span(1)
            # It holds the SHA-256 of itself with zeros for it.
            is_whole = _text_sha256(text[:start] + _NO_SHA256 + text[end:]) == found[1]
    if not is_whole:
        raise ValueError(
            f"{str(file)!r} is not as it was written, so that it proves nothing; {again}."
        )
    names = [PurePosixPath(name) for name in fields["files"]]
    if any(name.is_absolute() or ".." in name.parts for name in names):
        raise ValueError(f"{str(file)!r} names files outside its folder; {again}.")
    return fields


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def compare(
    folder: Path, *, file: Path | None = None, on_progress: Callable[[int, int], None] | None = None
) -> Checked:
    """Compares the files of a version with its record.

    Args:
        folder: the version's.
        file: the one to look at, if it is not part of a SavedModel; None for all.
        on_progress: called with (bytes read, bytes in all).
    """
    try:
        record = read_record(folder)
    except (OSError, ValueError) as error:
        return Checked(folder=folder, made="", verdicts=(), faults=(str(error),))
    found, only = list(record["artefacts"].items()), None
    is_part = any(path == "." for _, path in found)
    if not (file is None or is_part or file == record_file(folder)):
        only = files_of(file.relative_to(folder).as_posix(), record)
        found = [(name, path) for name, path in found if folder / path == file]
    wrong = dict(find_faults(folder, record, only=only, on_progress=on_progress))
    if only == []:
        wrong[str(file)] = f"{str(file)!r} was added after the export."
    verdicts = []
    for name, path in found:
        is_whole = not any(path == "." or each in files_of(path, record) for each in wrong)
        size = sum(int(record["files"][each]["bytes"]) for each in files_of(path, record))
        verdicts.append(Verdict(format=name, path=folder / path, bytes=size, is_whole=is_whole))
    return Checked(
        folder=folder,
        made=f"{record['made']}, keras-vit {record['versions']['keras-vit']}",
        verdicts=tuple(verdicts),
        faults=tuple(wrong.values()),
    )


def find_faults(
    folder: Path,
    record: Mapping[str, Any],
    *,
    only: Sequence[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields the name of each file that is not as the record says, and a sentence on it.

    Where `only` names the files to look at, none is looked for that was added. `on_progress` is
    called with (bytes read, bytes in all).
    """
    files = record["files"]
    recorded = {name: files[name] for name in files if only is None or name in only}
    total, done = sum(each["bytes"] for each in recorded.values()), 0
    for name, expected in recorded.items():
        file = folder / name
        if not file.is_file():
            yield name, f"{str(file)!r} is missing."
        elif (size := file.stat().st_size) != (was := expected["bytes"]):
            yield name, f"{str(file)!r} has {size} bytes, and was exported with {was}."
        elif (found := sha256(file)) != expected["sha256"]:
            text = f"has other content than was exported: its SHA-256 is {found}."
            yield name, f"{str(file)!r} {text}"
        done += expected["bytes"]
        if on_progress is not None:
            on_progress(done, total)
    if only is None:
        own = record_file(folder)
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            if (file.is_file() or file.is_symlink()) and file != own and name not in recorded:
                yield name, f"{str(file)!r} was added after the export."


def files_of(path: str, record: Mapping[str, Any]) -> list[str]:
    """Returns the files that an artefact consists of: all, or one and its external weights."""
    if path == ".":
        return list(record["files"])
    return [name for name in record["files"] if name == path or name == f"{path}.data"]
