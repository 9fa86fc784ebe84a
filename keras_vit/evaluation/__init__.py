"""Measures classifiers and names what images show. TensorFlow only."""

from keras_vit.evaluation.calibration import Calibration, calibration
from keras_vit.evaluation.few_shot import SHOTS, FewShot, few_shot
from keras_vit.evaluation.metrics import ClassScore, Evaluation, evaluate
from keras_vit.evaluation.mistakes import Mistake, confident_mistakes, plot_mistakes
from keras_vit.evaluation.neighbors import NEIGHBORS, nearest_neighbors
from keras_vit.evaluation.outputs import frozen_features, log_probabilities
from keras_vit.evaluation.precision import (
    PRECISIONS,
    has_bfloat16_units,
    in_precision,
    sensible_batch_size,
)
from keras_vit.evaluation.predict import Prediction, predict
from keras_vit.evaluation.real import read_real_labels, real_accuracy
from keras_vit.evaluation.report import METRICS, plot_confusion, write_report

__all__ = [
    "METRICS",
    "NEIGHBORS",
    "PRECISIONS",
    "SHOTS",
    "Calibration",
    "ClassScore",
    "Evaluation",
    "FewShot",
    "Mistake",
    "Prediction",
    "calibration",
    "confident_mistakes",
    "evaluate",
    "few_shot",
    "frozen_features",
    "has_bfloat16_units",
    "in_precision",
    "log_probabilities",
    "nearest_neighbors",
    "plot_confusion",
    "plot_mistakes",
    "predict",
    "read_real_labels",
    "real_accuracy",
    "sensible_batch_size",
    "write_report",
]
