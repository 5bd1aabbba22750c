"""Runs attention modules over rows of tokens in chunks, and the same attention in float64 without pages."""

from collections.abc import Callable, Sequence
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from paged_jax import page_table
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import NO_PAGE, PageTable
from paged_jax.ragged_batch import RaggedBatch

# Largest error over largest output: some five roundings one after the other, in sums of about 30 terms.
TOLERANCE = {"float64": 5e-15, "float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}

# At these sizes compiling is all the time there is.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

extend = jax.jit(page_table.extend)
packed = jax.jit(RaggedBatch.packed, static_argnums=2)
decode = jax.jit(RaggedBatch.decode)


def run_rows(
    call: Callable, rows: Sequence, chunks: Sequence, table: PageTable, pages: KVPages, *, size: int | None
) -> tuple[list[np.ndarray], PageTable, KVPages]:
    """Feeds the next `chunks[i][r]` tokens of each row in call i and returns each row's outputs in order.

    Args:
        call: (x, pages, batch) -> (y, pages).
        rows: per row its tokens from position 0 on; a row goes on where the table says that it stands.
        size: tokens a call, padded with NaN if they are vectors. None: decode steps, at most a token a row.
    """
    outputs = [[] for _ in rows]
    for counts in np.asarray(chunks, np.int32):
        begins = np.asarray(table.lengths)
        table, grant = extend(table, counts)
        assert grant.granted.all()
        assert (grant.copies == NO_PAGE).all()
        fresh = [row[begin : begin + count] for row, begin, count in zip(rows, begins, counts, strict=True)]
        assert [len(tokens) for tokens in fresh] == counts.tolist()
        if size is None:
            batch, starts = decode(table, counts == 1), np.arange(len(rows))
        else:
            batch, starts = packed(table, counts, size), np.cumsum(counts) - counts
        padding = np.nan if np.issubdtype(rows[0].dtype, np.floating) else 0
        x = np.full((batch.rows.shape[0], *rows[0].shape[1:]), padding, rows[0].dtype)
        for tokens, start in zip(fresh, starts, strict=True):
            x[start : start + len(tokens)] = tokens
        y, pages = call(jnp.asarray(x), pages, batch)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            outputs[row].append(np.asarray(y[start : start + count]))
    return [np.concatenate(output) for output in outputs], table, pages


def assert_close(got: Sequence, expected: Sequence, dtype: DTypeLike = jnp.float32):
    """Per row, within the tolerance of the coarsest dtype that took part."""
    got, expected = ([np.asarray(y, np.float64) for y in rows] for rows in (got, expected))
    largest = max(np.abs(y).max() for y in expected)
    chex.assert_trees_all_close(got, expected, rtol=0, atol=TOLERANCE[jnp.dtype(dtype).name] * largest)


def far(got: Sequence, wrong: Sequence) -> bool:
    """Differs by far more than any rounding: a mistake as large as this one would be seen."""
    return max(np.abs(np.asarray(a, np.float64) - b).max() for a, b in zip(got, wrong, strict=True)) > 0.05


def nnx_call(module: nnx.Module) -> Callable:
    """The jitted module as `run_rows` wants it; modules of one form share their compilation."""
    graphdef, state = nnx.split(module)
    return partial(_run_nnx, graphdef, state)


@partial(quick_jit, static_argnums=0)
def _run_nnx(graphdef, state, x, pages, batch):
    return nnx.merge(graphdef, state)(x, pages, batch)


def linen_call(module: nn.Module, variables: dict) -> Callable:
    return partial(_run_linen, module, variables)


@partial(quick_jit, static_argnums=0)
def _run_linen(module, variables, x, pages, batch):
    return module.apply(variables, x, pages, batch)


def random_like(tree, seed: int):
    """Random parameters in place of all, biases, norms and sinks too: none can be left out unseen."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.4, leaf.shape), leaf.dtype), tree)


def randomized(make: Callable[[], nnx.Module], seed: int) -> nnx.Module:
    """The module that `make` makes, with random parameters."""
    module = nnx.eval_shape(make)
    nnx.update(module, random_like(nnx.state(module, nnx.Param), seed))
    return module


def weights_of(module: nnx.Module) -> dict:
    """The parameters by name, float64."""
    return as_float64(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def full_forward(
    weights: dict,
    x: np.ndarray,  # [tokens, features]
    *,
    theta: float | None = None,
    positions: np.ndarray | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    norm_first: bool = True,
) -> np.ndarray:
    """Attention of one whole row on the parameters of a module, numpy float64: [tokens, features].

    `theta`, of a rotation of whole heads, `positions` and `norm_first` (before the rotation) may also
    be wrong on purpose, to show what a test can tell apart.
    """
    tokens = len(x)
    positions = np.arange(tokens) if positions is None else positions

    def project(name: str) -> np.ndarray:
        return np.einsum("te,ehd->thd", x, weights[name]["kernel"]) + weights[name].get("bias", 0)

    def rotate(heads: np.ndarray) -> np.ndarray:
        if theta is None:
            return heads
        first, second = np.split(heads, 2, axis=-1)
        pairs = np.arange(first.shape[-1])
        turn = np.exp(1j * positions[:, None] * theta ** (-pairs / len(pairs)))[:, None, :]
        turned = (first + 1j * second) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def normalize(name: str, heads: np.ndarray) -> np.ndarray:
        norm = weights.get(f"{name}_norm", weights.get(f"{name}_ln"))
        if norm is None:
            return heads
        centered = heads - heads.mean(axis=-1, keepdims=True)
        return centered / np.sqrt(heads.var(axis=-1, keepdims=True) + 1e-6) * norm["scale"]

    def prepare(name: str) -> np.ndarray:
        heads = project(name)
        return rotate(normalize(name, heads)) if norm_first else normalize(name, rotate(heads))

    q, k, v = prepare("query"), prepare("key"), project("value")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    back = np.arange(tokens)[:, None] - np.arange(tokens)
    scores[:, (back < 0) | (back >= (tokens if window is None else window))] = -np.inf
    if "sinks" in weights:  # one more key, whose value is nothing
        sinks = np.broadcast_to(weights["sinks"][:, None, None], (*scores.shape[:2], 1))
        scores, v = np.concatenate([scores, sinks], axis=-1), np.concatenate([v, np.zeros_like(v[:1])])
    exps = np.exp(scores - scores.max(axis=-1, keepdims=True))
    heads = np.einsum("hqk,khd->qhd", exps / exps.sum(axis=-1, keepdims=True), v)
    return np.einsum("qhd,hdo->qo", heads, weights["out"]["kernel"]) + weights["out"].get("bias", 0)
