"""Asks TensorFlow Serving over gRPC what images show.

pip install grpcio tensorflow-serving-api
python grpc_client.py --model digits photo.jpg other.png
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

SIGNATURE = "serving_default"
# What the same request may succeed at a moment later: a full queue, or a server that starts. A
# deadline that has passed is no such thing: the request would add to the load that made it late.
RETRIABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
LONGEST_PAUSE = 10  # seconds
LARGEST_ANSWER = 64 * 2**20  # gRPC's own limit of 4 MB is below a batch of feature maps


def predict(
    files: Sequence[Path], *, stub: Any, model: str, timeout: float, retries: int
) -> list[tuple[str, list[tuple[str, float]]]]:
    """Sends one batch of image files and returns a status and (label, score), best first, for each.

    To ask again is safe: a prediction changes nothing on the server. The pauses grow and are drawn,
    so that clients that failed together do not come back together.
    """
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, SIGNATURE
    contents = [file.read_bytes() for file in files]
    request.inputs["image_bytes"].CopyFrom(tf.make_tensor_proto(contents))
    for attempt in range(retries + 1):
        try:
            outputs = stub.Predict(request, timeout=timeout).outputs
            break
        except grpc.RpcError as error:
            if error.code() not in RETRIABLE or attempt == retries:
                raise
            time.sleep(random.uniform(0.5, 1) * min(0.4 * 2**attempt, LONGEST_PAUSE))  # noqa: S311
    names = ("status", "classes", "scores")
    rows = zip(*(tf.make_ndarray(outputs[name]) for name in names), strict=True)
    return [
        (
            status.decode(),
            [(label.decode(), float(score)) for label, score in zip(labels, scores, strict=True)],
        )
        for status, labels, scores in rows
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the labels of each image; returns 1 if one could not be classified."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--address", default="localhost:8500")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=8, help="images in a request (default: 8)")
    parser.add_argument("--timeout", type=float, default=30, help="seconds (default: 30)")
    parser.add_argument("--retries", type=int, default=4, help="while unavailable (default: 4)")
    options = parser.parse_args(arguments)
    limits = [("grpc.max_receive_message_length", LARGEST_ANSWER)]
    failed = 0
    with grpc.insecure_channel(options.address, options=limits) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        for start in range(0, len(options.images), options.batch):
            files = options.images[start : start + options.batch]
            try:
                answers = predict(
                    files,
                    stub=stub,
                    model=options.model,
                    timeout=options.timeout,
                    retries=options.retries,
                )
            except (grpc.RpcError, OSError) as error:
                reason = error.details() if isinstance(error, grpc.RpcError) else error
                print(f"{', '.join(map(str, files))}: {reason}", file=sys.stderr)
                failed = 1
                continue
            for file, (status, pairs) in zip(files, answers, strict=True):
                if status != "OK":
                    print(f"{file}: {status}", file=sys.stderr)
                    failed = 1
                    continue
                print(f"{file}: " + ", ".join(f"{label} {score:.1%}" for label, score in pairs))
    return failed


if __name__ == "__main__":
    sys.exit(main())
