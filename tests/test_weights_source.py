"""Tests of weights.sources: published names and layouts, the Hub, URLs, and what is in reach."""

import dataclasses
import hashlib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import download_rig as rig
import hub_rig
import keras
import numpy as np
import published
import pytest
from conftest import FLOAT32

import keras_vit
from keras_vit.weights import building, download, loading, sources
from keras_vit.weights.catalog import CatalogRow, catalog
from keras_vit.weights.layouts import original_rows

server, home, hub = rig.server_fixture, rig.home_fixture, hub_rig.hub_fixture

LAYOUTS = {(row.variant, row.image_size, row.representation_dim): row for row in catalog()}
TINY_AUGREG = "augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"
HUB_FILES = {
    "config.json": published.GOLDEN / "tiny_hf_config.json",
    "model.safetensors": published.GOLDEN / "tiny_hf.safetensors",
    "preprocessor_config.json": published.GOLDEN / "modern/hf_vit_msn/preprocessor_config.json",
}
ADDRESSES = {
    "hf://someone/tiny-vit": "main",
    "hf://someone/tiny-vit@v1.0": "v1.0",
    "hf://someone/tiny-vit@refs%2Fpr%2F1": "refs%2Fpr%2F1",
    "hf://someone/tiny-vit@v1.0/model.safetensors": "v1.0",
    "hf://someone/tiny-vit/model.safetensors": "main",
    f"hf://someone/tiny-vit@{'a' * 40}": "a" * 40,
}
BAD_ADDRESSES: list[str] = published.TABLES["bad addresses"]
SHA256_ENTRANCES = ["load", "model", "builder", "path", "folder", "url", "hub", "name"]
ROW = keras_vit.weights.resolve("Ti/16", "imagenet21k")
UNREACHABLE: dict[rig.Fault, str] = {
    rig.status(404): r"no file at .*404",
    rig.status(403): r"was refused \(403",
    rig.status(503): r"^127\.0\.0\.1:\d+: 503",
    rig.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>"): "with a web page",
    lambda handler, _: handler.server.released.wait(): "127",  # says nothing
}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.full] if row.config.hidden_dim > 768 else [])
        for row in LAYOUTS.values()
    ],
    ids=["-".join(map(str, key)) for key in LAYOUTS],
)
def test_every_published_layout_loads(
    row: CatalogRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the row's layout, one block deep, fills every variable exactly once."""
    config = dataclasses.replace(row.config, num_layers=1, classes=9)
    shapes = {name: array.shape for name, array in published.arrays(config).items()}
    # Each is filled with a number of its own.
    arrays: dict[str, Any] = {
        name: np.full(shape, 1 + i / 64, np.float32)
        for i, (name, shape) in enumerate(shapes.items())
    }
    np.savez(tmp_path / "weights.npz", **arrays)
    model = keras_vit.VisionTransformer(config)
    assigned: list[str] = []
    assign = keras.Variable.assign

    def counting(variable: keras.Variable, value: object) -> object:
        assigned.append(variable.path)
        return assign(variable, value)

    with monkeypatch.context() as patch:
        patch.setattr(keras.Variable, "assign", counting)
        keras_vit.weights.load_weights(model, tmp_path / "weights.npz")
    assert sorted(assigned) == sorted(variable.path for variable in model.weights)
    sources = {r.path: r.names for r in original_rows(config)}
    for variable in model.weights:
        values = keras.ops.convert_to_numpy(variable)
        numbers = {arrays[name].flat[0] for name in sources[variable.path]}
        counts = [np.count_nonzero(values == number) for number in numbers]
        assert min(counts) > 0
        assert sum(counts) == values.size


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "mirror"))
    return tmp_path / "mirror"


def put(mirror: Path, name: str, config: keras_vit.ViTConfig, **arrays: np.ndarray) -> Path:
    path = mirror / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{**published.arrays(config), **arrays})
    return path


def test_short_names_find_the_recommended_file(mirror: Path) -> None:
    """AugReg's file answers to "imagenet21k", and becomes the model that the catalogue says."""
    row = keras_vit.weights.resolve("Ti/16", "imagenet21k")
    put(mirror, row.name, row.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = keras_vit.ViTTi16(
            weights="imagenet21k", include_preprocessing=False, classifier_activation=None
        )
    assert row.name == TINY_AUGREG
    assert (model.config, model.count_params()) == (row.config, row.parameters)
    assert model.output_shape == (None, 21843)
    head = keras.ops.convert_to_numpy(model.get_layer("head").kernel)
    np.testing.assert_array_equal(head, published.arrays(row.config)["head/kernel"])


def test_zero_heads_are_told(mirror: Path) -> None:
    """A classifier that was published as zeros warns, unless it is not used."""
    config = dataclasses.replace(keras_vit.variant("Ti/16"), classes=9)
    zeros = {"head/kernel": np.zeros((192, 9), np.float32), "head/bias": np.zeros(9, np.float32)}
    put(mirror, TINY_AUGREG, config, **zeros)
    with pytest.warns(
        UserWarning, match=r"all zeros.*classes=N.*include_top=False.*augreg"
    ) as seen:
        keras_vit.ViTTi16(weights=TINY_AUGREG)
    assert Path(seen[0].filename) == Path(__file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_vit.ViTTi16(weights=TINY_AUGREG, classes=5)
        keras_vit.ViTTi16(weights=TINY_AUGREG, include_top=False)


def test_input_shape_chooses_among_files(mirror: Path) -> None:
    """Of the 224 and the 384 pixel file, the one nearer to the images is loaded."""
    for size in (224, 384):
        row = keras_vit.weights.resolve("Ti/16", "imagenet21k+imagenet2012", image_size=size)
        assert row.image_size == size
        put(mirror, row.name, dataclasses.replace(row.config, classes=size))
    model = keras_vit.ViTTi16(weights="imagenet21k+imagenet2012", input_shape=(352, 384, 3))
    assert model.output_shape == (None, 384)
    assert model.config.input_shape == (352, 384, 3)
    model = keras_vit.ViTTi16(weights="imagenet21k+imagenet2012")
    assert (model.output_shape, model.config.input_shape) == ((None, 224), (224, 224, 3))


def test_unknown_name_lists_what_there_is() -> None:
    """A misspelt name is a sentence with those of that variant; a SHA-256 of nothing a mistake."""
    with pytest.raises(ValueError, match=r"no weights 'imagenet' for H/14.*original/imagenet21k"):
        keras_vit.ViTH14(weights="imagenet")
    with pytest.raises(ValueError, match="weights=None"):
        keras_vit.ViTTi16(weights=None, sha256="0" * 64)


@pytest.fixture
def files(hub: hub_rig.Hub) -> dict[str, bytes]:
    """The files of hf://someone/tiny-vit."""
    content = {name: path.read_bytes() for name, path in HUB_FILES.items()}
    return hub.repositories.setdefault("someone/tiny-vit", content)


@pytest.mark.usefixtures("files")
def test_a_hub_repository_gives_its_librarys_logits() -> None:
    """Weights and both JSON files come over HTTP through the Hub's own client."""
    model = keras_vit.load(
        "hf://someone/tiny-vit", classifier_activation=None, include_preprocessing=False
    )
    images = published.images(keras_vit.ViTConfig(input_shape=(32, 48, 3), patch_size=8))
    expected = np.load(published.GOLDEN / "tiny_safetensors_logits.npz")["hf"]

    assert model.config.image_mean == (0.485, 0.456, 0.406)
    np.testing.assert_allclose(model(images), expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("address", ADDRESSES)
def test_all_files_come_from_one_commit(
    address: str,
    hub: hub_rig.Hub,
    files: dict[str, bytes],
    home: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The commit of the first file is asked for by all others, said, and part of the record."""
    caplog.set_level(logging.INFO)
    path = sources.find(address)

    commit = path.parent.name
    first, *others = dict.fromkeys(hub.revisions)
    assert (first, set(others)) == (ADDRESSES[address], {commit} - {first})
    assert {name.name for name in path.parent.iterdir()} == set(files)
    assert f"is commit {commit}" in caplog.text
    records = {file.name for file in home.rglob(f"{commit}/*")}
    assert records == {f"{name}.sha256" for name in files}


@pytest.mark.parametrize("file", ["", "/model.safetensors.index.json"])
def test_shards_come_from_the_commit_of_their_index(
    file: str, hub: hub_rig.Hub, files: dict[str, bytes], home: Path, tmp_path: Path
) -> None:
    """Each is downloaded at that commit, recorded, and compared when it is used again."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(files.pop("model.safetensors"))
    published.write_shards(folder, count=3)
    files |= {path.name: path.read_bytes() for path in folder.iterdir()}
    address = f"hf://someone/tiny-vit{file}"
    index = sources.find(address)
    commit = index.parent.name

    assert {path.name for path in index.parent.iterdir()} == set(files)
    assert set(hub.revisions) == {"main", commit}
    records = {path.name for path in home.rglob(f"{commit}/*")}
    assert records == {f"{name}.sha256" for name in files}
    assert keras_vit.load(address).config.hidden_dim == 32
    with pytest.raises(ValueError, match="sha256 is of one file"):
        sources.find(address, sha256="0" * 64)
    shard = (index.parent / "model-00002-of-00003.safetensors").resolve()
    shard.write_bytes(rig.flipped(shard.read_bytes(), 2000))
    with pytest.raises(ValueError, match="its publisher states"):
        sources.find(address)


def test_what_the_hub_does_not_have(hub: hub_rig.Hub, files: dict[str, bytes]) -> None:
    """Each is a sentence with the address: what was looked for, what else can be given."""
    hub.repositories["someone/other"] = {}
    del files["model.safetensors"]
    for name, message in (
        ("someone/other", "hf://someone/other has no config.json"),
        ("someone/tiny-vit", r"none of model\.safetensors, .*named as hf://"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            sources.find(f"hf://{name}")
    with pytest.raises(OSError, match="hf://nobody/tiny-vit could not be fetched"):
        sources.find("hf://nobody/tiny-vit")


@pytest.mark.usefixtures("files")
def test_hub_file_that_changed() -> None:
    """Damage of a kept file, settings too, is seen by the Hub's SHA-256 and by the first use's."""
    address = f"hf://someone/tiny-vit@{'b' * 40}"
    path = sources.find(address)
    for file in (path.parent / "preprocessor_config.json", path):
        blob, content = file.resolve(), file.read_bytes()
        blob.write_bytes(rig.flipped(content, len(content) - 1))
        with pytest.raises(ValueError, match="its publisher states"):
            sources.find(address)
        blob.write_bytes(content)
    path.unlink()
    path.write_bytes(rig.flipped(content, 0))  # as where links are not to be had
    with pytest.raises(ValueError, match=r"\.sha256 holds another"):
        sources.find(address)


def test_addresses_that_are_none_of_the_hub(hub: hub_rig.Hub) -> None:
    """What is no address is refused before anyone is asked."""
    for address in BAD_ADDRESSES:
        with pytest.raises(ValueError, match=r"on the Hub|A Hub address is") as raised:
            sources.find(address)
        assert "hunter2" not in str(raised.value)
    assert hub.revisions == []


@pytest.mark.parametrize("entrance", SHA256_ENTRANCES)
def test_sha256_is_compared_before_anything_is_read(
    entrance: str, mirror: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> None:
    """On each road the right SHA-256 loads, and another one is refused with the file unopened."""
    row = keras_vit.weights.resolve("Ti/16", "imagenet21k")
    config = dataclasses.replace(keras_vit.variant("Ti/16"), classes=3)
    file = put(mirror, row.name, config)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with rig.serving() as server:
        server.files["/vit.npz"] = file.read_bytes()
        roads: dict[str, Callable[[Any], Any]] = {
            "load": lambda sha256: keras_vit.load(file, sha256=sha256),
            "model": lambda sha256: keras_vit.weights.load_weights(
                keras_vit.VisionTransformer(config), file, sha256=sha256
            ),
            "builder": lambda sha256: keras_vit.ViTTi16(weights=str(file), sha256=sha256),
            "path": lambda sha256: keras_vit.ViTTi16(weights=file, sha256=sha256),
            "folder": lambda sha256: keras_vit.load(file.parent, sha256=sha256),
            "url": lambda sha256: keras_vit.ViTTi16(weights=f"{server.url}/vit.npz", sha256=sha256),
            "hub": lambda sha256: sources.find("hf://someone/tiny-vit", sha256=sha256),
            "name": lambda sha256: keras_vit.ViTTi16(weights="imagenet21k", sha256=sha256),
        }
        road = roads[entrance]
        if entrance == "hub":
            digest = hashlib.sha256(files["model.safetensors"]).hexdigest()
        with monkeypatch.context() as patch:
            for module in (building, loading, keras_vit.applications):
                patch.setattr(module, "open_checkpoint", lambda path: pytest.fail("was read"))
            with pytest.raises(ValueError, match=f"{'0' * 64} was asked for"):
                road("0" * 64)
            with pytest.raises(ValueError, match="64 hexadecimal digits"):
                road("abc")
            with pytest.raises(TypeError, match="Received: a int"):
                road(5)
        road(digest.upper())


def test_changed_settings_beside_a_url_are_not_read(server: rig.Server) -> None:
    """A config.json that is no longer what it was stops the model; a missing one does not."""
    server.files["/a/vit.safetensors"] = rig.safetensors()
    server.files["/a/config.json"] = b"{}"
    path = sources.find(f"{server.url}/a/vit.safetensors")
    assert {file.name for file in path.parent.iterdir()} >= {"vit.safetensors", "config.json"}
    (path.parent / "config.json").write_bytes(b'{"a": 1}')
    with pytest.raises(ValueError, match=r"config\.json\.sha256 holds another"):
        sources.find(f"{server.url}/a/vit.safetensors")


def test_reach_of_a_server(server: rig.Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for one byte, and nothing is kept; or the reason is the middle of a sentence."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", server.url)
    server.files[f"/{ROW.name}.npz"] = rig.BODY
    assert sources.resolve_origin("imagenet21k", "Ti/16") == "mirror"
    assert [request["range"] for request in server.requests] == ["bytes=0-0"]
    for fault, message in UNREACHABLE.items():
        server.faults = [fault]
        seconds = 0.3 if message == "127" else 4.0
        with pytest.raises(ConnectionError, match=message) as caught:
            sources.resolve_origin("imagenet21k", "Ti/16", seconds=seconds)
        assert not str(caught.value).endswith(".")
    monkeypatch.setenv("KERAS_VIT_MIRROR", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9: Connection refused"):
        sources.resolve_origin("imagenet21k", "Ti/16")
    assert not home.exists()


def test_reach_of_files_on_this_machine(mirror: Path) -> None:
    """A folder has the file or not; what is in the cache is not looked for."""
    with pytest.raises(ConnectionError, match=r"there is no .*Ti_16.*\.npz"):
        sources.resolve_origin("imagenet21k", "Ti/16")
    put(mirror, ROW.name, dataclasses.replace(ROW.config, classes=3))
    assert sources.resolve_origin("imagenet21k", "Ti/16") == "mirror"
    file = download.cached_path(ROW.url)
    file.parent.mkdir(parents=True)
    file.write_bytes(rig.BODY)
    assert sources.resolve_origin("imagenet21k", "Ti/16") == "cache"
    with pytest.raises(ValueError, match="There are no weights 'imagenet22k'"):
        sources.resolve_origin("imagenet22k", "Ti/16")
