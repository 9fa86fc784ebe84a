"""Tests of weights.sources, weights.building and of the builders on every published layout."""

import contextlib
import dataclasses
import functools
import hashlib
import http.server
import json
import logging
import shutil
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import download_rig as rig
import huggingface_hub
import keras
import numpy as np
import published
import pytest

import keras_vit
from keras_vit.weights import building, download, loading, sources
from keras_vit.weights.catalog import CatalogRow, catalog
from keras_vit.weights.layouts import original_rows

LAYOUTS = {
    (row.variant, row.image_size, row.classes, row.representation_dim): row for row in catalog()
}
TINY_AUGREG = "augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"


def constant_arrays(config: keras_vit.ViTConfig) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, each filled with a number of its own."""
    shapes = [
        pair for row in original_rows(config) for pair in zip(row.names, row.shapes, strict=True)
    ]
    return {name: np.full(s, 1 + i / 64, np.float32) for i, (name, s) in enumerate(shapes)}


def layout_name(row: CatalogRow) -> str:
    return f"{row.variant}-{row.image_size}-{row.classes}-{row.representation_dim}"


@contextlib.contextmanager
def counted_assignments(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    paths: list[str] = []
    assign = keras.Variable.assign

    def counting(variable: keras.Variable, value: object) -> object:
        paths.append(variable.path)
        return assign(variable, value)

    with monkeypatch.context() as patch:
        patch.setattr(keras.Variable, "assign", counting)
        yield paths


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.full] if row.config.hidden_dim > 768 else [])
        for row in LAYOUTS.values()
    ],
    ids=map(layout_name, LAYOUTS.values()),
)
def test_every_published_layout_loads(
    row: CatalogRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the row's layout, one block deep, fills every variable exactly once."""
    config = dataclasses.replace(row.config, num_layers=1)
    arrays = constant_arrays(config)
    np.savez(tmp_path / "weights.npz", **arrays)
    model = keras_vit.VisionTransformer(config)
    with counted_assignments(monkeypatch) as assigned:
        keras_vit.weights.load(model, tmp_path / "weights.npz")
    assert sorted(assigned) == sorted(variable.path for variable in model.weights)
    sources = {r.path: r.names for r in original_rows(config)}
    for variable in model.weights:
        values = keras.ops.convert_to_numpy(variable)
        numbers = {arrays[name].flat[0] for name in sources[variable.path]}
        counts = [np.count_nonzero(values == number) for number in numbers]
        assert min(counts) > 0
        assert sum(counts) == values.size


# One of each variant, as the test above has their layouts: with and without representation.
FULL_SIZE = {row.variant: row for row in LAYOUTS.values() if row.parameters < 110e6}


@pytest.mark.full
@pytest.mark.parametrize("row", FULL_SIZE.values(), ids=map(layout_name, FULL_SIZE.values()))
def test_every_published_variant_builds(
    row: CatalogRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full-size file is found by its name in a mirror and becomes the model it describes."""
    path = tmp_path / f"{row.name}.npz"
    path.parent.mkdir(parents=True)
    np.savez(path, **constant_arrays(row.config))
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    builder = keras_vit.applications.BUILDERS[row.variant]
    model = builder(weights=row.name, include_preprocessing=False, classifier_activation=None)
    assert model.config == row.config
    assert model.count_params() == row.parameters


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local mirror, and a cache of its own."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    return tmp_path / "mirror"


def put(mirror: Path, name: str, config: keras_vit.ViTConfig, **arrays: np.ndarray) -> None:
    path = mirror / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{**published.arrays(config), **arrays})


def test_short_names_find_the_recommended_file(mirror: Path) -> None:
    """AugReg's file answers to "imagenet21k", with its trained head of 21,843 classes."""
    row = keras_vit.weights.resolve("Ti/16", "imagenet21k")
    put(mirror, row.name, row.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = keras_vit.ViTTi16(weights="imagenet21k")
    assert row.name == TINY_AUGREG
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
    """A misspelt name is a sentence with the names of that variant."""
    with pytest.raises(ValueError, match=r"no weights 'imagenet' for H/14.*original/imagenet21k"):
        keras_vit.ViTH14(weights="imagenet")


HUB_FILES = {
    "config.json": published.GOLDEN / "tiny_hf_config.json",
    "model.safetensors": published.GOLDEN / "tiny_hf.safetensors",
    "preprocessor_config.json": published.GOLDEN / "modern/hf_vit_msn/preprocessor_config.json",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hugging Face Hub answers for a file of a repository."""

    def do_HEAD(self) -> None:
        self.respond(body=False)

    def do_GET(self) -> None:
        self.respond(body=True)

    def respond(self, *, body: bool) -> None:
        _, owner, name, *rest = self.path.split("/")
        file = HUB_FILES.get(rest[-1])
        if (owner, name) != ("someone", "tiny-vit") or file is None:
            self.send_response(404)
            error = "EntryNotFound" if owner == "someone" else "RepoNotFound"
            self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None: ...


HUB_CODE = """
import json, sys
import keras, numpy as np
import keras_vit
try:
    model = keras_vit.load(
        sys.argv[1], classifier_activation=None, include_preprocessing=False
    )
    assert model.config.image_mean == (0.485, 0.456, 0.406), model.config
    images = np.load(sys.argv[2])
    print(json.dumps(keras.ops.convert_to_numpy(model(images)).tolist()))
except (OSError, ValueError) as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def from_hub(address: str, hub: str, folder: Path) -> object:
    """Returns the logits, or the error, of a fresh process that knows only this Hub."""
    config = keras_vit.ViTConfig(input_shape=(32, 48, 3), patch_size=8)
    np.save(folder / "images.npy", published.images(config))
    environment = {"HF_ENDPOINT": hub, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}
    code = f"import os; os.environ.update({environment!r})\n{HUB_CODE}"
    done = subprocess.run(
        [sys.executable, "-c", code, address, str(folder / "images.npy")],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_hub_repository_gives_its_librarys_logits(hub: str, tmp_path: Path) -> None:
    """Weights and both JSON files come over HTTP through the Hub's own client."""
    logits = np.array(from_hub("hf://someone/tiny-vit", hub, tmp_path))
    expected = np.load(published.GOLDEN / "tiny_safetensors_logits.npz")["hf"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://someone/other", "FileNotFoundError: hf://someone/other has no config.json"),
        ("hf://nobody/tiny-vit", "OSError: hf://nobody/tiny-vit could not be fetched"),
        (
            "hf://tiny-vit",
            "ValueError: A Hub address is hf://owner/name. Received: 'hf://tiny-vit'",
        ),
    ],
)
def test_what_the_hub_does_not_have(hub: str, tmp_path: Path, address: str, message: str) -> None:
    """Each failure is a sentence that names the address."""
    assert message in str(from_hub(address, hub, tmp_path))


class MovingHub(Hub):
    """A Hub whose branches are at another commit for each file, as if they moved in between."""

    server: "MovingServer"

    def respond(self, *, body: bool) -> None:
        *_, revision, name = self.path.rsplit("/", 2)
        self.server.revisions.append(revision)
        is_commit = len(revision) == 40
        commit = revision if is_commit else f"{sum(name.encode()):040x}"
        content = HUB_FILES[name].read_bytes() if name in HUB_FILES else b""
        if name == "config.json":
            content = content.replace(b"{", b'{"commit": "%b", ' % commit.encode(), 1)
        digest = hashlib.sha256(content).hexdigest()
        self.send_response(200 if content else 404)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", commit)
        if not content:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


class MovingServer(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MovingHub)
        self.revisions: list[str] = []


@pytest.fixture
def moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MovingServer]:
    """The Hub's own client, told to ask this server."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with MovingServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        client = types.SimpleNamespace(
            hf_hub_download=functools.partial(
                huggingface_hub.hf_hub_download,
                endpoint=f"http://127.0.0.1:{server.server_port}",
                cache_dir=tmp_path / "hub",
            ),
            errors=huggingface_hub.errors,
            constants=huggingface_hub.constants,
        )
        monkeypatch.setattr(download, "_hub_library", lambda address: client)
        yield server
        server.shutdown()
        thread.join()


ADDRESSES = {
    "hf://someone/tiny-vit": "main",
    "hf://someone/tiny-vit@v1.0": "v1.0",
    "hf://someone/tiny-vit@refs%2Fpr%2F1": "refs%2Fpr%2F1",
    "hf://someone/tiny-vit@v1.0/model.safetensors": "v1.0",
    "hf://someone/tiny-vit/model.safetensors": "main",
    f"hf://someone/tiny-vit@{'a' * 40}": "a" * 40,
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_all_files_come_from_one_commit(
    address: str, moving: MovingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit of the first file is asked for by all others, said, and part of the record."""
    caplog.set_level(logging.INFO)
    path = sources.find(address)

    commit = path.parent.name
    first, *others = dict.fromkeys(moving.revisions)
    assert (first, set(others)) == (ADDRESSES[address], {commit} - {first})
    assert {name.name for name in path.parent.iterdir()} == set(HUB_FILES)
    assert f"is commit {commit}" in caplog.text
    records = {file.name for file in (tmp_path / "keras").rglob(f"{commit}/*")}
    assert records == {f"{name}.sha256" for name in HUB_FILES}


@pytest.fixture
def sharded_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Hub's repository keeps its weights in shards; the names of its files."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copy(HUB_FILES["model.safetensors"], folder / "model.safetensors")
    published.write_shards(folder, count=3)
    monkeypatch.delitem(HUB_FILES, "model.safetensors")
    for path in folder.iterdir():
        monkeypatch.setitem(HUB_FILES, path.name, path)
    return sorted(HUB_FILES)


@pytest.mark.parametrize("file", ["", "/model.safetensors.index.json"])
def test_shards_come_from_the_commit_of_their_index(
    file: str, moving: MovingServer, sharded_files: list[str], tmp_path: Path
) -> None:
    """Each is downloaded at that commit, recorded, and compared when it is used again."""
    address = f"hf://someone/tiny-vit{file}"
    index = sources.find(address)
    commit = index.parent.name

    assert sorted(path.name for path in index.parent.iterdir()) == sharded_files
    assert set(moving.revisions) == {"main", commit}
    records = {path.name for path in (tmp_path / "keras").rglob(f"{commit}/*")}
    assert records == {f"{name}.sha256" for name in sharded_files}
    assert keras_vit.load(address).config.hidden_dim == 32
    with pytest.raises(ValueError, match="sha256 is of one file"):
        sources.find(address, sha256="0" * 64)
    shard = (index.parent / "model-00002-of-00003.safetensors").resolve()
    shard.write_bytes(rig.flipped(shard.read_bytes(), 2000))
    with pytest.raises(ValueError, match="its publisher states"):
        sources.find(address)


def test_a_repository_without_weights(
    moving: MovingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names both files that were looked for, and what else can be given."""
    monkeypatch.delitem(HUB_FILES, "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"none of model\.safetensors, .*named as hf://"):
        sources.find("hf://someone/tiny-vit")


def test_hub_file_that_changed(moving: MovingServer, tmp_path: Path) -> None:
    """Damage of a kept file is seen by the Hub's SHA-256, and by the record of its first use."""
    address = f"hf://someone/tiny-vit@{'b' * 40}"
    path = sources.find(address)
    blob, content = path.resolve(), path.read_bytes()
    blob.write_bytes(rig.flipped(content, len(content) - 1))
    with pytest.raises(ValueError, match="its publisher states"):
        sources.find(address)
    path.unlink()
    path.write_bytes(blob.read_bytes())  # as where links are not to be had
    with pytest.raises(ValueError, match=r"\.sha256 holds another"):
        sources.find(address)


def test_hub_settings_that_changed(moving: MovingServer) -> None:
    """A changed file that is only useful stops the model too: it would be read."""
    address = f"hf://someone/tiny-vit@{'c' * 40}"
    path = sources.find(address)
    (path.parent / "preprocessor_config.json").resolve().write_text("{}")

    with pytest.raises(ValueError, match="its publisher states"):
        sources.find(address)


BAD_ADDRESSES = [
    "hf://someone",
    "hf://someone/tiny-vit/",
    "hf://someone/tiny-vit@",
    "hf://someone/tiny-vit@a/b/../c.npz",
    "hf://someone/tiny-vit@a@b",
    "hf://someone/tiny-vit/pytorch_model.bin",
    "hf://some one/tiny-vit",
    "hf://someone/tiny-vit@main?token=hunter2",
]


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_addresses_that_are_none_of_the_hub(address: str, moving: MovingServer) -> None:
    """What is no address is refused before anyone is asked."""
    with pytest.raises(ValueError, match=r"on the Hub|A Hub address is") as raised:
        sources.find(address)

    assert moving.revisions == []
    assert "hunter2" not in str(raised.value)


SHA256_ENTRANCES = ["load", "model", "builder", "path", "folder", "url", "hub", "name"]


@pytest.mark.parametrize("entrance", SHA256_ENTRANCES)
def test_sha256_is_compared_before_anything_is_read(
    entrance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moving: MovingServer
) -> None:
    """On each road the right SHA-256 loads, and another one is refused with the file unopened."""
    row = keras_vit.weights.resolve("Ti/16", "imagenet21k")
    file = tmp_path / "mirror" / f"{row.name}.npz"
    file.parent.mkdir(parents=True)
    config = dataclasses.replace(keras_vit.variant("Ti/16"), classes=3)
    np.savez(file, **published.arrays(config))
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "mirror"))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with rig.serving() as server:
        server.files["/vit.npz"] = file.read_bytes()
        roads: dict[str, Callable[[Any], Any]] = {
            "load": lambda sha256: keras_vit.load(file, sha256=sha256),
            "model": lambda sha256: keras_vit.weights.load(
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
            digest = hashlib.sha256(HUB_FILES["model.safetensors"].read_bytes()).hexdigest()
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


def test_sha256_without_weights() -> None:
    """A SHA-256 of nothing is a mistake."""
    with pytest.raises(ValueError, match="weights=None"):
        keras_vit.ViTTi16(weights=None, sha256="0" * 64)


def test_changed_settings_beside_a_url_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config.json that is no longer what it was stops the model; a missing one does not."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with rig.serving() as server:
        server.files["/a/vit.safetensors"] = rig.safetensors()
        server.files["/a/config.json"] = b"{}"
        path = sources.find(f"{server.url}/a/vit.safetensors")
        assert {file.name for file in path.parent.iterdir()} >= {"vit.safetensors", "config.json"}
        (path.parent / "config.json").write_bytes(b'{"a": 1}')
        with pytest.raises(ValueError, match=r"config\.json\.sha256 holds another"):
            sources.find(f"{server.url}/a/vit.safetensors")
