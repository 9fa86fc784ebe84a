"""`keras-vit predict`, `explain` and `demo`: what a model sees in images, in words and pictures."""

import argparse
import collections
import contextlib
import csv
import io
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from keras_vit import environment
from keras_vit.cli import flags, output
from keras_vit.limits import counted

if TYPE_CHECKING:
    import numpy as np

    from keras_vit.data import NamedImage, SkippedFile
    from keras_vit.training import OpenedModel, Run

    Maps = list[tuple[np.ndarray, str]]

_HOST = "127.0.0.1"
_PORT = 7860  # where it is free; where most such pages are
_DESCRIPTION = """\
Classifies images with the model of a run or of another source, such as a file or hf://owner/name.

IMAGE is a file; a folder, whose images are taken at any depth; a pattern in quotes, such as
"photos/**/*.jpg"; or - for a pipe. If the pipe holds an image, it is that image. Otherwise it holds
names of files and folders, one a line, or with a NUL after each, as find -print0 prints them.

Prints the most probable classes of each image and their probabilities: a table, or a line an image
where there are many. With --csv it prints how many images each class has. An image that cannot be
read gives a line on stderr; the others are predicted, and the exit code is 1. The same image has
the same numbers, however many others there are.

examples:
  keras-vit predict digits-run digits-run/sample.png
  keras-vit predict photos-run holiday-photos --csv holiday.csv
  keras-vit predict photos-run "photos/**/*.jpg" --top 1 --json
  find photos -newer last.txt -print0 | keras-vit predict photos-run -
  curl https://example.org/cat.jpg | keras-vit predict photos-run -
  keras-vit predict photos-run holiday.jpg --tta
  keras-vit predict hf://google/vit-base-patch16-224 holiday.jpg
  keras-vit predict export/photos/onnx/1 holiday.jpg
"""
_EXPLAIN = """\
Draws what a model attends to in an image: attention rollout, relevance of a class, each head of the
last layer, attention distance, token similarity, position embeddings, embedding filters.

Writes PNG files, and index.html, one page that contains them all and needs no network.

examples:
  keras-vit explain digits-run digits-run/sample.png --out seen
  keras-vit explain photos-run holiday.jpg --out seen --class dog
  keras-vit explain my-model.keras holiday.jpg --out seen --class 207
  keras-vit explain hf://timm/deit_base_patch16_224.fb_in1k holiday.jpg --out seen
"""
_DEMO = """\
Starts a page on this machine, at 127.0.0.1, to try a model: drop an image, see the top
classes, what the model attends to, and class relevance. Ctrl-C ends it.

Nothing leaves the machine, and no other machine can reach the page.

examples:
  keras-vit demo digits-run
  keras-vit demo photos-run --port 8000 --no-browser
  keras-vit demo hf://google/vit-base-patch16-224
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(commands, "predict", run, "classify images", _DESCRIPTION)
    flags.add_source(parser, takes_exports=True)
    parser.add_argument(
        "images",
        metavar="IMAGE",
        nargs="+",
        help="image files, folders, patterns in quotes, or - for a pipe",
    )
    flags.add(
        parser,
        f"""
  --top N  number of classes to name for each image (default: 5)
  --csv FILE  write a table to this .csv file, one row an image; whole, or not at all after an
      interruption (default: none)
{flags.JSON}""",
        top={"type": flags.whole(1), "default": 5},
        # So that no image is replaced by mistake.
        csv={"type": flags.matching(r"(?i).*\.csv", "a name that ends in .csv")},
    )
    flags.add_inference(parser)


def run(arguments: argparse.Namespace) -> int:
    """Predicts, prints and writes."""
    if arguments.csv is not None:  # before anything takes time
        path = Path(arguments.csv)
        if path.is_dir():
            raise IsADirectoryError(f"{str(path)!r} is a folder; give the name of a .csv file.")
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"There is no folder {str(path.parent)!r} to write {path.name!r} to; make it."
            )
    opened = flags.open_to_run(arguments)
    if not opened.has_classifier:
        advice = (
            "keras-vit evaluate measures its features, and predict takes an exported classifier"
            if opened.exported
            else "train one on images of yours with keras-vit train --data FOLDER --out RUN "
            f"--weights {opened.source}"
        )
        raise ValueError(f"{opened.source} has no classifier, so that it names no class; {advice}.")
    skipped: list[SkippedFile] = []
    images, count = _images(arguments, skipped)
    is_listed = arguments.json or arguments.csv is None
    display = output.PredictDisplay(total=count, is_listed=is_listed, json=arguments.json)
    with _csv(arguments.csv) as write:
        _predict(opened, images, display, write, arguments)
    display.finish(skipped)
    if arguments.json:
        return 1 if display.failures else 0
    if arguments.csv is not None:
        output.say(f"Written: {arguments.csv}")
    if display.failures and not display.images:  # nothing was named that could be looked at
        return 1
    first = display.first or ""
    if not opened.exported and first.isprintable() and Path(first).is_file():
        output.say_next("explain", arguments.source, first, "--out", "seen")
    else:
        output.say_next(*output.after_looking(opened))
    return 1 if display.failures else 0


def _predict(
    opened: "OpenedModel",
    images: "Iterator[NamedImage]",
    display: output.PredictDisplay,
    write: Callable[[list[object]], object],
    arguments: argparse.Namespace,
) -> None:
    from keras_vit import data, evaluation

    top = min(arguments.top, len(opened.labels))
    numbers = ["", *(f"_{place}" for place in range(2, top + 1))]
    write(["image", *(f"{name}{n}" for n in numbers for name in ("label", "probability"))])
    views = flags.views(opened, arguments)
    found = evaluation.predict_files(opened.model, images, labels=opened.labels, top=top, tta=views)
    try:
        with display, contextlib.closing(found):
            for image, predictions in found:
                if isinstance(predictions, Exception):
                    display.fail(f"error: {predictions}")
                    continue
                pairs = ((one.label, one.probability) for one in predictions)
                write([image.name, *(value for pair in pairs for value in pair)])
                display.show(image.name, predictions)
    except KeyboardInterrupt:
        table = "" if arguments.csv is None else f"; {arguments.csv} was not written"
        done = f"Interrupted after {counted(display.images, 'image')}{table}."
        raise KeyboardInterrupt(done) from None
    if not display.images and not display.failures:
        raise ValueError(f"There are no {data.FORMATS} files to predict; check the names.")


def _images(
    arguments: argparse.Namespace, skipped: "list[SkippedFile]"
) -> "tuple[Iterator[NamedImage], int | None]":
    from keras_vit import data

    has_pipe = data.PIPE in arguments.images
    if has_pipe and sys.stdin.isatty():
        raise ValueError("- reads an image, or names of images, from a pipe; there is none.")
    pipe = cast(io.BufferedIOBase, sys.stdin.buffer) if has_pipe else None
    named = data.named_images(arguments.images, pipe=pipe)

    def images() -> "Iterator[NamedImage]":
        for one in named:
            if isinstance(one, data.SkippedFile):
                skipped.append(one)
            else:
                yield one

    if has_pipe:
        return images(), None
    listed = list(images())
    return iter(listed), len(listed)


@contextlib.contextmanager
def _csv(name: str | None) -> Iterator[Callable[[list[object]], object]]:
    """Gives what writes a row of the table, which is there at the end; nothing without a name."""
    from keras_vit import atomic

    if name is None:
        yield lambda row: None
        return
    with (
        atomic.whole_file(Path(name), kept="nothing was written") as temporary,
        temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream,
    ):
        yield csv.writer(stream).writerow


def add_explain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `explain`."""
    parser = flags.add_command(
        commands, "explain", explain, "draw what a model attends to", _EXPLAIN
    )
    flags.add_source(parser)
    parser.add_argument(
        "image", metavar="IMAGE", help="a JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF file"
    )
    flags.add(
        parser,
        f"""
  --out DIR  folder to write to
  --class NAME  class whose relevance is drawn, by name or number from 0 (default: the most
      probable)
{flags.JSON}""",
        out={"required": True},
    )


def explain(arguments: argparse.Namespace) -> int:
    """Reads the image, draws, prints the names of the files."""
    from keras_vit import data
    from keras_vit.explain.page import how_taken, write_explanation

    image = data.read_image(arguments.image)
    opened = flags.open_model(arguments.source)
    model, labels = opened.model, opened.labels or None
    name, target = vars(arguments)["class"], None
    if name is not None:
        name = data.source.composed(name)
    if labels is not None and name in labels:
        target = labels.index(name)
    elif name is not None and name.isdecimal():
        target = int(name)
    elif name is not None:
        examples = "" if labels is None else f", such as {', '.join(labels[:5])}"
        raise ValueError(
            f"There is no class {name!r}; give the number or name of a class{examples}."
        )
    files = write_explanation(
        model, image, arguments.out, labels=labels, target=target, title=Path(arguments.image).name
    )
    size, how = image.shape[:2], data.resizing_of(model)
    if arguments.json:
        names = [str(file) for file in files]
        output.print_json("explanation", files=names, image=size, taken=how.size)
        return 0
    output.say(how_taken(size, how))
    output.say(f"Written: {', '.join(file.name for file in files[:-1])}")
    output.say(f"Open {files[-1]} in a browser.")
    output.say_next(*output.after_looking(opened))
    return 0


def add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `demo`."""
    parser = flags.add_command(commands, "demo", demo, "try a model in a browser", _DEMO)
    flags.add_source(parser)
    flags.add(
        parser,
        """
  --port N  port of 127.0.0.1 to serve at, 0 for any that is free (default: 7860, or another if
      that is taken)
  --no-browser  print the address alone (default: also open it in a browser)
""",
        port={"type": flags.whole(0, 2**16 - 1)},
    )


def demo(arguments: argparse.Namespace) -> int:
    """Serves the page until it is interrupted."""
    with tempfile.TemporaryDirectory(prefix="keras-vit-") as uploads:
        with _listen(arguments.port) as listener:  # nobody takes the port while the model is opened
            port = listener.getsockname()[1]
            page, launch = _make_page(flags.open_model(arguments.source), uploads)
        # A browser has a window to open in; in a terminal alone one would take it over.
        is_x11 = sys.platform.startswith(("linux", "freebsd"))
        has_window = not is_x11 or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
        is_shown = has_window and not arguments.no_browser
        page.launch(server_port=port, inbrowser=is_shown, **launch)
        with contextlib.suppress(KeyboardInterrupt):
            output.say(f"Open http://{_HOST}:{port} in a browser; Ctrl-C ends it.")
            while True:
                time.sleep(3600)
        page.close(verbose=False)
    output.say("The page is closed.")
    output.say_next("export", arguments.source, "--out", "export")
    return 0


def look(opened: "OpenedModel", image: "np.ndarray") -> "tuple[dict[str, float] | None, Maps, str]":
    """Returns the probabilities of the top classes, maps with their names, and notes."""
    from keras_vit import evaluation, figures
    from keras_vit.explain import page

    counts = collections.Counter(opened.labels)  # ImageNet has two classes "crane"
    names = [
        name if counts[name] == 1 else f"{name} ({index})"
        for index, name in enumerate(opened.labels)
    ]
    classes, notes = None, ["The model has no classifier, so that it names no class."]
    if opened.has_classifier:
        (found,) = evaluation.predict(opened.model, [image], labels=names)
        classes, notes = {each.label: each.probability for each in found}, []
    try:
        subject = page.make_subject(opened.model, image)
        maps = page.overlays(subject, names)
    except ValueError as error:  # it holds no Vision Transformer, or pools by maximum
        return classes, [], " ".join([*notes, str(error)])
    shown = [(figures.lit(subject.image / 255, each.values), each.name) for each in maps]
    return classes, shown, " ".join([*notes, *subject.notes])


def _test_image(run: "Run") -> str | None:
    sample, splits = run.path / "sample.png", run.path / "splits.csv"
    with contextlib.suppress(OSError, ValueError):  # the folder of the training is gone
        if splits.is_file():
            return next(filter(str.isprintable, run.data().test.images), None)  # what can be sent
    return str(sample) if sample.is_file() else None


def _make_page(opened: "OpenedModel", uploads: str) -> tuple[Any, dict[str, Any]]:
    # Gradio reads these, and asks its own server whether it is there: no proxy could reach that.
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=uploads, no_proxy="*")
    with environment.installed("The page is made by Gradio", "gradio"):
        import gradio as gr
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    import numpy as np

    from keras_vit import data

    def answer(file: dict[str, Any] | None) -> tuple[Any, ...]:
        if file is None:
            return None, [], ""
        try:
            return look(opened, data.read_image(file["path"]))
        except (ValueError, OSError, MemoryError) as error:
            sentence = str(error) or "There is too little memory for this image."
            # Not `gr.Error`, under which the answer to the image before stays.
            return None, [], sentence.replace(f"{Path(file['path']).parent}{os.sep}", "")

    look(opened, np.zeros((*data.resizing_of(opened.model).size, 3), np.uint8))  # errors come now
    with gr.Blocks(title=f"Try {opened.source}", analytics_enabled=False) as page:
        gr.Markdown(f"# Try {opened.source}")
        with gr.Row():
            first = (opened.run and _test_image(opened.run)) or gr.media.get_image("lion.jpg")
            label = "Image (drop or choose one of yours)"
            photo = gr.Image(first, sources=["upload", "clipboard"], label=label)
            classes = gr.Label(label="Classes", visible=opened.has_classifier)
        note = gr.Markdown()
        shown = gr.Gallery(label="Maps", columns=5, object_fit="contain", height="max-content")
        events, outputs = [page.load, photo.upload, photo.clear], [classes, shown, note]
        # Without `preprocess`: Gradio would refuse a damaged image in its own words.
        turn = {"api_name": "look", "preprocess": False, "concurrency_limit": 1}
        gr.on(events, answer, photo, outputs, **turn)
    own = Middleware(TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])
    launch = {"server_name": _HOST, "share": False, "app_kwargs": {"middleware": [own]}}
    quiet = {"prevent_thread_lock": True, "quiet": True, "ssr_mode": False, "footer_links": []}
    return page, {**launch, **quiet}


def _listen(port: int | None) -> socket.socket:
    for candidate in (_PORT, 0) if port is None else (port,):
        try:
            return socket.create_server((_HOST, candidate))
        except OSError as error:
            problem = error
    raise OSError(
        f"Port {port} of {_HOST} cannot be used ({problem.strerror}); choose another with --port, "
        "or --port 0 for any that is free."
    )
