"""Loads the 1,797 handwritten digits that scikit-learn carries inside its package: no download."""

import numpy as np

from keras_vit.data import source
from keras_vit.data.splits import PixelSplit

# Fractions of the images. Testing has the larger one: an error is then 0.3 per cent, not 0.6.
VALIDATION, TEST = 0.1, 0.2
INK = 16  # the images count ink in 0..16


def load_digits() -> source.ImageData:
    """Loads the digits, white on black, 8 by 8 pixels, in three fixed splits.

    The images are the test set of the "Optical Recognition of Handwritten Digits" (E. Alpaydin and
    C. Kaynak, UCI Machine Learning Repository, 1998), as scikit-learn distributes them.

    Example:
        >>> data = load_digits()
        >>> data.counts
        {'train': 1259, 'validation': 179, 'test': 359}
        >>> data.train.images.shape
        (1259, 8, 8, 3)

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        import sklearn.datasets
    except ImportError:
        raise ImportError(
            "The digits come with scikit-learn, which is not installed; "
            'run: pip install "keras-vit[data]"'
        ) from None
    digits = sklearn.datasets.load_digits()
    grey = np.round(digits.images * 255 / INK).astype(np.uint8)
    everything = PixelSplit(
        images=np.repeat(grey[..., None], 3, axis=-1), targets=digits.target.astype(np.int32)
    )
    names = [str(index) for index in range(len(everything))]
    splits = source.assign_splits(names, everything.targets, validation=VALIDATION, test=TEST)
    return source.ImageData(
        source="digits",
        labels=tuple(map(str, digits.target_names)),
        train=everything.take(splits["train"]),
        validation=everything.take(splits["validation"]),
        test=everything.take(splits["test"]),
    )
