"""Renders pages that need no other file: styles and scripts are written out, nothing is requested.

A template of `templates/` extends `base.html`, which has the head, both colour schemes and the
switch between them. Text is escaped. The Content-Security-Policy of a page allows its own styles
and scripts by their hashes, and nothing else: what hostile names smuggle in does not run. So a
template has no `style` attributes and no `onclick`.
"""

import base64
import functools
import hashlib
import importlib.resources
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit import environment
from keras_vit.atomic import whole_file

if TYPE_CHECKING:
    import jinja2

_STYLE, _SCHEME = "base.css", "scheme.js"
_POLICY = {
    "default-src": "'none'",
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
}
# Pictures of at most so many pixels a side are kept exactly; larger ones are compressed.
_EXACT = 64


def render(
    template: str,
    *,
    title: str,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    **content: Any,
) -> str:
    """Returns a page as text.

    Args:
        template: a file of `templates/` that extends `base.html`.
        title: the page's title and first heading.
        styles: further style sheets of `templates/`, written into the page after `base.css`.
        scripts: scripts of `templates/`, written at the page's end, in this order.
        content: what the template names.

    Raises:
        ImportError: Jinja2 is not installed.
        jinja2.UndefinedError: the template names what is not in `content`.
    """
    templates = _templates()
    import markupsafe

    sheets = [_source(name) for name in (_STYLE, *styles)]
    programs = [_source(name) for name in (_SCHEME, *scripts)]
    rules = _POLICY | {"style-src": _hashes(sheets), "script-src": _hashes(programs)}
    page = {
        "policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "styles": [markupsafe.Markup(text) for text in sheets],  # noqa: S704  # our own files
        "head_script": markupsafe.Markup(programs[0]),  # noqa: S704
        "scripts": [markupsafe.Markup(text) for text in programs[1:]],  # noqa: S704
    }
    return templates.get_template(template).render(title=title, page=page, **content)


def write_page(path: str | os.PathLike[str], template: str, *, title: str, **content: Any) -> int:
    """Writes a page of `render`, whole or not at all, and returns its size in bytes.

    Names of files that are no text appear with escapes such as `\\udcff`.

    Raises:
        ImportError: Jinja2 is not installed.
        OSError: the file cannot be written; what was there before is kept.
    """
    encoded = render(template, title=title, **content).encode("utf-8", "backslashreplace")
    with whole_file(Path(path)) as temporary:
        temporary.write_bytes(encoded)
    return len(encoded)


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """Returns the content of a file as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def thumbnail(pixels: np.ndarray, *, side: int = 160, quality: int = 75) -> str:
    """Returns an image as a data address: at most `side` pixels wide and high, WebP or PNG.

    Args:
        pixels: (height, width, 3) or (height, width), 0..255.
        side: of a larger image the longer side becomes this.
        quality: of WebP, 1..100; images of up to 64x64 pixels are kept exactly.
    """
    from PIL import Image

    pixels = np.asarray(pixels)
    if pixels.dtype != np.uint8:
        pixels = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side))
    is_small = max(picture.size) <= _EXACT
    file = io.BytesIO()
    if is_small:
        picture.save(file, "PNG", optimize=True)
    else:
        picture.save(file, "WEBP", quality=quality)
    return data_uri(file.getvalue(), "image/png" if is_small else "image/webp")


@functools.cache
def _templates() -> "jinja2.Environment":
    with environment.installed("Pages are made by Jinja2", "jinja2"):
        import jinja2
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("keras_vit"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # `JSON.parse` knows no NaN: it must not arrive here.
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return templates


@functools.cache
def _source(name: str) -> str:
    return (importlib.resources.files("keras_vit") / "templates" / name).read_text("utf-8")


def _hashes(texts: Sequence[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
