"""Settings to make before a framework is imported, and how to install a missing package.

It imports no framework.
"""

import contextlib
import functools
import gc
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
# As absl writes them: I0000 00:00:1795404080.989839   32505 port.cc:153] ...; and as LiteRT does.
_LOG_LINE = re.compile(
    rb"[IWE]\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\] |WARNING: All log messages before absl"
    rb"|INFO: Created TensorFlow Lite"
)
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_TRITON_GEMM = "xla_gpu_enable_triton_gemm"
# Processor features with which TensorFlow enables oneDNN by itself: tsl/util/onednn_util, 2.21.
_ONEDNN_FEATURES = {"avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile"}
# What oneDNN asks of a processor before it multiplies bfloat16, with units for it or without; and
# the values of its variable that hold it below them.
_AVX512_CORE = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_MAX_ISA = "ONEDNN_MAX_CPU_ISA"
_BELOW_AVX512 = {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"}
# What lets a processor multiply bfloat16, by its name in /proc/cpuinfo; the first, whole tiles.
BFLOAT16_TILES = "amx_bf16"
_BFLOAT16_UNITS = (BFLOAT16_TILES, "avx512_bf16", "bf16")


@functools.cache
def is_command() -> bool:
    """Whether this process is `keras-vit` or `python -m keras_vit`, which import on demand."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    return program in ("keras-vit", "keras-vit.exe") or module == ["keras_vit"]


def cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def silence_tensorflow() -> None:
    """Sets TensorFlow's log level so that only the command line's own lines are printed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@contextlib.contextmanager
def without_log_lines() -> Iterator[None]:
    """Removes from standard error the log lines that C++ parts of TensorFlow and LiteRT write.

    TensorFlow writes some on import, before it reads its log level. All other lines are written
    after the block.
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
                if not _LOG_LINE.match(line):
                    os.write(_STDERR, line)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Imports without looking for garbage, of which modules leave none.

    Python would look at each of the million objects that Keras and TensorFlow make many times:
    that is a fifth of the time of the import (3.9 instead of 5.0 s of a processor).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def enable_onednn() -> None:
    """Makes TensorFlow use oneDNN on every x86 processor that it is safe on.

    On two cores with AVX2, B/16 predicts 1.56 images/s without oneDNN and 3.4 with it. TensorFlow
    reads the variable when it is imported; if it was imported before, this warns.
    """
    if platform.machine().lower() not in ("x86_64", "amd64") or _ONEDNN in os.environ:
        return
    features = _processor_features()
    # TensorFlow 2.21 leaves bfloat16 to oneDNN wherever it finds AVX512F, and the first product
    # ends the process if oneDNN does not get along with that: on Xeon Phi, or if held below it.
    is_held = os.environ.get(_MAX_ISA, "").lower() in _BELOW_AVX512
    is_unsafe = "avx512f" in features and (is_held or not features >= _AVX512_CORE)
    if "tensorflow" not in sys.modules:
        if importlib.util.find_spec("tensorflow") is not None:
            os.environ[_ONEDNN] = "0" if is_unsafe else "1"
    elif not is_unsafe and not _ONEDNN_FEATURES & features:
        warnings.warn(
            "TensorFlow was imported before keras_vit and computes without oneDNN on this "
            f"processor, at about half the speed; set {_ONEDNN}=1, or import keras_vit first.",
            stacklevel=3,
        )


def prefer_cublas() -> None:
    """Makes XLA leave matrix products on NVIDIA GPUs to cuBLAS, unless XLA_FLAGS has the option.

    cuBLAS fuses bias, residual and GELU into the product; after XLA's own kernels each is another
    pass over the tokens. L/16 in bfloat16 on an H100 (6 blocks, 64 images) takes 4.2 ms instead of
    4.8. XLA reads the variable when it first compiles.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _TRITON_GEMM not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_TRITON_GEMM}=false".strip()


@contextlib.contextmanager
def installed(needs: str, *packages: str) -> Iterator[None]:
    """Turns an ImportError of the block into one that says what to install.

    Args:
        needs: start of the message, which ends in the library's name.
        packages: names for `pip install`.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{needs}, which is not installed; run: pip install {' '.join(packages)}"
        ) from error


def pictures() -> contextlib.AbstractContextManager[None]:
    """Turns an ImportError of matplotlib in the block into one that says what to install."""
    return installed("Pictures are drawn by matplotlib", "matplotlib")


def has_bfloat16_units(*, among: tuple[str, ...] = _BFLOAT16_UNITS) -> bool:
    """Whether this machine's processor has units for bfloat16, as far as Linux tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return not set(among).isdisjoint(text.split())


def _processor_features() -> set[str]:
    """Returns the processor's features as Linux names them; elsewhere it assumes oneDNN's."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
            return set(next(flags, []))
    except OSError:
        return _ONEDNN_FEATURES
