"""Measures classifiers and names what images show. TensorFlow only."""

from keras_vit.environment import has_bfloat16_units
from keras_vit.evaluation.metrics import (
    NEIGHBORS,
    SHOTS,
    Calibration,
    ClassScore,
    Evaluation,
    FewShot,
    Mistake,
    Predictions,
    confident_mistakes,
    evaluate,
    few_shot,
    nearest_neighbors,
    read_real_labels,
    real_accuracy,
    write_report,
)
from keras_vit.evaluation.predictions import (
    PRECISIONS,
    Prediction,
    default_batch_size,
    frozen_features,
    in_precision,
    log_probabilities,
    predict,
    predict_files,
    prediction_batch_size,
)
from keras_vit.figures import plot_confusion, plot_mistakes

__all__ = ["NEIGHBORS", "PRECISIONS", "SHOTS", "Calibration", "ClassScore", "Evaluation",
           "FewShot", "Mistake", "Prediction", "Predictions", "confident_mistakes",
           "default_batch_size", "evaluate", "few_shot", "frozen_features", "has_bfloat16_units",
           "in_precision", "log_probabilities", "nearest_neighbors", "plot_confusion",
           "plot_mistakes", "predict", "predict_files", "prediction_batch_size",
           "read_real_labels", "real_accuracy", "write_report"]  # fmt: skip
