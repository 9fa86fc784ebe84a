"""Tests of what the package depends on: the licences, and the versions that are tested."""

import functools
import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# What lets the whole be used and passed on in products, beside the Apache licence of the package.
# MPL-2.0 binds changes to its own files alone, and none is changed or shipped here.
PERMITTED = re.compile(
    r"\b(apache|mit|bsd|0bsd|isc|psf|python software foundation|mpl-2\.0|mozilla public license 2|"
    r"zlib|cnri-python|cc0)",
    re.IGNORECASE,
)
REFUSED = re.compile(r"\b(a?gpl|lgpl|gnu|sspl|busl|non-?commercial|proprietary)", re.IGNORECASE)
# Packages whose metadata says nothing, with what their repository's LICENSE file is.
SILENT = {"namex": "Apache-2.0"}


@functools.cache
def closure() -> dict[str, frozenset[str]]:
    """Returns every package that the package and its extras bring, with the extras asked of it."""
    extras_by_name: dict[str, frozenset[str]] = {}
    waiting = [("keras-vision-transformer", frozenset({"all", "keras-cv"}))]
    while waiting:
        name, extras = waiting.pop()
        if name in extras_by_name and extras <= extras_by_name[name]:
            continue
        extras_by_name[name] = extras_by_name.get(name, frozenset()) | extras
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(
                marker.evaluate({"extra": e}) for e in (*extras_by_name[name], "")
            ):
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return extras_by_name


def license_of(name: str) -> str:
    """Returns what a package says of its licence: the expression, the text or classifiers."""
    data = importlib.metadata.metadata(name)
    classifiers = [c for c in data.get_all("Classifier") or () if c.startswith("License ::")]
    said = "".join(data.get_all("License-Expression") or ()) or " ".join(classifiers)
    return said or "".join(data.get_all("License") or ()) or SILENT.get(name, "")


def test_every_dependency_may_be_used_and_passed_on() -> None:
    licenses = {name: license_of(name) for name in closure()}
    doubtful = {
        name: said[:80]
        for name, said in licenses.items()
        if REFUSED.search(said) or not PERMITTED.search(said)
    }
    assert doubtful == {}
    assert len(licenses) > 50


def test_the_tested_versions_are_written_down_and_fit_what_is_asked() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    missing = set(closure()) - set(pins) - {"keras-vision-transformer", "setuptools", "wheel"}
    assert not missing
    for text in importlib.metadata.requires("keras-vision-transformer") or ():
        needed = Requirement(text)
        name = canonicalize_name(needed.name)
        if name in pins:
            assert needed.specifier.contains(pins[name], prereleases=True), text
