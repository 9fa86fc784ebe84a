"""What a user does wrong is one sentence of the command line, and nothing is written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cli_rig
import image_files
import keras
import published
import pytest

from keras_vit.cli import train
from keras_vit.cli.main import main

nowhere = cli_rig.nowhere_fixture
ZEROS = "0" * 64
BACKBONE = published.GOLDEN / "modern" / "hf_dinov2"

# What follows `train --data digits --out new`, and what the sentence says, "..." for what is
# between. The last words of a line are those of the folder that `place` makes.
TRAIN = {
    "--weights x.npz": "no model file 'x.npz'",
    "--weights imagenet21k": "as a published name it needs --model",
    "--weights sam": "needs --model ... such as --model B/16",
    "--weights images": "holds no checkpoint",
    "--weights . --model Ti/16": "holds no checkpoint",
    "--weights broken --model Ti/16": "--model is the run's",
    "--weights x.npz --model Ti/16 --set patch_size=8": "for random weights",
    "--weights x.npz --model tiny": "no model 'tiny'; choose one of Ti/16",
    "--weights x --model Ti/16 --lora 2 --freeze 1": "leave out --freeze",
    f"--weights-sha256 {ZEROS}": "needs --weights",
    f"--weights run --weights-sha256 {ZEROS}": f"model.keras has the SHA-256 ... {ZEROS} was asked",
    "--freeze 1": "--freeze needs --weights",
    "--lora 2": "--lora needs --weights",
    "--positions bicubic": "--positions needs --weights",
    "--set temperature=2": "temperature needs --teacher",
    "--teacher run --set temperature=hot": "has the classes plain, striped, the data has 0, 1",
    "--set distillation_weight=0.5": "distillation_weight needs --teacher",
    "--teacher gone.keras": "no model file 'gone.keras'",
    "--teacher gone": "no run directory 'gone'",
    f"--teacher-sha256 {ZEROS}": "needs --teacher",
    f"--teacher run --teacher-sha256 {ZEROS}": f"model.keras has the SHA-256 ... {ZEROS} was asked",
    "--set width=3": "no setting 'width'; --set takes one of epochs, ",
    "--set classes=3": "classes is decided by the data",
    "--set input_shape=9,9,3": "input_shape is decided by image_size (--image-size)",
    "--set dropout_rate=much": "dropout_rate must be a number or None",
    "--set epochs=1.5": "epochs must be a whole number or None. Received: epochs=1.5",
    "--set epochs=2 steps=3": "either epochs or steps",
    "--set flip=maybe": "flip must be one of [False, True]",
    "--set betas=0.9": "betas must be a tuple of 2 numbers",
    "--set average=1": "average must lie between 0 and 0.999",
    "--learning-rate nan": "learning_rate must lie between 0 and 100. Received: learning_rate=nan",
    "--learning-rate fast": "learning_rate must be a number. Received: learning_rate='fast'",
    "--batch-size 2.5": "batch_size must be a whole number",
    "--set checkpoint_minutes=0": "checkpoint_minutes must be a number above 0",
    "--set patch_size=big": "patch_size must be a positive integer",
    "--epochs 0": "epochs must lie between 1 and",
    "--strategy fast": "strategy must be one of ['auto', ",
    "--gradient-accumulation-steps 0": "gradient_accumulation_steps must be a positive integer",
    "--set dropout_rate=2": "dropout_rate must lie between 0 and 0.99",
    "--set hidden_dim=65": "hidden_dim must be a multiple of num_heads=4",
    "--set pooling=mean": "pooling must be one of",
    "--set pooling=token": 'pooling="token" needs class_token=True',
    "--set pooling=avg --model Ti/16 --weights x.npz": "for random weights",
    "--recipe plain-s32": "no recipe 'plain-s32'; choose one of digits, ",
    "--recipe deit3-s16 --set layer_decay=0.7": "LAMB",
    "--set sam_rho=0.05 remat=true": "sam_rho=0.05 and remat=True do not go together",
}
PRETRAIN = "pretrain --out new --data"
WRONG = {
    **{f"train --data digits --out new {flags}": text for flags, text in TRAIN.items()},
    "train --data gone --out new": "no folder 'gone'",
    "train --data empty --out new": "holds no class folders",
    "train --data one --out new": "has one class, 'only'",
    "train --data one --plan": "has one class, 'only'; a classifier needs at least two",
    "train --data few --plan": "too few for a validation split",
    "train --data images --out new --strict": "001.png",
    "train --data images --out new --image-size 60": "multiples of 8",
    "train --data images --out new --model vgg": "no model 'vgg'",
    "train --data images --out run": "already holds a run; resume it (--resume), replace it "
    "(--overwrite) or choose another --out",
    "train --data images --out images": "holds other things",
    "train --data images --out new --teacher vit": "has the classes ant, bee ... the same order",
    f"{PRETRAIN} empty": "too few images to train and validate on",
    f"{PRETRAIN} digits --target small_patch --set patch_size=2 --image-size 16": "a multiple "
    "of 4 pixels. Received: 2",
    f"{PRETRAIN} digits --set corruption=much": "corruption must be above 0, at most",
    f"{PRETRAIN} digits --set temperature=2": "no setting 'temperature'",
    f"{PRETRAIN} digits --set head_bias=-10": "head_bias belongs to a classifier",
    f"{PRETRAIN} images --model digits --set representation_dim=8": "belongs to a classifier",
    "predict images a.png": "holds no checkpoint",
    "predict gone a.png": "no run directory 'gone'",
    "predict gone.safetensors a.png": "no model file 'gone.safetensors'",
    "predict hf://owner a.png": "A Hub address is hf://owner/name",
    f"predict {BACKBONE} a.png": f"no classifier ... --weights {BACKBONE}.",
    "predict run images --csv gone/found.csv": "no folder 'gone'",
    "predict run images --csv empty.csv": "is a folder",
    "predict run *.webp": "No file matches '*.webp'",
    "predict run empty.csv": "holds no JPEG",
    "evaluate gone": "no run directory 'gone'",
    "evaluate vit": "has no images of its own ... give --data",
    "evaluate vit --data other": "stranger",
    f"evaluate {BACKBONE}": "no labelled images of its own ... give --data",
    "evaluate features": "has no labelled images of its own; give --data",
    "evaluate features --data images --real real.json": "has no classifier; --real measures one",
    "explain gone.keras a.png --out new": "There is no model file 'gone.keras'",
    "explain gone a.png --out new": "There is no run directory 'gone'",
    "explain run gone.png --out new": "There is no image file 'gone.png'",
    "explain run a.png --out new --class cat": "There is no class 'cat'; give the number or name",
    "explain run a.png --out new --class 2": "There is no class 2; the model has 2",
    "explain models/other.keras a.png --out new": "contains 0 Vision Transformers",
    "demo gone": "There is no run directory 'gone'",
    "export gone.keras --out new": "There is no model file 'gone.keras'",
    "export gone --out new": "gone",
    "export run --out new --formats pdf": "formats must be some of",
    "export run --out new --images gone.png": "gone.png",
    "list --variant B/17": "no variant 'B/17'",
    "list --family dino2": "Did you mean 'dinov2'?",
}
USAGE = {
    "": "required",
    "fly": "fly",
    "train": "--data",
    "train --data x": "--out",
    "train --data x --out y --freeze -1": "'-1' is not a whole number from 0",
    "train --data x --out y --lora 0": "'0' is not a ",
    "train --data x --out y --epoch 3": "train: error: unrecognized arguments: --epoch 3; see",
    "train --data x --out y --image-size big": "'big' is not a ",
    "predict run": "IMAGE",
    "predict run images --csv a.jpg": "ends in .csv",
    "evaluate": "required",
    "demo run --port 65536": "'65536' is not a whole number from 0 to 65535",
    "list --family vit --variant B/16": "not allowed with",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    image_files.write_classes(folder / "images")
    image_files.damage(folder / "images" / "plain" / "001.png")
    image_files.write_classes(folder / "one", classes=("only",))
    image_files.write_classes(folder / "few", count=1, classes=("cat", "dog", "owl"))
    image_files.write_classes(folder / "other", count=3, classes=("ant", "stranger"))
    image_files.write_image(folder / "a.png")
    (folder / "file").write_text("mine")
    for name in ("empty", "empty.csv", "models"):
        (folder / name).mkdir()
    cli_rig.make_run(folder / "run")
    settings = {"objective": "masked-patches", "labels": []}
    cli_rig.make_run(folder / "features", settings=settings, **cli_rig.FEATURES)
    shutil.copytree(folder / "run", folder / "broken")
    (folder / "broken" / "config.json").rename(folder / "broken" / "history.csv")
    shutil.copytree(BACKBONE.with_name("hf_vit_cls"), folder / "vit")
    fields = json.loads((folder / "vit" / "config.json").read_text())
    fields["id2label"] = dict(enumerate(["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]))
    (folder / "vit" / "config.json").write_text(json.dumps(fields))
    other = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()])
    other.save(folder / "models" / "other.keras")
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def faults(command: str, text: str, place: Path, *, code: int) -> list[str]:
    """What a command does that is not to be done with a mistake."""
    before = contents(place)
    result = cli_rig.run(*command.split(), folder=place)
    start = "keras-vit" if code == 2 else "keras-vit: error: "
    checks = {
        f"exit code {result.code}": result.code == code,
        f"stderr {result.errors}": len(result.errors) == 1
        and result.errors[0].startswith(start)
        and all(part in result.errors[0] for part in text.split(" ... ")),
        "something written": contents(place) == before,
    }
    if code == 2:
        points = result.errors[0].endswith("--help") and ": error: " in result.errors[0]
        checks |= {f"stdout {result.out}": not result.out, "no pointer to the help": points}
    return [f"{command}: {fault}" for fault, is_right in checks.items() if not is_right]


def test_what_is_wrong_is_one_sentence(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line on stderr that says what to do, exit code 1, nothing written or lost.

    What is not installed is named, with the command that installs it.
    """
    assert [each for pair in WRONG.items() for each in faults(*pair, place, code=1)] == []
    monkeypatch.setitem(sys.modules, "sklearn", None)
    command = "train --data digits --out new --model digits"
    assert faults(command, "pip install scikit-learn", place, code=1) == []


def test_wrong_usage_is_one_line(place: Path) -> None:
    """Exit code 2, and nothing is printed but one line that points to the help."""
    assert [each for pair in USAGE.items() for each in faults(*pair, place, code=2)] == []
    process = subprocess.run([sys.executable, "-m", "keras_vit", "fly"], capture_output=True)
    assert process.returncode == 2


def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is raised is told with the documented exit code; a mistake of ours is not hidden."""
    errors: tuple[tuple[BaseException, int, str], ...] = (
        (ValueError("Two\nlines."), 1, "keras-vit: error: Two lines.\n"),
        (FileNotFoundError("Gone."), 1, "keras-vit: error: Gone.\n"),
        (ImportError("pip install x"), 1, "keras-vit: error: pip install x\n"),
        (KeyboardInterrupt(), 130, "keras-vit: Interrupted: nothing was saved.\n"),
        (KeyboardInterrupt("Saved."), 130, "keras-vit: Saved.\n"),
    )

    def fail(error: BaseException) -> int:
        def run(arguments: object) -> int:
            raise error

        monkeypatch.setattr(train, "run", run)
        return main(["train", "--data", "x", "--out", "y"])

    for error, code, line in errors:
        assert (fail(error), capsys.readouterr().err) == (code, line)
    with pytest.raises(TypeError):
        fail(TypeError("bug"))


def test_only_its_own_lines_reach_the_terminal(tmp_path: Path) -> None:
    """TensorFlow's remarks at its import do not, whatever the environment says of its log level.

    The exit code is that of the process.
    """
    done = subprocess.run(
        [sys.executable, "-m", "keras_vit", "predict", str(tmp_path / "gone"), "image.png"],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("TF_")},
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("keras-vit: error: ")
