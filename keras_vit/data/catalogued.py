"""Loads image classification datasets of TensorFlow Datasets, undecoded."""

import os
from typing import Any

import tensorflow as tf

from keras_vit.data import datasets, source

PREFIX = "tfds:"


def load_tfds(
    name: Any, *, data_dir: str | os.PathLike[str] | None = None, strict: bool = False
) -> source.ImageData:
    """Loads a dataset of TensorFlow Datasets, which is downloaded if it is not there.

    The splits train, validation and test are the dataset's own. Where validation or test is
    missing, or has no classes, it is carved out of the training images, see
    `keras_vit.data.from_dataset`.

    Example:
        >>> load_tfds("no_such_dataset", data_dir="/nowhere")  # doctest: +SKIP
        Traceback (most recent call last):
        ValueError: TensorFlow Datasets has no dataset 'no_such_dataset'; ...

    Args:
        name: as in https://www.tensorflow.org/datasets/catalog, such as "oxford_flowers102"; or a
            builder of that package, whose data is there.
        data_dir: where the package keeps its data; None for its own choice.
        strict: whether a damaged image is an error, instead of being left out and counted.

    Raises:
        ImportError: tensorflow-datasets is not installed.
        ValueError: there is no such dataset, or it does not hold labelled images.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise ImportError(
            f"{PREFIX}NAME needs TensorFlow Datasets, which is not installed; "
            'run: pip install "keras-vit[tfds]"'
        ) from None
    builder = name
    if isinstance(name, str):
        try:
            builder = tfds.builder(name, data_dir=data_dir)
        except tfds.core.DatasetNotFoundError:
            raise ValueError(
                f"TensorFlow Datasets has no dataset {name!r}; choose one of "
                "https://www.tensorflow.org/datasets/catalog."
            ) from None
        builder.download_and_prepare()
    image, label = _keys(builder)
    config = tfds.ReadConfig(add_tfds_id=True, try_autocache=False)
    found = {
        split: _records(builder, split, image=image, label=label, config=config)
        for split in source.SPLITS
        if split in builder.info.splits
    }
    found = {split: records for split, records in found.items() if _is_labelled(records)}
    if "train" not in found:
        raise ValueError(
            f"The dataset {builder.name!r} has no labelled split called train; it has "
            f"{', '.join(builder.info.splits) or 'none'}."
        )
    return datasets.from_dataset(
        found["train"],
        found.get("validation"),
        test=found.get("test"),
        labels=builder.info.features[label].names,
        name=f"{PREFIX}{name}" if isinstance(name, str) else PREFIX + builder.name,
        strict=strict,
    )


def _keys(builder: Any) -> tuple[str, str]:
    """The names of a dataset's image and class."""
    features, keys = builder.info.features, builder.info.supervised_keys
    kinds = [type(features[key]).__name__ for key in keys or () if key in features]
    if kinds != ["Image", "ClassLabel"]:
        raise ValueError(
            f"The dataset {builder.name!r} must give an image and one class; it gives "
            f"{', '.join(kinds) or 'no such pair'}. Choose an image classification dataset."
        )
    return keys[0], keys[1]


def _records(builder: Any, split: str, *, image: str, label: str, config: Any) -> tf.data.Dataset:
    """The bytes, the class and the name of each image, in the order of the files."""
    from tensorflow_datasets import decode

    examples = builder.as_dataset(
        split=split,
        decoders={image: decode.SkipDecoding()},
        read_config=config,
        shuffle_files=False,
    )
    names = [key for key in ("tfds_id", "image/filename") if key in examples.element_spec]
    keys = (image, label, *names[:1])
    return examples.map(lambda example: tuple(example[key] for key in keys))


def _is_labelled(records: tf.data.Dataset) -> bool:
    # The test images of ImageNet are all of class -1.
    return all(record[1] >= 0 for record in records.take(1).as_numpy_iterator())
