"""Checks of an artefact in a process of their own, where Keras and keras_vit cannot be imported.

These modules import only the standard library, NumPy and the runtime of the artefact. The limits
stand here, as the table of formats is read where even NumPy would take too long.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a format may differ by; errors are in standard deviations, see `agreement`.

    Attributes:
        error: the root mean square error of all outputs.
        largest: the largest error of one output.
        of_one: the root mean square error of one class, or feature, over its own deviation.
        best: the least share of images with the model's best class. It is less where the model
            itself hardly decides: what errors of the allowed size leave.
        accuracy: the most that the accuracy on labelled images may fall.
    """

    error: float
    largest: float
    of_one: float
    best: float
    accuracy: float
