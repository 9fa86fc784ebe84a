"""Tests of weights in shards: .safetensors files that an index puts together."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import download_rig as rig
import published
import pytest
import safetensors.numpy
from conftest import assert_same_arrays
from published import MODERN

import keras_vit
from keras_vit.model import VisionTransformer
from keras_vit.weights import sources

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
NOT_THERE = "does not have there"
NOT_HERE = "names files that are not beside it"
NOT_A_NAME = "which is not the name of a .safetensors file beside it"
NO_NAMES = (
    *("../model.safetensors", "a/model.safetensors", "a\\model.safetensors", "/model.safetensors"),
    *(f"{SHARDS[0]}\n", ".safetensors", "model.bin", INDEX, 3),
)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The index of a model in three shards, beside its settings."""
    folder = Path(shutil.copytree(MODERN / "hf_vit_cls", tmp_path / "sharded"))
    (folder / "reference.npz").unlink()
    return published.write_shards(folder, count=3)


def assert_same(left: VisionTransformer, right: VisionTransformer) -> None:
    assert left.config == right.config
    assert_same_arrays(left.weights, right.weights)


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    """A folder and the path of its index give every bit of the whole file; load_weights too."""
    for family in ("hf_dinov2", "timm_siglip", "timm_beit"):
        folder = Path(shutil.copytree(MODERN / family, tmp_path / family))
        index = published.write_shards(folder, count=3)
        whole = keras_vit.load(MODERN / family)
        filled = VisionTransformer(whole.config)
        keras_vit.weights.load_weights(filled, index)
        assert_same(filled, whole)
        for source in (folder, index, str(index)):
            assert_same(keras_vit.load(source), whole)


def test_sha256_is_refused(index: Path) -> None:
    """An index says nothing of the bytes in its shards: its own SHA-256 would promise nothing."""
    model = keras_vit.load(index)
    for attempt in (
        lambda: keras_vit.load(index.parent, sha256="0" * 64),
        lambda: keras_vit.load(index, sha256="0" * 64),
        lambda: keras_vit.weights.load_weights(model, index, sha256="0" * 64),
        lambda: sources.find(f"http://127.0.0.1:9/{INDEX}", sha256="0" * 64),
        lambda: sources.find(f"hf://owner/name/{INDEX}", sha256="0" * 64),
    ):
        with pytest.raises(ValueError, match=r"sha256 is of one file, and .* names several"):
            attempt()


def rewrite(index: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def mapped(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return functools.partial(rewrite, change=change)


def rename(index: Path, name: str | int) -> None:
    """Calls the first shard so, in the index."""

    def change(places: dict[str, Any]) -> None:
        places.update({array: name for array, file in places.items() if file == SHARDS[0]})

    rewrite(index, change)


def twice(index: Path) -> None:
    """An array of the first shard is in the second as well."""
    arrays = [safetensors.numpy.load_file(index.parent / file) for file in SHARDS[:2]]
    name = sorted(arrays[0])[0]
    content = {**arrays[1], name: arrays[0][name]}
    safetensors.numpy.save_file(content, index.parent / SHARDS[1])


def elsewhere(index: Path) -> None:
    """A shard is a link to another folder."""
    other = index.parent.parent / "other"
    other.mkdir()
    shutil.move(index.parent / SHARDS[0], other / SHARDS[0])
    (index.parent / SHARDS[0]).symlink_to(other / SHARDS[0])


def cut(index: Path) -> None:
    shard = index.parent / SHARDS[2]
    shard.write_bytes(shard.read_bytes()[:-4])


def pipe(index: Path) -> None:
    (index.parent / SHARDS[0]).unlink()
    os.mkfifo(index.parent / SHARDS[0])


def lose(*shards: str) -> Callable[[Path], None]:
    def remove(index: Path) -> None:
        for shard in shards:
            (index.parent / shard).unlink()

    return remove


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no shard": (lose(*SHARDS), f"{NOT_HERE}: {', '.join(SHARDS)}."),
    "one shard missing": (lose(SHARDS[1]), f"{NOT_HERE}: {SHARDS[1]}."),
    **{str(name): (functools.partial(rename, name=name), NOT_A_NAME) for name in NO_NAMES},
    "a link": (elsewhere, "is a link to another folder"),
    "a pipe": (pipe, "is a folder, a pipe or a device"),
    "cut off": (cut, "is not a whole .safetensors file"),
    "an array twice": (twice, NOT_THERE),
    "an array that nobody has": (
        mapped(lambda places: places.update(x=SHARDS[0])),
        f"has 'x' in {SHARDS[0]}, which does not hold it",
    ),
    "an array that the index lacks": (mapped(lambda places: places.pop(min(places))), NOT_THERE),
    "an array in another shard": (
        mapped(lambda places: places.update({min(places): SHARDS[1]})),
        NOT_THERE,
    ),
    "no map": (lambda index: index.write_text('{"weight_map": []}'), "has no weight_map"),
    "an empty map": (lambda index: index.write_text('{"weight_map": {}}'), "has no weight_map"),
    "no JSON": (lambda index: index.write_text("<html>"), "is not a whole JSON file"),
    "much JSON": (lambda index: index.write_bytes(b" " * (3 * 2**20 + 1)), "at most 3145728"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_fit_is_refused(change: Any, message: str, index: Path) -> None:
    """In one sentence that names the file; nothing outside the folder is read."""
    change(index)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        keras_vit.load(index.parent)
    assert message in str(caught.value)
    assert str(index.parent) in str(caught.value)
    assert rig.one_sentence(caught.value)


def test_the_cache_of_the_hub_is_no_other_folder(index: Path) -> None:
    """Its snapshots are links to blobs two folders above."""
    snapshot = index.parent.parent / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = snapshot.parents[1] / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(index.parent.iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert_same(keras_vit.load(snapshot), keras_vit.load(MODERN / "hf_vit_cls"))


def test_whole_and_in_shards_is_one_too_many(index: Path) -> None:
    """Which of the two is meant is the user's to say; shards without index are told as such."""
    shutil.copy(MODERN / "hf_vit_cls" / "model.safetensors", index.parent)
    with pytest.raises(ValueError, match=r"several checkpoints \(model\.safetensors, model\.saf"):
        keras_vit.load(index.parent)
    (index.parent / "model.safetensors").unlink()
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"in parts \(model-00001.*\) without model\.safet"):
        keras_vit.load(index.parent)


def test_shards_behind_a_url(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the index names and the settings come from beside it, all of them checked."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with rig.serving() as server:
        for file in index.parent.glob("*.[js]*"):
            server.files[f"/a/{file.name}"] = file.read_bytes()
        url = f"{server.url}/a/{INDEX}"
        assert_same(keras_vit.load(url), keras_vit.load(MODERN / "hf_vit_cls"))
        shard = sources.find(url).parent / SHARDS[1]
        shard.write_bytes(rig.flipped(shard.read_bytes(), 3000))
        with pytest.raises(ValueError, match=r"model-00002.*\.sha256 holds another"):
            sources.find(url)
        shutil.rmtree(shard.parent)
        del server.files[f"/a/{SHARDS[2]}"]
        with pytest.raises(FileNotFoundError, match="model-00003"):
            sources.find(url)
