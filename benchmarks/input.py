"""Times the input pipeline: decoded, cropped and augmented images per second, against peers.

    python -m benchmarks.input --rounds 5
    python -m benchmarks.input --processor --rounds 5
    python -m benchmarks.input --records 1.15

Every contender reads the same random JPEGs (500 by 375 pixels), cuts an Inception crop, resizes it
to 224 by 224 and applies RandAugment with two operations. The peers get the crop from our pipeline.
The contenders take turns; figures are medians, ratios are medians over the turns. Then a Ti/16
trains on a constant batch and on the pipeline: the difference is the time that a step waits.
Contenders that are not installed are left out.

With --processor it measures the processor's time of an image, of all threads together, in batches
of 128: ours, and TensorFlow's operations for decoding, crop and resizing alone.

With --records it writes so many GiB of such JPEGs as a dataset of TensorFlow Datasets, in
array_record files, and reads it by number, in batches of 64 with crop and flip.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZE, JPEG_SIZE, BATCH = (224, 224), (375, 500), 32
LARGE_BATCH, COPIES = 128, 8  # with --processor: the batch, and how often an epoch has an image
OURS = "keras_vit RandAugment"
CONTENDERS = ("keras_vit crop alone", OURS, "keras RandAugment", "keras-cv RandAugment")
BARE = "TensorFlow's operations, crop"
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "keras_vit crop": {},
    "keras_vit crop, flip": {"flip": True},
    "keras_vit crop, flip, erase": {"flip": True, "erase": 0.25},
    "keras_vit crop, flip, RandAugment": {
        "flip": True,
        "randaugment_layers": 2,
        "randaugment_magnitude": 15,
    },
}


def main() -> None:
    """Makes the JPEGs, measures in turns, prints the figures and writes them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--images", type=int, default=256, help="images in a turn (default: 256)")
    parser.add_argument("--steps", type=int, default=6, help="steps in a turn (default: 6)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, help="write the figures as JSON (default: do not)")
    parser.add_argument("--processor", action="store_true", help="measure the processor's time")
    parser.add_argument("--records", type=float, metavar="GIB", help="read records by number")
    options = parser.parse_args()
    jpegs = make_jpegs(64)
    if options.records:
        measure_records(jpegs, options)
        return
    if options.processor:
        measure_processor(jpegs, options)
        return
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
    from keras_vit.data import Augmentation, Resizing, Split, train_batches
    from keras_vit.environment import cores

    split = Split(images=np.array(jpegs * 8, object), targets=np.zeros(8 * len(jpegs), np.int32))
    ours = name == OURS
    batches = train_batches(
        split,
        resizing=Resizing(SIZE),
        batch_size=BATCH,
        epochs=1_000_000,
        seed=0,
        augmentation=Augmentation(crop=0.05, randaugment_layers=2 if ours else 0),
    )
    augment = peer_augmentation(name)
    if augment is not None:
        batches = batches.map(augment, num_parallel_calls=cores()).prefetch(2)
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


def measure_processor(jpegs: list[bytes], options: argparse.Namespace) -> None:
    """Prints the processor's milliseconds for an image, in turns."""
    pairs = {name: [epochs(name, jpegs, count) for count in (1, 3)] for name in AUGMENTATIONS}
    pairs[BARE] = [bare_epochs(jpegs, count) for count in (1, 3)]
    turns = []
    for _ in range(options.rounds):
        # The difference of two lengths: what it takes to begin is in both.
        seconds = {name: [processor_seconds(each) for each in pair] for name, pair in pairs.items()}
        images = 2 * COPIES * len(jpegs)
        turns.append({name: (long - short) / images for name, (short, long) in seconds.items()})
    print(f"{machine()}; medians of {len(turns)} turns")
    for name in pairs:
        cost = statistics.median(turn[name] for turn in turns)
        ratio = statistics.median(turn[name] / turn[BARE] for turn in turns)
        print(f"{name:<34}{1000 * cost:>6.2f} ms of a core   {ratio:.2f} times {BARE!r}")
    if options.out:
        figures = {"machine": machine(), "processor_seconds_per_image": turns}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def measure_records(jpegs: list[bytes], options: argparse.Namespace) -> None:
    """Prints how fast a dataset on the disk is opened and read, and the peak of memory."""
    import tensorflow_datasets as tfds

    from keras_vit.data import Augmentation, Resizing, load_tfds, train_batches

    size = sum(map(len, jpegs)) / len(jpegs)
    images = [jpegs[number % len(jpegs)] for number in range(int(options.records * 2**30 / size))]
    with tempfile.TemporaryDirectory() as folder:
        features = {
            "image": tfds.features.Image(),
            "label": tfds.features.ClassLabel(num_classes=1),
        }
        identity = tfds.core.DatasetIdentity(
            name="jpegs", version=tfds.core.Version("1.0.0"), data_dir=folder, module_name="jpegs"
        )
        info = tfds.core.DatasetInfo(
            builder=identity,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )
        writer = tfds.core.SequentialWriter(info, len(images) // 16, file_format="array_record")
        writer.initialize_splits(["train"])
        writer.add_examples({"train": [{"image": io.BytesIO(x), "label": 0} for x in images]})
        writer.close_all()
        start = time.perf_counter()
        split = load_tfds(tfds.builder_from_directory(folder)).train
        opened = time.perf_counter()
        batches = iter(
            train_batches(
                split,
                resizing=Resizing(SIZE),
                batch_size=64,
                epochs=1000,
                seed=0,
                augmentation=Augmentation(crop=0.05, flip=True),
            )
        )
        next(batches)
        print(f"{machine()}; {len(images)} images of {size:.0f} bytes, {type(split).__name__}")
        print(
            f"opened in {opened - start:.2f} s, first batch after {time.perf_counter() - start:.2f}"
        )
        for _ in range(options.rounds):
            start, processor = time.perf_counter(), time.process_time()
            for _ in range(60):
                next(batches)
            seconds, busy = time.perf_counter() - start, time.process_time() - processor
            print(
                f"{60 * 64 / seconds:.0f} images/s, {1000 * busy / 60 / 64:.2f} ms of a core each"
            )


def epochs(name: str, jpegs: list[bytes], count: int) -> Any:
    """Makes the batches of so many epochs of ours."""
    from keras_vit.data import Augmentation, Resizing, Split, train_batches

    images = np.array(jpegs * COPIES, object)
    return train_batches(
        Split(images=images, targets=np.zeros(len(images), np.int32)),
        resizing=Resizing(SIZE),
        batch_size=LARGE_BATCH,
        epochs=count,
        seed=0,
        augmentation=Augmentation(crop=0.05, **AUGMENTATIONS[name]),
    )


def bare_epochs(jpegs: list[bytes], count: int) -> Any:
    """Makes batches with TensorFlow's operations for decoding, crop and resizing, and no more."""
    import tensorflow as tf

    from keras_vit.data import augment
    from keras_vit.data.source import untuned
    from keras_vit.environment import cores

    def load(contents: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        shape = tf.image.extract_jpeg_shape(contents)[:2]
        seed = tf.stack([step, 0])
        part = augment.inception_part(shape, smallest_area=0.05, seed=seed)
        pixels = tf.image.decode_and_crop_jpeg(contents, part, channels=3)
        return tf.ensure_shape(tf.image.resize(pixels, SIZE, antialias=True), (*SIZE, 3))

    images = untuned(tf.data.Dataset.from_tensor_slices(jpegs)).repeat(COPIES * count)
    loaded = tf.data.Dataset.zip(images, tf.data.Dataset.range(2**31)).map(
        load, num_parallel_calls=cores(), deterministic=True
    )
    return loaded.batch(LARGE_BATCH, drop_remainder=True).prefetch(2)


def processor_seconds(batches: Any) -> float:
    """Measures the processor's time, of all threads, in which all batches are made."""
    start = time.process_time()
    for _ in batches:
        pass
    return time.process_time() - start


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
