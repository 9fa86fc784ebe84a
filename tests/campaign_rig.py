"""A campaign whose cases end in every way that there is, to test the runner and the oracle."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from campaigns import oracle
from keras_vit.weights.checkpoint import open_checkpoint

WAYS = ("same", "wrong", "unseen", "refused", "unclear", "slow", "large", "crashed", "hung")


class Campaign:
    def __init__(self, folder: Path) -> None:
        self._folder, self._next = folder, 0

    def case(self, rng: np.random.Generator) -> oracle.Case:
        return self.made(WAYS[int(rng.integers(len(WAYS)))])

    def made(self, way: str) -> oracle.Case:
        return oracle.Case(
            what=way,
            act=lambda: self.act(way),
            sound="sound",
            names=("lost.npz",),
            has_checksum=way != "unseen",
            seconds=0.01 if way == "slow" else oracle.SECONDS,
        )

    def act(self, way: str) -> str:
        if way == "refused":
            open_checkpoint(self._folder / "lost.npz")
        if way == "unclear":
            raise KeyError("lost.npz")
        if way == "slow":
            start = time.process_time()
            while time.process_time() < start + 0.05:
                pass
        if way == "large":
            np.ones(20_000_000)
        if way == "crashed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "hung":
            time.sleep(1000)
        return "other" if way in ("wrong", "unseen") else "sound"
