"""On PYTHONPATH: a process in which TensorFlow, matplotlib and scikit-learn are not installed."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class Without(PathFinder):
    """Finds all else. A None in `sys.modules` would not do: Keras takes the name for an import."""

    @classmethod
    def find_spec(cls, fullname: str, *arguments: Any) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ("tensorflow", "matplotlib", "sklearn"):
            return None
        return super().find_spec(fullname, *arguments)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
