"""Tests of `keras-vit list`."""

import cli_rig

from keras_vit.weights import catalog, repositories
from keras_vit.weights.catalog import FAMILIES, Repository


def listed(*flags: str) -> list[str]:
    return cli_rig.done("list", *flags).out.splitlines()


def test_list_shows_every_row() -> None:
    """One line per file in 80 columns, zero classifiers marked; then the families' in 100."""
    lines = listed()
    end = lines.index("")
    for line, row in zip(lines[1 : 1 + len(catalog())], catalog(), strict=True):
        assert line.split()[:2] == [row.variant, row.words[1]]
        assert ("*" in line) == (row.head == "zeros")
    assert max(map(len, lines[:end])) <= 80
    assert any("all zeros" in line for line in lines)
    lines = lines[end + 1 :]
    assert max(map(len, lines)) <= 100
    assert [line.split(":")[0] for line in lines if line.split(":")[0] in FAMILIES] == [*FAMILIES]
    shown = [line for line in lines if line.startswith("hf://")]
    text = " ".join(" ".join(lines).split())
    for line, repository in zip(shown, repositories(), strict=True):
        assert faults(line, repository, text) == [], line


def faults(line: str, row: Repository, text: str) -> list[str]:
    """What a line does not say of a repository; what is restricted has a mark, explained below."""
    words = line.split()
    mark = words[5] if len(words) > 5 and len(words[5]) == 1 else None
    checks = {
        "address and size": words[:2] == [row.address, str(row.image_size)],
        "licence": words[4] == row.licence,
        "mark": (mark is not None) == bool(row.restrictions),
        "its meaning": mark is None or f"{mark}: {row.restrictions}" in text,
        "accuracy": row.accuracy is None or str(round(row.accuracy, 2)) in line,
        "its kind": line.endswith("z") == (row.accuracy_kind == "zero-shot"),
    }
    return [name for name, is_right in checks.items() if not is_right]


def test_list_of_a_variant_has_its_files() -> None:
    """With --variant each row is followed by the address of its file; no files are told, too."""
    shown = "\n".join(listed("--variant", "H/14"))
    (row,) = (row for row in catalog() if row.variant == "H/14")
    assert row.url in shown
    assert "L/16" not in shown
    assert "hf://" not in shown
    assert "No weights of G/14 are published" in "\n".join(listed("--variant", "G/14"))


def test_list_for_machines() -> None:
    """--json prints one object per row, with address, parameters and licence."""
    objects, files = cli_rig.done("list", "--json").events, len(catalog())
    assert [(o["name"], o["url"], o["parameters"], o["licence"]) for o in objects[:files]] == [
        (row.name, row.url, row.parameters, row.licence) for row in catalog()
    ]
    assert [(o["address"], o["card"], o["restrictions"]) for o in objects[files:]] == [
        (row.address, row.card, row.restrictions) for row in repositories()
    ]
    for name, value in (("variant", "B/8"), ("family", "pe")):
        rows = cli_rig.done("list", f"--{name}", value, "--json").events
        assert {row[name] for row in rows} == {value}


def test_list_of_a_family_has_its_sources() -> None:
    """With --family each row has its data, notes and addresses, the family what it forbids."""
    for family in FAMILIES:
        lines = listed("--family", family)
        assert max(map(len, lines)) <= 100
        assert [line.split()[0] for line in lines if line.startswith("hf://")] == [
            row.address for row in repositories(family)
        ]
        text = " ".join(" ".join(lines).split())
        for row in repositories(family):
            said = (row.card, row.source, row.accuracy_source or "", row.data, row.note)
            assert [part for part in (*said, row.restrictions) if part not in text] == []


def test_the_help_teaches_load() -> None:
    """Its address is one of the list, and its lines fit."""
    shown = cli_rig.done("list", "--help").out
    (address,) = (row.address for row in repositories() if row.address.endswith("/dinov2-base"))
    assert f'keras_vit.load("{address}")' in shown
    assert max(map(len, shown.splitlines())) <= 100
