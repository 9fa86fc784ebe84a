#!/bin/sh
# Serves the models in this folder with TensorFlow Serving: gRPC on 8500, REST on 8501.
folder=$$(cd "$$(dirname "$$0")" && pwd)
exec docker run --rm -p 8500:8500 -p 8501:8501 \
  --mount "type=bind,source=$$folder,target=/models/$name,readonly" \
  -t "tensorflow/serving:$${TF_SERVING_VERSION:-2.20.0}" \
  --model_config_file=/models/$name/models.config \
  --monitoring_config_file=/models/$name/monitoring.config \
  --enable_batching=true \
  --batching_parameters_file=/models/$name/batching_parameters.txt "$$@"
