"""Pallas kernels for NVIDIA GPUs in half precision: layer normalisation and attention.

A profile of L/16 at 224 pixels on an H100 shows what XLA's own forms cost. cuDNN's attention takes
queries, keys and values as three arrays, so that XLA copies them out of their common product, and
their gradients back into one. A layer normalisation takes 2.5 times as long as reading and writing
its tokens. The attention here reads and writes the product in place, for any number of tokens (JAX
refuses to train cuDNN's with an odd number, such as 197).

Each kernel works on whole images, so that arrays sharded by images are not moved between devices.

Shapes: B images, N tokens, D hidden_dim, H heads, K = D / H.
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
_BIG = 1e30  # larger than any logit
# Tokens per block, and warps, that are the fastest on an H100. Those of attention are by the number
# of parts of a head: one in L/16 at 224 pixels, two in H/14.
_KEYS, _NORM_ROWS, _NORM_WARPS, _NORM_PART, _NORM_STEP = 64, 4, 8, 32, 2
_BLOCK, _WARPS = {1: 128, 2: 64}, {1: 8, 2: 4}


def head_parts(size: int) -> tuple[int, ...] | None:
    """Returns the one or two powers of two whose sum is a head's width; None for other widths.

    A kernel's arrays have sides of powers of two, and matrix units multiply at least 16 columns.
    """
    first = 1 << (size.bit_length() - 1)
    parts = (first, size - first) if size > first else (first,)
    fits = all(part >= 16 and part & (part - 1) == 0 for part in parts)
    return parts if fits and size <= 128 else None


def _by_images(rule: str, static: tuple[int, ...]) -> Callable[[Any], Any]:
    """Makes XLA shard arrays by their images alone, "b" in the `rule` in Shardy's notation."""
    axes = dict.fromkeys(rule.replace("->", " ").replace(",", " ").split())
    replicated = tuple(axis for axis in axes if axis != "b")

    def decorate(function: Any) -> Any:
        partitioned = custom_partitioning(function, static_argnums=static)

        def partition(*arguments: Any) -> Any:
            *settings, mesh, inputs, outputs = arguments
            spec = inputs[0].sharding.spec
            images = spec[0] if len(spec) else None

            def sharding(axes: str) -> NamedSharding:
                sides = [images if axis == "b" else None for axis in axes.split()]
                return NamedSharding(mesh, PartitionSpec(*sides))

            shardings = [
                [sharding(axes) for axes in side.strip().split(",")] for side in rule.split("->")
            ]
            results = jax.tree.unflatten(jax.tree.structure(outputs), shardings[1])

            def lowered(*arrays: Any) -> Any:
                return function(*arrays, *settings)

            return mesh, lowered, results, tuple(shardings[0])

        # Only the axis of the images may be sharded: a kernel sums over the tokens and the width.
        partitioned.def_partition(
            partition, sharding_rule=rule, need_replication_factors=replicated
        )
        return partitioned

    return decorate


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    """Normalises tokens (B, N, D) over their width in float32, then applies gamma and beta (D,)."""
    return _norm(x, gamma, beta, epsilon)


def _norm_forward(x: Any, gamma: Any, beta: Any, epsilon: float) -> tuple[Any, Any]:
    return _norm(x, gamma, beta, epsilon), (x, gamma, beta)


def _norm_backward(epsilon: float, residuals: Any, dy: Any) -> tuple[Any, Any, Any]:
    x, gamma, beta = residuals
    # The kernel sums over tokens of one image; XLA sums over images, which may be on other devices.
    dx, dgamma, dbeta = _norm_gradients(x, gamma, dy, epsilon, -(-x.shape[1] // _NORM_PART))
    return dx, dgamma.sum((0, 1)).astype(gamma.dtype), dbeta.sum((0, 1)).astype(beta.dtype)


layer_norm.defvjp(_norm_forward, _norm_backward)


@_by_images("b n d, d, d -> b n d", static=(3,))
def _norm(x: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    width = x.shape[-1]
    # Tokens of all images in one list: only its last block may be partly empty.
    rows = x.reshape(-1, width)  # (B*N, D)
    tokens = pl.BlockSpec((_NORM_ROWS, width), lambda i: (i, 0))
    vector = pl.BlockSpec((width,), lambda i: (0,))
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
    mask = is_row[:, None] & (columns < width)[None]
    gamma, beta = (_load(ref, columns, columns < width) for ref in (gamma_ref, beta_ref))
    place = (pl.ds(0, _NORM_ROWS), pl.ds(0, len(columns)))
    normalized, _ = _normalize(_load(x_ref, place, mask), mask, width, epsilon)
    y = normalized * gamma[None] + beta[None]
    triton.store(y_ref.at[place], y.astype(y_ref.dtype), mask=mask)


@_by_images("b n d, d, b n d -> b n d, b p d, b p d", static=(3, 4))
def _norm_gradients(x: Any, gamma: Any, dy: Any, epsilon: float, parts: int) -> Any:
    """Returns dx (B, N, D), and dgamma and dbeta (B, parts, D), each a sum over some tokens."""
    images, tokens, width = x.shape
    image = pl.BlockSpec((None, tokens, width), lambda b, p: (b, 0, 0))
    part = pl.BlockSpec((None, None, width), lambda b, p: (b, p, 0))
    sums = jax.ShapeDtypeStruct((images, parts, width), jnp.float32)
    return _call(
        functools.partial(_norm_gradients_kernel, epsilon=epsilon),
        "layer_norm_gradients",
        grid=(images, parts),
        inputs=[image, pl.BlockSpec((width,), lambda b, p: (0,)), image],
        outputs=[image, part, part],
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
        mask = (start + jnp.arange(_NORM_STEP) < tokens)[:, None] & is_column[None]
        place = (pl.ds(start, _NORM_STEP), pl.ds(0, len(columns)))
        x, dy = _load(x_ref, place, mask), _load(dy_ref, place, mask)
        normalized, scale = _normalize(x, mask, width, epsilon)
        # dx is gamma * dy without its mean and without its projection on the normalised row.
        dnormalized = dy * gamma[None]
        mean = dnormalized.sum(1, keepdims=True) / width
        projection = (dnormalized * normalized).sum(1, keepdims=True) / width
        dx = (dnormalized - mean - normalized * projection) * scale
        triton.store(dx_ref.at[place], dx.astype(dx_ref.dtype), mask=mask)
        return sums[0] + (dy * normalized).sum(0), sums[1] + dy.sum(0)

    zeros = jnp.zeros(columns.shape, jnp.float32)
    sums = jax.lax.fori_loop(0, _NORM_PART // _NORM_STEP, step, (zeros, zeros))
    for ref, value in zip((dgamma_ref, dbeta_ref), sums, strict=True):
        triton.store(ref.at[pl.ds(0, len(columns))], value, mask=is_column)


def _normalize(x: Any, mask: Any, width: int, epsilon: float) -> tuple[Any, Any]:
    """Returns normalised rows, zero outside of the mask, and 1 / their deviations, in float32."""
    # Masked after the subtraction, too: in columns outside, 0 - mean would add to the variance.
    centred = jnp.where(mask, x - x.sum(1, keepdims=True) / width, 0)
    scale = jax.lax.rsqrt((centred * centred).sum(1, keepdims=True) / width + epsilon)
    return centred * scale, scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def attention(qkv: Any, num_heads: int) -> Any:
    """Returns multi-head attention (B, N, D) of queries, keys and values (B, N, 3D).

    The width of a head must have `head_parts`.
    """
    return _attend(qkv, num_heads)[0]


def _attention_forward(qkv: Any, num_heads: int) -> tuple[Any, Any]:
    y, log_sums = _attend(qkv, num_heads)
    return y, (qkv, y, log_sums)


def _attention_backward(num_heads: int, residuals: Any, dy: Any) -> tuple[Any]:
    return (_attention_gradients(*residuals, dy, num_heads),)


attention.defvjp(_attention_forward, _attention_backward)


@_by_images("b n f -> b n d, b h n", static=(1,))
def _attend(qkv: Any, num_heads: int) -> Any:
    """Returns the result (B, N, D), and the log2 of the softmax's denominators (B, H, N)."""
    images, tokens, size = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3 // num_heads
    heads = qkv.reshape(images, tokens, 3, num_heads, size)
    parts = len(head_parts(size) or ())
    rows = _BLOCK[parts]
    query = pl.BlockSpec((None, rows, None, None, size), lambda b, h, i: (b, i, 0, h, 0))
    key, value = (_head_spec(tokens, size, third) for third in (1, 2))
    y, log_sums = _call(
        functools.partial(_attend_kernel, tokens=tokens, size=size),
        "attention",
        grid=(images, num_heads, pl.cdiv(tokens, rows)),
        inputs=[query, key, value],
        outputs=[
            pl.BlockSpec((None, rows, None, size), lambda b, h, i: (b, i, h, 0)),
            pl.BlockSpec((None, None, rows), lambda b, h, i: (b, h, i)),
        ],
        results=[
            jax.ShapeDtypeStruct((images, tokens, num_heads, size), qkv.dtype),
            # The gradient recomputes the weights from these: N numbers for each head, not N * N.
            jax.ShapeDtypeStruct((images, num_heads, tokens), jnp.float32),
        ],
        warps=_WARPS[parts],
        stages=2,
    )(heads, heads, heads)
    return y.reshape(images, tokens, -1), log_sums


def _attend_kernel(
    query_ref: Any, key_ref: Any, value_ref: Any, y_ref: Any, log_sums_ref: Any,
    *, tokens: int, size: int,
) -> None:  # fmt: skip
    """Visits the keys block by block for one block of queries, with a running softmax."""
    parts = head_parts(size) or ()
    rows = _BLOCK[len(parts)]
    is_query = pl.program_id(2) * rows + jnp.arange(rows) < tokens
    query = _rows(query_ref, parts, 0, is_query)

    def step(index: Any, carry: Any) -> Any:
        sums, highest, denominator = carry
        start = index * _KEYS
        is_key = start + jnp.arange(_KEYS) < tokens
        # In base 2: NVIDIA GPUs have an instruction for 2^x, and none for e^x.
        logits = _product(query, _rows(key_ref, parts, start, is_key)) * (size**-0.5 * _LOG2_E)
        # Keys after the last token get no weight: any number of tokens works without padding.
        logits = jnp.where(is_key[None], logits, -_BIG)
        maximum = jnp.maximum(highest, logits.max(1))
        # Sums of earlier blocks are rescaled to the new maximum, so that no exponential overflows.
        correction, weights = jnp.exp2(highest - maximum), jnp.exp2(logits - maximum[:, None])
        # Matrix units multiply in 16 bits and add in float32, as the carried sums do: these run
        # over all blocks, and would lose digits in 16 bits.
        rounded = weights.astype(value_ref.dtype)
        values = _rows(value_ref, parts, start, is_key)
        sums = [
            part * correction[:, None] + triton.dot(rounded, value)
            for part, value in zip(sums, values, strict=True)
        ]
        return sums, maximum, denominator * correction + weights.sum(1)

    zeros = [jnp.zeros((rows, part), jnp.float32) for part in parts]
    lowest = jnp.full((rows,), -_BIG, jnp.float32)
    carry = (zeros, lowest, jnp.zeros((rows,), jnp.float32))
    sums, highest, denominator = jax.lax.fori_loop(0, pl.cdiv(tokens, _KEYS), step, carry)
    # One division of each row at the end, in place of one for every block of keys.
    _store_rows(y_ref, [part / denominator[:, None] for part in sums], is_query)
    # All that the backward pass needs to make the weights again: a number for a row, not N.
    triton.store(log_sums_ref, highest + jnp.log2(denominator), mask=is_query)


@_by_images("b n f, b n d, b h n, b n d -> b n f", static=(4,))
def _attention_gradients(qkv: Any, y: Any, log_sums: Any, dy: Any, num_heads: int) -> Any:
    images, tokens, size = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3 // num_heads
    heads = qkv.reshape(images, tokens, 3, num_heads, size)
    head = pl.BlockSpec((None, tokens, None, size), lambda b, h, i: (b, 0, h, 0))
    parts = len(head_parts(size) or ())
    rows = _BLOCK[parts]
    dqkv = _call(
        functools.partial(_attention_gradients_kernel, tokens=tokens, size=size),
        "attention_gradients",
        grid=(images, num_heads, pl.cdiv(tokens, rows)),
        inputs=[
            *(_head_spec(tokens, size, third) for third in range(3)),
            *(head, pl.BlockSpec((None, None, tokens), lambda b, h, i: (b, h, 0)), head),
        ],
        outputs=[pl.BlockSpec((None, rows, 3, None, size), lambda b, h, i: (b, i, 0, h, 0))],
        results=[jax.ShapeDtypeStruct(heads.shape, qkv.dtype)],
        warps=_WARPS[parts],
    )(heads, heads, heads, y.reshape(images, tokens, num_heads, size), log_sums,
      dy.reshape(images, tokens, num_heads, size))[0]  # fmt: skip
    return dqkv.reshape(qkv.shape)


def _attention_gradients_kernel(
    query_ref: Any, key_ref: Any, value_ref: Any, y_ref: Any, log_sums_ref: Any, dy_ref: Any,
    dqkv_ref: Any, *, tokens: int, size: int,
) -> None:  # fmt: skip
    """Computes the gradients of one block of tokens: of keys and values, then of queries."""
    parts = head_parts(size) or ()
    rows, scale = _BLOCK[len(parts)], size**-0.5
    first = pl.program_id(2) * rows
    is_token = first + jnp.arange(rows) < tokens

    def load_queries(start: Any) -> Any:
        is_query = start + jnp.arange(rows) < tokens
        query, y, dy = (_rows(ref, parts, start, is_query) for ref in (query_ref, y_ref, dy_ref))
        # After the last token 2^(logit - 1e30) is 0: such rows add nothing to keys and values.
        place = log_sums_ref.at[pl.ds(start, rows)]
        return query, dy, triton.load(place, mask=is_query, other=_BIG), _row_products(y, dy)

    def load_keys(start: Any) -> Any:
        is_key = start + jnp.arange(rows) < tokens
        return *(_rows(ref, parts, start, is_key) for ref in (key_ref, value_ref)), is_key

    zeros = [jnp.zeros((rows, part), jnp.float32) for part in parts]
    # One program has this block both as queries and as keys, and visits all others for each. No
    # gradient is then written by two programs, which would need atomic additions.
    queries, keys = load_queries(first), load_keys(first)

    def add_key_gradients(index: Any, sums: Any) -> Any:
        others = load_queries(index * rows)
        weights, dlogits = _logit_gradients(*others, *keys, scale=scale)
        dkey = _add_product(sums[0], dlogits.T, others[0])
        return dkey, _add_product(sums[1], weights.T, others[1])

    def add_query_gradients(index: Any, sums: Any) -> Any:
        others = load_keys(index * rows)
        return _add_product(sums, _logit_gradients(*queries, *others, scale=scale)[1], others[0])

    blocks = pl.cdiv(tokens, rows)
    # The scale of the logits multiplies the float32 sums once, and not each block's gradients.
    dkey, dvalue = jax.lax.fori_loop(0, blocks, add_key_gradients, (zeros, zeros))
    _store_rows(dqkv_ref, [part * scale for part in dkey], is_token, third=1)
    _store_rows(dqkv_ref, dvalue, is_token, third=2)
    dquery = jax.lax.fori_loop(0, blocks, add_query_gradients, zeros)
    _store_rows(dqkv_ref, [part * scale for part in dquery], is_token, third=0)


def _row_products(y: list[Any], dy: list[Any]) -> Any:
    pairs = zip(y, dy, strict=True)
    return sum((a.astype(jnp.float32) * b.astype(jnp.float32)).sum(1) for a, b in pairs)


def _logit_gradients(
    query: Any, dy: Any, log_sums: Any, products: Any, key: Any, value: Any, is_key: Any,
    *, scale: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Returns weights (queries, keys) and the gradients of their logits, in half precision."""
    # Recomputed from the saved log2 of their sums (arXiv 2307.08691, 3.1.2).
    weights = jnp.exp2(_product(query, key) * (scale * _LOG2_E) - log_sums[:, None])
    # Keys after the last token were loaded as zeros, so that their logits are 0, not -1e30.
    weights = jnp.where(is_key[None], weights, 0)
    # `products`, the sums of y * dy, equal those of weights * dweights (arXiv 2205.14135, B.2).
    dlogits = weights * (_product(dy, value) - products[:, None])
    return weights.astype(query[0].dtype), dlogits.astype(query[0].dtype)


def _head_spec(tokens: int, size: int, third: int) -> Any:
    """Returns the block of one head's queries, keys or values (N, K) in (B, N, 3, H, K)."""
    return pl.BlockSpec((None, tokens, None, None, size), lambda b, h, i: (b, 0, third, h, 0))


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
        # Elsewhere Pallas interprets the kernel, so that its numbers are tested without a GPU.
        interpret=jax.default_backend() != "gpu",
        name=name,
    )


def _load(ref: Any, place: Any, mask: Any) -> Any:
    return triton.load(ref.at[place], mask=mask, other=0).astype(jnp.float32)


def _rows(ref: Any, parts: tuple[int, ...], start: Any, is_row: Any) -> list[Any]:
    """Loads rows of one head (rows, K), in parts of its width; zeros outside of the mask."""
    values, column = [], 0
    # Two blocks such as 64 and 16 columns: one of 128 for a width of 80 would waste three eighths.
    for part in parts:
        mask = jnp.broadcast_to(is_row[:, None], (len(is_row), part))
        place = (pl.ds(start, len(is_row)), pl.ds(column, part))
        values.append(triton.load(ref.at[place], mask=mask, other=0))
        column += part
    return values


def _store_rows(ref: Any, values: list[Any], is_row: Any, third: int | None = None) -> None:
    """Stores parts of rows in (rows, K), or in a third of (rows, 3, K)."""
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
    """Returns left right^T in float32, for rows in parts."""
    return sum(triton.dot(a, b.T) for a, b in zip(left, right, strict=True))


def _add_product(sums: list[Any], weights: Any, rows: list[Any]) -> list[Any]:
    return [part + triton.dot(weights, row) for part, row in zip(sums, rows, strict=True)]
