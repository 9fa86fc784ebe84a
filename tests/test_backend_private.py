"""Tests of the one room for private names: all are there, and nothing else touches one."""

import ast
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit.backend.private import PRIVATE_NAMES, Private

tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("most private names are of Keras on TensorFlow", allow_module_level=True)

PACKAGE = Path(keras_vit.__file__).parent
ROOM = PACKAGE / "backend" / "private.py"
NAMES = {private.name for private in PRIVATE_NAMES}

# Private by their look alone: of a named tuple, and of the standard library.
PUBLIC = {"_replace", "_ArgumentGroup", "_exit"}
# What runs in a process of its own, where neither Keras nor the room may be imported.
APART = {
    "exporting/clean/checker.py": {"_get_ops_details"},
    "exporting/clean/loader.py": {"_ZN10tensorflow21DisableXlaCompilationEv"},
}
PRIVATE_MODULES = ("keras.src", "tensorflow.python")
WHY = "to see it missed"
BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "object.__setattr__", "object.__delattr__")


def fitted() -> keras.Model:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.compile("adam", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    return model


def state_of_a_call() -> dict[str, Any]:
    """Returns what Keras keeps, under the names of the table, while a layer is called."""
    state = module("keras.src.backend.common.global_state")
    read = getattr(state, "get_global_attribute", lambda name: None)
    values = {}

    class Probe(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            values.update({name: read(name) for name in NAMES})
            return x

    Probe()(np.ones(1))
    return {name: value for name, value in values.items() if value is not None}


def module(name: str) -> Any:
    """Returns a module, None if there is none of this name any more."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def example_of(owner: str) -> Any:
    """Returns an object that is what the table calls by this name, None if there is none."""
    if owner.startswith(PRIVATE_MODULES):
        return module(owner)
    examples: dict[str, Callable[[], Any]] = {
        "keras.Model": fitted,
        "CompileLoss": lambda: getattr(fitted(), "_compile_loss", None),
        "a tensor": lambda: keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[0, 1]])),
        "keras.layers.Dense": lambda: fitted().layers[-1],
        "keras.optimizers.Adam": lambda: fitted().optimizer,
        "the state of a call": lambda: type("State", (), state_of_a_call()),
        "the context of a call": lambda: state_of_a_call().get("current_call_ctx"),
        "a TFLite interpreter": lambda: module("ai_edge_litert.interpreter").Interpreter,
    }
    return examples[owner]()


def missing(names: tuple[Private, ...]) -> list[str]:
    """Returns a sentence for each name that the installed Keras and TensorFlow lack."""
    wanted = {private.owner for private in names}
    if importlib.util.find_spec("ai_edge_litert") is None:
        wanted.discard("a TFLite interpreter")  # an optional dependency
    owners = {owner: example_of(owner) for owner in wanted}
    return [
        f"keras {keras.__version__} with tensorflow {tf.__version__} no longer has {private.name} "
        f"of {private.owner}, which keras_vit needs: {private.why}."
        for private in names
        if private.owner in owners and not hasattr(owners[private.owner], private.name)
    ]


def touched(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a module reaches for and that look private, and private modules."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr, ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("keras_vit"):
            names = [alias.name for alias in node.names if not node.level]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value.startswith(PRIVATE_MODULES) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            constants = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            names = [value for value in constants if isinstance(value, str)]
            names += [ast.unparse(node.func)] if "__" in ast.unparse(node.func) else []
        for name in names:
            is_private = name.isidentifier() and name.startswith("_") and name[1:2] != "_"
            if is_private or name.startswith((*PRIVATE_MODULES, "object.__")):
                yield name


def defined(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a module defines, in itself or in its classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            yield from [node.attr] if isinstance(node.ctx, ast.Store) else []


def foreign(trees: dict[str, ast.AST]) -> dict[str, set[str]]:
    """Returns the private names of others that each module touches, for those that do."""
    own = {name for tree in trees.values() for name in defined(tree)} - NAMES
    private_names = {
        path: {name for name in touched(tree) if name not in own | PUBLIC | APART.get(path, set())}
        for path, tree in trees.items()
    }
    return {path: names for path, names in private_names.items() if names}


def sources() -> dict[str, ast.AST]:
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "keras_vit"


def test_installed_keras_and_tensorflow_have_every_private_name() -> None:
    missing_names = missing(PRIVATE_NAMES)
    assert not missing_names, "\n".join(missing_names)


def test_a_name_that_is_gone_is_named_with_its_owner_and_its_reason() -> None:
    for owner in ("keras.Model", "the context of a call", "keras.src.gone"):
        (sentence,) = missing((Private(owner, "_gone", WHY),))
        assert sentence.startswith(f"keras {keras.__version__}")
        assert sentence.endswith(f"no longer has _gone of {owner}, which keras_vit needs: {WHY}.")


def test_no_other_module_touches_a_private_name() -> None:
    trees = sources()
    private_names = foreign(trees)
    private_names.pop(ROOM.relative_to(PACKAGE).as_posix())
    assert not private_names, f"these belong into backend/private.py: {private_names}"


def test_a_private_name_outside_of_the_room_is_seen() -> None:
    lines = (
        *("model._flatten_layers()", "self._loss_tracker", "self._initial_epoch = None"),
        *("x._never_heard_of = 1", "from tensorflow.python.eager import record"),
        *("getattr(x, '_keras_mask', None)", "object.__setattr__(optimizer, 'apply', apply)"),
        *("import keras.src.layers", "from keras.src.models import functional"),
        *("from keras.layers import _Hidden", "keras.src.backend.common"),
        "module = 'keras.src.export'",
    )
    assert not [line for line in lines if not foreign({"a.py": ast.parse(line)})]


def test_what_a_module_has_itself_is_not_private() -> None:
    source = (
        "def _own(): ...\nclass A:\n def f(self): self._mine = 1\n_own()\na._mine\ne._replace()"
    )
    assert not foreign({"a.py": ast.parse(source)})


def test_every_name_of_the_room_is_in_its_table_and_every_row_is_used() -> None:
    tree = ast.parse(ROOM.read_text())
    names = {name for name in touched(tree) if name.startswith("_")} - PUBLIC
    assert names - set(defined(tree)) <= NAMES
    apart = set.union(*APART.values())
    in_room = {name for name in NAMES if name.startswith("_")} - apart
    assert in_room <= names | set(defined(tree))


def test_no_class_overrides_a_private_method_outside_of_the_room() -> None:
    for name in ("model", "optimizers", "exact", "losses", "adaptation", "training", "explain"):
        importlib.import_module(f"keras_vit.{name}")
    kinds = (keras.layers.Layer, keras.optimizers.Optimizer, keras.losses.Loss)
    classes = [each for kind in kinds for each in subclasses(kind) if is_ours(each)]
    assert keras_vit.ExactModel in classes
    overridden = {
        (part.__module__, part.__name__, name)
        for each in classes
        for part in filter(is_ours, each.__mro__)
        for base in each.__mro__
        if not is_ours(base)
        for name in vars(part).keys() & vars(base).keys()
        if name.startswith("_") and not name.startswith("__") and name != "_abc_impl"
    }
    outside = {each for each in overridden if each[0] != "keras_vit.backend.private"}
    assert not outside
    assert {name for _, _, name in overridden} == {
        "_apply_weight_decay",
        "_make_function",
        "_maybe_symbolic_build",
    }
