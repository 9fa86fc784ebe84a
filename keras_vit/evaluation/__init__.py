"""Measures classifiers and names what images show. TensorFlow only."""

from keras_vit.evaluation.metrics import ClassScore, Evaluation, evaluate
from keras_vit.evaluation.predict import Prediction, predict
from keras_vit.evaluation.report import plot_confusion, write_report

__all__ = [
    "ClassScore",
    "Evaluation",
    "Prediction",
    "evaluate",
    "plot_confusion",
    "predict",
    "write_report",
]
