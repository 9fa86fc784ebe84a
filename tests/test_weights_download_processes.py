"""Downloads in processes of their own: full disks, several at once, kill -9, terminals."""

import contextlib
import os
import pty
import re
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import download_rig as rig
import numpy as np
import pytest

from keras_vit.weights import download

server, url, home = rig.server_fixture, rig.url_fixture, rig.home_fixture


@pytest.mark.full
def test_cache_is_in_keras_own_folder(tmp_path: Path) -> None:
    """Files are kept where keras.utils.get_file keeps a model, with and without KERAS_HOME."""
    (tmp_path / "file.bin").write_bytes(b"x")
    ask = rig.CHILD + (
        "import keras\n"
        "print(keras.utils.get_file(origin=sys.argv[2], cache_subdir='models'))\n"
        "print(download.cached_path(sys.argv[3]))"
    )
    plain = {name: text for name, text in os.environ.items() if name != "KERAS_HOME"}
    plain["HOME"] = str(tmp_path)
    address = "https://storage.googleapis.com/vit_models/sam/ViT-B_16.npz"
    folders = []
    for more in ({}, {"KERAS_HOME": str(tmp_path / "elsewhere")}):
        child = rig.run_child(ask, f"file://{tmp_path}/file.bin", address, env=plain | more)
        of_keras, ours = (Path(line) for line in child.stdout.splitlines()[-2:])
        assert ours == of_keras.parent / "keras_vit" / "vit_models" / "sam" / "ViT-B_16.npz"
        folders.append(of_keras.parent)

    assert folders == [tmp_path / ".keras" / "models", tmp_path / "elsewhere" / "models"]


def test_download_needs_no_framework(url: str) -> None:
    """It runs where neither Keras nor TensorFlow is imported; into a pipe nothing is drawn."""
    loaded = "; print([name for name in ('keras', 'tensorflow') if name in sys.modules])"
    child = rig.run_child(rig.FETCH + loaded, url)

    assert (child.stdout.splitlines()[-1], child.stderr) == ("[]", "")


@pytest.mark.parametrize("length", [True, False])
def test_no_room(length: bool, server: rig.Server, url: str, home: Path) -> None:
    """What does not fit is refused while it is written, and leaves nothing."""
    server.length = length
    limits = (rig.MIDDLE, rig.MIDDLE)  # of the size of a file: half of the download
    child = rig.run_child(
        rig.FETCH, url, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    )

    assert rig.kept(home) == set()
    assert child.returncode == 1
    said = child.stderr.splitlines()[-1]
    assert said.startswith("OSError")
    assert f"{url} was not downloaded" in said
    assert "set KERAS_HOME" in said


def test_cache_that_cannot_be_written(
    server: rig.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a mirror is read as it is; a download says where it could go."""
    file = tmp_path / "imagenet21k" / "ViT-B_16.npz"
    file.parent.mkdir()
    file.write_bytes(rig.BODY)
    monkeypatch.setenv("KERAS_HOME", str(file))  # which is no folder
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path))
    child = rig.run_child(rig.FETCH, f"https://storage.googleapis.com/x/imagenet21k/{file.name}")
    assert child.stdout.strip() == str(file), child.stderr
    assert "Cannot record the SHA-256" in child.stderr
    with pytest.raises(OSError, match="set KERAS_HOME to a folder that you can write to"):
        download.fetch(server.url + rig.NAME)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_two_processes_and_two_threads_at_once(server: rig.Server, url: str) -> None:
    """All that want the same file at once get it by one download."""
    server.pause = 0.02
    children = [rig.start_child(rig.FETCH, url) for _ in "ab"]
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(download.fetch(url))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = [child.communicate(timeout=300) for child in children]

    assert [out.strip() for out, _ in results] == [str(download.cached_path(url))] * 2, results
    assert paths == [download.cached_path(url)] * 2
    assert len(server.requests) == 1
    assert download.cached_path(url).read_bytes() == rig.BODY


def test_killed_in_the_middle(server: rig.Server, url: str, home: Path) -> None:
    """kill -9 leaves a partial file and no held lock; the next call asks only for the rest."""
    server.faults = [rig.stall(rig.MIDDLE)]
    partial = download.cached_path(url).with_name("ViT-B_16.npz.partial")
    child = rig.start_child(rig.FETCH, url)
    while size(partial) == 0 and child.poll() is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=300)
    there = size(partial)

    assert "ViT-B_16.npz" not in rig.kept(home)
    assert 0 < there <= rig.MIDDLE
    assert download.fetch(url).read_bytes() == rig.BODY
    assert server.starts[-1] == there - 1


@pytest.mark.full
def test_killed_again_and_again(server: rig.Server, home: Path) -> None:
    """Killed at any moment, a download leaves either no file under its name or the whole one."""
    body = rig.archive(3, floats=200_000)
    server.files["/large.npz"] = body
    server.pause = 0.01
    url = f"{server.url}/large.npz"
    path = download.cached_path(url)
    partial = path.with_name("large.npz.partial")
    for least in np.linspace(1, len(body), 8):
        child = rig.start_child(rig.FETCH, url)
        while size(partial) < least and not path.exists():
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=300)
        assert not path.exists() or path.read_bytes() == body

    assert download.fetch(url).read_bytes() == body
    assert rig.kept(home) == {"large.npz", "large.npz.sha256"}


def on_a_terminal(code: str, url: str) -> str:
    """Runs a child whose standard error is a terminal and returns what it drew."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        rig.child_command(rig.CHILD + code, url), stderr=theirs, env=environment
    ) as child:
        os.close(theirs)
        drawn = b""
        with contextlib.suppress(OSError):  # the terminal's end is an error on Linux
            while piece := os.read(ours, 2**16):
                drawn += piece
        child.wait(300)
    os.close(ours)
    assert child.returncode == 0, drawn.decode()
    return drawn.decode()


def test_progress_bar_on_a_terminal(server: rig.Server, url: str) -> None:
    """It shows the name, the bytes, the speed and the time left; nothing of a small file."""
    server.files["/config.json"] = b"{}"
    assert on_a_terminal("download.fetch(sys.argv[2])", f"{server.url}/config.json") == ""
    server.pause = 0.03
    drawn = on_a_terminal("download.fetch(sys.argv[2])", url)

    assert "ViT-B_16.npz" in drawn
    assert "KiB" in drawn
    assert "kB/s" in drawn or "MB/s" in drawn
    assert re.search(r"\d:\d\d:\d\d", drawn)
