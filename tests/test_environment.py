"""Tests of keras_vit.environment: what is set before TensorFlow is imported, by processor."""

import ast
import os
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from keras_vit import environment

pytest.importorskip("tensorflow")

AVX2 = {"avx2", "fma"}
AVX512F = {*AVX2, "avx512f"}
AVX512 = {*AVX512F, "avx512bw", "avx512dq", "avx512vl"}
# Features, the value that holds oneDNN below them, and what TensorFlow is told.
PROCESSORS: list[tuple[set[str], str | None, str]] = [
    (AVX2, None, "1"),
    (AVX2, "AVX2", "1"),
    (AVX512F, None, "0"),
    (AVX512, None, "1"),
    (AVX512, "AVX2", "0"),
    (AVX512, "avx2_vnni_2", "0"),
    (AVX512, "AVX512_CORE", "1"),
    (AVX512, "AVX512_CORE_AMX", "1"),
]
# Both imports, on a processor with these features alone, and what was warned of oneDNN.
IMPORTS = """
import io, pathlib, warnings
real = pathlib.Path.open
def masked(path, *arguments, **options):
    if str(path) == "/proc/cpuinfo":
        return io.StringIO("flags\\t\\t: {features}\\n")
    return real(path, *arguments, **options)
pathlib.Path.open = masked
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import {first}
    import {second}
print([str(each.message) for each in caught if "oneDNN" in str(each.message)])
"""
PREDICTS = """
import numpy as np
config = keras_vit.ViTConfig(
    input_shape=(16, 16, 3), patch_size=8, hidden_dim=16, mlp_dim=32, num_heads=2, num_layers=1,
    classes=5,
)
models = [keras_vit.VisionTransformer(config, dtype=dtype) for dtype in ("float32", "bfloat16")]
draw = np.random.default_rng(0)
values = [draw.standard_normal(variable.shape) * 0.3 for variable in models[0].weights]
for model in models:
    model.set_weights(values)
    print(model.predict(np.ones((2, 16, 16, 3), "float32"), verbose=0).tolist())
"""


def said(code: str, **variables: str) -> list[Any]:
    """What a process with these variables prints, line by line."""
    kept = {name: os.environ[name] for name in os.environ if "ONEDNN" not in name}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "KERAS_BACKEND": "tensorflow", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return [ast.literal_eval(line) for line in process.stdout.splitlines()]


def test_onednn_is_for_processors_that_it_is_safe_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set before TensorFlow is imported, and never over what the user has set."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for features, held, expected in PROCESSORS:
        with monkeypatch.context() as patch:
            patch.setattr(environment, "_processor_features", lambda found=features: found)
            if held is not None:
                patch.setenv("ONEDNN_MAX_CPU_ISA", held)
            for mine in (None, "0", "1"):
                if mine is not None:
                    patch.setenv("TF_ENABLE_ONEDNN_OPTS", mine)
                environment.enable_onednn()
                got = os.environ.pop("TF_ENABLE_ONEDNN_OPTS")
                assert got == (mine or expected), (features, held)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN is for x86")
def test_after_tensorflow_one_warning_says_what_to_do() -> None:
    """On a processor that TensorFlow by itself uses without oneDNN."""
    code = IMPORTS.format(features=" ".join(AVX2), first="tensorflow", second="keras_vit")
    ((message,),) = said(code)
    assert "set TF_ENABLE_ONEDNN_OPTS=1, or import keras_vit first" in message


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN is for x86")
def test_before_tensorflow_nothing_is_said_and_bfloat16_is_safe() -> None:
    """TensorFlow alone would end the process at the first product: oneDNN is held back here."""
    code = IMPORTS.format(features=" ".join(AVX512F), first="keras_vit", second="tensorflow")
    messages, single, half = said(code + PREDICTS, ONEDNN_MAX_CPU_ISA="AVX2")
    assert not messages
    assert np.std(single) > 0.1
    np.testing.assert_allclose(half, single, rtol=0, atol=0.05)
