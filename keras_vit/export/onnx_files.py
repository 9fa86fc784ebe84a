"""Writes ONNX files: directly for published networks, through tf2onnx for all others."""

from pathlib import Path

from keras_vit.export import onnx_conversion, onnx_graph
from keras_vit.export.rebuild import Exportable

# Protocol buffers end at 2 GiB; the weights of a larger model go to a file of their own.
LARGEST = 1_900_000_000


def write_onnx(exportable: Exportable, file: Path, *, largest: int = LARGEST) -> None:
    """Writes an ONNX file, and `<name>.data` beside it if the weights exceed `largest` bytes.

    Args:
        exportable: the rebuilt model.
        file: where to.
        largest: bytes of weights that stay within the file.
    """
    import onnx

    activation = exportable.activation
    is_known = activation is None or activation.__name__ in onnx_graph.ACTIVATIONS
    if exportable.written_config is not None and is_known:
        model = onnx_graph.make_onnx(exportable)
    else:
        model = onnx_conversion.convert_to_onnx(exportable)
    onnx.save_model(
        model,
        str(file),
        save_as_external_data=exportable.parameter_bytes > largest,
        location=f"{file.name}.data",
    )
