"""The suites of targets, and their cases."""

from typing import Any

from benchmarks.cases import CONTENDERS, Case, Target

_ALL_FLOAT = ("timm", "Hugging Face", "KerasHub")
_LIVE = ("keras_vit", "keras_vit tf.function")


def _inference() -> list[Target]:
    half, full = Case(precision="bfloat16"), Case()
    one = Case(precision="bfloat16", batch=1)
    return [
        *(Target(case=half, ours=ours, peers=("timm",), ratio=1.0) for ours in _LIVE),
        *(Target(case=half, ours=ours, peers=("OpenVINO",), ratio=1.0) for ours in _LIVE),
        *(Target(case=half, ours=ours, peers=("KerasHub",), ratio=2.4) for ours in _LIVE),
        *(Target(case=full, ours=ours, peers=_ALL_FLOAT, ratio=1.0) for ours in _LIVE),
        *(Target(case=one, ours=ours, peers=("timm",), ratio=1.0) for ours in _LIVE),
        Target(case=full, ours="keras_vit SavedModel", peers=_LIVE[1:], ratio=0.95),
    ]


def _training() -> list[Target]:
    half, full = Case(task="training", precision="bfloat16"), Case(task="training")
    return [
        Target(case=half, ours="keras_vit", peers=("timm",), ratio=0.9),
        Target(case=half, ours="keras_vit", peers=("KerasHub",), ratio=2.0),
        Target(case=full, ours="keras_vit", peers=("timm",), ratio=1.0),
    ]


def _cold() -> list[Target]:
    return [
        Target(case=Case(task="cold", batch=1), ours="keras_vit", peers=("timm",), ratio=1.0),
        Target(case=Case(task="cold", batch=1), ours="keras_vit", peers=("KerasHub",), ratio=1.0),
    ]


def _memory() -> list[Target]:
    step, plain = Case(task="training"), ("keras_vit",)
    remat = "keras_vit remat"
    return [
        Target(case=Case(), ours="keras_vit", peers=("timm",), ratio=1.0, figure="memory"),
        Target(case=step, ours="keras_vit", peers=("timm",), ratio=1.0, figure="memory"),
        Target(case=step, ours=remat, peers=plain, ratio=2.0, figure="activations"),
        Target(case=step, ours=remat, peers=plain, ratio=1 / 1.3),
    ]


def _accelerator() -> list[Target]:
    # The batches that fill an H100; a turn has enough steps to hide what the host does.
    cases = [
        Case(task=task, variant=variant, batch=batch, precision="bfloat16", steps=steps)
        for task, steps, batches in (
            ("inference", 20, (256, 128, 64)),
            ("training", 10, (128, 64, 32)),
        )
        for variant, batch in zip(("B/16", "L/16", "H/14"), batches, strict=True)
    ]
    return [
        Target(case=case, ours="keras_vit on JAX", peers=("timm compiled",), ratio=1.0)
        for case in cases
    ]


def _trial() -> list[Target]:
    tiny: dict[str, Any] = {"variant": "tiny/16", "image_size": 32, "batch": 2}
    cases = {
        Case(**tiny, precision="bfloat16", steps=2): "timm compiled",
        Case(**tiny, task="training", precision="bfloat16", steps=2): "timm compiled",
        Case(**tiny, task="training", precision="bfloat16", replicas=2): "keras_vit remat",
        Case(**tiny, task="cold", precision="bfloat16"): "timm",
    }
    return [
        # A tiny model says nothing of speed.
        Target(case=case, ours=ours, peers=(peer,), ratio=0.0)
        for case, peer in cases.items()
        for ours in ("keras_vit", "keras_vit on JAX")
        if CONTENDERS[ours].takes(case)
    ]


SUITES = {
    "accelerator": _accelerator(),
    "trial": _trial(),
    "inference": _inference(),
    "training": _training(),
    "cold": _cold(),
    "memory": _memory(),
    "issue": [*_inference(), *_training(), *_cold(), *_memory()],
}
