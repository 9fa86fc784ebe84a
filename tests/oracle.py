"""The same network once more, in float64 NumPy, read off the published checkpoint's names."""

import numpy as np


def norm(p: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    out: np.ndarray = x * p[f"{name}/scale"] + p[f"{name}/bias"]
    return out


def dense(p: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    out: np.ndarray = x @ p[f"{name}/kernel"] + p[f"{name}/bias"]
    return out


def gelu(x: np.ndarray, exact: bool) -> np.ndarray:
    if exact:
        import scipy.special

        doubled: np.ndarray = x * (1 + scipy.special.erf(x / np.sqrt(2)))
    else:
        doubled = x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return np.asarray(doubled / 2)
