"""Tests of `keras-vit list`."""

import json

import pytest

from keras_vit.cli import main
from keras_vit.weights import catalog, repositories
from keras_vit.weights.catalog import FAMILIES


def json_rows(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main(arguments) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_list_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per checkpoint in 80 columns, zero classifiers marked."""
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[1 : 1 + len(catalog())]
    for line, row in zip(rows, catalog(), strict=True):
        assert line.split()[:2] == [row.variant, row.words[1]]
        assert ("*" in line) == (row.head == "zeros")
    assert max(map(len, lines[: lines.index("")])) <= 80
    assert any("all zeros" in line for line in lines)


def test_list_of_a_variant_has_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    """With --variant each row is followed by the address of its file."""
    assert main(["list", "--variant", "H/14"]) == 0
    shown = capsys.readouterr().out
    (row,) = (row for row in catalog() if row.variant == "H/14")
    assert row.url in shown
    assert "L/16" not in shown
    assert "hf://" not in shown


def test_list_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object per row, with address, parameters and licence."""
    files, listed = len(catalog()), len(repositories())
    objects = json_rows(["list", "--json"], capsys)
    assert [(o["name"], o["url"], o["parameters"], o["licence"]) for o in objects[:files]] == [
        (row.name, row.url, row.parameters, row.licence) for row in catalog()
    ]
    assert [(o["address"], o["card"], o["forbids"]) for o in objects[files:]] == [
        (row.address, row.card, row.forbids) for row in repositories()
    ]
    assert len(objects) == files + listed
    assert {o["variant"] for o in json_rows(["list", "--variant", "B/8", "--json"], capsys)} == {
        "B/8"
    }
    assert {o["family"] for o in json_rows(["list", "--family", "pe", "--json"], capsys)} == {"pe"}


def test_unpublished_and_unknown_variants(capsys: pytest.CaptureFixture[str]) -> None:
    """A variant without weights says so; one that does not exist is an error."""
    assert main(["list", "--variant", "G/14"]) == 0
    assert "No weights of G/14 are published" in capsys.readouterr().out
    assert main(["list", "--variant", "B/17"]) == 1
    assert "no variant 'B/17'" in capsys.readouterr().err


def test_list_shows_the_repositories_by_family(capsys: pytest.CaptureFixture[str]) -> None:
    """After Google's files, in 100 columns; what is restricted has a mark, explained below."""
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = lines[lines.index("") + 1 :]
    assert max(map(len, lines)) <= 100
    assert [line.split(":")[0] for line in lines if line.split(":")[0] in FAMILIES] == [*FAMILIES]
    shown = [line for line in lines if line.startswith("hf://")]
    text = " ".join(" ".join(lines).split())
    for line, row in zip(shown, repositories(), strict=True):
        words = line.split()
        assert words[:2] == [row.address, str(row.image_size)]
        assert words[4] == row.licence
        mark = words[5] if len(words) > 5 and len(words[5]) == 1 else None
        assert (mark is not None) == bool(row.forbids)
        assert mark is None or f"{mark}: {row.forbids}" in text
        accuracy = "" if row.accuracy is None else str(round(row.accuracy, 2))
        assert accuracy in line
        assert line.endswith("z") == (row.accuracy_kind == "zero-shot")


@pytest.mark.parametrize("family", FAMILIES)
def test_list_of_a_family_has_its_sources(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --family each row has its data, notes and addresses, the family what it forbids."""
    assert main(["list", "--family", family]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if line.startswith("hf://")] == [
        row.address for row in repositories(family)
    ]
    text = " ".join(" ".join(lines).split())
    for row in repositories(family):
        said = (row.card, row.source, row.accuracy_source or "", row.data, row.note, row.forbids)
        assert [part for part in said if part not in text] == []


def test_a_wrong_family_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The right ones are named; with a variant it is wrong usage."""
    assert main(["list", "--family", "dino2"]) == 1
    assert capsys.readouterr().err.endswith("Did you mean 'dinov2'?\n")
    with pytest.raises(SystemExit) as stopped:
        main(["list", "--family", "vit", "--variant", "B/16"])
    assert stopped.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_the_help_teaches_load(capsys: pytest.CaptureFixture[str]) -> None:
    """Its address is one of the list, and its lines fit."""
    with pytest.raises(SystemExit):
        main(["list", "--help"])
    shown = capsys.readouterr().out
    (address,) = (row.address for row in repositories() if row.address.endswith("/dinov2-base"))
    assert f'keras_vit.load("{address}")' in shown
    assert max(map(len, shown.splitlines())) <= 100
