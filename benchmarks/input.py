"""Times the input: decoded, cropped and varied images per second, beside keras and keras-cv.

    python -m benchmarks.input --rounds 5

Every contender reads the same JPEGs (500 by 375 pixels, made on the spot), cuts an Inception crop,
resizes it to 224 by 224 and applies RandAugment with two operations. The peers get the crop from
our own pipeline, and differ in what follows. The contenders take turns; figures are medians, ratios
turn by turn. Then a Ti/16 trains on one batch that is always the same, and on the pipeline: what
the pipeline adds to a step is the share that is spent waiting. A contender that is not installed is
left out.
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
    """Makes the JPEGs, takes turns, prints the figures, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--images", type=int, default=256, help="images in a turn (default: 256)")
    parser.add_argument("--steps", type=int, default=6, help="steps in a turn (default: 6)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, help="write the figures as JSON (default: do not)")
    options = parser.parse_args()
    jpegs = make_jpegs(64)
    contenders = {name: make_batches(name, jpegs) for name in options.only if is_there(name)}
    turns = [
        {name: images_per_second(made, options.images) for name, made in contenders.items()}
        for _ in range(options.rounds)
    ]
    steps = [
        dict(zip(("constant", "pipeline"), pair, strict=True)) for pair in train(jpegs, options)
    ]
    report(turns, steps)
    if options.out:
        figures = {"machine": machine(), "images_per_second": turns, "step_seconds": steps}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def is_there(name: str) -> bool:
    """Whether a contender is installed."""
    return not name.startswith("keras-cv") or importlib.util.find_spec("keras_cv") is not None


def make_jpegs(count: int) -> list[bytes]:
    """Soft pictures with some noise, as large as photographs of ImageNet."""
    import tensorflow as tf

    generator = np.random.default_rng(0)
    jpegs = []
    for _ in range(count):
        soft = tf.image.resize(generator.integers(0, 256, (24, 32, 3)), JPEG_SIZE, method="bicubic")
        noisy = np.clip(soft.numpy() + generator.normal(0, 8, (*JPEG_SIZE, 3)), 0, 255)
        jpegs.append(tf.io.encode_jpeg(noisy.astype(np.uint8), quality=90).numpy())
    return jpegs


def make_batches(name: str, jpegs: list[bytes]) -> Any:
    """The batches of a contender, more than will be taken."""
    from keras_vit.data import Augmentation, Split, train_batches

    whole = Split(images=np.array(jpegs * 8, object), targets=np.zeros(8 * len(jpegs), np.int32))
    ours = name == OURS
    batches = train_batches(
        whole,
        image_size=SIZE,
        batch_size=BATCH,
        epochs=1_000_000,
        seed=0,
        augmentation=Augmentation(crop=0.05, randaugment_layers=2 if ours else 0),
    )
    vary = peer(name)
    if vary is not None:
        batches = batches.map(vary, num_parallel_calls=-1).prefetch(-1)
    return batches


def peer(name: str) -> Callable[[Any, Any], Any] | None:
    """What a peer does to a batch: two operations of its own RandAugment."""
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
    """Starts to make batches; a new iterator each time, so that none is made in another's turn."""
    stream = iter(batches)
    for _ in range(2):
        next(stream)
    return stream


def images_per_second(batches: Any, count: int) -> float:
    """Takes as many images as fast as they come."""
    stream, taken = warm(batches), -(-count // BATCH)
    begun = time.perf_counter()
    for _ in range(taken):
        next(stream)
    return taken * BATCH / (time.perf_counter() - begun)


def train(jpegs: list[bytes], options: argparse.Namespace) -> list[tuple[float, float]]:
    """Seconds of a training step of Ti/16: on a batch that is always the same, on the pipeline."""
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
        begun = time.perf_counter()
        for _ in range(options.steps):
            model.train_on_batch(*fetch())
        mean: float = (time.perf_counter() - begun) / options.steps
        return mean

    pairs = []
    for _ in range(options.rounds):
        alone = seconds(lambda: constant)
        fetch = functools.partial(next, warm(batches))
        pairs.append((alone, seconds(fetch)))
    return pairs


def report(turns: list[dict[str, float]], steps: list[dict[str, float]]) -> None:
    """Prints medians, and ratios turn by turn."""
    print(f"{machine()}; medians of {len(turns)} turns")
    for name in turns[0]:
        speed = statistics.median(turn[name] for turn in turns)
        ratio = (
            statistics.median(turn[OURS] / turn[name] for turn in turns) if OURS in turns[0] else 0
        )
        print(f"{name:<24}{speed:>8.0f} images/s   {OURS} is {ratio:.2f} times as fast")
    alone, fed = (
        statistics.median(step[key] for step in steps) for key in ("constant", "pipeline")
    )
    share = statistics.median(max(1 - s["constant"] / s["pipeline"], 0) for s in steps)
    print(
        f"a step of Ti/16, batch {BATCH}: {alone:.2f} s on one batch, {fed:.2f} s on the pipeline; "
        f"{share:.0%} of it waiting"
    )


def machine() -> str:
    """Cores and versions."""
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
