"""From a trained model to TensorFlow Serving, TFLite and ONNX. TensorFlow only."""

from typing import TYPE_CHECKING, Any

from keras_vit.exporting.formats import FORMATS

if TYPE_CHECKING:
    from keras_vit.exporting.artefacts import Artefact, export
    from keras_vit.exporting.verification import VerificationError

__all__ = ["FORMATS", "Artefact", "VerificationError", "export"]


def __getattr__(name: str) -> Any:
    """Looks at the backend before anything but the table of formats is imported."""
    import keras

    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "keras_vit.exporting writes graphs of TensorFlow: save the model, and give its file to "
            "`keras-vit export`, or load it under KERAS_BACKEND=tensorflow. Received: the backend "
            f"{keras.backend.backend()!r}."
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from keras_vit.exporting import artefacts, verification

    return getattr(verification if name == "VerificationError" else artefacts, name)
