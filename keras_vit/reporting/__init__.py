"""What stands in the report of a run, and in the comparison of several."""

from keras_vit.reporting.comparison import Comparison, compare, write_comparison
from keras_vit.reporting.page import Subject, try_report, write_report_page

__all__ = [
    "Comparison",
    "Subject",
    "compare",
    "try_report",
    "write_comparison",
    "write_report_page",
]
