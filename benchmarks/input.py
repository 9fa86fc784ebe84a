"""Times the input pipeline: decoded, cropped and augmented images per second, against peers.

    python -m benchmarks.input --rounds 5

Every contender reads the same random JPEGs (500 by 375 pixels), cuts an Inception crop, resizes it
to 224 by 224 and applies RandAugment with two operations. The peers get the crop from our pipeline.
The contenders take turns; figures are medians, ratios are medians over the turns. Then a Ti/16
trains on a constant batch and on the pipeline: the difference is the time that a step waits.
Contenders that are not installed are left out.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZE, JPEG_SIZE, BATCH = (224, 224), (375, 500), 32
OURS = "keras_vit RandAugment"
CONTENDERS = ("keras_vit crop alone", OURS, "keras RandAugment", "keras-cv RandAugment")


def main() -> None:
    """Makes the JPEGs, measures in turns, prints the figures and writes them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--images", type=int, default=256, help="images in a turn (default: 256)")
    parser.add_argument("--steps", type=int, default=6, help="steps in a turn (default: 6)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, help="write the figures as JSON (default: do not)")
    options = parser.parse_args()
    jpegs = make_jpegs(64)
    contenders = {name: make_batches(name, jpegs) for name in options.only if is_installed(name)}
    turns = [
        {name: images_per_second(batches, options.images) for name, batches in contenders.items()}
        for _ in range(options.rounds)
    ]
    steps = [
        dict(zip(("constant", "pipeline"), pair, strict=True)) for pair in train(jpegs, options)
    ]
    report(turns, steps)
    if options.out:
        figures = {"machine": machine(), "images_per_second": turns, "step_seconds": steps}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def is_installed(name: str) -> bool:
    """Whether a contender is installed."""
    return not name.startswith("keras-cv") or importlib.util.find_spec("keras_cv") is not None


def make_jpegs(count: int) -> list[bytes]:
    """Makes smooth pictures with some noise, of the size of ImageNet photographs."""
    import tensorflow as tf

    generator = np.random.default_rng(0)
    jpegs = []
    for _ in range(count):
        smooth = tf.image.resize(
            generator.integers(0, 256, (24, 32, 3)), JPEG_SIZE, method="bicubic"
        )
        noisy = np.clip(smooth.numpy() + generator.normal(0, 8, (*JPEG_SIZE, 3)), 0, 255)
        jpegs.append(tf.io.encode_jpeg(noisy.astype(np.uint8), quality=90).numpy())
    return jpegs


def make_batches(name: str, jpegs: list[bytes]) -> Any:
    """Makes an endless dataset of the contender's batches."""
    from keras_vit.data import Augmentation, Split, train_batches

    split = Split(images=np.array(jpegs * 8, object), targets=np.zeros(8 * len(jpegs), np.int32))
    ours = name == OURS
    batches = train_batches(
        split,
        image_size=SIZE,
        batch_size=BATCH,
        epochs=1_000_000,
        seed=0,
        augmentation=Augmentation(crop=0.05, randaugment_layers=2 if ours else 0),
    )
    augment = peer_augmentation(name)
    if augment is not None:
        batches = batches.map(augment, num_parallel_calls=-1).prefetch(-1)
    return batches


def peer_augmentation(name: str) -> Callable[[Any, Any], Any] | None:
    """Returns a peer's RandAugment of a batch, with two operations; None for ours."""
    if name == "keras RandAugment":
        import keras

        layer = keras.layers.RandAugment(value_range=(0, 255), num_ops=2, factor=0.5)
        return lambda images, targets: (layer(images, training=True), targets)
    if name == "keras-cv RandAugment":
        import keras_cv

        layer = keras_cv.layers.RandAugment(
            value_range=(0, 255), augmentations_per_image=2, magnitude=0.5
        )
        return lambda images, targets: (layer(images, training=True), targets)
    return None


def warm(batches: Any) -> Any:
    """Starts a new iterator, so that no batch is made in the turn of another contender."""
    stream = iter(batches)
    for _ in range(2):
        next(stream)
    return stream


def images_per_second(batches: Any, count: int) -> float:
    """Measures the images per second while it takes `count` images."""
    stream, steps = warm(batches), -(-count // BATCH)
    start = time.perf_counter()
    for _ in range(steps):
        next(stream)
    return steps * BATCH / (time.perf_counter() - start)


def train(jpegs: list[bytes], options: argparse.Namespace) -> list[tuple[float, float]]:
    """Returns the seconds of a training step of Ti/16 on a constant batch and on the pipeline."""
    import keras

    import keras_vit

    model = keras_vit.ViTTi16(weights=None, include_preprocessing=True, classifier_activation=None)
    model.compile(
        keras.optimizers.AdamW(1e-4), loss=keras.losses.SparseCategoricalCrossentropy(True)
    )
    batches = make_batches(OURS, jpegs)
    constant = next(iter(batches))
    model.train_on_batch(*constant)

    def seconds(fetch: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(options.steps):
            model.train_on_batch(*fetch())
        mean: float = (time.perf_counter() - start) / options.steps
        return mean

    pairs = []
    for _ in range(options.rounds):
        alone = seconds(lambda: constant)
        fetch = functools.partial(next, warm(batches))
        pairs.append((alone, seconds(fetch)))
    return pairs


def report(turns: list[dict[str, float]], steps: list[dict[str, float]]) -> None:
    """Prints medians, and medians of the ratios of each turn."""
    print(f"{machine()}; medians of {len(turns)} turns")
    for name in turns[0]:
        speed = statistics.median(turn[name] for turn in turns)
        ratio = (
            statistics.median(turn[OURS] / turn[name] for turn in turns) if OURS in turns[0] else 0
        )
        print(f"{name:<24}{speed:>8.0f} images/s   {OURS} is {ratio:.2f} times as fast")
    constant, fed = (
        statistics.median(step[key] for step in steps) for key in ("constant", "pipeline")
    )
    share = statistics.median(max(1 - s["constant"] / s["pipeline"], 0) for s in steps)
    print(
        f"a step of Ti/16, batch {BATCH}: {constant:.2f} s on one batch, {fed:.2f} s on the "
        f"pipeline; {share:.0%} of it waiting"
    )


def machine() -> str:
    """Describes the cores and the versions."""
    packages = ("tensorflow", "keras", "keras-cv", "keras-vit")
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return (
        f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
        + ", ".join(versions)
    )


if __name__ == "__main__":
    main()
