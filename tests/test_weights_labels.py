"""Tests of the names of classes that lie beside weights."""

from pathlib import Path
from typing import Any

import numpy as np
from published import MODERN, rewritten

import keras_vit
from keras_vit import preprocessing

WORDS = ["cat", "dog", "sea urchin", "owl", "fox", "hen", "crane"]
PAIRS = tuple((word, word) for word in WORDS)
NUMBERED = {str(place): word for place, word in enumerate(WORDS)}
MEANINGS = {"dog": "dog, Canis familiaris", "owl": 3, "stranger": "x"}
IMAGENET = preprocessing.class_labels(1000)
SYNONYMS = {str(i): f"{word.replace('_', ' ')}, other" for i, (_, word) in enumerate(IMAGENET)}
UNUSABLE: dict[str, Any] = {
    "placeholders": {str(place): f"LABEL_{place}" for place in range(7)},
    "none": None,
    "too few": {"0": "cat", "1": "dog"},
    "a gap": {str(place): "x" for place in range(1, 8)},
    "no text": {**NUMBERED, "3": ["owl"]},
    "nothing": {**NUMBERED, "3": " "},
    "a list of lists": [[]],
    "a number": 7,
}


def source(family: str, folder: Path, *, classes: int | None = None, **more: Any) -> Path:
    """A copy of a family's folder with more settings, and a classifier of another size."""

    def change(arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
        settings.update(more)
        if classes is not None:
            head = "classifier" if "classifier.bias" in arrays else "head"
            width = arrays[f"{head}.weight"].shape[1]
            arrays[f"{head}.weight"] = np.ones((classes, width), np.float32)
            arrays[f"{head}.bias"] = np.ones(classes, np.float32)

    return rewritten(family, folder, change)


def test_names_of_transformers(tmp_path: Path) -> None:
    """id2label, by the numbers of the classes, whatever their order; each name has one line."""
    for family in ("hf_vit_cls", "hf_deit_cls", "hf_dinov2_cls", "hf_beit"):
        folder = source(family, tmp_path, id2label=dict(reversed(NUMBERED.items())))
        assert keras_vit.weights.labels(folder) == PAIRS
    many = {**NUMBERED, "0": "a\nb\t c\u2028"}
    folder = source("hf_vit_cls", tmp_path / "lines", id2label=many)
    assert keras_vit.weights.labels(folder) == (("a b c", "a b c"), *PAIRS[1:])


def test_names_of_timm(tmp_path: Path) -> None:
    """label_names, described where label_descriptions has them; at the top or inside."""
    names: dict[str, Any] = {"label_names": WORDS, "label_descriptions": MEANINGS}
    expected = (PAIRS[0], ("dog", "dog, Canis familiaris"), *PAIRS[2:])
    inside = source("timm_deit", tmp_path / "inside", pretrained_cfg=dict(names))
    for folder in (inside, source("timm_deit", tmp_path, **names)):
        assert keras_vit.weights.labels(folder) == expected


def test_what_names_no_class_is_left_aside(tmp_path: Path) -> None:
    """The model loads as it does without; nobody says its classes then. Features are none."""
    assert keras_vit.weights.labels(MODERN / "hf_dinov2") is None
    for case, names in UNUSABLE.items():
        for family, field in (("hf_vit_cls", "id2label"), ("timm_deit", "label_names")):
            folder = source(family, tmp_path / case, **{field: names})
            assert keras_vit.weights.labels(folder) is None, (case, family)
            assert keras_vit.load(folder).config.classes == 7


def test_a_thousand_classes_are_imagenets(tmp_path: Path) -> None:
    """As decode_predictions takes them, where the source has no names of its own.

    transformers' files lack what ImageNet's folders are called; in another order they stay.
    """
    for family in ("hf_vit_cls", "timm_deit"):
        assert keras_vit.weights.labels(source(family, tmp_path, classes=1000)) == IMAGENET
    turned = {str(999 - i): SYNONYMS[str(i)] for i in range(1000)}
    fewer, named, other = (
        keras_vit.weights.labels(
            source("hf_vit_cls", tmp_path / str(place), classes=1000, id2label=names)
        )
        for place, names in enumerate((NUMBERED, SYNONYMS, turned))
    )
    # Names that do not fit are not replaced by others that are as likely wrong.
    assert fewer is None
    assert named == tuple((IMAGENET[i][0], SYNONYMS[str(i)]) for i in range(1000))
    assert other is not None
    assert other[0] == (turned["0"], turned["0"])
