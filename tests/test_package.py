"""Tests of the package as a whole: its names, its imports, its documentation."""

import ast
import doctest
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keras_vit

ROOT = Path(__file__).parents[1]

PUBLIC = [
    "VARIANTS",
    *("R26ViTB32", "R26ViTS32", "R50ViTB16", "R50ViTL32", "RViTTi16"),
    *("ViTB16", "ViTB32", "ViTB8", "ViTG14", "ViTH14", "ViTL16", "ViTL32", "ViTS16", "ViTS32"),
    *("ViTSo400m14", "ViTTi16", "ViTg14"),
    *("ViTConfig", "VisionTransformer", "decode_predictions", "export", "layers"),
    *(
        "FullySharded",
        "freeze",
        "layout_map",
        "load",
        "load_adapter",
        "lora",
        "merge_lora",
        "save_adapter",
    ),
    *("ExactModel", "ExactTrainer", "losses", "optimizers"),
    *("parameter_count", "preprocess_input", "resize", "variant", "weights"),
]

# What `import keras_vit` must leave for later: together these take seconds.
LATE = (
    "matplotlib",
    "sklearn",
    "scipy",
    "tensorflow_datasets",
    "keras_cv",
    "huggingface_hub",
    "urllib.request",
)

# They train, or build every variant.
SLOW_EXAMPLES = {
    "keras_vit.applications",
    "keras_vit.exporting.artefacts",
    "keras_vit.training.masked_patches",
    "keras_vit.training.planning",
    "keras_vit.training.sweep",
    "keras_vit.training.train",
}
# They need JAX: tests/test_backend_jax.py runs their examples.
ON_JAX = ("keras_vit.backend.jax", "keras_vit.backend.jax_kernels", "keras_vit.training.jax_engine")
FILES = sorted(Path(keras_vit.__path__[0]).rglob("*.py"))
MODULES = [
    module.name
    for module in pkgutil.walk_packages(keras_vit.__path__, "keras_vit.")
    if module.name not in ("keras_vit.__main__", *ON_JAX)
]


def test_public_names() -> None:
    """Names come and go by decision: this list and the package's are the same."""
    assert sorted(keras_vit.__all__) == sorted(PUBLIC)
    assert all(hasattr(keras_vit, name) for name in PUBLIC)


def test_what_is_public_can_be_found() -> None:
    """`dir` shows the public names and nothing else."""
    uses = {"data", "evaluation", "explain", "training"}
    assert set(dir(keras_vit)) == {*PUBLIC, *uses}


@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "list", "list --variant B/16", "list --family pe", "train --help"],
)
def test_the_command_line_answers_without_a_framework(arguments: str) -> None:
    """Help, version and catalogue import neither Keras nor NumPy: they answer at once."""
    command = [sys.executable, "-X", "importtime", "-m", "keras_vit", *arguments.split()]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "keras_vit.cli.main" in imported
    assert not imported & {"keras", "tensorflow", "numpy", "jax", "torch", "h5py"}


def test_the_house_is_kept() -> None:
    """A file has at most 500 lines, a function 40 beside its docstring; private names stay in."""
    broken = []
    for file in FILES:
        source = file.read_text(encoding="utf-8")
        if source.count("\n") > 500:
            broken.append(f"{file}: {source.count(chr(10))} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                has_text = ast.get_docstring(node) is not None and len(node.body) > 1
                start = node.body[1].lineno if has_text else node.lineno
                if (node.end_lineno or start) - start >= 40:
                    broken.append(f"{file}: {node.name}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_vit"):
                names = [each.name for each in node.names]
                private = [one for one in names if one.startswith("_") and not one.endswith("__")]
                broken += [f"{file}: imports {one}" for one in private]
    assert not broken


def test_version_is_the_distributions() -> None:
    """The installed package and the code agree on the version."""
    assert importlib.metadata.version("keras-vision-transformer") == keras_vit.__version__


def test_import_brings_nothing_heavy() -> None:
    """Beyond Keras itself the package loads no slow library; uses of a model come when named."""
    code = f"""
import sys
import keras
with_keras = [name for name in {LATE!r} if name in sys.modules]
import keras_vit
print([name for name in {LATE!r} if name in sys.modules] == with_keras)
print("keras_vit.training" in sys.modules, keras_vit.training.RECIPES["digits"].epochs > 0)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "True\nFalse True\n"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) if name in SLOW_EXAMPLES else name
        for name in ("keras_vit", *MODULES)
    ],
)
def test_docstring_examples_run(name: str) -> None:
    """Every example in a docstring gives what it says."""
    module = importlib.import_module(name)
    globs = {**vars(importlib.import_module("keras_vit")), **vars(module)}
    globs["keras"] = importlib.import_module("keras")
    failed, _ = doctest.testmod(
        module,
        extraglobs=globs,
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )
    assert failed == 0


def test_a_wrong_example_would_be_seen() -> None:
    """The runner above fails on an example that does not hold."""
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 1


def test_public_things_are_documented() -> None:
    """Every public function and class has a docstring with an example."""
    public = {name: getattr(keras_vit, name) for name in PUBLIC}
    documents = {name: each.__doc__ or "" for name, each in public.items() if callable(each)}
    assert not [name for name, text in documents.items() if ">>>" not in text]


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of the README runs from top to bottom, as one script."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_documents_link_to_what_exists() -> None:
    """Relative links in the documents lead to files of the repository."""
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")]:
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
