"""Where a run comes from: the commands that trained it, and the weights that it started from."""

import dataclasses
import json
import os
import urllib.parse
from pathlib import Path
from typing import Any, Self

from keras_vit.training import run
from keras_vit.variants import VARIANTS
from keras_vit.weights.catalog import BASE_URL, LICENCE, repositories, resolve

# Of config.json and settings.json; nothing in it decides the result.
PROVENANCE = "provenance"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """What nobody can see in a model: how it was made, of what, and on what terms.

    Attributes:
        commands: the command lines of the training: the first, and those that resumed it otherwise.
        weights: what it started from, such as "Ti/16 imagenet21k"; None for fresh weights, and
            where nobody said it.
        licence: of these weights; None where it is not known.
        teacher: the model whose predictions it learnt; None for none.
        teacher_licence: of the teacher's weights; None where it is not known.
        forbids: what these licences forbid or ask, in sentences; "" for nothing.
    """

    commands: tuple[str, ...] = ()
    weights: str | None = None
    licence: str | None = None
    teacher: str | None = None
    teacher_licence: str | None = None
    forbids: str = ""

    @classmethod
    def of(
        cls,
        command: str,
        *,
        weights: str | None = None,
        model: str | None = None,
        teacher: str | None = None,
    ) -> Self:
        """Returns that of a training, with licences from the catalogues or earlier runs.

        Example:
            >>> Provenance.of("keras-vit train", weights="imagenet21k", model="Ti/16").licence
            'Apache-2.0'
            >>> Provenance.of("keras-vit train", weights="hf://timm/vit_base_patch16_224.mae").forbids
            'No commercial use.'

        Args:
            command: the command line.
            weights: as of `keras-vit train --weights`.
            model: the variant that published weights are of; None for other weights.
            teacher: as of `keras-vit train --teacher`.
        """
        licence, forbids = (None, "") if weights is None else _terms(weights, model)
        taught, also = (None, "") if teacher is None else _terms(teacher, None)
        name = f"{model} {weights}" if model and weights else weights and _without_secrets(weights)
        return cls(
            commands=(command,),
            weights=name,
            licence=licence,
            teacher=teacher and _without_secrets(teacher),
            teacher_licence=taught,
            forbids=" ".join(dict.fromkeys(filter(None, (forbids, also)))),
        )

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Self:
        """Reads it from config.json or settings.json; an empty one where there is none."""
        try:
            fields = run.read_fields(Path(file))
        except (OSError, ValueError):
            return cls()
        return cls.from_dict(fields.get(PROVENANCE))

    @classmethod
    def from_dict(cls, fields: Any) -> Self:
        """Returns what `to_dict` gave, and nothing of what is no such record."""
        if not isinstance(fields, dict):
            return cls()
        texts = {
            name: fields[name]
            for name in ("weights", "licence", "teacher", "teacher_licence", "forbids")
            if isinstance(fields.get(name), str)
        }
        commands = fields.get("commands")
        listed = commands if isinstance(commands, list) else []
        return cls(commands=tuple(one for one in listed if isinstance(one, str)), **texts)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain values that JSON can carry."""
        fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return fields

    def resumed(self, by: "Provenance") -> "Provenance":
        """Returns that of a training that another command resumes: its weights stay."""
        commands = tuple(dict.fromkeys((*self.commands, *by.commands)))
        return dataclasses.replace(self if self.commands else by, commands=commands)

    def public(self) -> "Provenance":
        """Returns what concerns others: no command, and of a file its name alone."""
        weights, teacher = (each and _short(each) for each in (self.weights, self.teacher))
        return dataclasses.replace(self, commands=(), weights=weights, teacher=teacher)


def _terms(weights: str, model: str | None) -> tuple[str | None, str]:
    """Returns the licence of weights, None where it is not known, and what it forbids."""
    if Path(weights).is_dir():
        earlier = Provenance.read(Path(weights) / run.CONFIG)
        return earlier.licence, earlier.forbids
    for row in repositories():
        address = row.address.partition("@")[0]
        if weights == address or weights.startswith((f"{address}@", f"{address}/")):
            return row.licence, row.forbids
    if weights.startswith(BASE_URL):
        return LICENCE, ""
    try:
        return resolve(model or "", weights).licence, ""
    except ValueError:  # a file
        return None, ""


def _short(weights: str) -> str:
    """Returns a source, of a file or folder without the path to it."""
    model, _, rest = weights.partition(" ")
    if model in VARIANTS:
        return f"{model} {_short(rest)}"
    return weights if "://" in weights else Path(weights).name


def _without_secrets(weights: str) -> str:
    """Returns a source without a password or token, which may stand in a URL."""
    if "://" not in weights:
        return weights
    parts = urllib.parse.urlsplit(weights)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
