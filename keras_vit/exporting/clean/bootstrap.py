"""Runs the checks of one request where `import keras` and `import keras_vit` fail.

Called as a script: `python -P bootstrap.py REQUEST_FOLDER`.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

BLOCKED = ("keras", "keras_vit")


class _Blocker(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the blocked packages, because TensorFlow looks for Keras, and fails to load them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in BLOCKED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        raise ImportError(f"{spec.name} is blocked: an artefact must do without it.")

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(module.__name__)


def block() -> None:
    """Makes all later imports of Keras and of this package fail.

    Raises:
        RuntimeError: one of them is already imported.
    """
    loaded = [name for name in BLOCKED if name in sys.modules]
    if loaded:
        raise RuntimeError(f"{loaded} are already imported; start a fresh process.")
    sys.meta_path.insert(0, _Blocker())


def load_package() -> None:
    """Makes the folder of this file importable as the package `clean`."""
    folder = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        "clean", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is not a package.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["clean"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    block()
    load_package()
    from clean import checker  # type: ignore[import-not-found]

    checker.run(Path(sys.argv[1]))
