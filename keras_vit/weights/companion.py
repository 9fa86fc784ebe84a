"""The file beside an .npz that says what the published layout has no room for.

`vit.json` beside `vit.npz` holds the ViTConfig that `vit.npz` was written from, and by which arrays
it is known. An .npz whose layout alone would be read as another network carries a mark, so that it
is never read without its companion. The archive holds a checksum of each array, the companion one
of the config.
"""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

from keras_vit.atomic import whole_file
from keras_vit.config import ViTConfig
from keras_vit.weights.arrays import open_archive, read_json

MARK = b"keras_vit: read with the .json file beside it"  # the comment of the archive
FORMAT = "keras_vit.ViTConfig"

# What the published layout means without a word (vit_jax/models_vit.py, preprocess in its README).
PUBLISHED: dict[str, Any] = {
    "activation": "gelu_tanh",
    "layer_norm_epsilon": 1e-6,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}


def companion_path(path: Path) -> Path:
    """Returns where the companion of an .npz file stands."""
    return path.with_suffix(".json")


def needs_companion(config: ViTConfig) -> bool:
    """Whether the published layout alone would be read as a network that computes otherwise."""
    natural = "token" if config.class_token else "avg"
    is_natural = config.pooling in (natural, "map", None)
    numbers = {name: getattr(config, name) for name in ("activation", "layer_norm_epsilon")}
    same = all(value == PUBLISHED[name] for name, value in numbers.items())
    return not (same and is_natural and config.rescaling == ViTConfig().rescaling)


def check_free(path: Path) -> None:
    """Raises a FileExistsError if another file has the companion's name."""
    beside = companion_path(path)
    if beside.exists() and _read_config(beside) is None:
        raise FileExistsError(
            f"{beside} is there and no companion of an .npz file, which would take its place; "
            "choose another name for the .npz, or move the other file away."
        )


def write_companion(path: Path, config: ViTConfig) -> None:
    """Writes the companion of a whole .npz file, whole or not at all."""
    with open_archive(path) as archive:
        arrays = _fingerprint(archive)
    fields = config.to_dict()
    checksum = _checksum(fields)
    record = {"format": FORMAT, "arrays": arrays, "config": fields, "config_sha256": checksum}
    with whole_file(companion_path(path)) as file:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_companion(path: Path) -> ViTConfig | None:
    """Returns the config that an .npz file was written from, None where it has no companion.

    Raises:
        ValueError: the companion is missing or damaged and the file says that it has one, or it
            belongs to other arrays.
    """
    beside = companion_path(path)
    with open_archive(path) as archive:
        is_marked, arrays = archive.comment == MARK, _fingerprint(archive)
    record = _read_config(beside)
    if record is None:
        if is_marked:
            raise ValueError(
                f"{path} was written with {beside.name} beside it, which says how the network "
                "computes and is missing or damaged; put it back, or write both again."
            )
        return None
    if record.get("arrays") != arrays:
        raise ValueError(
            f"{beside} describes other arrays than those of {path.name}; put the right one there, "
            "or delete it if the file is of the published layout and nothing else."
        )
    fields = record.get("config")
    if record.get("config_sha256", _checksum(fields)) != _checksum(fields):
        raise ValueError(
            f"{beside} is damaged or was changed: its config does not have its own checksum; write "
            'both files again, or delete the line "config_sha256" if the change was meant.'
        )
    try:
        return ViTConfig.from_dict({} if fields is None else fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{beside} holds no whole ViTConfig: {error}") from error


def _checksum(fields: Any) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _fingerprint(archive: zipfile.ZipFile) -> str:
    """Names the arrays by the checksums that the archive keeps of them: nothing is read."""
    members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
    rows = sorted(f"{info.filename} {info.CRC:08x} {info.file_size}" for info in members)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _read_config(path: Path) -> dict[str, Any] | None:
    """The record in a file, None for a file that is missing or something else's."""
    try:
        record = read_json(path)
    except (OSError, ValueError):
        return None
    return record if record.get("format") == FORMAT else None
