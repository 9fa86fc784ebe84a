"""Loads and runs a SavedModel through the C++ loader that TensorFlow Serving uses.

`tensorflow_model_server` calls `tensorflow::LoadSavedModel` and `Session::Run`. The shared library
of TensorFlow's wheel has both behind its C interface, so no Python part of TensorFlow is needed.
"""

import contextlib
import ctypes
import dataclasses
import importlib.util
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Value = int | bytes


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yields (field number, value) of a message: integers as int, others as bytes.

    Example:
        >>> list(fields(field(1, 300) + field(2, b"name")))
        [(1, 300), (2, b'name')]

    Raises:
        ValueError: the message ends too early or holds an unknown wire type.
    """
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, position = _read_varint(message, position)
            yield number, value
            continue
        if kind == BYTES:
            size, position = _read_varint(message, position)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"A message has a field of unknown wire type {kind}.")
        if position + size > len(message):
            raise ValueError("A message ends in the middle of a field.")
        yield number, message[position : position + size]
        position += size


def submessages(message: bytes, *path: int) -> Iterator[bytes]:
    """Yields the bytes of every field at this path of field numbers.

    Example:
        >>> list(submessages(field(1, field(2, b"a") + field(2, b"b")), 1, 2))
        [b'a', b'b']
    """
    first, *rest = path
    for number, value in fields(message):
        if number == first and isinstance(value, bytes):
            if rest:
                yield from submessages(value, *rest)
            else:
                yield value


def integer(message: bytes, number: int, default: int = 0) -> int:
    """Returns the last integer of a field: that is the one which protocol buffers use."""
    values = [value for key, value in fields(message) if key == number and isinstance(value, int)]
    return values[-1] if values else default


def mapping(message: bytes, number: int) -> dict[str, bytes]:
    """Reads a map<string, message> field."""
    entries = {}
    for entry in submessages(message, number):
        key = b"".join(submessages(entry, 1)).decode()
        entries[key] = b"".join(submessages(entry, 2))
    return entries


def varints(packed: bytes) -> list[int]:
    """Reads the integers of a packed field.

    Example:
        >>> varints(bytes([1, 172, 2]))
        [1, 300]
    """
    numbers, position = [], 0
    while position < len(packed):
        number, position = _read_varint(packed, position)
        numbers.append(number)
    return numbers


def signed(number: int) -> int:
    """Converts a varint to the signed 64-bit integer of an int32 or int64 field."""
    return number - (1 << 64) if number >= 1 << 63 else number


def field(number: int, value: Value) -> bytes:
    """Writes one field: an integer, or the bytes of a string or message."""
    if isinstance(value, int):
        return _encode_varint(number << 3 | VARINT) + _encode_varint(value)
    return _encode_varint(number << 3 | BYTES) + _encode_varint(len(value)) + value


def records(content: bytes) -> Iterator[bytes]:
    """Yields the records of a TFRecord file, without a test of their checksums.

    Raises:
        ValueError: the file ends in the middle of a record.
    """
    position = 0
    while position < len(content):
        # The size in 8 bytes, its checksum in 4, the record, its checksum in 4.
        start = position + 12
        size = int.from_bytes(content[position : position + 8], "little")
        if start + size > len(content):
            raise ValueError("A TFRecord file ends in the middle of a record.")
        yield content[start : start + size]
        position = start + size + 4


# tensorflow/core/framework/types.proto
STRING = 7
DTYPES = {1: np.float32, 2: np.float64, 3: np.int32, 4: np.uint8, 9: np.int64, 10: np.bool_}
NUMBERS = {np.dtype(dtype): number for number, dtype in DTYPES.items()}
_STRING_BYTES = 24  # sizeof(TF_TString), tensorflow/c/tf_tstring.h

# absl's canonical codes, tensorflow/c/tf_status.h
CODES = {3: "INVALID_ARGUMENT", 5: "NOT_FOUND", 8: "RESOURCE_EXHAUSTED", 9: "FAILED_PRECONDITION",
         14: "UNAVAILABLE"}  # fmt: skip


class ServingError(Exception):
    """An error of the loader or of a run of the model.

    Attributes:
        code: name of the status code, such as "INVALID_ARGUMENT".
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a signature: its name in the graph, dtype number, and shape, -1 for any size."""

    name: str
    dtype: int
    shape: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Signature:
    """The inputs and outputs of one signature, by their names."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class _Output(ctypes.Structure):
    _fields_ = (("operation", ctypes.c_void_p), ("index", ctypes.c_int))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("deallocator", ctypes.c_void_p),
    )


class SavedModel:
    """A SavedModel in a session of the C++ runtime, through TensorFlow's public C interface.

    Threads may run it at the same time. Its memory is freed with the last reference to it.

    Args:
        path: the version directory with saved_model.pb.
        library: folder of libtensorflow_cc; None for that of the installed TensorFlow.

    Raises:
        FileNotFoundError: there is no TensorFlow library.
        ServingError: the model cannot be loaded.
    """

    def __init__(self, path: str | Path, *, library: Path | None = None) -> None:
        self._lib = _load_library(library or installed_library())
        self._graph = self._lib.TF_NewGraph()
        weakref.finalize(self, self._lib.TF_DeleteGraph, self._graph).atexit = False
        buffer, settings = self._lib.TF_NewBuffer(), self._lib.TF_NewSessionOptions()
        tags = (ctypes.c_char_p * 1)(b"serve")
        load = self._lib.TF_LoadSessionFromSavedModel
        with self._checked() as status:
            self._session = load(
                settings, None, str(path).encode(), tags, 1, self._graph, buffer, status
            )
        self._lib.TF_DeleteSessionOptions(settings)
        # Finalizers run last to first: the session goes before its graph.
        weakref.finalize(self, _close, self._lib, self._session).atexit = False
        content = ctypes.cast(buffer, ctypes.POINTER(_Buffer)).contents
        self.signatures = _signatures(ctypes.string_at(content.data, content.length))
        self._lib.TF_DeleteBuffer(buffer)

    @property
    def version(self) -> str:
        """Version of the TensorFlow library."""
        return str(self._lib.TF_Version().decode())

    def run(
        self, signature: str, inputs: Mapping[str, np.ndarray[Any, Any]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Runs a signature. Strings are object arrays of bytes.

        Raises:
            ServingError: the runtime reports an error.
        """
        tensors = self.signatures[signature]
        feeds = [tensors.inputs[name] for name in inputs]
        fetches = list(tensors.outputs.values())
        values = (ctypes.c_void_p * len(feeds))(*map(self._tensor, inputs.values()))
        results = (ctypes.c_void_p * len(fetches))()
        sources = (_Output * len(feeds))(*map(self._output, feeds))
        targets = (_Output * len(fetches))(*map(self._output, fetches))
        takes, gives = (sources, values, len(feeds)), (targets, results, len(fetches))
        try:
            with self._checked() as status:
                self._lib.TF_SessionRun(self._session, None, *takes, *gives, None, 0, None, status)
        finally:
            for value in values:
                self._lib.TF_DeleteTensor(value)
        arrays = [self._array(int(result or 0)) for result in results]
        for result in results:
            self._lib.TF_DeleteTensor(result)
        return dict(zip(tensors.outputs, arrays, strict=True))

    @contextlib.contextmanager
    def _checked(self) -> Iterator[Any]:
        """Yields a status of its own for one call, and raises the error that is in it."""
        status = self._lib.TF_NewStatus()
        try:
            yield status
            code = self._lib.TF_GetCode(status)
            if code:
                message = self._lib.TF_Message(status).decode(errors="replace")
                raise ServingError(CODES.get(code, f"CODE_{code}"), message)
        finally:
            self._lib.TF_DeleteStatus(status)

    def _output(self, tensor: Tensor) -> _Output:
        name, _, index = tensor.name.partition(":")
        operation = self._lib.TF_GraphOperationByName(self._graph, name.encode())
        return _Output(operation, int(index or 0))

    def _tensor(self, value: Any) -> int:
        array = np.asarray(value)
        dims = (ctypes.c_int64 * array.ndim)(*array.shape)
        if array.dtype == object:
            return self._string_tensor(array, dims)
        array = np.ascontiguousarray(array)
        number = NUMBERS[array.dtype]
        tensor = self._lib.TF_AllocateTensor(number, dims, array.ndim, array.nbytes)
        ctypes.memmove(self._lib.TF_TensorData(tensor), array.ctypes.data, array.nbytes)
        return int(tensor)

    def _string_tensor(self, array: np.ndarray[Any, Any], dims: Any) -> int:
        tensor = self._lib.TF_AllocateTensor(STRING, dims, array.ndim, array.size * _STRING_BYTES)
        start = self._lib.TF_TensorData(tensor)
        for place, content in enumerate(array.ravel()):
            address = start + place * _STRING_BYTES
            self._lib.TF_StringInit(address)
            self._lib.TF_StringCopy(address, content, len(content))
        return int(tensor)

    def _array(self, tensor: int) -> np.ndarray[Any, Any]:
        rank = self._lib.TF_NumDims(tensor)
        shape = tuple(self._lib.TF_Dim(tensor, axis) for axis in range(rank))
        start, number = self._lib.TF_TensorData(tensor), self._lib.TF_TensorType(tensor)
        if number != STRING:
            content = ctypes.string_at(start, self._lib.TF_TensorByteSize(tensor))
            return np.frombuffer(content, DTYPES[number]).reshape(shape)
        strings = np.empty(shape, object)
        for place in range(strings.size):
            address = start + place * _STRING_BYTES
            size = self._lib.TF_StringGetSize(address)
            strings.flat[place] = ctypes.string_at(self._lib.TF_StringGetDataPointer(address), size)
        return strings


def _close(library: Any, session: int) -> None:
    status = library.TF_NewStatus()
    library.TF_DeleteSession(session, status)
    library.TF_DeleteStatus(status)


def installed_library() -> Path:
    """Returns the folder of the installed TensorFlow's shared library, without importing it.

    Raises:
        FileNotFoundError: TensorFlow is not installed.
    """
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("TensorFlow is not installed; its C++ loader comes with it.")
    return Path(spec.submodule_search_locations[0])


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while position < len(message):
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
    raise ValueError("A message ends in the middle of a number.")


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _load_library(folder: Path) -> Any:
    names = ("libtensorflow_{}.so.2", "libtensorflow_{}.2.dylib")
    for name in names:
        if (folder / name.format("cc")).is_file():
            ctypes.CDLL(str(folder / name.format("framework")), ctypes.RTLD_GLOBAL)
            return _declare(ctypes.CDLL(str(folder / name.format("cc"))))
    raise FileNotFoundError(
        f"There is no {names[0].format('cc')} in {str(folder)!r}; TensorFlow's wheels for Linux "
        "and macOS contain it."
    )


def _declare(library: Any) -> Any:
    """Declares the types of the C functions: by default ctypes cuts pointers to 32 bits."""
    pointer, number = ctypes.c_void_p, ctypes.c_int
    returns = {
        pointer: "TF_NewStatus TF_NewGraph TF_NewBuffer TF_NewSessionOptions TF_AllocateTensor "
        "TF_LoadSessionFromSavedModel TF_GraphOperationByName TF_TensorData "
        "TF_StringGetDataPointer",
        ctypes.c_char_p: "TF_Message TF_Version",
        ctypes.c_int64: "TF_Dim",
        ctypes.c_size_t: "TF_TensorByteSize TF_StringGetSize",
    }
    for kind, names in returns.items():
        for name in names.split():
            getattr(library, name).restype = kind
    texts, outputs, tensors = (ctypes.POINTER(kind) for kind in (ctypes.c_char_p, _Output, pointer))
    takes = {
        "TF_LoadSessionFromSavedModel": (
            *(pointer, pointer, ctypes.c_char_p, texts, number, pointer, pointer, pointer),
        ),
        "TF_SessionRun": (
            *(pointer, pointer, outputs, tensors, number, outputs, tensors, number),
            *(pointer, number, pointer, pointer),
        ),
        "TF_GraphOperationByName": (pointer, ctypes.c_char_p),
        "TF_AllocateTensor": (number, ctypes.POINTER(ctypes.c_int64), number, ctypes.c_size_t),
        "TF_DeleteSession": (pointer, pointer),
        "TF_StringCopy": (pointer, ctypes.c_char_p, ctypes.c_size_t),
        "TF_Dim": (pointer, number),
    }
    one_pointer = (
        "TF_DeleteTensor TF_TensorData TF_TensorType TF_NumDims TF_TensorByteSize TF_GetCode "
        "TF_Message TF_StringInit TF_StringGetSize TF_StringGetDataPointer TF_DeleteBuffer "
        "TF_DeleteStatus TF_DeleteGraph TF_DeleteSessionOptions"
    )
    for name, types in (*takes.items(), *((name, (pointer,)) for name in one_pointer.split())):
        getattr(library, name).argtypes = types
    return library


def _signatures(meta_graph: bytes) -> dict[str, Signature]:
    # MetaGraphDef.signature_def = 5; SignatureDef: inputs = 1, outputs = 2.
    return {
        key: Signature(
            inputs={name: _tensor_info(info) for name, info in mapping(value, 1).items()},
            outputs={name: _tensor_info(info) for name, info in mapping(value, 2).items()},
        )
        for key, value in mapping(meta_graph, 5).items()
        if not key.startswith("__")
    }


def _tensor_info(info: bytes) -> Tensor:
    # TensorInfo: name = 1, dtype = 2, tensor_shape = 3 (dim = 2 (size = 1), unknown_rank = 3).
    shapes = list(submessages(info, 3))
    shape = None
    if shapes and not integer(shapes[-1], 3):
        dims = submessages(shapes[-1], 2)
        shape = tuple(signed(integer(dim, 1)) for dim in dims)
    name = b"".join(submessages(info, 1)).decode()
    return Tensor(name=name, dtype=integer(info, 2), shape=shape)
