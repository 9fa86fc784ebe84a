"""Names what images show: pixels in memory, or a stream of files that are read beside it."""

import collections
import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import keras
import numpy as np

from keras_vit import environment
from keras_vit.data import NamedImage, Views, antialias_of, image_size_of, read_image, resize_image
from keras_vit.evaluation.outputs import log_softmax, mean_over_views, prediction_batch_size

Image = TypeVar("Image", bound=NamedImage | str | os.PathLike[str])
_Read = np.ndarray | Exception


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
    """Names the likeliest classes of each image, the likeliest first.

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
            probabilities of shape (batch, classes).
        images: pixels 0..255 of shape (height, width, 3), of any size.
        labels: the name of each class, in the order of the model's outputs.
        top: how many classes to name; all of them if there are fewer.
        tta: the views of test-time augmentation, whose probabilities are averaged; None for none.

    Returns:
        The predictions for each image.

    Raises:
        ValueError: the model has another number of classes, or an image another shape.
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
    """Names the likeliest classes of each image file, in order, as `predict` does.

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
        ValueError: the model has another number of classes.
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


class _Predictor:
    """A model that is run on batches of one size.

    Attributes:
        images: how many images are worth running at once.
    """

    def __init__(
        self, model: keras.Model, *, labels: Sequence[str], top: int, tta: Views | None
    ) -> None:
        if model.output_shape[-1] != len(labels):
            raise ValueError(
                f"The model has {model.output_shape[-1]} classes. Received: {len(labels)} labels."
            )
        self._model, self._labels, self._top, self._tta = model, labels, top, tta
        self._size, self._antialias = image_size_of(model), antialias_of(model)
        self._batch = prediction_batch_size(model)
        self._views = 1 if tta is None else tta.count
        self.images = max(self._batch // self._views, 1)

    def prepare(self, image: np.ndarray) -> np.ndarray:
        """Returns the views of an image, float32 of shape (views, height, width, 3)."""
        if self._tta is None:
            resized = resize_image(image, size=self._size, antialias=self._antialias)
            return np.asarray(resized)[None]
        return np.asarray(self._tta.stack(image, size=self._size, antialias=self._antialias))

    def run(self, prepared: Sequence[np.ndarray]) -> list[tuple[Prediction, ...]]:
        """Returns the predictions of images from `prepare`."""
        if not prepared:
            return []
        rows, outputs = np.concatenate(prepared), []
        for start in range(0, len(rows), self._batch):
            part = rows[start : start + self._batch]
            filled = np.zeros((self._batch, *rows.shape[1:]), np.float32)
            filled[: len(part)] = part
            outputs.append(np.asarray(self._model.predict_on_batch(filled))[: len(part)])
        scores = log_softmax(np.concatenate(outputs), model=self._model)
        return list(map(self._name, np.exp(mean_over_views(scores, self._views))))

    def _name(self, probabilities: np.ndarray) -> tuple[Prediction, ...]:
        likeliest = np.argsort(-probabilities, kind="stable")[: self._top]
        return tuple(
            Prediction(self._labels[place], float(probabilities[place])) for place in likeliest
        )


def _read_ahead(
    load: Callable[[Image], _Read], images: Iterable[Image], *, ahead: int
) -> Iterator[tuple[Image, _Read]]:
    """Yields each image and what threads make of it, in order, so many ahead of the caller."""
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
