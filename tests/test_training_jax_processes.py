"""Two processes train together on JAX: as one device does, and again after one was killed."""

import os
from pathlib import Path

import keras
import numpy as np
import processes
import pytest
import training_rig

if keras.backend.backend() != "jax":
    pytest.skip("Processes of JAX", allow_module_level=True)

pytestmark = pytest.mark.full
STEPS = 16
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


def start_both(**case: object) -> list[processes.Started]:
    """Two processes with two devices each; they find each other by Keras' variables."""
    addresses = processes.free_addresses(2)
    return [
        training_rig.start(
            {
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {TWO_DEVICES}",
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": ",".join(addresses),
                "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
                "KERAS_DISTRIBUTION_PROCESS_ID": str(index),
            },
            **case,
        )
        for index in range(2)
    ]


def test_two_processes_train_as_one_device_and_resume(tmp_path: Path) -> None:
    """Weights lie on four devices of two processes; one process is killed, both start again."""
    alone = training_rig.run(out=str(tmp_path / "alone"), steps=STEPS, mixup=0.0)
    case = {"out": str(tmp_path / "run"), "steps": STEPS, "mixup": 0.0, "mesh": "fsdp=4"}
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
