"""The REST API's rules between JSON and tensors.

Source: tensorflow/serving, util/json_tensor.cc and docs/api_rest.md.
"""

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

INTEGERS = (np.uint8, np.int32, np.int64)


class JsonError(ValueError):
    """A request that the server answers with 400."""


def read_inputs(body: Any, signatures: Mapping[str, Any]) -> tuple[str, Arrays, str]:
    """Returns (signature name, inputs by name, "row" or "columnar") of a request's JSON."""
    if not isinstance(body, dict):
        raise JsonError("Request body must be a JSON object")
    name = body.get("signature_name") or "serving_default"
    if name not in signatures:
        raise JsonError(f'Serving signature name: "{name}" not found in signature def')
    described = signatures[name].inputs
    if ("instances" in body) == ("inputs" in body):
        raise JsonError("Missing 'inputs' or 'instances' key")
    if "instances" in body:
        return name, _rows(body["instances"], described), "row"
    return name, _columns(body["inputs"], described), "columnar"


def write_outputs(outputs: Arrays, layout: str) -> dict[str, Any]:
    """Returns the JSON of an answer."""
    plain = {name: _plain(name, value) for name, value in outputs.items()}
    alone = next(iter(plain.values())) if len(plain) == 1 else None
    if layout == "columnar":
        return {"outputs": plain if alone is None else alone}
    if alone is not None:
        return {"predictions": alone}
    rows = len(next(iter(plain.values())))
    return {
        "predictions": [{name: value[row] for name, value in plain.items()} for row in range(rows)]
    }


def _rows(instances: Any, described: Mapping[str, Any]) -> Arrays:
    if not isinstance(instances, list) or not instances:
        raise JsonError("'instances' must be a list with at least one element")
    if _is_named(instances[0]):
        for instance in instances:
            if not _is_named(instance) or set(instance) != set(described):
                raise JsonError(
                    f"Failed to process element: expected all of the inputs {sorted(described)}"
                )
        columns = {name: [instance[name] for instance in instances] for name in described}
    elif len(described) == 1:
        columns = {next(iter(described)): instances}
    else:
        raise JsonError("instances is a plain list, but expecting list of objects")
    return {name: _tensor(name, value, described[name]) for name, value in columns.items()}


def _columns(inputs: Any, described: Mapping[str, Any]) -> Arrays:
    if not _is_named(inputs):
        if len(described) != 1:
            raise JsonError("inputs is a plain value/list, but expecting an object")
        inputs = {next(iter(described)): inputs}
    missing = sorted(set(described) - set(inputs))
    if missing:
        raise JsonError(f"Missing named input: {missing[0]} in 'inputs' object.")
    return {name: _tensor(name, inputs[name], tensor) for name, tensor in described.items()}


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and set(value) != {"b64"}


def _tensor(name: str, value: Any, described: Any) -> np.ndarray:
    from clean import loader  # type: ignore[import-not-found]

    if described.dtype == loader.STRING:
        leaves, shape = _flat(value, _string)
        array = np.empty(len(leaves), object)
        array[:] = leaves
        return array.reshape(shape)
    dtype = loader.DTYPES[described.dtype]
    leaves, shape = _flat(value, lambda leaf: _number(name, leaf, dtype))
    return np.array(leaves, dtype).reshape(shape)


def _flat(value: Any, read: Callable[[Any], Any]) -> tuple[list[Any], tuple[int, ...]]:
    if not isinstance(value, list):
        return [read(value)], ()
    parts = [_flat(item, read) for item in value]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        raise JsonError("Encountered list at unexpected size, expected a rectangular tensor")
    shape = (len(parts), *(shapes.pop() if shapes else ()))
    return [leaf for leaves, _ in parts for leaf in leaves], shape


def _string(leaf: Any) -> bytes:
    if isinstance(leaf, str):
        return leaf.encode()
    if isinstance(leaf, dict) and set(leaf) == {"b64"} and isinstance(leaf["b64"], str):
        try:
            return base64.b64decode(leaf["b64"], validate=True)
        except binascii.Error as error:
            raise JsonError(f"Unable to base64 decode: {error}") from error
    raise JsonError(f"JSON Value: {leaf!r} is not formatted correctly for base64 data")


def _number(name: str, leaf: Any, dtype: Any) -> Any:
    wants_integer = dtype in INTEGERS
    fits = isinstance(leaf, int) if wants_integer else isinstance(leaf, int | float)
    if isinstance(leaf, bool) or not fits:
        raise JsonError(f"JSON Value: {leaf!r} Type: is not of expected type: {dtype.__name__}")
    if wants_integer and not np.iinfo(dtype).min <= leaf <= np.iinfo(dtype).max:
        raise JsonError(f"JSON Value: {leaf!r} of {name} is out of range")
    return leaf


def _plain(name: str, value: np.ndarray) -> list[Any]:
    if value.ndim == 0:
        raise JsonError(f"Tensor name: {name} has no batch dimension")
    if value.dtype != object:
        return list(value.tolist())
    if name.endswith("_bytes"):
        return [{"b64": base64.b64encode(item).decode()} for item in value.ravel()]
    texts = np.array([text.decode() for text in value.ravel()], object)
    return list(texts.reshape(value.shape).tolist())
