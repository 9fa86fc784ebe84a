"""What must be set before a framework is imported, and which packages to install where one lacks.

It knows no framework.
"""

import contextlib
import functools
import importlib.util
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

_STDERR = 2
# As absl writes them: I0000 00:00:1795404080.989839   32505 port.cc:153] ...
_REMARK = re.compile(
    rb"[IWE]\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\] |WARNING: All log messages before absl"
)
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
# Units for which TensorFlow switches oneDNN on by itself: tsl/util/onednn_util, 2.21.
_SWITCHES_ON = {"avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile"}


@functools.cache
def is_command() -> bool:
    """Whether this process is `keras-vit` or `python -m keras_vit`.

    Its help answers at once because nothing is imported before a command needs it.
    """
    program = Path(sys.argv[0]).name if sys.argv else ""
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    return program in ("keras-vit", "keras-vit.exe") or module == ["keras_vit"]


def quieten_tensorflow() -> None:
    """Keeps TensorFlow's own remarks from standing between the lines of the command line."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Keeps from the terminal what TensorFlow's C++ part remarks while it is imported in the block.

    It writes to the process's standard error before its log level counts. Whatever else is written
    there follows after the block.
    """
    terminal = os.dup(_STDERR)
    with tempfile.TemporaryFile() as lines:
        os.dup2(lines.fileno(), _STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, _STDERR)
            os.close(terminal)
            lines.seek(0)
            for line in lines:
                if not _REMARK.match(line):
                    os.write(_STDERR, line)


def switch_onednn_on() -> None:
    """Has TensorFlow use oneDNN on every x86 processor; it does so by itself on the newest alone.

    B/16 predicts 1.56 images/s without and 3.4 with it, on two cores with AVX2. The variable is
    read when TensorFlow is imported: where that has been, one line says what to set.
    """
    if platform.machine().lower() not in ("x86_64", "amd64") or _ONEDNN in os.environ:
        return
    if "tensorflow" not in sys.modules:
        if importlib.util.find_spec("tensorflow") is not None:
            os.environ[_ONEDNN] = "1"
    elif not _SWITCHES_ON & _processor_flags():
        warnings.warn(
            "TensorFlow was imported before keras_vit and computes without oneDNN on this "
            f"processor, at about half the speed; set {_ONEDNN}=1, or import keras_vit first.",
            stacklevel=3,
        )


def let_products_end_in_activations() -> None:
    """Has XLA leave matrix products on NVIDIA GPUs to cuBLAS, unless XLA_FLAGS says otherwise.

    cuBLAS adds bias and residual and applies GELU in the product itself; after XLA's own kernels
    each is another pass over the tokens. L/16 in bfloat16 on an H100 (6 blocks, 64 images): 4.2 ms
    instead of 4.8. XLA reads the variable when it first compiles.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _TRITON_PRODUCTS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_TRITON_PRODUCTS}=false".strip()


@contextlib.contextmanager
def installed(needs: str, *packages: str) -> Iterator[None]:
    """Imports within the block, or an ImportError that says what to install.

    Example:
        >>> with installed("Pictures are drawn by nothing", "nothing-of-the-kind"):
        ...     import nothing_of_the_kind
        Traceback (most recent call last):
        ImportError: Pictures are drawn by nothing, which is not installed; run: pip install
        nothing-of-the-kind

    Args:
        needs: what needs which library, ending in the library's name.
        packages: what `pip install` takes.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{needs}, which is not installed; run: pip install {' '.join(packages)}"
        ) from error


def pictures() -> contextlib.AbstractContextManager[None]:
    """Imports of matplotlib within the block, see `installed`."""
    return installed("Pictures are drawn by matplotlib", "matplotlib")


def _processor_flags() -> set[str]:
    """Returns the processor's features as Linux names them; elsewhere none is missed."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return _SWITCHES_ON
    flags = (line.partition(":")[2].split() for line in text.splitlines() if "flags" in line)
    return set(next(flags, []))
