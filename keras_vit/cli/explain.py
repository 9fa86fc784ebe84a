"""`keras-vit explain` and `demo`: what a model sees, as pictures, or as a page to try it."""

import argparse
import collections
import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit import environment
from keras_vit.cli import flags, output

if TYPE_CHECKING:
    import numpy as np

    from keras_vit.training import OpenedModel

    Maps = list[tuple[np.ndarray, str]]

_HOST = "127.0.0.1"
_PORT = 7860  # where it is free; where most such pages are
_DESCRIPTION = """\
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
Starts a page on this machine, at 127.0.0.1, to try a model: drop an image, see the likeliest
classes, what the model attends to, and which parts speak for a class. Ctrl-C ends it.

Nothing leaves the machine, and no other machine can reach the page.

examples:
  keras-vit demo digits-run
  keras-vit demo photos-run --port 8000 --no-browser
  keras-vit demo hf://google/vit-base-patch16-224
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands, "explain", run, "draw what a model attends to", _DESCRIPTION
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


def run(arguments: argparse.Namespace) -> int:
    """Reads the image, draws, prints the names of the files."""
    from keras_vit import data, explain

    image = data.read_image(arguments.image)
    opened = flags.open_model(arguments.source)
    model, labels = opened.model, opened.labels or None
    name = vars(arguments)["class"]
    target = None if name is None else _target(name, labels)
    files = explain.write_explanation(
        model, image, arguments.out, labels=labels, target=target, title=Path(arguments.image).name
    )
    _show(files, image.shape[:2], tuple(model.input_shape[1:3]), json=arguments.json)
    if not arguments.json:
        output.say_next(*output.after_looking(opened))
    return 0


def _show(
    files: Sequence[Path], size: tuple[int, ...], input_size: tuple[int, ...], *, json: bool
) -> None:
    if json:
        names = [str(file) for file in files]
        output.print_json("explanation", files=names, image=size, taken=input_size)
        return
    from keras_vit.explain import attention

    if size != input_size:
        old, new = attention.sides(size), attention.sides(input_size)
        output.say(f"The image is {old}; it was resampled to {new}, the size that the model takes.")
    output.say(f"Written: {', '.join(file.name for file in files[:-1])}")
    output.say(f"Open {files[-1]} in a browser.")


def _target(text: str, labels: tuple[str, ...] | None) -> int:
    """Returns the number of a class given by name or number; names come first."""
    if labels is not None and text in labels:
        return labels.index(text)
    if text.isdecimal():
        return int(text)
    examples = "" if labels is None else f", such as {', '.join(labels[:5])}"
    raise ValueError(f"There is no class {text!r}; give the number or name of a class{examples}.")


def add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
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
    """Returns the probabilities of the likeliest classes, maps with their names, and notes."""
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


def _make_page(opened: "OpenedModel", uploads: str) -> tuple[Any, dict[str, Any]]:
    """Makes the page, and how to launch it: for this machine, and for no other site."""
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

    look(opened, np.zeros((*data.image_size_of(opened.model), 3), np.uint8))  # errors come now
    with gr.Blocks(title=f"Try {opened.source}", analytics_enabled=False) as page:
        gr.Markdown(f"# Try {opened.source}")
        with gr.Row():
            photo = gr.Image(sources=["upload", "clipboard"], label="Image")
            classes = gr.Label(label="Classes", visible=opened.has_classifier)
        note = gr.Markdown()
        shown = gr.Gallery(label="Maps", columns=5, object_fit="contain", height="max-content")
        events, outputs = [photo.upload, photo.clear], [classes, shown, note]
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
