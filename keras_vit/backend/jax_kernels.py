"""Kernels for NVIDIA GPUs in half precision, in Pallas: layer normalisation and attention.

XLA's own forms cost more than their arithmetic there. Seen in a profile of L/16 at 224 pixels on an
H100: cuDNN's attention takes query, key and value as arrays of their own, so that XLA copies the
three out of their common product, and gradients back into one; a layer normalisation takes 2.5
times as long as reading and writing its tokens. Attention here reads and writes the product where
it lies, for any number of tokens (JAX refuses to train cuDNN's with an odd number, as of 197).

Each kernel sees whole images, so that arrays divided by images among devices stay where they are.
Letters: B batch, N tokens, D width, H heads, K width of a head.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding, PartitionSpec

_LOG2_E = math.log2(math.e)
_FAR = 1e30  # beyond any logit
# Rows of tokens, and groups of 32 threads, that were the fastest on an H100: L/16 at 224 pixels for
# heads of one part, H/14 for those of two, by their number of parts.
_KEYS, _NORM_ROWS, _NORM_WARPS, _NORM_PART, _NORM_STEP = 64, 4, 8, 32, 2
_BLOCK, _WARPS = {1: 128, 2: 64}, {1: 8, 2: 4}


def head_parts(size: int) -> tuple[int, ...] | None:
    """Returns one or two powers of two that a head's width is the sum of; None for other widths.

    A kernel's arrays have sides of powers of two, and matrix units multiply 16 columns or more.

    Example:
        >>> head_parts(64), head_parts(80), head_parts(72)
        ((64,), (64, 16), None)
    """
    first = 1 << (size.bit_length() - 1)
    parts = (first, size - first) if size > first else (first,)
    fits = all(part >= 16 and part & (part - 1) == 0 for part in parts)
    return parts if fits and size <= 128 else None


def _by_images(rule: str, static: tuple[int, ...]) -> Callable[[Any], Any]:
    """Has XLA divide a function's arrays by their first axis alone, over any mesh of devices.

    Args:
        rule: the axes of arguments and results, "b" the images, as Shardy writes them.
        static: positions of the arguments that are no arrays.
    """
    axes_in_order = dict.fromkeys(rule.replace("->", " ").replace(",", " ").split())
    others = tuple(axis for axis in axes_in_order if axis != "b")

    def divide(function: Any) -> Any:
        divided = custom_partitioning(function, static_argnums=static)

        def partition(*arguments: Any) -> Any:
            *settings, mesh, given, results = arguments
            images = given[0].sharding.spec[0] if len(given[0].sharding.spec) else None
            sides = [part.strip().split(",") for part in rule.split("->")]

            def sharding(axes: str) -> NamedSharding:
                spec = [images if axis == "b" else None for axis in axes.split()]
                return NamedSharding(mesh, PartitionSpec(*spec))

            placed = [[sharding(axes) for axes in side] for side in sides]
            results = jax.tree.unflatten(jax.tree.structure(results), placed[1])

            def lowered(*arrays: Any) -> Any:
                return function(*arrays, *settings)

            return mesh, lowered, results, tuple(placed[0])

        divided.def_partition(partition, sharding_rule=rule, need_replication_factors=others)
        return divided

    return divide


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    """Normalises tokens (B, N, D) over their width in float32, then applies gamma and beta (D,)."""
    return _norm(x, gamma, beta, epsilon)


def _norm_forward(x: Any, gamma: Any, beta: Any, epsilon: float) -> tuple[Any, Any]:
    return _norm(x, gamma, beta, epsilon), (x, gamma, beta)


def _norm_backward(epsilon: float, kept: Any, dy: Any) -> tuple[Any, Any, Any]:
    x, gamma, beta = kept
    dx, dgamma, dbeta = _norm_gradients(x, gamma, dy, epsilon, -(-x.shape[1] // _NORM_PART))
    return dx, dgamma.sum((0, 1)).astype(gamma.dtype), dbeta.sum((0, 1)).astype(beta.dtype)


layer_norm.defvjp(_norm_forward, _norm_backward)


@_by_images("b n d, d, d -> b n d", static=(3,))
def _norm(x: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    width = x.shape[-1]
    rows = x.reshape(-1, width)  # (B*N, D)
    tokens = _block((_NORM_ROWS, width), lambda i: (i, 0))
    vector = _block((width,), lambda i: (0,))
    y = _call(
        functools.partial(_norm_kernel, count=len(rows), epsilon=epsilon),
        "layer_norm",
        grid=(pl.cdiv(len(rows), _NORM_ROWS),),
        inputs=[tokens, vector, vector],
        outputs=[tokens],
        results=[jax.ShapeDtypeStruct(rows.shape, x.dtype)],
        warps=_NORM_WARPS,
    )(rows, gamma, beta)[0]
    return y.reshape(x.shape)


def _norm_kernel(
    x_ref: Any, gamma_ref: Any, beta_ref: Any, y_ref: Any, *, count: int, epsilon: float
) -> None:
    width = x_ref.shape[1]
    columns = jnp.arange(pl.next_power_of_2(width))
    is_row = pl.program_id(0) * _NORM_ROWS + jnp.arange(_NORM_ROWS) < count
    inside = is_row[:, None] & (columns < width)[None]
    gamma, beta = (_load(ref, columns, columns < width) for ref in (gamma_ref, beta_ref))
    place = (pl.ds(0, _NORM_ROWS), pl.ds(0, len(columns)))
    normal, _ = _normalised(_load(x_ref, place, inside), inside, width, epsilon)
    y = normal * gamma[None] + beta[None]
    triton.store(y_ref.at[place], y.astype(y_ref.dtype), mask=inside)


@_by_images("b n d, d, b n d -> b n d, b p d, b p d", static=(3, 4))
def _norm_gradients(x: Any, gamma: Any, dy: Any, epsilon: float, parts: int) -> Any:
    """Returns those of x (B, N, D), and sums (B, parts, D) over tokens of gamma's and beta's."""
    images, tokens, width = x.shape
    image = _block((None, tokens, width), lambda b, p: (b, 0, 0))
    summed = _block((None, None, width), lambda b, p: (b, p, 0))
    sums = jax.ShapeDtypeStruct((images, parts, width), jnp.float32)
    return _call(
        functools.partial(_norm_gradients_kernel, epsilon=epsilon),
        "layer_norm_gradients",
        grid=(images, parts),
        inputs=[image, _block((width,), lambda b, p: (0,)), image],
        outputs=[image, summed, summed],
        results=[jax.ShapeDtypeStruct(x.shape, x.dtype), sums, sums],
        warps=4,
    )(x, gamma, dy)


def _norm_gradients_kernel(
    x_ref: Any, gamma_ref: Any, dy_ref: Any, dx_ref: Any, dgamma_ref: Any, dbeta_ref: Any,
    *, epsilon: float,
) -> None:  # fmt: skip
    tokens, width = x_ref.shape
    columns = jnp.arange(pl.next_power_of_2(width))
    is_column = columns < width
    gamma = _load(gamma_ref, columns, is_column)
    first = pl.program_id(1) * _NORM_PART

    def step(index: Any, sums: Any) -> Any:
        start = first + index * _NORM_STEP
        inside = (start + jnp.arange(_NORM_STEP) < tokens)[:, None] & is_column[None]
        place = (pl.ds(start, _NORM_STEP), pl.ds(0, len(columns)))
        x, dy = _load(x_ref, place, inside), _load(dy_ref, place, inside)
        normal, deviation = _normalised(x, inside, width, epsilon)
        # dx is what is left of gamma * dy without its mean and its part along the normal.
        scaled = dy * gamma[None]
        along = (scaled * normal).sum(1, keepdims=True) / width
        dx = (scaled - scaled.sum(1, keepdims=True) / width - normal * along) * deviation
        triton.store(dx_ref.at[place], dx.astype(dx_ref.dtype), mask=inside)
        return sums[0] + (dy * normal).sum(0), sums[1] + dy.sum(0)

    zeros = jnp.zeros(columns.shape, jnp.float32)
    sums = jax.lax.fori_loop(0, _NORM_PART // _NORM_STEP, step, (zeros, zeros))
    for ref, value in zip((dgamma_ref, dbeta_ref), sums, strict=True):
        triton.store(ref.at[pl.ds(0, len(columns))], value, mask=is_column)


def _normalised(x: Any, inside: Any, width: int, epsilon: float) -> tuple[Any, Any]:
    """Returns normal rows and one over their deviations, in float32; nothing is outside."""
    centred = jnp.where(inside, x - x.sum(1, keepdims=True) / width, 0)
    deviation = jax.lax.rsqrt((centred * centred).sum(1, keepdims=True) / width + epsilon)
    return centred * deviation, deviation


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def attention(qkv: Any, num_heads: int) -> Any:
    """Returns what tokens take from each other, (B, N, D), for (B, N, 3D) query, key and value.

    The width of a head must have `head_parts`.
    """
    return _attend(qkv, num_heads)[0]


def _attention_forward(qkv: Any, num_heads: int) -> tuple[Any, Any]:
    y, log_sums = _attend(qkv, num_heads)
    return y, (qkv, y, log_sums)


def _attention_backward(num_heads: int, kept: Any, dy: Any) -> tuple[Any]:
    return (_attention_gradients(*kept, dy, num_heads),)


attention.defvjp(_attention_forward, _attention_backward)


@_by_images("b n f -> b n d, b h n", static=(1,))
def _attend(qkv: Any, num_heads: int) -> Any:
    """Returns the result (B, N, D), and each query's logarithm of its sum of weights (B, H, N)."""
    images, tokens, size = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3 // num_heads
    thirds = qkv.reshape(images, tokens, 3, num_heads, size)
    parts = len(head_parts(size) or ())
    rows = _BLOCK[parts]
    query = _block((None, rows, None, None, size), lambda b, h, i: (b, i, 0, h, 0))
    key, value = (_third(tokens, size, part) for part in (1, 2))
    y, log_sums = _call(
        functools.partial(_attend_kernel, tokens=tokens, size=size),
        "attention",
        grid=(images, num_heads, pl.cdiv(tokens, rows)),
        inputs=[query, key, value],
        outputs=[
            _block((None, rows, None, size), lambda b, h, i: (b, i, h, 0)),
            _block((None, None, rows), lambda b, h, i: (b, h, i)),
        ],
        results=[
            jax.ShapeDtypeStruct((images, tokens, num_heads, size), qkv.dtype),
            jax.ShapeDtypeStruct((images, num_heads, tokens), jnp.float32),
        ],
        warps=_WARPS[parts],
        stages=2,
    )(thirds, thirds, thirds)
    return y.reshape(images, tokens, -1), log_sums


def _attend_kernel(
    query_ref: Any, key_ref: Any, value_ref: Any, y_ref: Any, log_sums_ref: Any,
    *, tokens: int, size: int,
) -> None:  # fmt: skip
    """One block of queries meets the keys block by block; the softmax is corrected as it goes."""
    parts = head_parts(size) or ()
    rows = _BLOCK[len(parts)]
    is_query = pl.program_id(2) * rows + jnp.arange(rows) < tokens
    query = _rows(query_ref, parts, 0, is_query)

    def step(index: Any, carry: Any) -> Any:
        sums, highest, weight = carry
        start = index * _KEYS
        is_key = start + jnp.arange(_KEYS) < tokens
        logits = _product(query, _rows(key_ref, parts, start, is_key)) * (size**-0.5 * _LOG2_E)
        logits = jnp.where(is_key[None], logits, -_FAR)
        now = jnp.maximum(highest, logits.max(1))
        shrunk, weights = jnp.exp2(highest - now), jnp.exp2(logits - now[:, None])
        rounded = weights.astype(value_ref.dtype)
        values = _rows(value_ref, parts, start, is_key)
        sums = [
            old * shrunk[:, None] + triton.dot(rounded, part)
            for old, part in zip(sums, values, strict=True)
        ]
        return sums, now, weight * shrunk + weights.sum(1)

    none = [jnp.zeros((rows, part), jnp.float32) for part in parts]
    least = jnp.full((rows,), -_FAR, jnp.float32)
    carry = (none, least, jnp.zeros((rows,), jnp.float32))
    sums, highest, weight = jax.lax.fori_loop(0, pl.cdiv(tokens, _KEYS), step, carry)
    _store_rows(y_ref, [part / weight[:, None] for part in sums], is_query)
    triton.store(log_sums_ref, highest + jnp.log2(weight), mask=is_query)


@_by_images("b n f, b n d, b h n, b n d -> b n f", static=(4,))
def _attention_gradients(qkv: Any, y: Any, log_sums: Any, dy: Any, num_heads: int) -> Any:
    images, tokens, size = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3 // num_heads
    thirds = qkv.reshape(images, tokens, 3, num_heads, size)
    whole = _block((None, tokens, None, size), lambda b, h, i: (b, 0, h, 0))
    parts = len(head_parts(size) or ())
    rows = _BLOCK[parts]
    gradients = _call(
        functools.partial(_attention_gradients_kernel, tokens=tokens, size=size),
        "attention_gradients",
        grid=(images, num_heads, pl.cdiv(tokens, rows)),
        inputs=[
            *(_third(tokens, size, part) for part in range(3)),
            *(whole, _block((None, None, tokens), lambda b, h, i: (b, h, 0)), whole),
        ],
        outputs=[_block((None, rows, 3, None, size), lambda b, h, i: (b, i, 0, h, 0))],
        results=[jax.ShapeDtypeStruct(thirds.shape, qkv.dtype)],
        warps=_WARPS[parts],
    )(thirds, thirds, thirds, y.reshape(images, tokens, num_heads, size), log_sums,
      dy.reshape(images, tokens, num_heads, size))[0]  # fmt: skip
    return gradients.reshape(qkv.shape)


def _attention_gradients_kernel(
    query_ref: Any, key_ref: Any, value_ref: Any, y_ref: Any, log_sums_ref: Any, dy_ref: Any,
    gradients_ref: Any, *, tokens: int, size: int,
) -> None:  # fmt: skip
    """One block of tokens: the gradients of its keys and values, then those of its queries.

    The weights are computed anew from the logarithms of their sums (arXiv 2307.08691, 3.1.2).
    """
    parts = head_parts(size) or ()
    rows, scale = _BLOCK[len(parts)], size**-0.5
    here = pl.program_id(2) * rows
    is_here = here + jnp.arange(rows) < tokens

    def queries_of(start: Any) -> Any:
        is_query = start + jnp.arange(rows) < tokens
        query, y, dy = (_rows(ref, parts, start, is_query) for ref in (query_ref, y_ref, dy_ref))
        place = log_sums_ref.at[pl.ds(start, rows)]
        return query, dy, triton.load(place, mask=is_query, other=_FAR), _along(y, dy)

    def keys_of(start: Any) -> Any:
        is_key = start + jnp.arange(rows) < tokens
        return *(_rows(ref, parts, start, is_key) for ref in (key_ref, value_ref)), is_key

    zeros = [jnp.zeros((rows, part), jnp.float32) for part in parts]
    queries, keys = queries_of(here), keys_of(here)

    def of_keys(index: Any, sums: Any) -> Any:
        seen = queries_of(index * rows)
        weights, slopes = _slopes(*seen, *keys, scale=scale)
        return _plus(sums[0], slopes.T, seen[0]), _plus(sums[1], weights.T, seen[1])

    def of_queries(index: Any, sums: Any) -> Any:
        seen = keys_of(index * rows)
        return _plus(sums, _slopes(*queries, *seen, scale=scale)[1], seen[0])

    blocks = pl.cdiv(tokens, rows)
    dkey, dvalue = jax.lax.fori_loop(0, blocks, of_keys, (zeros, zeros))
    _store_rows(gradients_ref, [part * scale for part in dkey], is_here, third=1)
    _store_rows(gradients_ref, dvalue, is_here, third=2)
    dquery = jax.lax.fori_loop(0, blocks, of_queries, zeros)
    _store_rows(gradients_ref, [part * scale for part in dquery], is_here, third=0)


def _along(y: list[Any], dy: list[Any]) -> Any:
    """Returns the products of rows with their gradients, in float32."""
    pairs = zip(y, dy, strict=True)
    return sum((a.astype(jnp.float32) * b.astype(jnp.float32)).sum(1) for a, b in pairs)


def _slopes(
    query: Any, dy: Any, log_sums: Any, along: Any, key: Any, value: Any, is_key: Any, *, scale: Any
) -> tuple[Any, Any]:
    """Returns weights (queries, keys) and the gradients of their logits, in half precision."""
    weights = jnp.exp2(_product(query, key) * (scale * _LOG2_E) - log_sums[:, None])
    weights = jnp.where(is_key[None], weights, 0)
    slopes = weights * (_product(dy, value) - along[:, None])
    return weights.astype(query[0].dtype), slopes.astype(query[0].dtype)


def _block(shape: tuple[int | None, ...], place: Callable[..., Any]) -> Any:
    return pl.BlockSpec(shape, place)


def _third(tokens: int, size: int, part: int) -> Any:
    """Where all of one head's queries, keys or values (N, K) lie in (B, N, 3, H, K)."""
    return _block((None, tokens, None, None, size), lambda b, h, i: (b, 0, part, h, 0))


def _call(
    kernel: Any, name: str, *, grid: Any, inputs: Any, outputs: Any, results: Any, warps: int,
    stages: int = 1,
) -> Any:  # fmt: skip
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=inputs,
        out_specs=outputs,
        out_shape=results,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=jax.default_backend() != "gpu",
        name=name,
    )


def _load(ref: Any, place: Any, mask: Any) -> Any:
    """Reads float32 values; zeros outside of the mask."""
    return triton.load(ref.at[place], mask=mask, other=0).astype(jnp.float32)


def _rows(ref: Any, parts: tuple[int, ...], start: Any, is_row: Any) -> list[Any]:
    """Reads rows of one head (rows, K), in parts of its width; zeros outside of the mask."""
    read, column = [], 0
    for part in parts:
        mask = jnp.broadcast_to(is_row[:, None], (len(is_row), part))
        place = (pl.ds(start, len(is_row)), pl.ds(column, part))
        read.append(triton.load(ref.at[place], mask=mask, other=0))
        column += part
    return read


def _store_rows(ref: Any, values: list[Any], is_row: Any, third: int | None = None) -> None:
    """Writes parts of rows to (rows, K), or to a third of (rows, 3, K)."""
    column = 0
    for value in values:
        place: Any = (pl.ds(0, len(is_row)), pl.ds(column, value.shape[1]))
        mask = jnp.broadcast_to(is_row[:, None], value.shape)
        value = value.astype(ref.dtype)
        if third is not None:
            place = (place[0], pl.ds(third, 1), place[1])
            mask, value = mask[:, None], value[:, None]
        triton.store(ref.at[place], value, mask=mask)
        column += value.shape[-1]


def _product(left: list[Any], right: list[Any]) -> Any:
    """Returns left right^T in float32, of rows in parts."""
    return sum(triton.dot(a, b.T) for a, b in zip(left, right, strict=True))


def _plus(sums: list[Any], weights: Any, rows: list[Any]) -> list[Any]:
    return [old + triton.dot(weights, part) for old, part in zip(sums, rows, strict=True)]
