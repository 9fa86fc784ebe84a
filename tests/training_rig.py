"""A training in a process of its own, that tells what it does and can be stopped or killed.

Run as `python training_rig.py '{"out": "run", "steps": 60}'`; under TF_CONFIG it is one of the
workers. It prints `resumed N`, `step N`, `saving N`, `saved N`, `done HASH`, `stopped CODE`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "replicas": 1,
    "steps": 40,
    "stop_at": 0,
    "checkpoint_steps": 7,
    "learning_rate": 1e-3,
    "accumulate": 1,
    "precision": "float32",
}


def start(environment: dict[str, str] | None = None, **case: Any) -> subprocess.Popen[str]:
    """Starts a training; see `DEFAULTS` for what a case may say besides `out`."""
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(case)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: "subprocess.Popen[str]", *, seconds: float = 300) -> dict[str, list[str]]:
    """Waits for the end and returns what was printed, by its first word, and the exit code."""
    output, errors = process.communicate(timeout=seconds)
    said: dict[str, list[str]] = {"code": [str(process.returncode)], "errors": [errors[-3000:]]}
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        said.setdefault(word, []).append(rest)
    return said


def run(**case: Any) -> dict[str, list[str]]:
    """Runs a training to wherever it ends."""
    return told(start(**case))


def _say(*words: object) -> None:
    print(*words, flush=True)


def _main(case: dict[str, Any]) -> int:
    import tensorflow as tf

    from keras_vit import training
    from keras_vit.config import ViTConfig
    from keras_vit.data import Augmentation, load_digits
    from keras_vit.training import checkpoints, loop

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * case["replicas"]
    )
    _listen(checkpoints.Checkpoints, loop.Loop)
    several = "multi_worker" if os.environ.get("TF_CONFIG") else "mirrored"
    recipe = training.Recipe(
        steps=case["steps"],
        batch_size=64,
        learning_rate=case["learning_rate"],
        label_smoothing=0.1,
        mixup=0.2,
        average=0.9,
        dropout_rate=0.1,
        drop_path_rate=0.1,
        augmentation=Augmentation(rotation=15, shift=0.1),
    )

    def on_event(event: training.Event) -> None:
        if isinstance(event, training.StepDone):
            _say("step", event.step)
            if event.step == case["stop_at"]:
                raise KeyboardInterrupt

    config = ViTConfig(
        input_shape=(8, 8, 3), patch_size=4, hidden_dim=32, mlp_dim=64, num_heads=2, num_layers=2
    )
    execution = training.Execution(
        strategy=several if case["replicas"] > 1 or several == "multi_worker" else "none",
        checkpoint_steps=case["checkpoint_steps"],
        accumulate=case["accumulate"],
        precision=case["precision"],
    )
    try:
        run = training.train(
            load_digits(),
            out=Path(case["out"]),
            model=config,
            recipe=recipe,
            existing="resume",
            execution=execution,
            on_event=on_event,
        )
    except training.TrainingInterrupted as interruption:
        _say("stopped", interruption.exit_code)
        return interruption.exit_code
    except (training.WorkerLostError, FloatingPointError) as error:
        _say("failed", error)
        return getattr(error, "exit_code", 1)
    _say("done", run.config["result"]["state_sha256"])
    return 0


def _listen(checkpoints: Any, loop: Any) -> None:
    """Makes saving and resuming tell about themselves."""
    save, resume = checkpoints.save, loop.resume

    def telling_save(self: Any, step: int, *args: Any, **kwargs: Any) -> None:
        _say("saving", step)
        save(self, step, *args, **kwargs)
        _say("saved", step)

    def telling_resume(self: Any) -> None:
        resume(self)
        _say("resumed", self.watcher.step)

    checkpoints.save, loop.resume = telling_save, telling_resume


if __name__ == "__main__":
    sys.exit(_main({**DEFAULTS, **json.loads(sys.argv[1])}))
