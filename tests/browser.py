"""Opens pages in a headless Chromium and says what is wrong with them.

`check_page` is for every page that the package writes. It drives the system's Chromium through
Playwright, which brings no browser of its own, and asks axe-core for contrast and the rest of
WCAG 2 A and AA.
"""

import contextlib
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (390, 1280)  # of a phone, of a laptop
SCHEMES = ("light", "dark")
# What a reader can press; of some hundred buttons of one kind, as in a matrix, each tenth.
CONTROLS = "button, summary, select, input, [role=slider]"
MOST_PRESSED = 40

# What of a page is wider than the window, though not inside of something that scrolls.
WIDE = """() => {
    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= width) return [];
    return [...document.querySelectorAll("body *")]
        .filter((node) => node.getBoundingClientRect().right > width + 1)
        .slice(0, 5).map((node) => node.outerHTML.slice(0, 120));
}"""
BROKEN = """async () => {
    const broken = [];
    for (const image of document.images) {
        try { await image.decode(); } catch { broken.push(image.outerHTML.slice(0, 120)); }
    }
    return broken;
}"""
# What tells a reader to press something, and is of no use on paper.
PRINTED = """() => [...document.querySelectorAll("select, input, label, .screen")]
    .filter((node) => node.checkVisibility()).map((node) => node.outerHTML.slice(0, 120))"""
# Everything that can be folded is open, so that it is looked at, too.
UNFOLD = "() => document.querySelectorAll('details').forEach((each) => { each.open = true; })"


def check_page(page: Path, *, press: bool = True) -> list[str]:
    """Returns what is wrong with a page, in both widths and schemes and on paper; nothing if well.

    Wrong is an error or a warning in the console, a script's exception, a breach of the page's
    policy, a request that leaves the file, a picture that does not decode, something wider than the
    window, text without the contrast of AA, a control without a name, and all of this again after
    every control was pressed.
    """
    address = page.absolute().as_uri()
    problems: dict[str, None] = {}
    with opened_browser() as browser:
        for width in WIDTHS:
            for scheme in SCHEMES:
                with opened_page(browser, address, width=width, scheme=scheme) as (opened, heard):
                    where = f"{width} pixels, {scheme}"
                    found = _look(opened)
                    if press:
                        found += [f"{problem} (pressed)" for problem in _press_all(opened)]
                    found += _print(opened)
                    problems.update(dict.fromkeys(f"{where}: {one}" for one in (*heard, *found)))
    return list(problems)


@contextlib.contextmanager
def opened_browser() -> Iterator[Browser]:
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        raise FileNotFoundError("This test opens Chromium; install it: apt-get install chromium.")
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened_page(
    browser: Browser, address: str, *, width: int = 1280, scheme: str = "light"
) -> Iterator[tuple[Page, list[str]]]:
    """Yields a page of a browser, and the list of what is heard of it while it is open."""
    height = 844 if width < 800 else 900
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]  # one of SCHEMES
        has_touch=width < 800,
    )
    heard: list[str] = []
    opened = context.new_page()
    opened.on("console", lambda said: _hear(said, heard))
    opened.on("pageerror", lambda error: heard.append(f"exception: {error}"))
    opened.on("request", lambda request: _weigh(request.url, address, heard))
    opened.on("requestfailed", lambda request: heard.append(f"failed: {request.url[:120]}"))
    try:
        opened.goto(address, wait_until="load")
        yield opened, heard
    finally:
        context.close()


def _hear(said: Any, heard: list[str]) -> None:
    if said.type in ("error", "warning"):
        heard.append(f"console: {said.text}")


def _weigh(url: str, address: str, heard: list[str]) -> None:
    """Notes a request for anything but the page, what stands in it, or its own server."""
    asked, own = urllib.parse.urlsplit(url), urllib.parse.urlsplit(address)
    is_own = url.partition("#")[0] == address if own.scheme == "file" else asked[:2] == own[:2]
    if asked.scheme not in ("data", "blob") and not is_own:
        heard.append(f"request: {url[:120]}")


def _look(opened: Page) -> list[str]:
    opened.evaluate(UNFOLD)
    problems = [f"wider than the window: {node}" for node in opened.evaluate(WIDE)]
    problems += [f"does not decode: {image}" for image in opened.evaluate(BROKEN)]
    return problems + _axe(opened)


def _axe(opened: Page) -> list[str]:
    options = {
        "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"],
        "resultTypes": ["violations"],
    }
    answer = Axe().run(opened, options=options)
    return [
        f"{rule['id']}: {node['html'][:160]} {' '.join(node['failureSummary'].split())[:200]}"
        for rule in answer.response["violations"]
        for node in rule["nodes"][:3]
    ]


def _press_all(opened: Page) -> list[str]:
    controls = [one for one in opened.query_selector_all(CONTROLS) if one.is_visible()]
    step = max(len(controls) // MOST_PRESSED, 1)
    unpressed = []
    for place, control in enumerate(controls):
        if len(controls) > MOST_PRESSED and place % step and place > 10:
            continue
        kind = control.evaluate("node => node.type || node.getAttribute('role') || node.tagName")
        try:
            _press(control, kind)
        except Exception as error:  # one that is covered, or cannot be reached
            unpressed.append(f"cannot be pressed: {kind}: {str(error)[:200]}")
    return unpressed + _look(opened)


def _press(control: Any, kind: str) -> None:
    if kind in ("slider", "range"):
        control.focus()
        for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
            control.press(key)
        control.hover()
    elif kind in ("search", "text", "number"):
        control.fill("1")
        control.fill("")
    elif kind.startswith("select"):
        for place in range(control.evaluate("node => node.options.length")):
            control.select_option(index=place)
    else:
        control.click(timeout=3000)


def _print(opened: Page) -> list[str]:
    """Looks at the page as it is printed, on paper of 190 mm."""
    opened.emulate_media(media="print")
    opened.set_viewport_size({"width": 718, "height": 1000})
    problems = [f"wider than paper: {node}" for node in opened.evaluate(WIDE)]
    problems += [f"printed, but for the screen: {node}" for node in opened.evaluate(PRINTED)]
    return problems + [f"on paper: {problem}" for problem in _axe(opened) if "contrast" in problem]
