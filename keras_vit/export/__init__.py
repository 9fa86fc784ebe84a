"""From a trained model to TensorFlow Serving, TFLite and ONNX. TensorFlow only."""

from keras_vit.export.arguments import FORMATS
from keras_vit.export.artefacts import Artefact, export
from keras_vit.export.verification import VerificationError

__all__ = ["FORMATS", "Artefact", "VerificationError", "export"]
