"""Trainings on JAX, with TensorFlow as the reader of images: meshes, checkpoints, the way there.

The tests of training itself run on JAX too; these are of what JAX alone has.
"""

import contextlib
import dataclasses
import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import processes
import pytest
import training_rig
from conftest import TINY, assert_same_steps, randomize

from keras_vit import VisionTransformer, training
from keras_vit.data import ImageData, load_digits
from keras_vit.training.checkpoints import DamagedError, WorkDirectory, hash_of, state_variables
from keras_vit.training.train import make_engine

if keras.backend.backend() != "jax":
    pytest.skip("Meshes are JAX's", allow_module_level=True)

jax = pytest.importorskip("jax")

FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
DEVICES = {"XLA_FLAGS": FLAGS}
STEPS = 24
MESHES = {
    "data, then fsdp and model": ("data=4", "fsdp=2,model=2"),
    "fsdp, then one device": ("fsdp=4", None),
}
Said = dict[str, list[str]]


def losses(said: dict[str, list[str]]) -> np.ndarray:
    return np.array(said["loss"], float)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    """One on one device that nothing stops; for each of `MESHES` two, the first one stopped."""
    folder = tmp_path_factory.mktemp("meshes")
    cases: list[dict[str, Any]] = [{"out": str(folder / "alone")}]
    for name, meshes in MESHES.items():
        for mesh, stop_at in zip(meshes, (10, 0), strict=True):
            cases.append({"out": str(folder / name), "mesh": mesh, "stop_at": stop_at})
    return training_rig.run_each([{**case, "steps": STEPS} for case in cases], DEVICES)


@pytest.mark.full
@pytest.mark.parametrize("name", MESHES)
def test_a_training_goes_on_on_another_mesh(name: str, trainings: list[Said]) -> None:
    """Its losses are those of one device, before and after it was stopped."""
    alone, *others = trainings
    begin = 2 * list(MESHES).index(name)
    first, second = others[begin : begin + 2]
    assert (first["code"], second["code"]) == (["130"], ["0"])
    assert second["resumed"] == ["10"]
    together = np.concatenate([losses(first), losses(second)])
    assert_same_steps(together, losses(alone))


@pytest.mark.full
def test_a_training_goes_on_on_its_own_backend_alone(tmp_path: Path) -> None:
    """Another has a format of its own: the sentence says which began it, and nothing is lost."""
    out = tmp_path / "run"
    case = {"out": str(out), "steps": STEPS}
    first = training_rig.told(training_rig.start({"KERAS_BACKEND": "jax"}, **case, stop_at=8))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    refused = training_rig.told(training_rig.start({"KERAS_BACKEND": "tensorflow"}, **case))
    assert (first["code"], refused["code"]) == (["130"], ["1"])
    text = "was started with backend='jax', not 'tensorflow'; resume it with KERAS_BACKEND=jax"
    assert text in refused["errors"][0]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.full
def test_a_killed_training_on_a_mesh_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Kill -9 at moments all over it, and resumed each time, as often as KERAS_VIT_TEST_KILLS."""
    kills = int(os.environ.get("KERAS_VIT_TEST_KILLS", "2"))
    case = {"steps": STEPS, "checkpoint_steps": 3, "mesh": "fsdp=2,model=2"}
    whole = training_rig.told(training_rig.start(DEVICES, out=str(tmp_path / "whole"), **case))
    assert whole["code"] == ["0"], whole["errors"]
    out = str(tmp_path / "killed")
    for number in range(kills):
        pause = ("step", 2 + number * (STEPS - 4) // kills, 500 * (number % 7))
        training_rig.kill(training_rig.start(DEVICES, out=out, **case, pause=pause))
    ended = training_rig.told(training_rig.start(DEVICES, out=out, **case))
    assert ended["done"] == whole["done"], ended["errors"]


def test_meshes_that_are_none_are_refused() -> None:
    """The sentence says what a mesh is, or which devices there are."""
    for mesh in ("8", "data", "data=0", "batch=2", "data=2,fsdp=2", "data=2,data=2", "data=1.5"):
        with pytest.raises(ValueError, match=r'"data=8" or "fsdp=8".*Received: mesh='):
            make_engine(training.Execution(mesh=mesh))
    from keras_vit.training import jax_engine  # needs JAX

    sizes = jax_engine._sizes("model=2, fsdp=4")
    assert list(sizes.items()) == [("fsdp", 4), ("model", 2)]
    assert jax_engine._sizes("model=2") == {"data": 1, "model": 2}
    with pytest.raises(ValueError, match=r"mesh='data=64' needs 64 devices. Received: \d+ of JAX"):
        make_engine(training.Execution(mesh="data=64"))
    with pytest.raises(ValueError, match=r"Strategies are TensorFlow's. Received: .* 'jax'"):
        training.Execution().make_strategy()


@pytest.mark.full
def test_the_command_line_trains_on_jax_and_exports(tmp_path: Path) -> None:
    """One command each: train on a mesh, evaluate and predict on JAX, export by TensorFlow."""

    def command(*words: object) -> str:
        process = processes.Process(["-m", "keras_vit", *map(str, words)], DEVICES, tmp_path)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return output

    out = tmp_path / "run"
    way = ("--mesh", "data=2,model=2", "--set", "remat=dots", "scan_blocks=true")
    command("train", "--data", "digits", "--out", "run", "--epochs", 1, *way)
    config = json.loads((out / "config.json").read_text())
    assert config["execution"]["mesh"] == "data=2,model=2"
    assert config["versions"]["backend"] == "jax"
    answer = json.loads(command("evaluate", out, "--json").splitlines()[-1])
    assert answer["images"] == len(load_digits().test)
    command("predict", out, out / "sample.png")
    # It chooses the backend before Keras is imported: nothing may be imported before it.
    export = ["export", str(out), "--out", str(tmp_path / "served"), "--formats", "savedmodel"]
    subprocess.run(
        [sys.executable, "-m", "keras_vit", *export], env={**os.environ, **DEVICES}, check=True
    )
    assert (tmp_path / "served" / "1" / "saved_model.pb").is_file()


def test_a_tensorflow_reader_leaves_the_accelerators(data: ImageData) -> None:
    """TensorFlow reads images on the host; whatever it could compute on, it does not see."""
    import tensorflow as tf

    visible = {device.device_type for device in tf.config.get_visible_devices()}
    assert visible == {"CPU"}
    assert len(data.train)


@pytest.fixture(scope="module")
def data() -> ImageData:
    digits = load_digits()
    train, validation = (digits.split(name).take(range(24)) for name in ("train", "validation"))
    return dataclasses.replace(digits, train=train, validation=validation)


def test_a_save_is_of_its_moment_and_its_damage_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps after it, which reuse the memory of the state, do not reach the file."""
    model = VisionTransformer(TINY)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    randomize(model)
    images, targets = np.ones((2, 32, 48, 3)), np.ones((2, 7))
    model.fit(images, targets, verbose=0)
    engine, folder = make_engine(training.Execution()), WorkDirectory(tmp_path / "run")
    folder.path.mkdir()
    checkpoints = engine.make_checkpoints(model, folder)
    before = hash_of(state_variables(model))
    best = [np.full(3, 0.5, np.float32)]
    finish = checkpoints.begin(1, progress={"step": 1}, best=best)
    model.fit(images, targets, epochs=2, verbose=0)
    finish()
    assert hash_of(state_variables(model)) != before
    found = checkpoints.load(1)
    found.restore()
    assert (hash_of(state_variables(model)), found.progress) == (before, {"step": 1})
    np.testing.assert_array_equal(found.best, best)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"on JAX is saved by .* pip install orbax-checkpoint"):
        engine.make_checkpoints(model, folder)
    monkeypatch.undo()

    # Of one array: orbax leaves the tasks of others pending, which speak up in a later test.
    monkeypatch.setattr(checkpoints, "_copied", lambda: [model.trainable_variables[0].value])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # bytes of a file
    try:
        with pytest.raises(OSError, match=r"older checkpoints are kept; allow larger files"):
            checkpoints.begin(2, progress={}, best=best)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert checkpoints.steps() == [1]
    checkpoints.begin(2, progress={}, best=best)()
    assert checkpoints.steps() == [1, 2]
    part = next(file for file in checkpoints.path(2).rglob("d/*") if file.stat().st_size > 9999)
    for file in (part, checkpoints.path(2) / "best.npz", checkpoints.path(2) / "checkpoint.json"):
        content, middle = file.read_bytes(), file.stat().st_size // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:-1], b"", None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(DamagedError):
                checkpoints.load(2)
        file.write_bytes(content)
    assert checkpoints.load(2).step == 2
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"of another model or optimizer: it has \d+ arrays"):
        checkpoints.load(2).restore()
    part.write_bytes(b"")
    engine.count, whole = 2, []
    for engine.index in range(2):  # each checks its own part
        with contextlib.suppress(DamagedError):
            whole.append(checkpoints.load(2))
    assert len(whole) == 1


def test_each_step_is_compiled_once(
    data: ImageData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not again after a checkpoint, an evaluation or an epoch: each would cost minutes."""
    recipe = training.Recipe(steps=9, batch_size=8, learning_rate=1e-3)
    execution = training.Execution(checkpoint_steps=2)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        training.train(data, out=tmp_path / "run", recipe=recipe, execution=execution)
    texts = [record.getMessage() for record in caplog.records]
    compiled = [text for text in texts if text.startswith("Compiling")]
    assert sum("train_step" in text for text in compiled) == 1
    assert sum("test_step" in text for text in compiled) == 1


def start_both(**case: object) -> list[processes.Started]:
    """Two processes with two devices each; they find each other by Keras' variables."""
    addresses = processes.free_addresses(2)
    return [
        training_rig.start(
            {
                "XLA_FLAGS": FLAGS.replace("count=4", "count=2"),
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": ",".join(addresses),
                "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
                "KERAS_DISTRIBUTION_PROCESS_ID": str(index),
            },
            **case,
        )
        for index in range(2)
    ]


@pytest.mark.full
def test_two_processes_train_as_one_device_and_resume(tmp_path: Path) -> None:
    """Weights lie on four devices of two processes; one process is killed, both start again."""
    alone = training_rig.run(out=str(tmp_path / "alone"), steps=16, mixup=0.0)
    case = {"out": str(tmp_path / "run"), "steps": 16, "mixup": 0.0, "mesh": "fsdp=4"}
    first, second = start_both(checkpoint_steps=4, **case)
    assert first.stdout is not None
    for line in iter(first.stdout.readline, ""):
        if line == "step 9\n":
            break
    second.kill()
    second.communicate()
    lost = training_rig.told(first)
    assert lost["code"] == ["75"]
    assert "Another worker was lost at step" in lost["failed"][0]
    told = [training_rig.told(process) for process in start_both(checkpoint_steps=4, **case)]
    assert [said["code"] for said in told] == [["0"], ["0"]], told[0]["errors"]
    assert told[0]["done"] == told[1]["done"]
    assert told[0]["resumed"] == told[1]["resumed"]
    (step,) = map(int, told[0]["resumed"])
    assert 4 <= step <= 12
    expected = np.array(alone["loss"][step:], float)
    # Of steps 4 to 24, whose noise has grown.
    np.testing.assert_allclose(np.array(told[0]["loss"], float), expected, rtol=1e-3)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "alone"] == ["run"]
