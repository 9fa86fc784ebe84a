"""Times the parts of a block in training, each with its gradient, and those of PyTorch.

    python -m benchmarks.parts
    python -m benchmarks.parts --variant S/16 --batch 32

Both must be installed in this Python. The two take turns; figures are medians in milliseconds.
In a training step a part takes longer, because it shares the processor with others.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.cases import Case, case_parser

Part = Callable[[], Any]
Shape = tuple[int, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Times every part and prints the table."""
    parser = case_parser("python -m benchmarks.parts", __doc__)
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="turns of each part (%(default)s)"
    )
    options = vars(parser.parse_args(arguments))
    rounds = options.pop("rounds")
    if rounds < 1:
        parser.error(f"--rounds must be 1 or more. Received: {rounds}.")
    try:
        case = Case(task="training", **options)
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import torch
    except ImportError:
        parser.error("PyTorch is not in this Python; run: pip install torch")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    blocks = case.sizes["num_layers"]
    print(f"{f'a block of {case}, ms':56}{'keras_vit':>10}{'PyTorch':>10}{'ratio':>7}")
    total = np.zeros(2)
    for name, ours, theirs, shapes in _parts(case):
        pair = _take_turns(_in_tensorflow(ours, shapes), _in_torch(theirs, shapes), rounds)
        _print(name, pair)
        total += pair
    _print(f"all of {blocks} blocks", blocks * total)


def _print(name: str, pair: Any) -> None:
    print(f"{name:56}{pair[0]:>10.1f}{pair[1]:>10.1f}{pair[1] / pair[0]:>7.2f}")


def _take_turns(ours: Part, theirs: Part, rounds: int) -> np.ndarray:
    """Returns the median milliseconds of both."""
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 2):
        for part, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            part()
            if turn > 1:  # the first two compile and warm up
                seconds.append(time.perf_counter() - start)
    return 1e3 * np.array([statistics.median(seconds) for seconds in times])


def _parts(case: Case) -> list[tuple[str, Callable[..., Any], Callable[..., Any], list[Shape]]]:
    """Returns each part: its name, ours, PyTorch's, and the shapes of its inputs and output."""
    from keras_vit import backend

    width, mlp, heads = (case.sizes[key] for key in ("hidden_dim", "mlp_dim", "num_heads"))
    x, wide, hidden = ((case.batch, case.tokens, each) for each in (width, 3 * width, mlp))
    norm, attend, dense, dense_gelu, add = _torch_calls(heads)

    def our_norm(x: Any, gamma: Any, beta: Any) -> Any:
        return backend.layer_norm(x, gamma, beta, epsilon=1e-6)

    def our_add(x: Any, kernel: Any, bias: Any, residual: Any) -> Any:
        return backend.dense(x, kernel, bias, residual=residual)

    def twice(norm: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *weights: norm(norm(x, *weights), *weights)

    scale = (width,)
    qkv, out, fc1, fc2 = (width, 3 * width), (width, width), (width, mlp), (mlp, width)
    return [
        ("two layer normalisations", twice(our_norm), twice(norm), [x, scale, scale, x]),
        ("query, key and value", backend.dense, dense, [x, qkv, qkv[1:], wide]),
        ("attention", lambda qkv: backend.self_attention(qkv, heads), attend, [wide, x]),
        ("its output, with the residual", our_add, add, [x, out, scale, x, x]),
        (
            "first dense layer of the MLP, with GELU",
            lambda x, kernel, bias: backend.dense(x, kernel, bias, "gelu_tanh"),
            dense_gelu,
            [x, fc1, fc1[1:], hidden],
        ),
        ("second, with the residual", our_add, add, [hidden, fc2, scale, x, x]),
    ]


def _torch_calls(heads: int) -> list[Callable[..., Any]]:
    """Returns PyTorch's layer normalisation, attention, and dense layers: plain, GELU, residual.

    They take kernels (D, M) and transpose them to those of PyTorch, (M, D).
    """
    import torch

    functional = torch.nn.functional

    def attend(qkv: Any) -> Any:
        split = qkv.reshape(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)

    def dense(x: Any, kernel: Any, bias: Any) -> Any:
        return functional.linear(x, kernel.T, bias)

    return [
        lambda x, gamma, beta: functional.layer_norm(x, gamma.shape, gamma, beta),
        attend,
        dense,
        lambda *x: functional.gelu(dense(*x)),
        lambda x, kernel, bias, residual: residual + dense(x, kernel, bias),
    ]


def _arrays(shapes: list[Shape]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape, dtype=np.float32) for shape in shapes]


def _in_tensorflow(call: Callable[..., Any], shapes: list[Shape]) -> Part:
    """Returns a function of the call and its gradient; the last array is the output's gradient."""
    import tensorflow as tf

    *inputs, upstream = map(tf.constant, _arrays(shapes))

    def run(upstream: Any, *inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            value = call(*inputs)
        return value, tape.gradient(value, inputs, upstream)

    function = tf.function(run, autograph=False)
    return lambda: function(upstream, *inputs)


def _in_torch(call: Callable[..., Any], shapes: list[Shape]) -> Part:
    import torch

    *inputs, upstream = map(torch.from_numpy, _arrays(shapes))
    # In the memory layout of torch.nn.Linear, as the call transposes them.
    inputs = [x.T.contiguous().T if x.ndim == 2 else x for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(call(*inputs), inputs, upstream)


if __name__ == "__main__":
    main()
