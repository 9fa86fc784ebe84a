"""Opens a page in a headless Chromium and returns what its console said."""

import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

# Appended to a copy of the page: proves that the console is heard, and that pictures decoded.
PROBE = """<script>
const images = [...document.images];
console.log("loaded " + images.filter(image => image.naturalWidth > 0).length
            + " of " + images.length + " title " + document.title);
</script>"""


def console(page: Path, folder: Path) -> list[str]:
    """Returns the lines that the page, with the probe at its end, wrote to the console.

    Raises:
        FileNotFoundError: no Chromium is installed.
    """
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        raise FileNotFoundError("This test opens Chromium; install it: apt-get install chromium.")
    copy = folder / "probed.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"))
    command = [
        *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"),
        f"--user-data-dir={folder / 'profile'}",
        copy.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return re.findall(r'CONSOLE[^"]*"(.*?)", source', done.stderr)
