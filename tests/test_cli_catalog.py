"""Tests of `keras-vit list`."""

import json

import pytest

from keras_vit.cli import main
from keras_vit.weights import catalog


def test_list_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per checkpoint in 80 columns, zero classifiers marked."""
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[1 : 1 + len(catalog())]
    for line, row in zip(rows, catalog(), strict=True):
        assert line.split()[:2] == [row.variant, row.words[1]]
        assert ("*" in line) == (row.head == "zeros")
    assert max(map(len, lines)) <= 80
    assert any("all zeros" in line for line in lines)


def test_list_of_a_variant_has_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    """With --variant each row is followed by the address of its file."""
    assert main(["list", "--variant", "H/14"]) == 0
    shown = capsys.readouterr().out
    (row,) = (row for row in catalog() if row.variant == "H/14")
    assert row.url in shown
    assert "L/16" not in shown


def test_list_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object per row, with address, parameters and licence."""
    assert main(["list", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(o["name"], o["url"], o["parameters"], o["licence"]) for o in objects] == [
        (row.name, row.url, row.parameters, row.licence) for row in catalog()
    ]


def test_unpublished_and_unknown_variants(capsys: pytest.CaptureFixture[str]) -> None:
    """A variant without weights says so; one that does not exist is an error."""
    assert main(["list", "--variant", "G/14"]) == 0
    assert "No weights of G/14 are published" in capsys.readouterr().out
    assert main(["list", "--variant", "B/17"]) == 1
    assert "no variant 'B/17'" in capsys.readouterr().err
