"""A training in a process of its own, that tells what it does and can be stopped or killed.

Run as `python training_rig.py '{"out": "run", "steps": 60}'`, or for several trainings with a list
of such cases as "each"; under TF_CONFIG it is one of the workers. It prints `resumed N`, `loss X`,
`step N`, `ends N`, `saving N`, `saved N`, `done HASH`, `stopped CODE`; of several, `begins` and
`code N` too. With "pause": [WORD, N, CALLS] it prints `pauses N` and stops itself so many calls of
functions after it printed the word with N or more: `kill` does the rest.
"""

import dataclasses
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import processes

DEFAULTS: dict[str, Any] = {
    "replicas": 1, "steps": 40, "stop_at": 0, "checkpoint_steps": 7, "learning_rate": 1e-3,
    "gradient_accumulation_steps": 1, "precision": "float32", "mesh": None, "mixup": 0.2,
    "patience": None, "pause": None,
}  # fmt: skip


def start(environment: dict[str, str] | None = None, **case: Any) -> processes.Started:
    """Starts a training; see `DEFAULTS` for what a case may say besides `out`."""
    return processes.start(__file__, case, environment)


def told(process: processes.Started, *, seconds: float = 300) -> dict[str, list[str]]:
    """Waits for the end and returns what was printed, by its first word, and the exit code."""
    output, errors = process.communicate(timeout=seconds)
    end = {"code": [str(process.returncode)], "errors": [errors[-3000:]]}
    return end | _by_first_word(output)


def kill(process: processes.Started) -> dict[str, list[str]]:
    """Kills a training where it has stopped itself; returns what it said until then."""
    assert process.stdout is not None
    lines = list(itertools.takewhile(lambda line: not line.startswith("pauses"), process.stdout))
    process.send_signal(signal.SIGKILL)
    end = told(process)
    assert end["code"] == [str(-signal.SIGKILL)], end["errors"]
    return _by_first_word("".join(lines))


def _by_first_word(output: str) -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        said.setdefault(word, []).append(rest)
    return said


def run(**case: Any) -> dict[str, list[str]]:
    return told(start(**case))


def run_each(
    cases: list[dict[str, Any]], environment: dict[str, str] | None = None
) -> list[dict[str, list[str]]]:
    """Runs trainings one after another in one process, which imports everything once."""
    process = processes.start(__file__, {"each": cases}, environment)
    output, errors = process.communicate(timeout=300 * len(cases))
    said = [_by_first_word(part) for part in output.split("begins\n")[1:]]
    if process.returncode or len(said) != len(cases):
        raise RuntimeError(errors[-3000:])
    return said


def _say(*words: object) -> None:
    # In one piece: checkpoints are written in a thread of their own.
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _pause(case: dict[str, Any], word: str, number: int) -> None:
    """Makes this thread stop the process where the case says so."""
    wanted, least, after = case["pause"] or ("", 0, 0)
    if word != wanted or number < least or sys.getprofile():
        return
    calls = itertools.count()

    def stop(_: object, event: str, __: object) -> None:
        if event in ("call", "c_call") and next(calls) == after:
            _say("pauses", number)
            signal.raise_signal(signal.SIGSTOP)

    sys.setprofile(stop)


def _main(case: dict[str, Any]) -> int:
    each = [{**DEFAULTS, **one} for one in case.get("each", [case])]
    processes.make_devices(each[0]["replicas"])
    import keras

    from keras_vit.training import checkpoints, loop

    kind: Any = checkpoints.NumpyCheckpoints
    if keras.backend.backend() == "jax":
        from keras_vit.training.jax_engine import OrbaxCheckpoints as kind
    _listen(each[0], kind, loop.Loop)
    if "each" not in case:
        return _train(each[0])
    for one in each:
        _say("begins")
        _say("code", _train(one))
    return 0


def _train(case: dict[str, Any]) -> int:
    from keras_vit import training

    def on_event(event: training.Event) -> None:
        if isinstance(event, training.StepDone):
            _say("loss", event.loss)
            _say("step", event.step)
            _say("ends", event.steps)
            _pause(case, "step", event.step)
            if event.step == case["stop_at"]:
                raise KeyboardInterrupt

    try:
        run = training.train(
            _data(), out=Path(case["out"]), existing="resume", on_event=on_event, **_settings(case)
        )
    except training.TrainingInterrupted as interruption:
        _say("stopped", interruption.exit_code)
        return interruption.exit_code
    except (training.WorkerLostError, FloatingPointError) as error:
        _say("failed", error)
        return getattr(error, "exit_code", 1)
    _say("done", run.config["result"]["state_sha256"])
    return 0


def _data() -> Any:
    """As many images as the digits have, and of their size; they are nothing to be learnt."""
    from trainings import in_memory, noise

    train, rest = (noise(np.arange(count) % 10) for count in (1259, 179))
    return in_memory(train, rest, labels="0123456789")


def _settings(case: dict[str, Any]) -> dict[str, Any]:
    """A small model, everything random that a recipe may have, and the devices of the case."""
    from trainings import CONFIG

    from keras_vit import training
    from keras_vit.data import Augmentation

    is_one_of_several = bool(os.environ.get("TF_CONFIG"))
    several: Any = "multi_worker" if is_one_of_several else "mirrored"
    return {
        "model": dataclasses.replace(CONFIG, hidden_dim=32, mlp_dim=64),
        "recipe": training.Recipe(
            steps=case["steps"],
            batch_size=64,
            learning_rate=case["learning_rate"],
            label_smoothing=0.1,
            mixup=case["mixup"],
            average=0.9,
            patience=case["patience"],
            dropout_rate=0.1,
            drop_path_rate=0.1,
            augmentation=Augmentation(rotation=15, shift=0.1),
        ),
        "execution": training.Execution(
            strategy=several if case["replicas"] > 1 or is_one_of_several else "none",
            checkpoint_steps=case["checkpoint_steps"],
            gradient_accumulation_steps=case["gradient_accumulation_steps"],
            precision=case["precision"],
            mesh=case["mesh"],
        ),
    }


def _listen(case: dict[str, Any], checkpoints: Any, loop: Any) -> None:
    """Makes saving and resuming tell about themselves."""
    resume = loop.resume

    def telling(save: Any) -> Any:
        def told(self: Any, step: int, *args: Any, **kwargs: Any) -> None:
            _say("saving", step)
            _pause(case, "saving", step)
            save(self, step, *args, **kwargs)
            sys.setprofile(None)
            _say("saved", step)

        return told

    def telling_resume(self: Any) -> None:
        resume(self)
        _say("resumed", self.logger.step)

    checkpoints.write = telling(checkpoints.write)
    loop.resume = telling_resume


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
