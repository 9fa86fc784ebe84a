"""Tests of keras_vit.cli.predict: a page on this machine to try a model, by the real Gradio."""

import re
import signal
import socket
import sys
from pathlib import Path

import browser
import cli_rig
import gradio
import gradio_client
import httpx
import keras
import numpy as np
import processes
import pytest
from exported import LABELS, photo, served_model

from keras_vit import data, evaluation, training
from keras_vit.cli import predict


def opened(model: keras.Model, labels: tuple[str, ...]) -> training.OpenedModel:
    return training.OpenedModel(
        source="pets", model=model, labels=labels, identifiers=labels, states_labels=True
    )


def test_an_image_is_named_as_predict_names_it() -> None:
    """By the five likeliest classes; of two with one name each is shown. The maps are pictures."""
    model, image = served_model(), data.read_image(photo(3, height=70, width=90))
    labels = ("crane", *LABELS[1:-1], "crane")
    names = ("crane (0)", *LABELS[1:-1], "crane (6)")
    (expected,) = evaluation.predict(model, [image], labels=names)
    classes, shown, note = predict.look(opened(model, labels), image)
    assert classes == {each.label: each.probability for each in expected}
    relevance = [f"Relevance for {each.label}" for each in expected[:3]]
    assert [name for _, name in shown][:4] == [*relevance, "Attention rollout"]
    assert {picture.shape for picture, _ in shown} == {image.shape}
    assert all(0 <= picture.min() < picture.max() <= 1 for picture, _ in shown)
    assert note.startswith("The image is 90 pixels wide and 70 high.")


def test_a_model_that_is_half_of_one_is_shown_as_far_as_it_goes() -> None:
    """The page says why there are no maps, or why it names no class."""
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(7, "softmax")]
    other, image = opened(keras.Sequential(layers), LABELS), np.zeros((9, 9, 3), np.uint8)
    classes, shown, note = predict.look(other, image)
    assert (len(classes or ()), shown) == (5, [])
    assert "contains 0 Vision Transformers" in note
    features = opened(served_model(classes=None, classifier_activation=None), ())
    classes, shown, note = predict.look(features, image)
    assert (classes, shown[0][1]) == (None, "Attention rollout")
    assert note.startswith("The model has no classifier, so that it names no class. The image is")


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is taken is one sentence, before the model is opened; so is a lacking Gradio."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        (said,) = cli_rig.run("demo", "gone", "--port", number).errors
    assert re.search(rf"error: Port {number} of 127.0.0.1 cannot be used .*--port 0", said)
    for name in ("GRADIO_TEMP_DIR", "GRADIO_ANALYTICS_ENABLED", "no_proxy"):
        monkeypatch.setenv(name, "")  # it is undone at the end of the test
    monkeypatch.setitem(sys.modules, "gradio", None)
    (said,) = cli_rig.run("demo", cli_rig.make_run(tmp_path / "run")).errors
    assert said.endswith("by Gradio, which is not installed; run: pip install gradio")


@pytest.mark.full
def test_the_page_answers_until_ctrl_c(tmp_path: Path) -> None:
    """As predict does, or in a sentence; here alone, by this name; the browser asks nobody else."""
    settings = {"labels": LABELS, "data": {"source": str(tmp_path)}}
    run = cli_rig.make_run(tmp_path / "run", settings=settings, classes=len(LABELS))
    (run / "splits.csv").write_text("split,label,path\ntest,ant,first.png\n")
    file, first = tmp_path / "photo.jpg", tmp_path / "first.png"
    first.write_bytes(photo(9, height=64, width=64))
    command = ["-m", "keras_vit", "demo", str(run), "--port", "0", "--no-browser"]
    environment = {"KERAS_VIT_MAX_PIXELS": "30000", "http_proxy": "http://127.0.0.1:9"}
    process = processes.Process(command, environment)
    line = process.stdout.readline()
    match = re.fullmatch(r"Open (http://127.0.0.1:(\d+)) in a browser; Ctrl-C ends it.\n", line)
    assert match is not None, line
    for host, status in ((match[1].removeprefix("http://"), 200), ("evil.example", 400)):
        assert httpx.head(match[1], headers={"Host": host}).status_code == status
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(match[2])))
    client = gradio_client.Client(match[1], verbose=False, download_files=False)
    for bad, said in ((b"no", "^'photo.jpg' is not an im"), (photo(height=800), "44800 pixels")):
        file.write_bytes(bad)
        *nothing, sentence = client.predict(gradio_client.handle_file(file), api_name="/look")
        assert (nothing, bool(re.search(said, sentence))) == ([{}, []], True), sentence
    file.write_bytes(photo(3, height=70, width=90, kind="JPEG"))
    model = training.open_source(run).model
    expected, before = (
        evaluation.predict(model, [data.read_image(each)], labels=LABELS)[0]
        for each in (file, first)
    )
    classes, *_ = client.predict(gradio_client.handle_file(file), api_name="/look")
    found = [(each["label"], each["confidence"]) for each in classes["confidences"]]
    assert found == [(each.label, each.probability) for each in expected]
    with (
        browser.opened_browser() as chromium,
        browser.opened_page(chromium, match[1]) as (page, heard),
    ):
        for size, named in (("64 pixels wide and 64", before), ("90 pixels wide and 70", expected)):
            page.wait_for_selector(f"text={size}", timeout=120_000)
            shown = page.inner_text("body")
            assert "Attention rollout" in shown
            assert all(f"{each.label}\n{each.probability:.0%}" in shown for each in named), shown
            page.set_input_files("input[type=file]", file)
        assert not [each for each in heard if each.startswith("request")]
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=300)
    assert out.splitlines() == ["The page is closed.", f"Next: keras-vit export {run} --out export"]
    assert (process.returncode, "Traceback" in errors) == (0, False)
    first.unlink()  # of such a run, as of a source that is none, a photo of Gradio's is shown
    assert predict._test_image(training.Run.load(run)) is None
    assert data.read_image(gradio.media.get_image("lion.jpg")).shape == (256, 256, 3)
