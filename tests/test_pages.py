"""Tests of keras_vit.pages: what is rendered, what the policy allows, and the test browser."""

import base64
import hashlib
import io
import re
from pathlib import Path
from typing import Any

import browser
import jinja2
import numpy as np
import pytest
from PIL import Image

import keras_vit
from keras_vit import pages

REPORT: dict[str, Any] = {
    "title": "<b>",
    "styles": ("charts.css",),
    "scripts": ("charts.js", "report.js"),
    "data": {"curves": []},
    "use": dict.fromkeys(("name", "path", "source", "is_run", "is_exported", "has_classes"), ""),
    **dict.fromkeys(("notes", "facts", "tables", "trained_by"), ()),
    **dict.fromkeys(("reconstructions", "measured", "command")),
    **{"version": "0", "verdict": "<i>"},
}


def digests(text: str, element: str) -> set[str]:
    """The hashes of what stands in a page's elements, as a policy writes them."""
    contents = re.findall(rf"(?s)<{element}>(.*?)</{element}>", text)
    hashes = (hashlib.sha256(content.encode()).digest() for content in contents)
    return {f"'sha256-{base64.b64encode(one).decode()}'" for one in hashes}


def test_the_policy_allows_the_pages_own_words_and_nothing_else() -> None:
    """Each style and script by its hash; no request to anywhere."""
    text = pages.render("report.html", **REPORT)
    written = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert written is not None
    parts = written[1].replace("&#39;", "'").split("; ")
    actual = {words[0]: set(words[1:]) for words in map(str.split, parts)}
    assert actual["default-src"] == {"'none'"}
    assert actual["script-src"] == digests(text, "script")
    assert actual["style-src"] == digests(text, "style")
    assert len(actual["script-src"]) == 3


def test_templates_have_nothing_that_the_policy_forbids() -> None:
    """No style or handler in an attribute, no address, and no end of a script inside of one."""
    shown = "http://127.0.0.1:8000"  # the text of a command
    for file in sorted((Path(keras_vit.__path__[0]) / "templates").iterdir()):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"\s(style|on[a-z]+)=", text), file
        addresses = re.findall(r"https?://[^\s\"'<]*", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg", shown}, file
        assert file.suffix not in (".js", ".css") or "</" not in text, file


def test_what_a_template_shows() -> None:
    """Text is text; what is lacking, or is no JSON, is an error."""
    assert '<p class="lead">&lt;i&gt;</p>' in pages.render("report.html", **REPORT)
    lacking = {name: value for name, value in REPORT.items() if name != "verdict"}
    with pytest.raises(jinja2.UndefinedError, match="verdict"):
        pages.render("report.html", **lacking)
    with pytest.raises(ValueError, match="JSON"):  # NaN would stop the page's script
        pages.render("report.html", **{**REPORT, "data": {"curves": [float("nan")]}})


def test_names_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    """A file's name may be any bytes but zero and the slash."""
    size = pages.write_page(tmp_path / "page.html", "base.html", title="photo-\udcff.png")
    written = (tmp_path / "page.html").read_bytes()
    assert len(written) == size
    assert rb"photo-\udcff.png" in written


def test_thumbnails_are_small_or_exact() -> None:
    """Small images keep every pixel; large ones lose bytes, and keep their proportions."""
    small = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    decoded = _decode(pages.thumbnail(small))
    np.testing.assert_array_equal(decoded, small)
    large = np.tile(small, (100, 100, 1))
    address = pages.thumbnail(large.astype(np.float32), side=150)
    assert address.startswith("data:image/webp")
    assert _decode(address).shape == (100, 150, 3)


def _decode(address: str) -> np.ndarray:
    content = base64.b64decode(address.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.mark.full
def test_the_browser_sees_what_is_wrong(tmp_path: Path) -> None:
    """Each kind of fault is named; of a sound page nothing is said."""
    page = tmp_path / "page.html"
    sound = pages.render("base.html", title="A page")
    page.write_text(sound)
    assert browser.check_page(page) == []
    faults = """<style>p { color: #999 }</style><p style="width: 3000px">wide</p>
<p>pale</p><img src="data:image/png;base64,AAAA" alt="x">
<img src="https://example.invalid/x.png" alt="x"><button></button>
<script>nothing()</script>"""
    free = re.sub(r"<meta http-equiv=.*?>", "", sound).replace("<main>", f"<main>{faults}")
    page.write_text(free)
    said = "\n".join(browser.check_page(page, press=False))
    for fault in (
        *("exception: nothing is not defined", "request: https://example.invalid"),
        *("does not decode", "wider than the window", "color-contrast", "button-name"),
    ):
        assert fault in said
    page.write_text(sound.replace("<main>", f"<main>{faults}"))
    said = "\n".join(browser.check_page(page, press=False))
    assert "violates the following Content Security Policy directive" in said
    assert "nothing is not defined" not in said  # it did not run
