"""Tests of keras_vit.weights.source and of the builders on every published layout."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import published
import pytest

import keras_vit
from keras_vit.weights.catalog import CatalogRow, catalog
from keras_vit.weights.layouts import original_rows

LAYOUTS = {
    (row.variant, row.image_size, row.classes, row.representation_dim): row for row in catalog()
}
TINY_AUGREG = "augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"


def constant_arrays(config: keras_vit.ViTConfig) -> dict[str, np.ndarray]:
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
        pytest.param(row, marks=[pytest.mark.slow] if row.config.hidden_dim > 768 else [])
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
        values = np.unique(keras.ops.convert_to_numpy(variable))
        assert values.tolist() == sorted(arrays[n].flat[0] for n in sources[variable.path])


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in LAYOUTS.values() if row.parameters < 110e6],
    ids=layout_name,
)
def test_every_published_name_builds(
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


@pytest.mark.slow
def test_a_hub_repository_gives_its_librarys_logits(hub: str, tmp_path: Path) -> None:
    """Weights and both JSON files come over HTTP through the Hub's own client."""
    logits = np.array(from_hub("hf://someone/tiny-vit", hub, tmp_path))
    expected = np.load(published.GOLDEN / "tiny_safetensors_logits.npz")["hf"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
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
