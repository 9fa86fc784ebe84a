"""Builds the wheel, looks at what it holds, and runs it where the repository cannot be imported."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ("py.typed", "labels/imagenet2012.txt", "weights/published.csv", "weights/repositories.csv")
SCRIPT = """
import keras_vit, pathlib, sys
folder = pathlib.Path(keras_vit.__file__).parents[1]
if folder != pathlib.Path(sys.argv[1]): raise SystemExit(f"imported from {folder}")
model = keras_vit.VisionTransformer(keras_vit.ViTConfig(input_shape=(32, 32, 3), patch_size=16,
    hidden_dim=16, mlp_dim=32, num_heads=2, num_layers=1, classes=3))
print(keras_vit.__version__, model(__import__("keras").ops.zeros((1, 32, 32, 3))).shape)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site").resolve()
        pip = (sys.executable, "-m", "pip")
        run(*pip, "wheel", "-q", "--no-deps", "-w", wheels, ROOT, place=folder)
        (wheel,) = wheels.glob("*.whl")
        about = "-".join(wheel.name.split("-")[:2])  # the distribution and its version
        check_names(zipfile.ZipFile(wheel).namelist(), tops={"keras_vit", f"{about}.dist-info"})
        run(*pip, "install", "-q", "--no-deps", "--target", site, wheel, place=folder)
        # -P: the working folder is not imported from.
        run(sys.executable, "-P", "-c", SCRIPT, site, place=folder, site=site)
        for words in (("--version",), ("list",), ("train", "--help")):
            run(sys.executable, "-P", "-m", "keras_vit", *words, place=folder, site=site)


def check_names(names: list[str], *, tops: set[str]) -> None:
    """The code, its data and the licence, and no tests."""
    others = {name.split("/")[0] for name in names} - tops
    lost = {f"keras_vit/{name}" for name in DATA} - {*names}
    if others or lost or not any(name.endswith("licenses/LICENSE") for name in names):
        raise SystemExit(f"The wheel holds {others or 'no other things'}, and lacks {lost}.")


def run(*words: object, place: str, site: Path | None = None) -> None:
    variables = {**os.environ, **({"PYTHONPATH": str(site)} if site else {})}
    subprocess.run(
        [*map(str, words)], cwd=place, env=variables, check=True, stdin=subprocess.DEVNULL
    )


if __name__ == "__main__":
    main()
