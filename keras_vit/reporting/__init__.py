"""What others see of a run: its report, its model card, its repository on the Hugging Face Hub."""

from keras_vit.reporting.hub import Published, model_card, push, write_card
from keras_vit.reporting.report import Subject, write_files, write_report_page

__all__ = ["Published", "Subject", "model_card", "push", "write_card", "write_files",
           "write_report_page"]  # fmt: skip
