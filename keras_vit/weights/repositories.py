"""Lists public repositories of today's families, which `keras_vit.load` reads by their address.

The rows are in `repositories.csv`. What no source says is left open there. What a licence forbids
is told in a sentence, which does not replace the licence.
"""

import csv
import dataclasses
import difflib
import functools
import importlib.resources
from collections.abc import Mapping
from typing import Any, Literal

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
_WHOLE = ("image_size", "patch_size", "hidden_dim", "num_layers", "mlp_dim", "parameters")
_OPTIONAL = ("classes", "representation_dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repository:
    """One public repository on the Hugging Face Hub.

    Example:
        >>> row = repositories("mae")[1]
        >>> row.address, row.licence, row.forbids
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
        forbids: what the licence forbids or asks beyond attribution, in a sentence; "" for nothing.
        note: what else to know before using it; "" for nothing.
        accuracy: reported ImageNet-1k top-1 accuracy in percent, None where nobody reports it.
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
    forbids: str
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
    return tuple(row for row in _rows() if family in (None, row.family))


@functools.cache
def _rows() -> tuple[Repository, ...]:
    file = importlib.resources.files("keras_vit") / "weights" / "repositories.csv"
    return tuple(map(_repository, csv.DictReader(file.read_text("utf-8").splitlines())))


def _repository(texts: Mapping[str, str]) -> Repository:
    values: dict[str, Any] = dict(texts)
    values |= {name: int(texts[name]) for name in _WHOLE}
    values |= {name: int(texts[name]) if texts[name] else None for name in _OPTIONAL}
    values["accuracy"] = float(texts["accuracy"]) if texts["accuracy"] else None
    values |= {name: texts[name] or None for name in ("accuracy_kind", "accuracy_source")}
    return Repository(**values)
