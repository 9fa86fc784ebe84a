"""From a trained model to TensorFlow Serving, TFLite and ONNX. TensorFlow only."""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "keras_vit.exporting writes graphs of TensorFlow: save the model, and give its file to "
        "`keras-vit export`, or load it under KERAS_BACKEND=tensorflow. Received: the backend "
        f"{keras.backend.backend()!r}."
    )

from keras_vit.exporting.artefacts import FORMATS, Artefact, export
from keras_vit.exporting.verification import VerificationError

__all__ = ["FORMATS", "Artefact", "VerificationError", "export"]
