"""A folder with a page that classifies images in a browser alone."""

import contextlib
import dataclasses
import functools
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import image_files
import pytest
from conftest import TINY
from exported import LABELS, photo, served_model
from playwright.sync_api import Page
from test_explain_attention import sharp

from keras_vit import data, evaluation
from keras_vit.cli.main import main
from keras_vit.exporting import VerificationError, export, web

FILES = {"index.html", "labels.txt", "model.onnx", "verification.json", *web.RUNTIME}


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what stands for the npm package, its integrity being the expected one."""
    folder = tmp_path / "npm"
    folder.mkdir()
    with tarfile.open(folder / web.ARCHIVE, "w:gz") as archive:
        for name in web.RUNTIME:
            member = tarfile.TarInfo(f"package/dist/{name}")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    monkeypatch.setattr(web, "INTEGRITY", web.integrity(folder / web.ARCHIVE))
    return folder


@pytest.mark.parametrize(("antialias", "scaled"), [(True, False), (False, True)])
def test_the_page_resizes_and_scales_as_predict_does(
    antialias: bool, scaled: bool, runtime: Path, tmp_path: Path
) -> None:
    """The graph takes files of any size; the checks compare it with the model on eight of them."""
    model = sharp(dataclasses.replace(TINY, antialias=antialias, include_preprocessing=scaled))
    (artefact,) = export(
        model, tmp_path / "pets", formats=["web"], labels=LABELS, web_runtime=runtime
    )
    assert artefact.path == tmp_path / "pets" / "web" / "1"
    assert {file.name for file in artefact.path.iterdir()} == FILES
    made = json.loads((artefact.path / "verification.json").read_text(encoding="utf-8"))
    assert set(made["files"]) == FILES - {"verification.json"}
    compared = [check for check in made["checks"]["web"] if check["name"].startswith("image ")]
    assert len(compared) == 8 * 2
    assert any(check["name"] == "gate: best class" for check in made["checks"]["web"])
    assert all(check["passed"] for check in compared)
    page = (artefact.path / "index.html").read_text(encoding="utf-8")
    assert "https://" not in page


def test_a_page_that_resizes_otherwise_is_refused(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing appears if the graph smooths what the model does not."""
    write, model = web.make_model, served_model(antialias=False)

    def smoothing(exportable: Any) -> Any:
        config = dataclasses.replace(exportable.input_config, antialias=True)
        return write(dataclasses.replace(exportable, input_config=config))

    monkeypatch.setattr(web, "make_model", smoothing)
    with pytest.raises(VerificationError, match="The web artefact does not do what the model does"):
        export(model, tmp_path / "pets", formats=["web"], labels=LABELS, web_runtime=runtime)
    assert not (tmp_path / "pets" / "web").exists()


def test_a_model_that_no_page_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to do instead."""
    for fields, most, message in (
        ({"classes": None, "classifier_activation": None}, 10**9, "this model has no classifier"),
        ({"input_shape": (32, 48, 4)}, 10**9, "reads images of 3 channels"),
        ({}, 10, "models of up to 10 bytes of weights"),
    ):
        monkeypatch.setattr(web, "LARGEST", most)
        with pytest.raises(ValueError, match=f"{message}.*export (it|this model|this one) as onnx"):
            export(served_model(**fields), tmp_path / "pets", formats=["web"])


def test_another_file_is_no_runtime(runtime: Path, tmp_path: Path) -> None:
    """What is not as published is refused; so is a place without the file."""
    (runtime / web.ARCHIVE).write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"is not onnxruntime-web .* its integrity is sha512-"):
        web.find_runtime(runtime)
    with pytest.raises(FileNotFoundError, match=r"npm pack onnxruntime-web@.* and give FOLDER"):
        web.find_runtime(tmp_path / "nowhere")


def test_npm_fetches_the_runtime_once(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for one version, and its file is kept; without it the error has the command."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(
        ImportError, match=r"npm pack .* --web-runtime FOLDER .npm is not installed"
    ):
        web.find_runtime()
    npm = tools / "npm"
    npm.write_text("#!/bin/sh\necho npm error 404 >&2\nexit 1\n")
    npm.chmod(0o755)
    with pytest.raises(ImportError, match=r"npm said: npm error 404"):
        web.find_runtime()
    npm.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "pack onnxruntime-web@{web.VERSION}" ] || exit 1\n'
        f'/bin/cp "{runtime / web.ARCHIVE}" "$4"\n'
    )
    kept = web.find_runtime()
    assert kept.is_relative_to(tmp_path / "keras")
    npm.unlink()
    assert web.find_runtime() == kept


def test_the_command_says_how_to_open_the_page(
    runtime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next command serves the folder."""
    served_model().save(tmp_path / "pets.keras")
    arguments = ["export", str(tmp_path / "pets.keras"), "--out", str(tmp_path / "pets")]
    assert main([*arguments, "--formats", "web", "--web-runtime", str(runtime)]) == 0
    said = capsys.readouterr().out
    folder = tmp_path / "pets" / "web" / "1"
    assert f"http.server --bind 127.0.0.1 --directory {folder} 8000" in said


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder, and yields its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


# Of JPEG those between whose best classes no decoder decides; the others are the same everywhere.
PHOTOS = {
    **{f"{seed}.jpeg": photo(seed, height=90, width=70, kind="JPEG") for seed in (5, 20, 26, 30)},
    **{f"grey {seed}.jpeg": photo(seed, mode="L", kind="JPEG") for seed in (20, 21, 23)},
    "turned.jpeg": image_files.photo(6),
    "turned.png": image_files.photo(8, "PNG"),
    **{f"{seed}.png": photo(seed, height=60, width=110) for seed in (8, 10, 12, 13)},
    "palette.png": photo(14, mode="P"),
    "15.bmp": photo(15, kind="BMP"),
    "lossless.webp": image_files.photo(1, "WEBP"),
}


def shown(opened: Page, file: Path) -> dict[str, float]:
    """Gives the page a file, and returns the classes and shares that it shows."""
    opened.set_input_files("#file", file)
    opened.wait_for_function(
        "name => document.getElementById('name').textContent === name && "
        "!document.getElementById('state').textContent",
        arg=file.name,
    )
    rows = opened.locator("#classes tr").all()
    return {
        row.locator("th").inner_text(): float(row.locator(".number").inner_text().strip(" %")) / 100
        for row in rows
    }


@pytest.mark.full
def test_the_page_is_well_made_and_names_what_predict_names(tmp_path: Path) -> None:
    """By the real runtime: the labels of all files are the same, the shares as near as decoders.

    In both widths and schemes; as a file it says what to do; what is no image is a sentence.
    """
    model = sharp(dataclasses.replace(TINY, include_preprocessing=True))
    (artefact,) = export(model, tmp_path / "photos", formats=["web"], labels=LABELS)
    files = [tmp_path / name for name in PHOTOS]
    for file in files:
        file.write_bytes(PHOTOS[file.name])
    images = [data.read_image(file) for file in files]
    expected = evaluation.predict(model, images, labels=LABELS, top=len(LABELS))
    assert len({classes[0].label for classes in expected}) > 2
    (tmp_path / "text.jpg").write_text("no image")
    differences = {}
    with served(artefact.path) as address:
        assert browser.check_page(address) == []
        with browser.opened_browser() as chromium:
            as_file = (artefact.path / "index.html").as_uri()
            with browser.opened_page(chromium, as_file) as (opened, _):
                assert opened.locator("#as-file").is_visible()
                assert not opened.locator("#drop").is_visible()
            with browser.opened_page(chromium, address) as (opened, heard):
                for file, classes in zip(files, expected, strict=True):
                    actual = shown(opened, file)
                    shares = {each.label: each.probability for each in classes}
                    assert next(iter(actual)) == classes[0].label, file.name
                    assert list(actual.values()) == sorted(actual.values(), reverse=True)
                    differences[file.name] = max(
                        abs(share - shares[label]) for label, share in actual.items()
                    )
                opened.set_input_files("#file", tmp_path / "text.jpg")
                opened.wait_for_selector("#error:not([hidden])")
                error = opened.inner_text("#error")
                assert heard == []
    assert "text.jpg is not an image that this browser reads" in error
    print(differences)
    # TensorFlow decodes JPEG by a faster transform than browsers and Pillow: up to 7 of 255 aside.
    lossless = [differences[name] for name in differences if not name.endswith("jpeg")]
    assert max(lossless) <= 1e-4  # half of the last digit shown, and float32 in other kernels
    assert max(differences.values()) < 0.03
