"""Runs an artefact of any format: one signature on a batch of inputs, outputs by name."""

import importlib.metadata
import importlib.util
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import loader

SIGNATURE = "serving_default"  # of a TFLite file
DESCRIPTION = "description.json"  # in the archive behind a TFLite file

Arrays = Mapping[str, np.ndarray]


class Runner(Protocol):
    """An artefact that is loaded.

    Attributes:
        versions: of what runs it.
    """

    versions: dict[str, str]

    def run(self, signature: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """Returns the outputs of a signature by name; "" where the format has but one."""


def family(name: str) -> str:
    """Returns what a format runs in, which its name begins with.

    Example:
        >>> family("tflite-int8")
        'tflite'
    """
    return name.partition("-")[0]


def require(name: str) -> None:
    """Raises an ImportError that says what to install, if a format's runtime is missing."""
    runtimes = {
        "onnx": ("ONNX Runtime", "onnxruntime", "onnxruntime"),
        "tflite": ("LiteRT", "ai_edge_litert", "ai-edge-litert"),
    }
    runtime, module, package = runtimes.get(family(name), ("", "numpy", ""))
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"{name} runs in {runtime}, which is not installed; run: pip install {package}"
        )


def open_runner(name: str, path: Path, *, library: Path | None = None) -> Runner:
    """Loads an artefact.

    Args:
        name: its format.
        path: the file, or the folder of a SavedModel.
        library: folder of another libtensorflow_cc for a SavedModel; None for the installed one.

    Raises:
        ImportError: the format's runtime is not installed.
        ValueError: no runtime is known for the format.
    """
    kind = family(name)
    if kind == "savedmodel":
        return SavedModelRunner(path, library=library)
    if kind == "onnx":
        return OnnxRunner(path)
    if kind == "tflite":
        return TfliteRunner(path)
    raise ValueError(f"There is no runtime for the format {name!r}.")


class SavedModelRunner:
    """A SavedModel in the C++ loader of TensorFlow Serving.

    Attributes:
        model: the loaded model.
    """

    def __init__(self, path: Path, *, library: Path | None = None) -> None:
        self.model = loader.SavedModel(path, library=library)
        self.versions = {"loader": f"TensorFlow C++ {self.model.version}"}

    def run(self, signature: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """As `Runner.run`."""
        return self.model.run(signature, inputs)


class OnnxRunner:
    """An ONNX file, or its content, in ONNX Runtime, on the processor."""

    def __init__(self, file: Path | bytes) -> None:
        import onnxruntime

        providers = ["CPUExecutionProvider"]
        model = file if isinstance(file, bytes) else str(file)
        self._session = onnxruntime.InferenceSession(model, providers=providers)
        self._names = [output.name for output in self._session.get_outputs()]
        self.versions = {"onnxruntime": str(onnxruntime.__version__)}

    @property
    def properties(self) -> dict[str, str]:
        """The file's `metadata_props`."""
        return dict(self._session.get_modelmeta().custom_metadata_map)

    def run(self, signature: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """As `Runner.run`."""
        return dict(zip(self._names, self._session.run(self._names, dict(inputs)), strict=True))


class TfliteRunner:
    """A TFLite file in LiteRT, with its own kernels; batches of other sizes are filled up."""

    def __init__(self, file: Path) -> None:
        from ai_edge_litert import interpreter as litert

        self._interpreter = litert.Interpreter(str(file))
        self._run = self._interpreter.get_signature_runner(SIGNATURE)
        self._batch = int(self._run.get_input_details()["images"]["shape"][0])
        self.versions = {"ai-edge-litert": importlib.metadata.version("ai-edge-litert")}

    def run(self, signature: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """As `Runner.run`."""
        images = inputs["images"]
        padded = np.concatenate([images, *[images[-1:]] * (-len(images) % self._batch)])
        parts = [
            self._run(images=padded[start : start + self._batch])
            for start in range(0, len(padded), self._batch)
        ]
        return {
            name: np.concatenate([part[name] for part in parts])[: len(images)] for name in parts[0]
        }


def read_archive(file: Path) -> dict[str, Any] | None:
    """Reads the description in the archive behind a TFLite file; None if there is none.

    Raises:
        ValueError: it is damaged.
    """
    if not zipfile.is_zipfile(file):
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            fields = json.loads(archive.read(DESCRIPTION))
    except KeyError:
        return None
    except zipfile.BadZipFile as error:
        raise ValueError(f"the archive behind it is damaged ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("its description is not one JSON object")
    return fields
