"""The command line `keras-vit`: it parses and prints, nothing else."""

from keras_vit.cli.main import main

__all__ = ["main"]
