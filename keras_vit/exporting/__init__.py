"""From a trained model to TensorFlow Serving, TFLite and ONNX. TensorFlow only."""

from keras_vit.exporting.artefacts import FORMATS, Artefact, export
from keras_vit.exporting.verification import VerificationError

__all__ = ["FORMATS", "Artefact", "VerificationError", "export"]
