"""Compares exported files with their record, at any time after the export."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from keras_vit.exporting import artefacts, references, verification
from keras_vit.exporting.clean import messages, runners
from keras_vit.exporting.description import Description
from keras_vit.limits import FileError, read_json

SAVED_MODEL = "saved_model.pb"
_LARGEST_RECORD = 2**27  # bytes; a record holds a few answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found of one artefact.

    Attributes:
        format: one of `FORMATS`.
        path: the file, or the folder of a SavedModel.
        bytes: its size.
        is_whole: whether every file is as it was exported.
        change: how far the answers are from those in the record, over their spread; None where they
            were not asked for.
    """

    format: str
    path: Path
    bytes: int
    is_whole: bool
    change: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found of one version, the files that were written together.

    Attributes:
        folder: that of the version.
        made: when it was exported, and by which version; "" if nobody says it.
        verdicts: of each artefact.
        faults: a sentence for each fault.
        unasked: sentences on what could not be asked for its answers.
    """

    folder: Path
    made: str
    verdicts: tuple[Verdict, ...]
    faults: tuple[str, ...]
    unasked: tuple[str, ...]


def find_versions(path: Path) -> list[Path]:
    """Returns the version folders of an export, or the one that a path is in.

    Raises:
        FileNotFoundError: there is nothing exported.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no {str(path)!r}; check the path.")
    if path.is_file():
        inner = path.parent
        return [inner.parent if inner.name == "assets.extra" else inner]
    name = path.absolute().name  # that of "." too
    if record_file(path).is_file() or (path / SAVED_MODEL).is_file() or name.isdecimal():
        return [path]
    folders = [path / each for each in dict.fromkeys(("", *artefacts.FOLDERS.values()))]
    if name in artefacts.FOLDERS.values():
        folders = [path]
    versions = [
        child
        for folder in folders
        if folder.is_dir()
        for child in sorted(folder.iterdir(), key=lambda each: (len(each.name), each.name))
        if child.name.isdecimal() and child.is_dir()
    ]
    if not versions:
        raise FileNotFoundError(
            f"{str(path)!r} holds nothing that keras-vit export wrote; give its --out, one of the "
            "versions in it, or a file."
        )
    return versions


def record_file(folder: Path) -> Path:
    """Returns where the record of a version is; in a SavedModel the server looks past it."""
    inner = folder / "assets.extra" / verification.RECORD
    is_saved_model = (folder / SAVED_MODEL).is_file() or inner.is_file()
    return inner if is_saved_model else folder / verification.RECORD


def read_record(folder: Path) -> dict[str, Any]:
    """Reads the record of a version.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not as it was written.
    """
    file = record_file(folder)
    again = "export the model again"
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {verification.RECORD}, which says what its files are; {again}."
        )
    try:
        fields = read_json(file, limit=_LARGEST_RECORD, finite=False)
        is_whole = verification.is_whole(file.read_text(encoding="utf-8"))
    except FileError:
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"{str(file)!r} is not as it was written, so that it proves nothing; {again}."
        )
    names = [PurePosixPath(name) for name in fields["files"]]
    if any(name.is_absolute() or ".." in name.parts for name in names):
        raise ValueError(f"{str(file)!r} names files outside its folder; {again}.")
    return fields


def check(
    folder: Path,
    *,
    file: Path | None = None,
    quick: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Checked:
    """Compares the files of a version with its record, and then its answers.

    Args:
        folder: the version's.
        file: the one to look at, if it is not part of a SavedModel; None for all.
        quick: whether to compare the files alone.
        on_progress: called with (bytes read, bytes in all).
    """
    try:
        record = read_record(folder)
    except (OSError, ValueError) as error:
        return Checked(folder=folder, made="", verdicts=(), faults=(str(error),), unasked=())
    found, only = _scope(folder, record, file)
    wrong = dict(find_faults(folder, record, only=only, on_progress=on_progress))
    if only == []:
        wrong[str(file)] = f"{str(file)!r} was added after the export."
    faults, unasked, verdicts = list(wrong.values()), [], []
    for name, path in found:
        is_whole = not any(path == "." or each in files_of(path, record) for each in wrong)
        change = None
        try:
            if is_whole and not quick:
                change = _change(folder, name, path, record)
        except ImportError as error:
            unasked.append(str(error))
        except ValueError as error:
            faults.append(str(error))
        size = sum(int(record["files"][each]["bytes"]) for each in files_of(path, record))
        verdicts.append(
            Verdict(format=name, path=folder / path, bytes=size, is_whole=is_whole, change=change)
        )
    return Checked(
        folder=folder,
        made=f"{record['made']}, keras-vit {record['versions']['keras-vit']}",
        verdicts=tuple(verdicts),
        faults=tuple(faults),
        unasked=tuple(unasked),
    )


def find_faults(
    folder: Path,
    record: Mapping[str, Any],
    *,
    only: Sequence[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields the name of each file that is not as the record says, and a sentence on it.

    Args:
        folder: the version's.
        record: from `read_record`.
        only: the files to look at, none of which may have been added; None for all.
        on_progress: called with (bytes read, bytes in all).
    """
    recorded = {
        name: each for name, each in record["files"].items() if only is None or name in only
    }
    owners = {each["sha256"]: name for name, each in record["files"].items()}
    total, done = sum(each["bytes"] for each in recorded.values()), 0
    for name, expected in recorded.items():
        file = folder / name
        if not file.is_file():
            yield name, f"{str(file)!r} is missing."
        elif (size := file.stat().st_size) != expected["bytes"]:
            yield (
                name,
                f"{str(file)!r} has {size} bytes, and was exported with {expected['bytes']}.",
            )
        elif (found := verification.sha256(file)) != expected["sha256"]:
            other = owners.get(found)
            what = "other content than was exported" if other is None else f"the content of {other}"
            yield name, f"{str(file)!r} has {what}: its SHA-256 is {found}."
        done += expected["bytes"]
        if on_progress is not None:
            on_progress(done, total)
    if only is None:
        own = record_file(folder)
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            if (file.is_file() or file.is_symlink()) and file != own and name not in recorded:
                yield name, f"{str(file)!r} was added after the export."


def _scope(
    folder: Path, record: Mapping[str, Any], file: Path | None
) -> tuple[list[tuple[str, str]], list[str] | None]:
    """Returns the artefacts to check, and the files to compare; None for all."""
    found = list(record["artefacts"].items())
    is_part = any(path == "." for _, path in found)
    if file is None or is_part or file == record_file(folder):
        return found, None
    of_file = [each for each in found if folder / each[1] == file]
    return of_file, files_of(file.relative_to(folder).as_posix(), record)


def files_of(path: str, record: Mapping[str, Any]) -> list[str]:
    """Returns the files that an artefact consists of: all, or one and its external weights."""
    if path == ".":
        return list(record["files"])
    return [name for name in record["files"] if name == path or name == f"{path}.data"]


def _change(folder: Path, name: str, path: str, record: Mapping[str, Any]) -> float:
    """Returns how far an artefact's answers are from those in the record.

    Raises:
        ImportError: the runtime is not installed, or there are none to compare with.
        ValueError: they are further than they may be.
    """
    if name not in record["answers"]:
        raise ImportError(
            f"The record of {name} in {str(folder)!r} holds no answers, as the export was not "
            "verified."
        )
    runners.require(name)
    about = Description.from_dict(record["description"])
    request = messages.Request(
        format=name,
        path=(folder / path).absolute(),
        parameter_bytes=0,
        batch_sizes=(),
        labels=about.labels,
        cases=(),
        references=references.make(name, about, recorded=record["answers"][name]),
    )
    report = verification.run_checks(request)
    failed = [check for check in report.checks if not check.passed]
    if failed:
        raise ValueError(
            f"{str(folder / path)!r} does not answer as it did when it was exported: "
            f"{failed[0].name}: {failed[0].measured} (limit {failed[0].limit}); "
            f"it ran in {', '.join(f'{key} {value}' for key, value in report.runtime.items())}."
        )
    return max(float(check.measured) for check in report.checks)
