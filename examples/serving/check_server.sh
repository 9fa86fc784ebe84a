#!/bin/sh
# Sends the requests of tests/test_export_serving.py to a real TensorFlow Serving in docker.
# Usage: check_server.sh [IMAGE]
set -eu
cd "$(dirname "$0")/../.."
KERAS_VIT_SERVING_IMAGE="${1:-tensorflow/serving:2.20.0}" \
  python -m pytest -m "" tests/test_export_serving.py -v
