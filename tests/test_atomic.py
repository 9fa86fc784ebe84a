"""Tests of keras_vit.atomic: files and folders whole or not at all, one writer at a time."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keras_vit import atomic

# The module without the package above it, which brings TensorFlow, whose threads forbid a fork.
CHILD = """
import os, signal, sys, time, types
from pathlib import Path
package = types.ModuleType("keras_vit")
package.__path__ = [sys.argv[1]]
sys.modules["keras_vit"] = package
from keras_vit import atomic
path = Path(sys.argv[2])
"""
HOLDER = """
with atomic.lock(path, what="training"):
    print("held", flush=True)
    signal.pause()
"""
# Publishes in processes that are killed before their first, second ... change of names, each in a
# folder of that number, until one is not; prints its number.
KILLED = """
if sys.argv[3] != "swapped":
    atomic._swap = lambda first, second: False
for number in range(1, 30):
    pid = os.fork()
    if pid and not os.waitpid(pid, 0)[1]:
        print(number)
        break
    if not pid:
        left, swap = [number], atomic._swap
        def hook(event, _):
            if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "swap"):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
        def told(first, second):
            hook("swap", ())
            return swap(first, second)
        atomic._swap = told
        sys.addaudithook(hook)
        folder = path / str(number)
        with atomic.staging_folder(folder / "work") as stage:
            for name in ("model", "config"):
                (stage / name).write_text("new")
            atomic.publish(stage, folder / "run")
        os._exit(0)
"""
HALF = """
with atomic.whole_file(path) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
WRITER = """
for _ in range(50):
    with atomic.whole_file(path) as temporary:
        temporary.write_text(sys.argv[3] * 5000)
"""
COUNTER = """
counter, done = Path(sys.argv[3]), 0
while done < 30:
    try:
        with atomic.lock(path, what="counting"):
            counter.write_text(str(int(counter.read_text()) + 1))
            done += 1
    except FileExistsError:
        time.sleep(0.0005)
"""
ADVICE = {
    errno.ENOSPC: "No space left on device: .*; make room and try again",
    errno.EDQUOT: "quota exceeded: .*; make room",
    errno.EROFS: "Read-only file system: .*; make it writable or choose another place",
    errno.EACCES: "Permission denied: .*; make it writable or choose another place",
    errno.EIO: "Input/output error: .*; check the disk",
    errno.EMFILE: r"Too many open files: .*; allow more open files \(ulimit -n\)",
    errno.EFBIG: r"File too large: .*; allow larger files \(ulimit -f\)",
}


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Runs code on a path and other arguments in a process of its own."""
    command = [sys.executable, "-c", CHILD + code, Path(atomic.__file__).parent, *arguments]
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)


def ended(*started: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Waits for the ends: exit codes, and what was printed."""
    printed = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, out) for process, out in zip(started, printed, strict=True)]


def write(folder: Path, content: str, names: tuple[str, ...] = ("model", "config")) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(content)
    return folder


def contents(folder: Path) -> set[str]:
    """What the files of a folder hold; one thing, where it is whole."""
    return {file.read_text() for file in folder.iterdir()}


@pytest.fixture(params=["swapped", "renamed twice"])
def swapping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Systems that can swap two names, and those that cannot."""
    if request.param != "swapped":
        monkeypatch.setattr(atomic, "_swap", lambda first, second: False)
    return str(request.param)


@pytest.mark.usefixtures("swapping")
def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """In the place of the old one, with none of its files; a failure leaves what there was."""
    out = tmp_path / "run"

    def publish(content: str, *names: str, fails: bool = False) -> None:
        with atomic.staging_folder(tmp_path) as stage:
            write(stage, content, names)
            assert not out.exists() or contents(out) == {"old"}
            if fails:
                raise ZeroDivisionError
            atomic.publish(stage, out)

    publish("old", "model", "config", "metrics")
    with pytest.raises(ZeroDivisionError):
        publish("new", "model", fails=True)
    assert contents(out) == {"old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    publish("new", "model", "config")
    assert contents(out) == {"new"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_rename_that_fails_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the second rename fails, the first is taken back, and the sentence says what to do."""
    out, rename = write(tmp_path / "run", "old"), Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target == out and contents(self) == {"new"}:
            raise OSError(errno.EIO, "no")
        return rename(self, target)

    monkeypatch.setattr(atomic, "_swap", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", failing)
    with (
        atomic.staging_folder(tmp_path) as stage,
        pytest.raises(OSError, match=r"run' cannot be written; what was there before is kept; "),
    ):
        atomic.publish(write(stage, "new"), out)
    assert contents(out) == {"old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_kill_leaves_the_old_folder_or_the_new(tmp_path: Path, swapping: str) -> None:
    """At every change of names; what a kill leaves beside it goes at the next start."""
    for number in range(1, 30):
        write(tmp_path / str(number) / "run", "old")
        (tmp_path / str(number) / "work").mkdir()
    whole = int(ended(start(KILLED, tmp_path, swapping))[0][1])
    seen = set()
    for number in range(1, whole + 1):
        out, work = (tmp_path / str(number) / name for name in ("run", "work"))
        if swapping == "swapped":
            assert out.is_dir()
        atomic.restore(work, out)
        seen.add(tuple(contents(out)))
        with atomic.staging_folder(work) as stage:
            assert [entry for entry in work.iterdir() if entry != stage] == []
    assert seen == {("old",), ("new",)}
    assert whole > 5


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """Not what another one is writing at the time, nor what only looks like it."""
    path = tmp_path / "vit.npz"
    assert ended(start(HALF, path)) == [(-signal.SIGKILL, "")]
    (tmp_path / ".vit.npz-backup").mkdir()
    assert len(list(tmp_path.iterdir())) == 3

    with atomic.whole_file(path) as first:
        first.write_text("first")
        with atomic.whole_file(path) as second:
            second.write_text("second")
    assert path.read_text() == "first"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".vit.npz-backup", "vit.npz"]


def test_many_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """None takes the other's file for a leftover; the file is always whole."""
    path = tmp_path / "file"
    writers = [start(WRITER, path, mark) for mark in "abcd"]
    while any(writer.poll() is None for writer in writers):
        text = path.read_text() if path.exists() else "-"
        assert text in ("-", *(mark * 5000 for mark in "abcd"))

    assert ended(*writers) == [(0, "")] * 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_lock_says_who_holds_it_and_a_kill_lets_it_go(tmp_path: Path) -> None:
    """The second is told at once; after a kill, and after the end, it is free."""
    path = tmp_path / "run.lock"
    holder = start(HOLDER, path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(FileExistsError, match=rf"Another .*: process {holder.pid} on .*, since 20"):
        atomic.check_unheld(path, what="training")
    holder.kill()
    holder.communicate()

    atomic.check_unheld(path, what="training")
    with atomic.lock(path, what="training"), ThreadPoolExecutor() as threads:
        error = threads.submit(atomic.lock(path, what="training").__enter__).exception()
    assert f"process {os.getpid()} on " in str(error)
    assert not path.exists()


def test_a_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    """Its file comes and goes; no two processes ever hold two of that name."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    others = [start(COUNTER, tmp_path / "lock", counter) for _ in range(4)]
    assert ended(*others) == [(0, "")] * 4
    assert counter.read_text() == "120"
    assert [entry.name for entry in tmp_path.iterdir()] == ["counter"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It goes on with a warning: a lock is no reason not to train."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.warns(UserWarning, match=r"has no locks \(No locks available\): make sure that"),
        atomic.lock(tmp_path / "lock", what="training"),
    ):
        pass
    with atomic.whole_file(tmp_path / "file") as temporary:
        temporary.write_text("whole")
    assert contents(tmp_path) == {"whole"}


def test_an_error_of_the_disk_says_what_to_do(tmp_path: Path) -> None:
    """One sentence: where, what is kept, what to do; the old content stays."""
    path = write(tmp_path, "old", ("file",)) / "file"

    def fail(number: int) -> None:
        with atomic.whole_file(path) as temporary:
            temporary.write_text("half")
            raise OSError(number, os.strerror(number), "elsewhere")

    for number, advice in ADVICE.items():
        with pytest.raises(OSError, match=advice) as raised:
            fail(number)
        assert raised.value.errno == number
        assert path.read_text() == "old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
