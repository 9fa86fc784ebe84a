"""Test-time augmentation: the views of an image whose probabilities are averaged."""

import dataclasses
from typing import Any

import tensorflow as tf

from keras_vit.data.images import resize_image

_CENTER = (0.5, 0.5)
_CORNERS = ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Views:
    """The views of an image in test-time augmentation: crops at several scales, and their mirrors.

    The first view is the whole image, which is what a model sees without test-time augmentation.
    Crops have the aspect of the image, and are resized as the whole is.

    Example:
        >>> views = Views(flip=True)
        >>> views.count
        14
        >>> views.stack(tf.zeros((60, 80, 3), tf.uint8), size=(32, 32)).shape.as_list()
        [14, 32, 32, 3]

    Attributes:
        flip: whether each view is seen mirrored, too; right where training mirrored images.
        scales: sides of the crops from the middle, as fractions of those of the image, beside the
            whole.
        shifted: side of the crops from the four corners, as such a fraction; None for none.

    Raises:
        ValueError: a side is not above 0 and below 1.
    """

    flip: bool = False
    scales: tuple[float, ...] = (0.9, 0.8)
    shifted: float | None = 0.9

    def __post_init__(self) -> None:
        sides = (*self.scales, *(() if self.shifted is None else (self.shifted,)))
        if not all(0 < side < 1 for side in sides):
            raise ValueError(
                "The crops of test-time augmentation have sides above 0 and below 1. "
                f"Received: scales={self.scales!r}, shifted={self.shifted!r}."
            )

    @property
    def crops(self) -> tuple[tuple[float, tuple[float, float]], ...]:
        """The side of each crop, and its place, (0, 0) for top left to (1, 1) for bottom right."""
        corners = [(self.shifted, place) for place in _CORNERS] if self.shifted else []
        return ((1.0, _CENTER), *((side, _CENTER) for side in self.scales), *corners)

    @property
    def count(self) -> int:
        """How many views there are of an image."""
        return len(self.crops) * (2 if self.flip else 1)

    def stack(self, image: Any, *, size: tuple[int, int], antialias: bool = True) -> tf.Tensor:
        """Returns the views of one image.

        Args:
            image: pixels of shape (height, width, 3).
            size: (height, width) in pixels that each view is resized to.
            antialias: see `keras_vit.data.resize_image`.

        Returns:
            The pixels, float32 in 0..255 of shape (count, height, width, 3).
        """
        image = tf.convert_to_tensor(image)
        parts = [_crop(image, side, place) for side, place in self.crops]
        seen = [resize_image(part, size=size, antialias=antialias) for part in parts]
        mirrored = [view[:, ::-1] for view in seen] if self.flip else []
        return tf.ensure_shape(tf.stack([*seen, *mirrored]), (self.count, *size, 3))

    def to_dict(self) -> dict[str, Any]:
        """Returns what was used as plain values that JSON can carry."""
        return {**dataclasses.asdict(self), "scales": list(self.scales), "views": self.count}


def _crop(image: tf.Tensor, side: float, place: tuple[float, float]) -> tf.Tensor:
    if side == 1:
        return image
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    size = tf.maximum(tf.round(side * shape), 1)
    start = tf.cast(tf.round(tf.constant(place) * (shape - size)), tf.int32)
    end = start + tf.cast(size, tf.int32)
    return image[start[0] : end[0], start[1] : end[1]]
