"""`keras-vit demo`: a page on this machine to try a model."""

import argparse
import contextlib
import os
import sys
import threading
import webbrowser

from keras_vit.cli import flags, output

_DESCRIPTION = """\
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
        commands, "demo", run, summary="try a model in a browser", description=_DESCRIPTION
    )
    flags.add_source(parser)
    parser.add_argument(
        "--port",
        type=_port,
        metavar="N",
        help="port of 127.0.0.1 to serve at, 0 for any that is free (default: 7860, or another if "
        "that is taken)",
    )
    parser.add_argument(
        "--no-browser",
        action="store_true",
        help="print the address alone (default: also open it in a browser)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves the page until it is interrupted."""
    from keras_vit import demo

    with demo.listen(arguments.port) as listener:
        server = demo.make_server(demo.make_app(flags.open_model(arguments.source)))
        address = demo.address(listener)
        output.say(f"Open {address} in a browser; Ctrl-C ends it.")
        if not arguments.no_browser and _has_window():
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
        output.say("The page is closed.")
    output.say_next("export", arguments.source, "--out", "export")
    return 0


def _has_window() -> bool:
    """Whether a browser has a window to open in; in a terminal alone one would take it over."""
    is_x11 = sys.platform.startswith(("linux", "freebsd"))
    return not is_x11 or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to {2**16 - 1}")
    return int(text)
