"""Lists the published checkpoints, one row each, and finds the one that a short name means.

Those of `catalog` are Google's own files, in the bucket gs://vit_models. The rows are in
`published.csv`, recommended ones first: of AugReg those of the original's README, its notebook for
B/8 and timm's choices at 224 pixels. The paper's own ImageNet-21k classifiers are zeros
(vision_transformer issues 10, 32, 252). Two of the bucket's folders need a word: `augreg` holds 52
thousand files more than the rows here, each reached by its name; `gsam` is not listed, because its
files are of another architecture and of doubtful quality (issues 195 and 223,
pytorch-image-models issue 1302).

Those of `repositories` are today's families on the Hugging Face Hub, which `keras_vit.load` reads
by their address. The rows are in `repositories.csv`. What no source says is left open there. What a
licence forbids is told in a sentence, which does not replace the licence.
"""

import csv
import dataclasses
import difflib
import functools
import importlib.resources
import re
import typing
import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from keras_vit import variants
from keras_vit.config import ViTConfig

# What other libraries call the data: keras.applications' "imagenet" has 1,000 classes.
_1K = ("imagenet21k+imagenet2012", "imagenet2012")
_21K = ("imagenet21k",)
_MEANT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("imagenet", "imagenet1k", "imagenet-1k", "in1k"), _1K),
    **dict.fromkeys(("imagenet-21k", "imagenet22k", "in21k", "in22k"), _21K),
}

Family = Literal["original", "augreg", "sam"]

BASE_URL = "https://storage.googleapis.com/vit_models/"
DEFAULT_IMAGE_SIZE = 224  # pixels
LICENCE = "Apache-2.0"  # of google-research/vision_transformer, which publishes the files

_SOURCE = "https://github.com/google-research/vision_transformer#available-vit-models"
_PAPERS: Mapping[Family, str] = {
    "original": "https://arxiv.org/abs/2010.11929",
    "augreg": "https://arxiv.org/abs/2106.10270",
    "sam": "https://arxiv.org/abs/2106.01548",
}

# The models of AugReg's sweep by their names there: "R26_S_32" is our "R26+S/32".
AUGREG_MODELS: Mapping[str, str] = {
    re.sub(r"[+/]", "_", name): name
    for name in (
        *("Ti/16", "S/32", "S/16", "B/32", "B/16", "B/8", "L/16"),
        *("R+Ti/16", "R26+S/32", "R50+L/32"),
    )
}

# Pre-training and fine-tuning data by their names there: the catalogue's word for it, and classes.
# "i21k_30" is of 30 epochs.
_AUGREG_DATA: Mapping[str, tuple[str, int]] = {
    "i1k": ("imagenet2012", 1000),
    **dict.fromkeys(("i21k", "i21k_30"), ("imagenet21k", 21843)),
}
_AUGREG_TUNED: Mapping[str, int] = {
    "imagenet2012": 1000,
    "cifar100": 100,
    "resisc45": 45,
    "oxford_iiit_pet": 37,
    "kitti": 4,  # distance to the nearest vehicle, four bins (VTAB)
}
_AUGREG_NAME = re.compile(
    r"(\w+)-(\w+)-(?:30|300)ep-lr_0\.001-aug_(?:none|light[01]|medium[12]|strong[12])"
    r"-wd_0\.(?:03|1)-do_(0\.[01])-sd_\3"  # dropout and stochastic depth have one rate
    r"(?:--(\w+)-steps_(?:0|2|10|20)k-lr_0\.(?:001|003|01|03)-res_(224|384))?",
    re.ASCII,
)

# Name -> what it stands for, in the order of the list.
FAMILIES: Mapping[str, str] = {
    "vit": "the paper's Vision Transformer, and How to train your ViT?",
    "deit": "DeiT, plain and distilled",
    "deit3": "DeiT III",
    "mae": "masked autoencoders",
    "ijepa": "I-JEPA",
    "msn": "masked siamese networks",
    "dinov2": "DINOv2, with and without registers",
    "dinov3": "DINOv3",
    "siglip": "the image towers of SigLIP",
    "siglip2": "the image towers of SigLIP 2, for one image size",
    "clip": "the image towers of OpenAI's CLIP",
    "openclip": "image towers trained with OpenCLIP",
    "metaclip": "the image towers of MetaCLIP",
    "beit": "BEiT and BEiT v2",
    "data2vec": "data2vec-vision",
    "flexivit": "FlexiViT, for patches of 16 pixels",
    "sbb": "searching for better ViT baselines, timm's own",
    "tipsv2": "the image towers of TIPSv2",
    "pe": "the image towers of Perception Encoder, core",
}

# What a reported accuracy is of, other than the classifier in the file.
AccuracyKind = Literal["classifier", "fine-tuned", "linear", "k-NN", "zero-shot"]
ACCURACY_KINDS: Mapping[AccuracyKind, str] = {
    "classifier": "of the classifier in the file",
    "fine-tuned": "after fine-tuning all of it; that classifier is not in the file",
    "linear": "of a linear classifier on its frozen features, which is not in the file",
    "k-NN": "of the nearest neighbours of its frozen features",
    "zero-shot": "without training, with the text tower, which is not loaded",
}

_HUB, _HUB_PAGES = "hf://", "https://huggingface.co/"
_Row = TypeVar("_Row")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CatalogRow:
    """One published checkpoint.

    Attributes:
        name: folder and file name in the bucket, without suffix.
        variant: the architecture, a key of `keras_vit.VARIANTS`.
        family: "original" (the ViT paper), "augreg" (How to train your ViT?) or "sam".
        data: what it was trained on, in order: "imagenet21k+imagenet2012".
        image_size: side of the images it was trained on last, in pixels.
        classes: size of its classifier.
        head: "trained", or "zeros" where the publisher blanked the classifier.
        representation_dim: width of its representation layer (pre-logits), None for none.
        published_size: the file's size in its publisher's words, None if unknown.
        accuracy: reported ImageNet top-1 accuracy in percent, None if unknown.
        accuracy_source: who reports it.
        sha256: the file's SHA-256, None where it is not known: Google publishes none.
    """

    name: str
    variant: str
    family: Family
    data: str
    image_size: int
    classes: int
    head: Literal["trained", "zeros"] = "trained"
    representation_dim: int | None = None
    published_size: str | None = None
    accuracy: float | None = None
    accuracy_source: str | None = None
    sha256: str | None = None
    licence: str = LICENCE
    source: str = _SOURCE

    @property
    def url(self) -> str:
        """Where the file is."""
        return f"{BASE_URL}{urllib.parse.quote(self.name)}.npz"

    @property
    def paper(self) -> str:
        """The paper that describes the training."""
        return _PAPERS[self.family]

    @property
    def config(self) -> ViTConfig:
        """The model that the file fills."""
        return dataclasses.replace(
            variants.variant(self.variant),
            input_shape=(self.image_size, self.image_size, 3),
            classes=self.classes,
            representation_dim=self.representation_dim,
            antialias=False,  # as the weights were trained
        )

    @property
    def parameters(self) -> int:
        """Parameters of that model; the file holds four bytes for each and a little more."""
        return variants.parameter_count(self.config)

    @property
    def words(self) -> tuple[str, ...]:
        """The names that `resolve` takes for it."""
        short = "sam" if self.family == "sam" else self.data
        return (short, f"{self.family}/{self.data}", self.name)


@functools.cache
def catalog() -> tuple[CatalogRow, ...]:
    """Returns all rows, recommended ones first.

    Example:
        >>> [(row.name, row.head) for row in catalog() if row.variant == "H/14"]
        [('imagenet21k/ViT-H_14', 'zeros')]
    """
    return _table("published.csv", CatalogRow)


def resolve(variant: str, weights: str, *, image_size: int | None = None) -> CatalogRow:
    """Returns the checkpoint that a short name means for a variant.

    `weights` is one of
    - "imagenet21k", "imagenet21k+imagenet2012", "imagenet2012": the recommended checkpoint trained
      on that data, AugReg's where there is one (its ImageNet-21k classifiers are trained, the
      original's are zeros), otherwise the paper's own;
    - "sam": trained on ImageNet-1k with sharpness-aware minimisation;
    - "original/imagenet21k", "augreg/imagenet2012", ...: the same of one family;
    - "augreg/<file name without .npz>": any file of the AugReg sweep;
    - the `name` of a row.

    Example:
        >>> resolve("L/16", "imagenet21k+imagenet2012", image_size=384).accuracy
        85.59
        >>> resolve("L/16", "original/imagenet21k").head
        'zeros'

    Args:
        variant: a key of `keras_vit.VARIANTS`.
        weights: a name as above.
        image_size: side in pixels of the images it shall be used on. Of several files the one
            trained nearest to that size is taken, the larger of two equally near. None stands for
            224, or the only size there is.

    Raises:
        ValueError: there is no such variant or no such checkpoint of it.
    """
    variants.variant(variant)
    rows = [row for row in catalog() if weights in row.words]
    if not rows and weights.startswith("augreg/") and weights.count("-") > 1:
        rows = [augreg_row(weights.removeprefix("augreg/"))]
    fitting = [row for row in rows if row.variant == variant]
    if not fitting:
        raise ValueError(_unknown(variant, weights, rows))
    target = DEFAULT_IMAGE_SIZE if image_size is None else image_size
    return min(fitting, key=lambda row: (abs(row.image_size - target), -row.image_size))


def _unknown(variant: str, weights: str, elsewhere: list[CatalogRow]) -> str:
    sizes: dict[str, list[int]] = {}
    for row in catalog():
        for word in row.words[:2] if row.variant == variant else ():
            sizes.setdefault(word, []).append(row.image_size)
    choices = [f"{word!r} ({', '.join(map(str, sorted({*at})))} px)" for word, at in sizes.items()]
    if variant in AUGREG_MODELS.values():
        choices.append("'augreg/<file name without .npz>'")
    other = f", it belongs to {elsewhere[0].variant}" if len(elsewhere) == 1 else ""
    available = f"there are {', '.join(choices)}" if choices else "none are published"
    meant = [word for word in _MEANT.get(weights.lower(), ()) if word in sizes]
    likely = [*meant, *difflib.get_close_matches(weights, sizes, n=1)]
    question = f" Did you mean {likely[0]!r}?" if likely and not other else ""
    return f"There are no weights {weights!r} for {variant}{other}; {available}.{question}"


def augreg_row(stem: str) -> CatalogRow:
    """Reads what the name of a file of AugReg says; whether it exists the server knows.

    Raises:
        ValueError: it is no such name, or of a model or data that the sweep does not have.
    """
    match = _AUGREG_NAME.fullmatch(stem)
    if match is None:
        raise ValueError(
            "An AugReg file is named like "
            "'B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0', followed by "
            f"'--imagenet2012-steps_20k-lr_0.03-res_384' if fine-tuned. Received: {stem!r}."
        )
    model, data, _, tuned, size = match.groups()
    checks: list[tuple[str, str, Collection[str]]] = [
        *(("model", model, AUGREG_MODELS), ("data", data, _AUGREG_DATA)),
        ("fine-tuning data", tuned or "imagenet2012", _AUGREG_TUNED),
    ]
    for part, received, allowed in checks:
        if received not in allowed:
            raise ValueError(
                f"AugReg has no file {stem!r}: its {part} {received!r} is not one of "
                f"{', '.join(allowed)}."
            )
    words, classes = _AUGREG_DATA[data]
    if tuned is not None:
        words, classes = words if tuned == words else f"{words}+{tuned}", _AUGREG_TUNED[tuned]
    return CatalogRow(
        name=f"augreg/{stem}",
        variant=AUGREG_MODELS[model],
        family="augreg",
        data=words,
        image_size=int(size or 224),
        classes=classes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repository:
    """One public repository on the Hugging Face Hub.

    Example:
        >>> row = repositories("mae")[1]
        >>> row.address, row.licence, row.restrictions
        ('hf://timm/vit_base_patch16_224.mae', 'CC-BY-NC-4.0', 'No commercial use.')

    Attributes:
        address: what `keras_vit.load` takes: "hf://owner/name", or "hf://owner/name@revision" where
            the owner's branch has no .safetensors file.
        family: a key of `FAMILIES`.
        library: whose names and settings its files have.
        architecture: timm's name of the architecture, or the model type of transformers.
        image_size: side in pixels of the images of the model that `load` builds.
        patch_size: side of a patch in pixels.
        hidden_dim: width of the tokens.
        num_layers: number of blocks.
        mlp_dim: width of the hidden layer of each block's MLP.
        parameters: of the model that `load` builds: the image tower with the classifier or
            projection in its file, without text tower, decoder and mask token. Biases that the
            library leaves out count, because they are variables, of zeros.
        classes: size of its classifier, None for no classifier.
        representation_dim: width of the projection or pre-logits layer in its file, None for none.
        data: what it was trained on, in order; "" where it is not known.
        licence: its SPDX identifier, or its name.
        restrictions: what the licence forbids or asks beyond attribution; "" for nothing.
        note: what else to know before using it; "" for nothing.
        accuracy: reported ImageNet-1k top-1 accuracy in percent, None if unknown.
        accuracy_kind: what that accuracy is of, a key of `ACCURACY_KINDS`, None without one.
        accuracy_source: URL of who reports it, None without one.
        source: URL of what says the rest.
    """

    address: str
    family: str
    library: Literal["timm", "transformers"]
    architecture: str
    image_size: int
    patch_size: int
    hidden_dim: int
    num_layers: int
    mlp_dim: int
    parameters: int
    classes: int | None
    representation_dim: int | None
    data: str
    licence: str
    restrictions: str
    note: str
    accuracy: float | None
    accuracy_kind: AccuracyKind | None
    accuracy_source: str | None
    source: str

    @property
    def card(self) -> str:
        """The page of the repository."""
        return _HUB_PAGES + self.address.removeprefix(_HUB).partition("@")[0]


def repositories(family: str | None = None) -> tuple[Repository, ...]:
    """Returns the rows of a family, or all of them.

    Example:
        >>> [row.address for row in repositories("flexivit")][:2]
        ['hf://timm/flexivit_small.1200ep_in1k', 'hf://timm/flexivit_base.1200ep_in1k']
        >>> {row.licence for row in repositories("dinov2")}
        {'Apache-2.0'}

    Args:
        family: a key of `FAMILIES`; None for all, family by family.

    Raises:
        ValueError: there is no such family.
    """
    if family is not None and family not in FAMILIES:
        likely = difflib.get_close_matches(str(family).lower(), FAMILIES, n=1)
        question = f" Did you mean {likely[0]!r}?" if likely else ""
        raise ValueError(
            f"There is no family {family!r} of repositories; the families are "
            f"{', '.join(FAMILIES)}.{question}"
        )
    return tuple(row for row in _repositories() if family in (None, row.family))


@functools.cache
def _repositories() -> tuple[Repository, ...]:
    return _table("repositories.csv", Repository)


def _table(file: str, kind: type[_Row]) -> tuple[_Row, ...]:
    """Reads a table; a column without text is None where its field may be."""
    text = (importlib.resources.files("keras_vit") / "weights" / file).read_text("utf-8")
    kinds = typing.get_type_hints(kind)
    return tuple(
        kind(**{name: _value(cell, kinds[name]) for name, cell in row.items()})
        for row in csv.DictReader(text.splitlines())
    )


def _value(cell: str, kind: Any) -> Any:
    choices = (kind, *typing.get_args(kind))
    if not cell and type(None) in choices:
        return None
    return next((number(cell) for number in (int, float) if number in choices), cell)
