"""`paged_attention`: check the arguments, choose an implementation, call it."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from paged_jax.attention.kernel_config import KernelConfig, Problem, problem_of, unsupported
from paged_jax.attention.mosaic_compat import interpreted, kernel_unavailable
from paged_jax.attention.reference import reference_attention
from paged_jax.attention.schedule import Tiling
from paged_jax.attention.xla import xla_attention

Implementation = Literal["reference", "xla", "mosaic_hopper"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "xla", "mosaic_hopper")


class Choice(NamedTuple):
    """An implementation and why it was taken."""

    name: Implementation
    reason: str


def paged_attention_implementation(
    implementation: Implementation | None = None, problem: Problem | None = None
) -> Choice:
    """Which implementation `paged_attention` runs here, and why.

    Args:
        implementation: as in `paged_attention`.
        problem: what the shapes and dtypes of a call say (`problem_of` its arguments). None: any that the
            kernels take.

    Raises:
        ValueError: if there is no implementation of that name.
        NotImplementedError: if the one that is asked for by name cannot run here, or not on such arguments.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"paged_attention: {implementation=} is not known; use None to choose, "
            f"or one of {list(IMPLEMENTATIONS)}"
        )
    if implementation in ("reference", "xla"):
        return Choice(implementation, "asked for by name")
    obstacle = kernel_unavailable() or (None if problem is None else unsupported(problem))
    if implementation == "mosaic_hopper":
        if obstacle is not None:
            raise NotImplementedError(
                f"paged_attention: the kernel mosaic_hopper cannot run this: {obstacle}; "
                "use implementation=None to choose one that can"
            )
        return Choice(implementation, "asked for by name")
    if obstacle is not None:
        return Choice("xla", f"portable; the kernel mosaic_hopper is not taken: {obstacle}")
    if interpreted():
        return Choice("xla", "portable; the kernel mosaic_hopper would be interpreted here")
    return Choice("mosaic_hopper", "the kernel for this GPU")


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    block_tables: Int[ArrayLike, "rows max_pages_per_row"],
    lengths: Int[ArrayLike, " rows"],
    query_starts: Int[ArrayLike, " rows+1"] | None = None,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float[Array, "num_pages kv_heads page_size"] | None = None,
    v_scales: Float[Array, "num_pages kv_heads page_size"] | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    tiling: Tiling | KernelConfig | None = None,
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """Causal attention of new tokens over keys and values that lie in pages.

    The new tokens' own keys and values are in the pages already: write them first. The idea is that
    of Kwon et al. 2023, arXiv:2309.06180.

    Args:
        q: the queries of all rows' new tokens, packed one row after the other. They are the last
            tokens of their rows.
        k_pages: the keys of one layer. Slots without a live token may hold anything.
        v_pages: its values, likewise.
        block_tables: page ids, in the order of the tokens. Entries that no query can see, behind the
            length or before the window, may hold anything.
        lengths: tokens of each row, the new ones included. A row longer than its table can hold gives
            NaN under jit.
        query_starts: row r owns the tokens query_starts[r]:query_starts[r + 1]; the tokens from
            query_starts[-1] on are padding. None: one token per row, the plain decode step.
        scale: of the scores q . k; 1 / sqrt(head_dim) by default.
        sliding_window: how many positions a token sees, itself included. None: all.
        logits_soft_cap: scores become cap * tanh(scores / cap), before masking. None: no cap.
        sinks: per head a logit that takes part in the softmax and has no value.
        k_scales: factors of quantised keys, per slot and kv head.
        v_scales: of quantised values, likewise.
        return_lse: also return the natural log-sum-exp of each token's scores, sinks included.
        implementation: "mosaic_hopper", "xla", "reference", or None for the best one that works here (see
            `paged_attention_implementation`).
        tiling: sizes of the pieces of work: a `Tiling` for the implementation "xla", a `KernelConfig` for
            "mosaic_hopper"; either also chooses its implementation. None: chosen from the shapes.

    Returns:
        The output in the dtype of `q`, and with `return_lse` the log-sum-exp in float32 or wider. A
        token with nothing to attend, such as padding or the token of an empty row, gives 0 and -inf.

    Gradients exist with implementation="reference" only.

    Query head h reads kv head h // (q_heads // kv_heads). Where q and the pages differ in dtype, the
    wider is used; float32 is never computed in less.

    Raises:
        ValueError: for arguments that do not fit together; outside jit also for lengths that are
            negative or longer than the table.
        NotImplementedError: if the implementation that is asked for by name cannot run here, or not on
            such arguments.
    """
    q, k_pages, v_pages = jnp.asarray(q), jnp.asarray(k_pages), jnp.asarray(v_pages)
    block_tables, lengths = jnp.asarray(block_tables), jnp.asarray(lengths)
    query_starts = None if query_starts is None else jnp.asarray(query_starts)
    sinks, k_scales, v_scales = (None if a is None else jnp.asarray(a) for a in (sinks, k_scales, v_scales))
    _check_arrays(q, k_pages, v_pages, block_tables, lengths, query_starts, sinks, k_scales, v_scales)
    if scale is not None and jnp.ndim(scale) != 0:
        raise ValueError(f"paged_attention: scale must be one number, got {jnp.shape(scale)=}")
    if scale is not None and not isinstance(scale, jax.Array):
        scale = float(scale)  # numpy's numbers have a dtype that would spread
    if sliding_window is not None and (type(sliding_window) is not int or sliding_window < 1):
        raise ValueError(
            "paged_attention: sliding_window counts positions, the token itself included: it must be an "
            f"integer of at least 1, or None to see everything; got {sliding_window=}"
        )
    if logits_soft_cap is not None:
        if not isinstance(logits_soft_cap, Real) or not 0 < logits_soft_cap < math.inf:
            raise ValueError(
                "paged_attention: logits_soft_cap must be a number, positive and finite, or None for none; "
                f"got {logits_soft_cap=}"
            )
        logits_soft_cap = float(logits_soft_cap)
    if implementation is None and tiling is not None:
        implementation = "xla" if isinstance(tiling, Tiling) else "mosaic_hopper"
    choice = paged_attention_implementation(
        implementation, problem_of(q, k_pages, block_tables, query_starts, k_scales)
    )
    run, sizes = _implementation(choice.name)
    if tiling is not None and type(tiling) is not sizes:
        raise ValueError(
            'paged_attention: tiling belongs to implementation="xla" as a Tiling, to "mosaic_hopper" as a '
            f"KernelConfig; got {implementation=}, {tiling=}"
        )

    block_tables, lengths = block_tables.astype(jnp.int32), _saturate(lengths)
    query_starts = None if query_starts is None else query_starts.astype(jnp.int32)
    capacity = block_tables.shape[1] * k_pages.shape[2]
    too_long = lengths > capacity
    if sliding_window is not None:
        sliding_window = min(sliding_window, capacity)  # so that it fits an int32
    _check_lengths(q.shape[0], lengths, query_starts, capacity)
    lengths = jnp.where(too_long, 0, jnp.maximum(lengths, 0))
    options = {} if sizes is None else {"tiling": tiling}
    output, lse = run(
        q,
        k_pages,
        v_pages,
        block_tables,
        lengths,
        query_starts,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        **options,
    )
    # Part of such a row's keys is nowhere: nothing that looks like a result may come out.
    lost = _of_rows(too_long, q.shape[0], query_starts)
    output = jnp.where(lost[:, None, None], jnp.nan, output).astype(q.dtype)
    return (output, jnp.where(lost[:, None], jnp.nan, lse)) if return_lse else output


def _implementation(name: Implementation) -> tuple[Callable, type | None]:
    """The function, and the type of its `tiling`."""
    if name == "mosaic_hopper":
        # Only here: older versions of jax cannot import it.
        from paged_jax.attention.mosaic_hopper import mosaic_hopper_attention

        return mosaic_hopper_attention, KernelConfig
    return (xla_attention, Tiling) if name == "xla" else (reference_attention, None)


def _of_rows(flags: Array, num_tokens: int, query_starts: Array | None) -> Array:
    """The flag of each token's row; False for padding."""
    if query_starts is None:
        return flags
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    return flags.at[jnp.searchsorted(query_starts[1:], token, side="right")].get(
        mode="fill", fill_value=False
    )


def _saturate(lengths: Array) -> Array:
    """To int32 without wrapping a long length around to a short one."""
    limit = min(jnp.iinfo(lengths.dtype).max, jnp.iinfo(jnp.int32).max)
    return jnp.minimum(lengths, jnp.asarray(limit, lengths.dtype)).astype(jnp.int32)


def _check_lengths(num_tokens: int, lengths: Array, query_starts: Array | None, capacity: int) -> None:
    """Values can be checked where they are known; a traced call clips them instead."""
    if isinstance(lengths, jax.core.Tracer) or isinstance(query_starts, jax.core.Tracer):
        return
    if jnp.any(lengths < 0) or jnp.any(lengths > capacity):
        raise ValueError(
            f"paged_attention: lengths must lie in [0, max_pages_per_row * page_size = {capacity}], "
            f"got {lengths.tolist()}; give the rows wider block tables"
        )
    if query_starts is None:
        return
    counts = jnp.diff(query_starts)
    fit = query_starts[0] == 0 and query_starts[-1] <= num_tokens
    if not fit or jnp.any(counts < 0) or jnp.any(counts > lengths):
        raise ValueError(
            f"paged_attention: query_starts must rise from 0 to at most the {num_tokens} tokens of q, and "
            "a row cannot have more new tokens than its length, "
            f"got query_starts={query_starts.tolist()}, lengths={lengths.tolist()}"
        )


def _check_arrays(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    lengths: Array,
    query_starts: Array | None,
    sinks: Array | None,
    k_scales: Array | None,
    v_scales: Array | None,
) -> None:
    def expect(holds: bool, what: str, got: str) -> None:
        if not holds:
            raise ValueError(f"paged_attention: {what}, got {got}")

    expect(
        q.ndim == 3 and q.size > 0,
        "q must have shape [tokens, q_heads, head_dim], none of them 0",
        f"{q.shape=}",
    )
    pages = "[num_pages, kv_heads, page_size, head_dim]"
    expect(k_pages.ndim == 4, f"k_pages must have shape {pages}", f"{k_pages.shape=}")
    expect(
        v_pages.shape == k_pages.shape,
        "v_pages must have the shape of k_pages",
        f"{v_pages.shape=}, {k_pages.shape=}",
    )
    expect(k_pages.size > 0, "k_pages must not be empty", f"{k_pages.shape=}")
    expect(
        v_pages.dtype == k_pages.dtype,
        "v_pages must have the dtype of k_pages",
        f"{v_pages.dtype=}, {k_pages.dtype=}",
    )
    expect(jnp.issubdtype(q.dtype, jnp.floating), "q must be floating", f"{q.dtype=}")
    expect(
        (jnp.issubdtype(k_pages.dtype, jnp.floating) and k_pages.dtype.itemsize > 1) or k_scales is not None,
        "k_pages of integers, or of 8 bits, need k_scales and v_scales",
        f"{k_pages.dtype=}",
    )
    expect(
        q.shape[2] == k_pages.shape[3],
        "q and k_pages must have one head_dim",
        f"{q.shape=}, {k_pages.shape=}",
    )
    expect(
        q.shape[1] % k_pages.shape[1] == 0,
        "q_heads must be a multiple of kv_heads",
        f"q_heads={q.shape[1]}, kv_heads={k_pages.shape[1]}",
    )
    expect(
        block_tables.ndim == 2 and block_tables.size > 0 and jnp.issubdtype(block_tables.dtype, jnp.integer),
        "block_tables must be an integer array of shape [rows, max_pages_per_row], none of them 0",
        f"{block_tables.shape=}, {block_tables.dtype=}",
    )
    rows = block_tables.shape[0]
    expect(
        lengths.shape == (rows,) and jnp.issubdtype(lengths.dtype, jnp.integer),
        f"lengths must be an integer array of shape [rows={rows}]",
        f"{lengths.shape=}, {lengths.dtype=}",
    )
    if query_starts is None:
        expect(
            q.shape[0] == rows,
            f"q must have one token for each of the {rows} rows where query_starts is None",
            f"{q.shape=}; pass query_starts for any other number of tokens",
        )
    else:
        expect(
            query_starts.shape == (rows + 1,) and jnp.issubdtype(query_starts.dtype, jnp.integer),
            f"query_starts must be an integer array of shape [rows + 1 = {rows + 1}]",
            f"{query_starts.shape=}, {query_starts.dtype=}",
        )
    if sinks is not None:
        expect(
            sinks.shape == (q.shape[1],), f"sinks must have shape [q_heads={q.shape[1]}]", f"{sinks.shape=}"
        )
    expect((k_scales is None) == (v_scales is None), "k_scales and v_scales go together", "one of them")
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is not None:
            expect(
                scales.shape == k_pages.shape[:3] and jnp.issubdtype(scales.dtype, jnp.floating),
                f"{name} must be floating, [num_pages, kv_heads, page_size] = {list(k_pages.shape[:3])}",
                f"{scales.dtype} {list(scales.shape)}",
            )
