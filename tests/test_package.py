"""Tests of the package as a whole: names, imports, documentation, dependencies."""

import ast
import dataclasses
import doctest
import functools
import importlib
import importlib.metadata
import pkgutil
import re
from pathlib import Path

import image_files
import processes
import published
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import keras_vit
from keras_vit import data, evaluation, explain, training
from keras_vit.cli.main import make_parser
from keras_vit.weights import resolve

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

PUBLIC = [
    "VARIANTS",
    *("R26ViTB32", "R26ViTS32", "R50ViTB16", "R50ViTL32", "RViTTi16"),
    *("ViTB16", "ViTB32", "ViTB8", "ViTG14", "ViTH14", "ViTL16", "ViTL32", "ViTS16", "ViTS32"),
    *("ViTSo400m14", "ViTTi16", "ViTg14"),
    *("ViTConfig", "VisionTransformer", "decode_predictions", "export", "layers"),
    *("FullySharded", "freeze", "layout_map", "load", "load_adapter", "lora", "merge_lora"),
    "save_adapter",
    *("ExactModel", "ExactTrainer", "losses", "optimizers"),
    *("parameter_count", "preprocess_input", "resize", "variant", "weights"),
]

# What `import keras_vit` must leave for later: together these take seconds.
LATE = (
    *("matplotlib", "sklearn", "scipy", "tensorflow_datasets", "keras_cv", "huggingface_hub"),
    "urllib.request",
)

# They train, or build every variant.
SLOW_EXAMPLES = {
    "keras_vit.applications",
    "keras_vit.exporting.artefacts",
    "keras_vit.training.masked_patches",
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

# A change may lower these, and raise none.
CEILINGS = {
    "files": 104,
    "lines": 31_620,
    "lines of tests": 23_903,
    "flags": 49,
    "public names": 145,
    "files of train": 54,
}

# What lets the whole be used and passed on in products, beside the Apache licence of the package.
# MPL-2.0 binds changes to its own files alone, and none is changed or shipped here.
PERMITTED = re.compile(
    r"\b(apache|mit|bsd|0bsd|isc|psf|python software foundation|mpl-2\.0|mozilla public license 2|"
    r"zlib|cnri-python|cc0)",
    re.IGNORECASE,
)
REFUSED = re.compile(r"\b(a?gpl|lgpl|gnu|sspl|busl|non-?commercial|proprietary)", re.IGNORECASE)
# Packages whose metadata says nothing, with what their repository's LICENSE file is.
SILENT = {"namex": "Apache-2.0"}


def test_public_names() -> None:
    """Names come and go by decision: the list here, the package's and `dir` are the same."""
    assert sorted(keras_vit.__all__) == sorted(PUBLIC)
    assert all(hasattr(keras_vit, name) for name in PUBLIC)
    uses = {"data", "evaluation", "explain", "training"}
    assert set(dir(keras_vit)) == {*PUBLIC, *uses}
    assert not {"contextlib", "keras", "tf"} & set(dir(keras_vit.data))
    assert importlib.metadata.version("keras-vision-transformer") == keras_vit.__version__


@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "list", "list --variant B/16", "list --family pe", "train --help"],
)
def test_the_command_line_answers_without_a_framework(arguments: str) -> None:
    """Help, version and catalogue import neither Keras nor NumPy: they answer at once."""
    answer = processes.python("-X", "importtime", "-m", "keras_vit", *arguments.split())
    assert answer.stdout
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "keras_vit.cli.main" in imported
    assert not imported & {"keras", "tensorflow", "numpy", "jax", "torch", "h5py"}


def test_the_house_is_kept() -> None:
    """A file has at most 700 lines, a function 60 beside its docstring; private names stay in."""
    broken = []
    for file in FILES:
        source = file.read_text(encoding="utf-8")
        if source.count("\n") > 700:
            broken.append(f"{file}: {source.count(chr(10))} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                has_text = ast.get_docstring(node) is not None and len(node.body) > 1
                start = node.body[1].lineno if has_text else node.lineno
                if (node.end_lineno or start) - start >= 60:
                    broken.append(f"{file}: {node.name}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_vit"):
                names = {each.name for each in node.names}
                odd = {one for one in names if one.startswith("_") and not one.endswith("__")}
                if node.module == "keras_vit":  # in the command line it has its modules alone
                    odd = names - {"__version__", *(name.split(".")[1] for name in MODULES)}
                broken += [f"{file}: imports {one}" for one in odd]
    assert not broken


def test_the_house_gets_no_larger() -> None:
    """What needs more code names what goes for it."""

    def lines(files: list[Path]) -> int:
        return sum(file.read_text(encoding="utf-8").count("\n") for file in files)

    (commands,) = (each.choices for each in make_parser()._actions if each.choices)
    options = [each for one in dict(commands).values() for each in one._actions]
    uses = (keras_vit, data, evaluation, explain, training)
    found = {
        "files": len(FILES),
        "lines": lines(FILES),
        "lines of tests": lines(sorted(Path(__file__).parent.rglob("*.py"))),
        "flags": len({name for each in options for name in each.option_strings}),
        "public names": sum(len(module.__all__) for module in uses),
        # A real run is traced by tests/test_walks.py, which holds this row.
        "files of train": int(re.findall(r"command line \| (\d+)", CONTRIBUTING)[0]),
    }
    assert {name: count for name, count in found.items() if count > CEILINGS[name]} == {}


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
    assert processes.python("-c", code).stdout == "True\nFalse True\n"


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
        module, extraglobs=globs, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
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


def test_readme_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python of the README runs, on a photo and a file of the published name and layout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path))
    file = tmp_path / f"{resolve('Ti/16', 'imagenet21k+imagenet2012').name}.npz"
    file.parent.mkdir(parents=True, exist_ok=True)
    published.write(file, dataclasses.replace(keras_vit.VARIANTS["Ti/16"], classes=1000))
    (tmp_path / "photo.jpg").write_bytes(image_files.photo(6))
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert re.search(r"\[\[\('n\d{8}', ", capsys.readouterr().out)


def test_words_are_those_of_the_glossary() -> None:
    """What CONTRIBUTING has a word of the field for is called by it, in names and in prose."""
    written = [*FILES, *ROOT.glob("*/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    others = re.compile(
        r"\baccumulate=|\bin \S+ parts\b|likeliest|thin matri|RotaryTurns|left_out|in spreads|"
        r"nobody (says|states)|fresh (weights|head|classifier)|parts of a (batch|replica)"
    )
    texts = {file.name: file.read_text(encoding="utf-8") for file in written}
    assert {name: others.findall(text) for name, text in texts.items() if others.search(text)} == {}


def test_documents_link_to_what_exists() -> None:
    """Relative links in the documents lead to files of the repository."""
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")]:
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


@functools.cache
def closure() -> dict[str, frozenset[str]]:
    """Returns every package that the package and its extras bring, with the extras asked of it."""
    extras_by_name: dict[str, frozenset[str]] = {}
    waiting = [("keras-vision-transformer", frozenset({"all", "keras-cv"}))]
    while waiting:
        name, extras = waiting.pop()
        if name in extras_by_name and extras <= extras_by_name[name]:
            continue
        extras_by_name[name] = extras_by_name.get(name, frozenset()) | extras
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(
                marker.evaluate({"extra": e}) for e in (*extras_by_name[name], "")
            ):
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return extras_by_name


def test_every_dependency_may_be_used_and_passed_on() -> None:
    """By what each says of its licence: the expression, classifiers or the text."""
    licenses = {}
    for name in closure():
        about = importlib.metadata.metadata(name)
        classifiers = [c for c in about.get_all("Classifier") or () if c.startswith("License ::")]
        said = "".join(about.get_all("License-Expression") or ()) or " ".join(classifiers)
        said = said or "".join(about.get_all("License") or ())
        licenses[name] = said or SILENT.get(name, "")
    doubtful = {
        name: said[:80]
        for name, said in licenses.items()
        if REFUSED.search(said) or not PERMITTED.search(said)
    }
    assert doubtful == {}
    assert len(licenses) > 50


def test_the_tested_versions_are_written_down_and_fit_what_is_asked() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    missing = set(closure()) - set(pins) - {"keras-vision-transformer", "setuptools", "wheel"}
    assert not missing
    for text in importlib.metadata.requires("keras-vision-transformer") or ():
        needed = Requirement(text)
        name = canonicalize_name(needed.name)
        if name in pins:
            assert needed.specifier.contains(pins[name], prereleases=True), text
