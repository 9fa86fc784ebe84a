"""Tests of the one room for private names: all are there, and nothing else touches one."""

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit.backend.private import PRIVATE_NAMES

tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("most private names are of Keras on TensorFlow", allow_module_level=True)

PACKAGE = Path(keras_vit.__file__).parent
ROOM = "backend/private.py"
NAMES = {name for names in PRIVATE_NAMES.values() for name in names}

# Private by their look alone: of a named tuple, and of the standard library.
PUBLIC = {"_replace", "_ArgumentGroup", "_exit"}
# What runs in a process of its own, where neither Keras nor the room may be imported.
APART: dict[str, set[str]] = {"exporting/clean/runners.py": {"_get_ops_details"}}


def fitted() -> keras.Model:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.compile("adam", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    return model


def state_of_a_call() -> dict[str, Any]:
    """Returns what Keras keeps, under the names of the table, while a layer is called."""
    values = {}

    class Probe(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            state = importlib.import_module("keras.src.backend.common.global_state")
            values.update({name: state.get_global_attribute(name) for name in NAMES})
            return x

    Probe()(np.ones(1))
    return {name: value for name, value in values.items() if value is not None}


EXAMPLES: dict[str, Callable[[], Any]] = {
    "keras.Model": fitted,
    "CompileLoss": lambda: getattr(fitted(), "_compile_loss", None),
    "a tensor": lambda: keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[0, 1]])),
    "keras.layers.Dense": lambda: fitted().layers[-1],
    "keras.optimizers.Adam": lambda: fitted().optimizer,
    "the state of a call": lambda: type("State", (), state_of_a_call()),
    "the context of a call": lambda: state_of_a_call().get("current_call_ctx"),
    "a TFLite interpreter": lambda: (
        importlib.import_module("ai_edge_litert.interpreter").Interpreter
    ),
}


def missing(table: dict[str, dict[str, str]]) -> list[str]:
    """Returns the names that the installed Keras and TensorFlow lack, each with its reason."""
    absent = []
    for owner, names in table.items():
        if owner == "a TFLite interpreter" and importlib.util.find_spec("ai_edge_litert") is None:
            continue  # an optional dependency
        example = EXAMPLES[owner]() if owner in EXAMPLES else importlib.import_module(owner)
        absent += [f"{n} of {owner}: {why}" for n, why in names.items() if not hasattr(example, n)]
    return absent


def touched(text: str) -> set[str]:
    """Returns the names that a module reaches for and that look private, and private modules."""
    attributes = re.findall(r"[\w)\]]\.(_[a-z]\w*)", text)
    modules = re.findall(r"\b(?:keras\.src|tensorflow\.python|object\.__\w+attr__)[\w.]*", text)
    imported = re.findall(r"from (?!keras_vit|\.)\S+ import .*\b(_[a-z]\w*)", text)
    known = {name for name in NAMES if re.search(rf"""["']{name}["']|  def {name}\b""", text)}
    return {*attributes, *modules, *imported, *(name for name in known if name.startswith("_"))}


def defined(text: str) -> set[str]:
    """Returns the names that a module defines, in itself or in its classes."""
    names = re.findall(
        r"(?:def|class) (_\w+)|(?:self|cls)\.(_\w+)(?=[^=\n]*=)|^\s*(_\w+)\b", text, re.M
    )
    return {name for each in names for name in each if name}


def foreign(texts: dict[str, str]) -> dict[str, set[str]]:
    """Returns the private names of others that each module touches, for those that do."""
    own = set.union(*map(defined, texts.values())) - NAMES
    names = {
        path: touched(text) - own - PUBLIC - APART.get(path, set()) for path, text in texts.items()
    }
    return {path: each for path, each in names.items() if each}


def test_installed_keras_and_tensorflow_have_every_private_name() -> None:
    assert missing(PRIVATE_NAMES) == []
    for owner in ("keras.Model", "the context of a call", "keras.src.models.functional"):
        assert missing({owner: {"_gone": "why"}}) == [f"_gone of {owner}: why"]


def test_no_other_module_touches_a_private_name() -> None:
    """All are those of the table of the room; each row of it is used there."""
    texts = {
        path.relative_to(PACKAGE).as_posix(): path.read_text()
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    private_names = foreign(texts)
    in_room = {name for name in private_names.pop(ROOM) if name.startswith("_")}
    assert not private_names, f"these belong into {ROOM}: {private_names}"
    assert in_room <= NAMES
    rows = {name for name in NAMES if name.startswith("_")} - set().union(*APART.values())
    assert rows <= in_room
    lines = (
        *("model._flatten_layers()", "self._loss_tracker", "self._initial_epoch = None"),
        *("x._never_heard_of = 1", "from tensorflow.python.eager import record"),
        *("getattr(x, '_keras_mask', None)", "object.__setattr__(optimizer, 'apply', apply)"),
        *("import keras.src.layers", "from keras.src.models import functional"),
        *("from keras.layers import _hidden", "keras.src.backend.common"),
        *("module = 'keras.src.export'", "  def _make_function(self): ..."),
    )
    assert not [line for line in lines if not foreign({"a.py": line})]
    own = "def _own(): ...\nclass A:\n def f(self): self._mine = 1\n_own()\na._mine\ne._replace()"
    assert not foreign({"a.py": own})
