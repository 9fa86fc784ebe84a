"""The C++ loader that TensorFlow Serving calls, through the C interface of TensorFlow's library.

It imports nothing of TensorFlow's Python: the library of another version needs its own process.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

STRING, STRING_BYTES = 7, 24  # types.proto; sizeof(TF_TString)
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("float32"),
    3: np.dtype("int32"),
    4: np.dtype("uint8"),
}
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
# What is fed and what is fetched, by the names of the tensors.
Request = tuple[Mapping[str, np.ndarray], Sequence[str]]
POINTERS = ("NewStatus", "NewGraph", "NewSessionOptions", "LoadSessionFromSavedModel",
            "GraphOperationByName", "AllocateTensor", "TensorData")  # fmt: skip


class Pointer(ctypes.c_void_p):
    """A pointer that ctypes hands on as one, and not as a number of 32 bits."""


class Output(ctypes.Structure):
    _fields_ = (("operation", ctypes.c_void_p), ("index", ctypes.c_int))


def run_all(path: Path, requests: Sequence[Request], library: Path) -> tuple[str, list[Any]]:
    """Returns the version of a library, and its answers to requests, of which an error is a text.

    Outputs are numbers. Nothing is freed, as the process ends.
    """
    ctypes.CDLL(str(library / "libtensorflow_framework.so.2"), ctypes.RTLD_GLOBAL)
    tf = ctypes.CDLL(str(library / "libtensorflow_cc.so.2"))
    for name in POINTERS:
        getattr(tf, f"TF_{name}").restype = Pointer
    tf.TF_Version.restype = tf.TF_Message.restype = ctypes.c_char_p
    tf.TF_Dim.restype, tf.TF_TensorByteSize.restype = ctypes.c_int64, ctypes.c_size_t

    def checked(function: Any, *arguments: Any) -> Any:
        status = tf.TF_NewStatus()
        result = function(*arguments, status)
        if tf.TF_GetCode(status):
            raise RuntimeError(f"{tf.TF_GetCode(status)}: {tf.TF_Message(status).decode()}")
        return result

    def output(tensor: str) -> Output:
        name, _, index = tensor.partition(":")
        return Output(tf.TF_GraphOperationByName(graph, name.encode()).value, int(index))

    def to_tensor(array: np.ndarray) -> Pointer:
        is_string = array.dtype == object
        size = array.size * STRING_BYTES if is_string else array.nbytes
        dims = (ctypes.c_int64 * array.ndim)(*array.shape)
        number = STRING if is_string else NUMBERS[array.dtype]
        tensor = tf.TF_AllocateTensor(number, dims, array.ndim, ctypes.c_size_t(size))
        start = tf.TF_TensorData(tensor).value
        if not is_string:
            ctypes.memmove(start, np.ascontiguousarray(array).ctypes.data, size)
        for place, content in enumerate(array if is_string else ()):
            string = Pointer(start + place * STRING_BYTES)
            tf.TF_StringInit(string)
            tf.TF_StringCopy(string, content, ctypes.c_size_t(len(content)))
        return Pointer(tensor.value)

    def to_array(tensor: Pointer) -> np.ndarray:
        shape = [tf.TF_Dim(tensor, axis) for axis in range(tf.TF_NumDims(tensor))]
        content = ctypes.string_at(tf.TF_TensorData(tensor), tf.TF_TensorByteSize(tensor))
        return np.frombuffer(content, DTYPES[tf.TF_TensorType(tensor)]).reshape(shape)

    def run(feeds: Mapping[str, np.ndarray], fetches: Sequence[str]) -> Any:
        sources = (Output * len(feeds))(*map(output, feeds))
        values = (Pointer * len(feeds))(*map(to_tensor, feeds.values()))
        targets = (Output * len(fetches))(*map(output, fetches))
        results = (Pointer * len(fetches))()
        sides = sources, values, len(feeds), targets, results, len(fetches)
        try:
            checked(tf.TF_SessionRun, session, None, *sides, None, 0, None)
        except RuntimeError as error:
            return str(error)
        return list(map(to_array, results))

    graph, options = tf.TF_NewGraph(), tf.TF_NewSessionOptions()
    tags = (ctypes.c_char_p * 1)(b"serve")
    place = str(path).encode()
    load = tf.TF_LoadSessionFromSavedModel
    session = checked(load, options, None, place, tags, 1, graph, None)
    return tf.TF_Version().decode(), [run(*request) for request in requests]
