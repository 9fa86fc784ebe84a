"""The catalogue: every row complete and of the right size, every short name to the right file."""

import itertools
import math
import re

import hypothesis
import hypothesis.strategies as st
import pytest

from keras_vit import variants
from keras_vit.weights import published
from keras_vit.weights.catalog import CatalogRow, catalog, resolve

# Parameters with 1,000 classes at 224 pixels, as the original's tests state them
# (google-research/vision_transformer, vit_jax/models_test.py), with width and pixels per token.
ORIGINAL_COUNTS = {
    "Ti/16": (5_717_416, 192, 16),
    "S/16": (22_050_664, 384, 16),
    "S/32": (22_878_952, 384, 32),
    "B/8": (86_576_872, 768, 8),
    "B/16": (86_567_656, 768, 16),
    "B/32": (88_224_232, 768, 32),
    "L/16": (304_326_632, 1024, 16),
    "L/32": (306_535_400, 1024, 32),
    "H/14": (632_045_800, 1280, 14),
    "R+Ti/16": (6_337_704, 192, 32),
    "R26+S/32": (36_431_912, 384, 32),
    "R26+B/32": (101_383_976, 768, 32),
    "R50+B/16": (98_659_112, 768, 16),
    "R50+L/32": (328_994_856, 1024, 32),
}

# variant, weights, image_size -> the row's name.
RESOLVED = [
    (
        "B/16",
        "imagenet21k",
        None,
        "augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0",
    ),
    ("H/14", "imagenet21k", None, "imagenet21k/ViT-H_14"),
    ("L/32", "imagenet21k", 384, "imagenet21k/ViT-L_32"),
    ("R50+B/16", "imagenet21k", None, "imagenet21k/R50+ViT-B_16"),
    ("R26+B/32", "imagenet21k", None, "imagenet21k/R26+ViT-B_32"),
    ("L/32", "imagenet21k+imagenet2012", None, "imagenet21k+imagenet2012/ViT-L_32"),
    ("R50+B/16", "imagenet21k+imagenet2012", 224, "imagenet21k+imagenet2012/R50+ViT-B_16"),
    (
        "Ti/16",
        "imagenet21k+imagenet2012",
        None,
        "augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"
        "--imagenet2012-steps_20k-lr_0.03-res_224",
    ),
    (
        "L/16",
        "augreg/imagenet21k+imagenet2012",
        512,
        "augreg/L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0"
        "--imagenet2012-steps_20k-lr_0.01-res_384",
    ),
    (
        "B/8",
        "imagenet21k+imagenet2012",
        None,
        "augreg/B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0"
        "--imagenet2012-steps_20k-lr_0.03-res_224",
    ),
    ("B/8", "imagenet21k+imagenet2012", 384, "imagenet21k+imagenet2012/ViT-B_8"),
    ("B/16", "original/imagenet21k", None, "imagenet21k/ViT-B_16"),
    ("B/16", "original/imagenet21k+imagenet2012", None, "imagenet21k+imagenet2012/ViT-B_16-224"),
    ("B/16", "original/imagenet21k+imagenet2012", 384, "imagenet21k+imagenet2012/ViT-B_16"),
    ("B/16", "sam", None, "sam/ViT-B_16"),
    (
        "B/16",
        "imagenet2012",
        None,
        "augreg/B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1"
        "--imagenet2012-steps_20k-lr_0.01-res_224",
    ),
]

# image_size -> size of the file, where 224 and 384 exist.
SIZES = {None: 224, 32: 224, 224: 224, 303: 224, 304: 384, 384: 384, 1024: 384}

UNKNOWN = [
    ("B/16", "imagenet", "'imagenet21k+imagenet2012' (224, 384 px)"),
    ("B/16", "jft", "'augreg/<file name without .npz>'"),
    ("H/14", "imagenet21k+imagenet2012", "'original/imagenet21k' (224 px)"),
    ("L/32", "augreg/imagenet21k", "'sam' (224 px)"),
    ("L/16", "imagenet2012", "'sam/imagenet2012' (224 px)"),
    ("G/14", "imagenet21k", "none are published"),
    ("L/16", "imagenet21k/ViT-B_16", "it belongs to B/16"),
    (
        "L/16",
        "augreg/B_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0",
        "it belongs to B/16",
    ),
]

BAD_STEMS = {
    "M_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0": "model 'M_16'",
    "B_16-jft-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0": "data 'jft'",
    "B_16-i1k-30ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0": "epochs '30'",
    "B_16-i21k-300ep-lr_0.01-aug_none-wd_0.1-do_0.0-sd_0.0": "is named like",
    "B_16-i21k-300ep-lr_0.001-aug_light2-wd_0.1-do_0.0-sd_0.0": "augmentation 'light2'",
    "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.2-do_0.0-sd_0.0": "weight decay '0.2'",
    "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.2-sd_0.2": "dropout '0.2'",
    "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.1": "stochastic depth '0.1'",
    "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0.npz": "is named like",
    "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0"
    "--flowers-steps_2k-lr_0.01-res_224": "fine-tuning data 'flowers'",
    "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0"
    "--kitti-steps_20k-lr_0.01-res_224": "steps '20k'",
    "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0"
    "--imagenet2012-steps_20k-lr_0.001-res_224": "fine-tuning rate '0.001'",
    "B_8-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0"
    "--imagenet2012-steps_20k-lr_0.01-res_384": "resolution '384'",
    "": "is named like",
}


@pytest.mark.parametrize("row", catalog(), ids=lambda row: row.name)
def test_rows_are_complete(row: CatalogRow) -> None:
    """Every row has a variant, a licence, a source, a paper, a URL and a count of parameters."""
    assert row.variant in variants.VARIANTS
    assert row.licence == "Apache-2.0"
    assert row.source.startswith("https://github.com/google-research/vision_transformer")
    assert row.paper.startswith("https://arxiv.org/abs/")
    assert re.fullmatch(r"https://storage\.googleapis\.com/vit_models/[\w%/.-]+\.npz", row.url)
    assert row.parameters > 5_000_000
    assert (row.accuracy is None) == (row.accuracy_source is None)
    assert (row.head == "zeros") == (row.family == "original" and row.classes == 21843)


@pytest.mark.parametrize("row", catalog(), ids=lambda row: row.name)
def test_parameters_follow_from_the_original_counts(row: CatalogRow) -> None:
    """The original's own totals, plus what head and positions change, give the row's."""
    total, width, stride = ORIGINAL_COUNTS[row.variant]
    positions = (row.image_size // stride) ** 2 - (224 // stride) ** 2
    expected = total + (row.classes - 1000) * (width + 1) + positions * width
    if row.representation_dim is not None:
        expected += width * row.representation_dim + row.representation_dim

    assert row.parameters == expected


def fits_size(size: str, parameters: int, *, copies: int = 1) -> bool:
    """Whether a printed size is that of float32 parameters, plus 0.1 % and 128 KiB at most."""
    figure, unit = size.split()
    place = 10.0 ** -len(figure.partition(".")[2]) / 2
    scale = {"MiB": 2**20, "GiB": 2**30}[unit]
    least, most = (float(figure) - place) * scale, (float(figure) + place) * scale
    nominal = 4 * parameters * copies
    return nominal <= most and least <= nominal * 1.001 + copies * 2**17


@pytest.mark.parametrize(
    "row", [row for row in catalog() if row.published_size], ids=lambda row: row.name
)
def test_published_sizes_agree(row: CatalogRow) -> None:
    """The file sizes that Google prints are those of the rows' parameters: heads are as stated."""
    copies = 3 if row.name == "sam/ViT-S_16" else 1  # with the optimizer's two moments

    assert fits_size(row.published_size or "", row.parameters, copies=copies)


def test_sizes_show_a_wrong_head() -> None:
    """The comparison of sizes tells a missing representation layer or a wrong classifier."""
    row = resolve("B/16", "original/imagenet21k")

    assert fits_size("393.69 MiB", row.parameters)
    assert not fits_size("393.69 MiB", row.parameters - 768 * 769)
    assert not fits_size("393.69 MiB", row.parameters - 20843 * 769)
    assert not fits_size("393.69 MiB", row.parameters + 768 * 769)


def test_names_are_unique_and_mean_themselves() -> None:
    """A row's name finds that row, whatever the image size."""
    names = [row.name for row in catalog()]

    assert len(set(names)) == len(names) == 57
    for row in catalog():
        assert resolve(row.variant, row.name) is row
        assert resolve(row.variant, row.name, image_size=800) is row


def test_every_word_finds_its_family_and_data() -> None:
    """Each short name of each row finds a checkpoint of that variant on that data."""
    for row in catalog():
        short, pinned, _ = row.words
        assert resolve(row.variant, short, image_size=row.image_size).data == row.data
        assert resolve(row.variant, pinned, image_size=row.image_size) is row


@pytest.mark.parametrize(("variant", "weights", "image_size", "expected"), RESOLVED)
def test_resolve(variant: str, weights: str, image_size: int | None, expected: str) -> None:
    """Short names mean the recommended files of the publishers' own tables."""
    assert resolve(variant, weights, image_size=image_size).name == expected


@pytest.mark.parametrize("image_size", SIZES)
def test_nearest_size_is_taken(image_size: int | None) -> None:
    """Of the files for 224 and 384 pixels the nearer is taken, the larger when equally near."""
    row = resolve("S/16", "imagenet21k+imagenet2012", image_size=image_size)

    assert row.image_size == SIZES[image_size]


def test_imagenet21k_heads_are_trained_where_augreg_exists() -> None:
    """Only variants without AugReg files come with a blank ImageNet-21k classifier."""
    rows = {row.variant: row for row in catalog() if "imagenet21k" in row.words}
    blank = {variant for variant in rows if resolve(variant, "imagenet21k").head == "zeros"}

    assert blank == {"H/14", "L/32", "R50+B/16", "R26+B/32"}


@pytest.mark.parametrize(("variant", "weights", "part"), UNKNOWN)
def test_unknown_weights_list_what_exists(variant: str, weights: str, part: str) -> None:
    """An unknown name is refused with all that the variant has."""
    with pytest.raises(ValueError, match="There are no weights") as raised:
        resolve(variant, weights)

    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unknown_variant() -> None:
    """A variant that is not in the table is refused by name."""
    with pytest.raises(ValueError, match="no variant 'B/17'"):
        resolve("B/17", "imagenet21k")


def test_urls_are_quoted() -> None:
    """The plus sign, which some servers read as a space, is written as %2B."""
    row = resolve("R50+B/16", "original/imagenet21k+imagenet2012")

    assert row.url == (
        "https://storage.googleapis.com/vit_models/imagenet21k%2Bimagenet2012/R50%2BViT-B_16.npz"
    )


# The AugReg file names.


@st.composite
def names(draw: st.DrawFn) -> published.AugRegName:
    """Any name of the sweep."""
    model = draw(st.sampled_from(list(published.VARIANTS)))
    pretrained = draw(st.sampled_from(list(published.PRETRAINED)))
    adaptation = None
    if draw(st.booleans()):
        data = draw(st.sampled_from(list(published.ADAPTED)))
        _, steps, rates = published.ADAPTED[data]
        adaptation = published.Adaptation(
            data=data,
            steps=draw(st.sampled_from(steps)),
            rate=draw(st.sampled_from(rates)),
            size="224" if model == "B_8" else draw(st.sampled_from(published.SIZES)),
        )
    return published.AugRegName(
        model=model,
        pretrained=pretrained,
        epochs=draw(st.sampled_from(published.PRETRAINED[pretrained][2])),
        augmentation=draw(st.sampled_from(published.AUGMENTATIONS)),
        weight_decay=draw(st.sampled_from(published.WEIGHT_DECAYS)),
        dropout=draw(st.sampled_from(published.DROPOUTS)),
        adaptation=adaptation,
    )


@hypothesis.given(name=names())
@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
def test_stems_round_trip(name: published.AugRegName) -> None:
    """Reading what was written gives the same name, and a row of that variant, data and size."""
    assert published.parse(str(name)) == name
    row = resolve(name.variant, f"augreg/{name}")
    assert row.url.endswith(f"/augreg/{name}.npz")
    assert (row.classes, row.image_size, row.data) == (name.classes, name.image_size, name.data)
    assert row.parameters == variants.parameter_count(row.config)


@hypothesis.given(name=names(), place=st.integers(0, 200), character=st.sampled_from("-_.0aT1"))
@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
def test_a_changed_stem_is_refused_or_another(
    name: published.AugRegName, place: int, character: str
) -> None:
    """No misspelling is read as the name it was made from."""
    stem = str(name)
    place %= len(stem)
    changed = stem[:place] + character + stem[place + 1 :]
    try:
        parsed = published.parse(changed)
    except ValueError:
        return
    assert str(parsed) == changed


@pytest.mark.parametrize("stem", BAD_STEMS)
def test_bad_stems_say_what_is_wrong(stem: str) -> None:
    """A name outside the sweep is refused, naming the part that is wrong."""
    with pytest.raises(ValueError, match=re.escape(BAD_STEMS[stem])) as raised:
        resolve("B/16", f"augreg/{stem}") if stem else published.parse(stem)

    assert "\n" not in str(raised.value)


def test_the_grammar_counts_what_was_published() -> None:
    """It admits 759 pre-trained and 51,510 fine-tuned files; the index lists 759 and 51,509."""
    per_model = math.prod(
        map(len, (published.AUGMENTATIONS, published.WEIGHT_DECAYS, published.DROPOUTS))
    )
    sweeps = 3  # i1k, i21k and i21k_30
    others = len(published.VARIANTS) - 1  # B/8 has three files alone
    fine_tunings = sum(
        len(steps) * len(rates) * len(published.SIZES)
        for _, steps, rates in published.ADAPTED.values()
    )

    assert others * sweeps * per_model + 3 == 759
    assert others * sweeps * per_model * fine_tunings + 3 * fine_tunings // 2 == 51_509 + 1


def test_the_tables_hold_no_file_twice() -> None:
    """A file is in one table only."""
    tables = (published.AUGREG_21K, published.AUGREG_21K_1K, published.AUGREG_1K)
    stems = [file.stem for file in itertools.chain(*tables)]

    assert len(stems) == len(set(stems)) == 35


MEANT = [
    ("B/16", "imagenet", "imagenet21k+imagenet2012"),
    ("Ti/16", "ImageNet-1k", "imagenet21k+imagenet2012"),
    ("B/16", "in21k", "imagenet21k"),
    ("B/16", "imagenet2021", "imagenet2012"),
    ("B/16", "augreg/imagenet-21k", "augreg/imagenet21k"),
]


@pytest.mark.parametrize(("variant", "wrong", "meant"), MEANT)
def test_a_wrong_name_is_asked_back(variant: str, wrong: str, meant: str) -> None:
    """What other libraries say, or a slip of the pen, gets the name that was meant."""
    with pytest.raises(ValueError, match=rf"no weights '{wrong}'.*Did you mean '(.*)'\?") as caught:
        resolve(variant, wrong)
    assert f"Did you mean '{meant}'?" in str(caught.value)


def test_names_far_from_all_are_not_asked_back() -> None:
    """No question where nothing is near."""
    with pytest.raises(ValueError, match="There are no weights 'zzz'") as caught:
        resolve("B/16", "zzz")
    assert "Did you mean" not in str(caught.value)
