"""What stands in the report of a run."""

from keras_vit.reporting.page import Subject, try_report, write_report_page

__all__ = ["Subject", "try_report", "write_report_page"]
