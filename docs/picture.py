"""Makes the README's picture, report.png: a run's report and a page of explain, side by side.

    keras-vit train --data photos --out photos-run
    keras-vit explain photos-run "photos/cat/cat 000.jpg" --out seen
    python docs/picture.py photos-run/report.html seen/index.html

It needs a Chromium, and Pillow.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, SCALE = 1000, 1100, 0.65


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs=2, type=Path, help="the pages, left and right")
    pages = parser.parse_args().pages
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        parser.error(f"there is none of {', '.join(PROGRAMS)}; install a Chromium")
    options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}")
    width, height = round(WIDTH * SCALE), round(HEIGHT * SCALE)
    picture = Image.new("RGB", (2 * width, height))
    for place, page in enumerate(pages):
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            address = page.resolve(strict=True).as_uri()
            command = [program, *options, f"--screenshot={file.name}", address]
            subprocess.run(command, check=True, capture_output=True)
            shot = Image.open(file.name).convert("RGB")
        picture.paste(shot.resize((width, height), Image.Resampling.LANCZOS), (place * width, 0))
    out = Path(__file__).with_name("report.png")
    picture.save(out, optimize=True)


if __name__ == "__main__":
    main()
