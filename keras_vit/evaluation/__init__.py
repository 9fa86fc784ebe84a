"""Measures classifiers and names what images show. TensorFlow only."""

from keras_vit.evaluation.features import NEIGHBORS, SHOTS, FewShot, few_shot, nearest_neighbors
from keras_vit.evaluation.metrics import (
    Calibration,
    ClassScore,
    Evaluation,
    calibration,
    evaluate,
    read_real_labels,
    real_accuracy,
)
from keras_vit.evaluation.outputs import (
    PRECISIONS,
    Prediction,
    frozen_features,
    has_bfloat16_units,
    in_precision,
    log_probabilities,
    predict,
    sensible_batch_size,
)
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
