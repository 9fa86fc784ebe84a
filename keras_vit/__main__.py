"""Runs the command line as `python -m keras_vit`."""

import sys

from keras_vit.cli import main

sys.exit(main())
