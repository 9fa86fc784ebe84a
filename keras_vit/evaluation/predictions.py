"""What a model makes of images: features and probabilities of a split, the classes of files.

Shapes: count images, C classes, D width of the features; views (views, height, width, 3).
"""

import collections
import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import keras
import numpy as np

from keras_vit import environment
from keras_vit.config import Ending, ending_of
from keras_vit.data import (
    NamedImage,
    Resizing,
    Split,
    Views,
    evaluation_batches,
    naming_damaged,
    read_image,
    resize_image,
    resizing_of,
)
from keras_vit.layers.dense import dense_changes
from keras_vit.model import VisionTransformer

PRECISIONS = ("float32", "bfloat16")
Image = TypeVar("Image", bound=NamedImage | str | os.PathLike[str])
_Read = np.ndarray | Exception
_LARGEST_BATCH = 128
_LARGEST_ON_PROCESSOR = 32  # of a prediction: beyond it, small models become no faster
_UNKNOWN_BATCH = 8  # of a model whose work is not known
# A batch's largest arrays then stay below 1 GiB in L/16, whatever the size of its images.
_TOKENS_IN_BATCH = 2**15
# Multiplications after which a processor computes a batch no faster by the image.
_WORK_IN_BATCH = 2**32


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One class that an image may show.

    Attributes:
        label: its name.
        probability: 0..1.
    """

    label: str
    probability: float


def predict(
    model: keras.Model,
    images: Sequence[np.ndarray],
    *,
    labels: Sequence[str],
    top: int = 5,
    tta: Views | None = None,
) -> list[tuple[Prediction, ...]]:
    """Names the top classes of each image, the most probable first.

    The numbers of an image do not depend on how many others there are: the model runs on batches
    of one size, the last one filled up, see `prediction_batch_size`.

    Example:
        >>> import keras_vit, numpy as np
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=2)
        >>> photo = np.zeros((480, 640, 3), np.uint8)
        >>> predict(keras_vit.VisionTransformer(config), [photo], labels=["cat", "dog"], top=1)
        [(Prediction(label='cat', probability=0.5),)]

    Args:
        model: takes pixels 0..255 of shape (batch, height, width, 3), gives logits or
            probabilities of shape (batch, classes), of softmax or of independent classes.
        images: pixels 0..255 of shape (height, width, 3), of any size.
        labels: the name of each class, in the order of the model's outputs.
        top: how many classes to name; all of them if there are fewer.
        tta: the views of test-time augmentation, whose probabilities are averaged; None for none.

    Returns:
        The predictions for each image.

    Raises:
        ValueError: the model has another number of classes, or answers with numbers or features,
            or an image has another shape.
    """
    predictor = _Predictor(model, labels=labels, top=top, tta=tta)
    for image in images:
        if np.ndim(image) != 3 or np.shape(image)[2] != 3:
            raise ValueError(
                "An image has the shape (height, width, 3). "
                f"Received: an array of shape {np.shape(image)}."
            )
    predictions = []
    for start in range(0, len(images), predictor.images):
        resized = [predictor.prepare(image) for image in images[start : start + predictor.images]]
        predictions += predictor.run(resized)
    return predictions


def predict_files(
    model: keras.Model,
    images: Iterable[Image],
    *,
    labels: Sequence[str],
    top: int = 5,
    tta: Views | None = None,
) -> Generator[tuple[Image, tuple[Prediction, ...] | Exception], None, None]:
    """Names the top classes of each image file, in order, as `predict` does.

    Threads read the files while the model runs. No more than a few batches are in memory, however
    many images there are.

    Example:
        >>> import keras_vit
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=2)
        >>> model = keras_vit.VisionTransformer(config)
        >>> for file, found in predict_files(model, ["no-such.jpg"], labels=["cat", "dog"]):
        ...     print(file, found)
        no-such.jpg There is no image file 'no-such.jpg'; check the path.

    Args:
        model: as in `predict`.
        images: paths, or what `keras_vit.data.named_images` yields.
        labels: as in `predict`.
        top: as in `predict`.
        tta: as in `predict`.

    Yields:
        Each image, with its predictions, or with the OSError or ValueError of reading it.

    Raises:
        ValueError: the model has another number of classes, or answers with numbers or features.
    """
    predictor = _Predictor(model, labels=labels, top=top, tta=tta)

    def load(image: Image) -> _Read:
        try:
            pixels = image.read() if isinstance(image, NamedImage) else read_image(image)
        except (OSError, ValueError) as error:
            return error
        return predictor.prepare(pixels)

    batch: list[tuple[Image, _Read]] = []
    for pair in _read_ahead(load, images, ahead=2 * predictor.images):
        batch.append(pair)
        sound = sum(isinstance(one, np.ndarray) for _, one in batch)
        if sound == predictor.images or len(batch) > 4 * predictor.images:
            yield from _named(predictor, batch)
            batch = []
    yield from _named(predictor, batch)


def frozen_features(
    model: keras.Model, split: Split, *, batch_size: int | None = None
) -> np.ndarray:
    """Returns the vector that a model makes of each image, before any classifier.

    Example:
        >>> import keras_vit
        >>> from keras_vit.data import load_digits
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=10, include_preprocessing=True)
        >>> frozen_features(keras_vit.VisionTransformer(config), load_digits().test).shape
        (359, 8)

    Args:
        model: a `VisionTransformer` that pools, whose vector before the classifier is taken (with
            the pre-logits layer, if there is one), or any model with outputs (B, D), taken as they
            are. It takes pixels 0..255.
        split: the images.
        batch_size: images in a batch; None for `default_batch_size`.

    Returns:
        (count, D), float32.

    Raises:
        ValueError: the split is empty, or the model makes no vector of an image.
    """
    _check_not_empty(split)
    resizing = resizing_of(model)
    if isinstance(model, VisionTransformer) and model.config.classes is not None:
        model = keras.Model(model.input, model.get_layer("head").input)
    if len(model.output_shape) != 2:
        raise ValueError(
            "Features are one vector for each image, (batch, width); build the model with pooling. "
            f"Received: a model with outputs of shape {model.output_shape}."
        )
    return _predict(model, split, batch_size, resizing=resizing)


def log_probabilities(
    model: keras.Model, split: Split, *, batch_size: int | None = None, tta: Views | None = None
) -> np.ndarray:
    """Returns a classifier's log-probabilities for each image of a split, (count, C) in float64.

    Args:
        model: takes pixels 0..255, gives logits or probabilities of shape (batch, C).
        split: the images.
        batch_size: images in a batch; None for `default_batch_size`.
        tta: the views of test-time augmentation, whose probabilities are averaged; None for none.

    Raises:
        ValueError: the split is empty, or the model answers with numbers or features.
    """
    _check_not_empty(split)
    ending = classifier_ending(model)
    outputs = _predict(model, split, batch_size, resizing=resizing_of(model), tta=tta)
    scores = log_scores(outputs, ending, model)
    return scores if tta is None else mean_over_views(scores, tta.count)


def mean_over_views(scores: np.ndarray, views: int) -> np.ndarray:
    """Returns the logarithm of the mean probability over the views of each image.

    Args:
        scores: log-probabilities, (images * views, C), the views of an image after one another.
        views: how many there are of an image.
    """
    if views == 1:
        return scores
    probabilities = np.exp(scores).reshape(-1, views, scores.shape[-1]).mean(axis=1)
    mean: np.ndarray = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    return mean


def classifier_ending(model: keras.Model) -> Ending:
    """Returns what the outputs of a classifier mean.

    Raises:
        ValueError: the model answers with features or values.
    """
    ending = ending_of(model)
    if ending.activation is None:
        raise ValueError(
            f"The model {model.name!r} answers with {ending.output}, not with classes, so that "
            "there is nothing to name or to count; ask it by model.predict(images)."
        )
    return ending


def log_scores(outputs: np.ndarray, ending: Ending, model: keras.Model) -> np.ndarray:
    """Turns a classifier's outputs into log-probabilities in float64."""
    if not np.isfinite(outputs).all():
        raise ValueError(
            f"The model {model.name!r} answers with what is no number (NaN or infinite): its "
            "weights are damaged, or its training went astray; use another."
        )
    outputs = outputs.astype(np.float64)
    if ending.is_probabilities:
        outputs = np.log(np.maximum(outputs, np.finfo(np.float32).tiny))
    elif ending.activation == "sigmoid":
        outputs = -np.logaddexp(0, -outputs)
    if ending.activation == "softmax":
        outputs = outputs - outputs.max(axis=-1, keepdims=True)
        outputs -= np.log(np.exp(outputs).sum(axis=-1, keepdims=True))
    return outputs


def in_precision(model: keras.Model, precision: str) -> keras.Model:
    """Returns the model, or a copy of it that computes and keeps its weights in another precision.

    bfloat16 is for processors with units for it, see `has_bfloat16_units`; without, it is slower
    than float32. The classifier stays in float32. On the digits, in a model of 8 epochs, the
    accuracy on 359 test images stayed the same, 61.28 %, and the loss rose from 1.1877 to 1.1879.

    Example:
        >>> import keras_vit
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=2)
        >>> in_precision(VisionTransformer(config), "bfloat16").get_layer("block_0").dtype
        'bfloat16'

    Args:
        model: the model; any Keras model if it is to stay as it is.
        precision: "float32", which changes nothing, or "bfloat16".

    Raises:
        TypeError: a model that is not a `VisionTransformer` cannot be copied.
        ValueError: another precision, or the model has been adapted by LoRA or quantised.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}. Received: {precision!r}.")
    if precision == "float32":
        return model
    if not isinstance(model, VisionTransformer):
        raise TypeError(
            f"Only a VisionTransformer runs in {precision}. Received: {type(model).__name__}."
        )
    if dense_changes(model):
        raise ValueError(
            f"Only plain dense layers run in {precision}. Merge the adapter first, with "
            "keras_vit.merge_lora, or convert the model from before it was quantised. "
            f"Received: {model.name!r}, whose dense layers are adapted or quantised."
        )
    return model.copy(dtype=precision)


def default_batch_size(model: keras.Model) -> int:
    """Returns how many images to run at once: 128, or fewer where the model makes many tokens."""
    grid = getattr(getattr(model, "config", None), "grid", None)
    if grid is None:
        return _LARGEST_BATCH
    fitting = max(_TOKENS_IN_BATCH // (grid[0] * grid[1] + 1), 1)
    return min(_LARGEST_BATCH, int(2 ** (fitting.bit_length() - 1)))


def prediction_batch_size(model: keras.Model) -> int:
    """Returns the one batch size that predictions are made with, however many images there are.

    A few images are filled up to a batch, so that it is as small as it can be without loss of
    speed: one image of B/16 on a processor, `default_batch_size` on an accelerator.
    """
    largest = default_batch_size(model)
    devices = keras.distribution.list_devices() if keras.backend.backend() != "torch" else ()
    if any(not device.lower().startswith("cpu") for device in devices):
        return largest
    grid = getattr(getattr(model, "config", None), "grid", None)
    if grid is None:
        return min(largest, _UNKNOWN_BATCH)
    work = (grid[0] * grid[1] + 1) * max(model.count_params(), 1)
    fitting = max(_WORK_IN_BATCH // work, 1)
    return min(largest, _LARGEST_ON_PROCESSOR, int(2 ** (fitting.bit_length() - 1)))


def _check_not_empty(split: Split) -> None:
    if not len(split):
        raise ValueError("There are no images to evaluate on; give a split that has some.")


def _predict(
    model: keras.Model,
    split: Split,
    batch_size: int | None,
    *,
    resizing: Resizing,
    tta: Views | None = None,
) -> np.ndarray:
    batch_size = batch_size or default_batch_size(model)
    batches = evaluation_batches(
        split,
        resizing=resizing,
        batch_size=batch_size if tta is None else max(batch_size // tta.count, 1),
        views=tta,
    )
    with naming_damaged(split):
        outputs = model.predict(batches.map(lambda images, targets: images), verbose=0)
    return np.asarray(outputs, np.float32)


class _Predictor:
    """A model that is run on batches of one size; `images` is how many are worth running."""

    def __init__(
        self, model: keras.Model, *, labels: Sequence[str], top: int, tta: Views | None
    ) -> None:
        self._ending = classifier_ending(model)
        if model.output_shape[-1] != len(labels):
            raise ValueError(
                f"The model has {model.output_shape[-1]} classes. Received: {len(labels)} labels."
            )
        self._model, self._labels, self._top, self._tta = model, labels, top, tta
        self._resizing = resizing_of(model)
        self._batch = prediction_batch_size(model)
        self._views = 1 if tta is None else tta.count
        self.images = max(self._batch // self._views, 1)

    def prepare(self, image: np.ndarray) -> np.ndarray:
        """Returns the views of an image, float32 of shape (views, height, width, 3)."""
        if self._tta is None:
            return np.asarray(resize_image(image, self._resizing))[None]
        return np.asarray(self._tta.stack(image, self._resizing))

    def run(self, prepared: Sequence[np.ndarray]) -> list[tuple[Prediction, ...]]:
        if not prepared:
            return []
        rows, outputs = np.concatenate(prepared), []
        for start in range(0, len(rows), self._batch):
            part = rows[start : start + self._batch]
            filled = np.zeros((self._batch, *rows.shape[1:]), np.float32)
            filled[: len(part)] = part
            outputs.append(np.asarray(self._model.predict_on_batch(filled))[: len(part)])
        scores = log_scores(np.concatenate(outputs), self._ending, self._model)
        probabilities = np.exp(mean_over_views(scores, self._views))
        best = np.argsort(-probabilities, axis=-1, kind="stable")[:, : self._top]
        return [
            tuple(Prediction(self._labels[place], float(row[place])) for place in places)
            for row, places in zip(probabilities, best, strict=True)
        ]


def _read_ahead(
    load: Callable[[Image], _Read], images: Iterable[Image], *, ahead: int
) -> Iterator[tuple[Image, _Read]]:
    threads = concurrent.futures.ThreadPoolExecutor(min(environment.cores(), 16))
    waiting: collections.deque[tuple[Image, concurrent.futures.Future[_Read]]] = collections.deque()
    try:
        for image in images:
            waiting.append((image, threads.submit(load, image)))
            if len(waiting) > ahead:
                first, read = waiting.popleft()
                yield first, read.result()
        while waiting:
            first, read = waiting.popleft()
            yield first, read.result()
    finally:
        threads.shutdown(cancel_futures=True)


def _named(
    predictor: _Predictor, batch: Sequence[tuple[Image, _Read]]
) -> Iterator[tuple[Image, tuple[Prediction, ...] | Exception]]:
    found = iter(predictor.run([one for _, one in batch if isinstance(one, np.ndarray)]))
    for image, one in batch:
        yield image, one if isinstance(one, Exception) else next(found)
