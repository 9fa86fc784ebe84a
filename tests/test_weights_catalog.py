"""The catalogue: every row complete and of the right size, every short name to the right file."""

import json
import re

import published
import pytest
from test_variants import PARAMETERS

from keras_vit import variants
from keras_vit.weights.catalog import augreg_row, catalog, resolve

# "resolved": variant, weights, image_size, the row's name; "unknown": a name that is not there, of
# a variant, and what the sentence says.
NAMES = json.loads((published.GOLDEN / "resolved.json").read_text())

# image_size -> size of the file, where 224 and 384 exist.
SIZES = {None: 224, 32: 224, 224: 224, 303: 224, 304: 384, 384: 384, 1024: 384}

PRETRAINED = "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0"
TUNED = f"{PRETRAINED}--imagenet2012-steps_20k-lr_0.01-res_224"

# A part of a file's name, one that the sweep does not have there, and what the sentence says.
MISNAMED = [
    (PRETRAINED, "B_16", "M_16", "model 'M_16'"),
    (PRETRAINED, "i21k", "jft", "data 'jft'"),
    (TUNED, "imagenet2012-steps_20k", "flowers-steps_2k", "fine-tuning data 'flowers'"),
    *(
        (TUNED, old, new, "is named like")
        for old, new in (
            *(("300ep", "7ep"), ("lr_0.001", "lr_0.01"), ("none", "light2"), ("wd_0.1", "wd_0.2")),
            *(("do_0.0-sd_0.0", "do_0.2-sd_0.2"), ("sd_0.0", "sd_0.1"), ("res_224", "res_448")),
            *(("sd_0.0", "sd_0.0.npz"), ("steps_20k", "steps_5k"), ("lr_0.01-", "lr_0.1-")),
            (TUNED, "--"),
        )
    ),
]


def test_rows_are_complete() -> None:
    """Every row has a variant, a licence, a source, a paper, a URL and a count of parameters."""
    source = "https://github.com/google-research/vision_transformer"
    url = re.compile(r"https://storage\.googleapis\.com/vit_models/[\w%/.-]+\.npz")
    wrong = [
        row.name
        for row in catalog()
        if row.variant not in variants.VARIANTS
        or row.licence != "Apache-2.0"
        or not row.source.startswith(source)
        or not row.paper.startswith("https://arxiv.org/abs/")
        or url.fullmatch(row.url) is None
        or (row.accuracy is None) != (row.accuracy_source is None)
        or (row.head == "zeros") != (row.family == "original" and row.classes == 21843)
    ]
    assert not wrong


def test_parameters_follow_from_the_original_counts() -> None:
    """The original's own totals, plus what head and positions change, give the row's."""
    counts = {}
    for row in catalog():
        variant = variants.VARIANTS[row.variant]
        width, stride = variant.hidden_dim, variant.stride
        positions = (row.image_size // stride) ** 2 - (224 // stride) ** 2
        counts[row.name] = PARAMETERS[row.variant] + positions * width
        counts[row.name] += (row.classes - 1000) * (width + 1)
        if row.representation_dim is not None:
            counts[row.name] += (width + 1) * row.representation_dim
    assert {row.name: row.parameters for row in catalog()} == counts


def fits_size(size: str, parameters: int, *, copies: int = 1) -> bool:
    """Whether a printed size is that of float32 parameters, plus 0.1 % and 128 KiB at most."""
    figure, unit = size.split()
    place = 10.0 ** -len(figure.partition(".")[2]) / 2
    scale = {"MiB": 2**20, "GiB": 2**30}[unit]
    least, most = (float(figure) - place) * scale, (float(figure) + place) * scale
    nominal = 4 * parameters * copies
    return nominal <= most and least <= nominal * 1.001 + copies * 2**17


def test_published_sizes_agree() -> None:
    """The file sizes that Google prints are those of the rows' parameters: heads are as stated."""
    wrong = []
    for row in [row for row in catalog() if row.published_size]:
        copies = 3 if row.name == "sam/ViT-S_16" else 1  # with the optimizer's two moments
        if not fits_size(row.published_size or "", row.parameters, copies=copies):
            wrong.append(row.name)
    assert not wrong
    # A missing or further representation layer, or another classifier, would be seen.
    parameters = resolve("B/16", "original/imagenet21k").parameters
    for others in (-768 * 769, 768 * 769, -20843 * 769):
        assert not fits_size("393.69 MiB", parameters + others)


def test_every_name_finds_its_row() -> None:
    """A row's own whatever the image size; the short ones a checkpoint on that data."""
    names = [row.name for row in catalog()]
    assert len(set(names)) == len(names) == 57
    for row in catalog():
        short, pinned, _ = row.words
        assert resolve(row.variant, short, image_size=row.image_size).data == row.data
        assert resolve(row.variant, pinned, image_size=row.image_size) is row
        assert resolve(row.variant, row.name) is row
        assert resolve(row.variant, row.name, image_size=800) is row
    # Some servers read a plus sign as a space.
    url = resolve("R50+B/16", "original/imagenet21k+imagenet2012").url
    assert url.endswith("/vit_models/imagenet21k%2Bimagenet2012/R50%2BViT-B_16.npz")


def test_short_names_mean_the_recommended_files() -> None:
    """Of the publishers' own tables; of 224 and 384 pixels the nearer, or the larger.

    Only variants without AugReg files come with a blank ImageNet-21k classifier.
    """
    found = [
        [v, w, size, resolve(v, w, image_size=size).name] for v, w, size, _ in NAMES["resolved"]
    ]
    assert found == NAMES["resolved"]
    tuned = {size: resolve("S/16", "imagenet21k+imagenet2012", image_size=size) for size in SIZES}
    assert {size: row.image_size for size, row in tuned.items()} == SIZES
    rows = {row.variant: row for row in catalog() if "imagenet21k" in row.words}
    blank = {variant for variant in rows if resolve(variant, "imagenet21k").head == "zeros"}
    assert blank == {"H/14", "L/32", "R50+B/16", "R26+B/32"}


def test_unknown_names_are_refused() -> None:
    """In one line with all that the variant has, and a question where a name is near."""
    for variant, weights, part in NAMES["unknown"]:
        with pytest.raises(ValueError, match="There are no weights") as caught:
            resolve(variant, weights)
        assert repr(weights) in str(caught.value)
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="There are no weights 'zzz'") as caught:
        resolve("B/16", "zzz")
    assert "Did you mean" not in str(caught.value)


def test_misnamed_files_are_refused() -> None:
    """A name outside the sweep, in one line with the part that is wrong."""
    for name, old, new, message in MISNAMED:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            resolve("B/16", f"augreg/{name.replace(old, new)}")
        assert "\n" not in str(caught.value)


def test_a_name_says_what_its_file_is() -> None:
    """Variant, classes, size and data, as in the rows of the catalogue."""
    rows = [row for row in catalog() if row.family == "augreg"]
    assert len(rows) == 35
    for row in rows:
        read = augreg_row(row.name.removeprefix("augreg/"))
        assert (read.variant, read.data, read.classes) == (row.variant, row.data, row.classes)
        assert (read.image_size, read.url) == (row.image_size, row.url)
    pets = resolve("B/16", f"augreg/{PRETRAINED}--oxford_iiit_pet-steps_0k-lr_0.003-res_384")
    assert (pets.data, pets.classes, pets.image_size) == ("imagenet21k+oxford_iiit_pet", 37, 384)
