"""The version of keras-vit."""

__version__ = "0.1.0"
