"""Replays the warm-up requests of a SavedModel, as the server does when it loads a version."""

from pathlib import Path

import numpy as np

from . import loader, wire

FILE = "assets.extra/tf_serving_warmup_requests"
LIMIT = 1000  # more make the server refuse the file
# TensorProto's repeated fields: float_val = 5, int_val = 7, string_val = 8.
_FLOATS, _INTEGERS, _STRINGS = 5, 7, 8


def replay(path: Path, model: loader.SavedModel) -> int:
    """Runs every recorded request and returns how many there are.

    Raises:
        ValueError: a request names other inputs than the signature has.
        loader.ServingError: a request fails.
    """
    file = path / FILE
    count = 0
    for record in wire.records(file.read_bytes()) if file.is_file() else ():
        signature, inputs = read_request(record)
        wanted = model.signatures[signature].inputs
        if set(inputs) != set(wanted):
            raise ValueError(
                f"A warm-up request for {signature!r} has the inputs {sorted(inputs)}; the "
                f"signature takes {sorted(wanted)}."
            )
        model.run(signature, inputs)
        count += 1
    return count


def read_request(record: bytes) -> tuple[str, dict[str, np.ndarray]]:
    """Reads the signature and the inputs of a PredictionLog with a PredictRequest."""
    request = b"".join(wire.submessages(record, 6, 1))
    signature = b"".join(wire.submessages(request, 1, 3)).decode() or "serving_default"
    tensors = wire.mapping(request, 2)
    return signature, {name: read_tensor(tensor) for name, tensor in tensors.items()}


def read_tensor(tensor: bytes) -> np.ndarray:
    """Reads a TensorProto; values that are left out repeat the last one."""
    # TensorProto: dtype = 1, tensor_shape = 2 (dim = 2 (size = 1)), tensor_content = 4.
    number = wire.integer(tensor, 1)
    shape = tuple(wire.integer(dim, 1) for dim in wire.submessages(tensor, 2, 2))
    content = b"".join(wire.submessages(tensor, 4))
    if number == loader.STRING:
        values = np.empty(int(np.prod(shape)), object)
        values[:] = list(wire.submessages(tensor, _STRINGS))
        return values.reshape(shape)
    dtype = loader.DTYPES[number]
    if content:
        return np.frombuffer(content, dtype).reshape(shape)
    listed: list[float] = []
    for field in wire.submessages(tensor, _FLOATS):
        listed += np.frombuffer(field, np.float32).tolist()
    for field in wire.submessages(tensor, _INTEGERS):
        listed += wire.varints(field)
    filled: np.ndarray = np.full(int(np.prod(shape)), listed[-1] if listed else 0, dtype)
    filled[: len(listed)] = listed
    return filled.reshape(shape)
