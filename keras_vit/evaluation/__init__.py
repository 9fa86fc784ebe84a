"""Measures classifiers and names what images show. TensorFlow only."""

from keras_vit.environment import has_bfloat16_units
from keras_vit.evaluation.features import NEIGHBORS, SHOTS, FewShot, few_shot, nearest_neighbors
from keras_vit.evaluation.metrics import (
    Answers,
    Calibration,
    ClassScore,
    Evaluation,
    calibration,
    calibration_of_answers,
    evaluate,
    read_real_labels,
    real_accuracy,
)
from keras_vit.evaluation.outputs import (
    PRECISIONS,
    frozen_features,
    in_precision,
    log_probabilities,
    prediction_batch_size,
    sensible_batch_size,
)
from keras_vit.evaluation.predictions import Prediction, predict, predict_files
from keras_vit.evaluation.report import (
    METRICS,
    Mistake,
    confident_mistakes,
    plot_confusion,
    plot_mistakes,
    write_report,
)

__all__ = [
    "METRICS",
    "NEIGHBORS",
    "PRECISIONS",
    "SHOTS",
    "Answers",
    "Calibration",
    "ClassScore",
    "Evaluation",
    "FewShot",
    "Mistake",
    "Prediction",
    "calibration",
    "calibration_of_answers",
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
    "predict_files",
    "prediction_batch_size",
    "read_real_labels",
    "real_accuracy",
    "sensible_batch_size",
    "write_report",
]
