"""Probes for tests of anything that computes paged attention, and the invariants of a page table.

No probe needs an oracle, and each takes any callable with the arguments of `paged_attention`:
`attention(q, k_pages, v_pages, block_tables, lengths, query_starts, **options)`. A kernel, or a whole
module behind a lambda, is tested in five lines (jit it, the probes call it often):

    inputs = paged_inputs(lengths=[1, 3, 5, 8], query_lens=[1, 0, 5, 2], page_size=4)
    check_mean_position(attention, inputs)  # nothing is left out, counted twice or read from elsewhere
    check_own(attention, inputs)  # every row reads its own pages, every query head its own kv head
    check_poison(attention, inputs)  # what holds no live token cannot be seen
    check_twin(attention, inputs)  # nothing depends on page ids, pool, table, batch or chunk

Inputs can as well be taken from a running program: `PagedInputs(q, pages.k_pages[0], pages.v_pages[0],
table.block_tables, table.lengths)`; and a loop that moves pages calls `check_page_table(table)` after each
step. A check that fails raises AssertionError, naming the first token, page or row that is wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, DTypeLike, Float, Int, Int32

from paged_jax.page_table import NO_PAGE, PageTable

Attention = Callable[..., Any]


class PagedInputs(NamedTuple):
    """The arrays of one attention call, in the order of the arguments of `paged_attention`."""

    q: Float[Array, "tokens q_heads head_dim"]
    k_pages: Float[Array, "num_pages kv_heads page_size head_dim"]
    v_pages: Float[Array, "num_pages kv_heads page_size head_dim"]
    block_tables: Int32[Array, "rows max_pages_per_row"]
    lengths: Int32[Array, " rows"]
    query_starts: Int32[Array, " rows+1"] | None = None


def paged_inputs(
    lengths: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    page_size: int = 4,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: DTypeLike = jnp.float32,
    max_pages_per_row: int | None = None,
    seed: int = 0,
) -> PagedInputs:
    """Normally distributed queries, keys and values in shuffled pages, with NaN in every other slot.

    Table entries behind a row's last page are stale: negative, far too large, or another row's page.

    Args:
        lengths: tokens of each row.
        query_lens: new tokens of each row. None: one each, and no `query_starts`.
        max_pages_per_row: by default one more than the longest row needs.

    Examples:
        >>> inputs = paged_inputs(lengths=[5, 2], page_size=4)
        >>> inputs.q.shape, inputs.k_pages.shape, inputs.block_tables.shape
        ((2, 4, 8), (6, 2, 4, 8), (2, 3))
    """
    rng = np.random.default_rng(seed)
    needed = [-(-length // page_size) for length in lengths]
    num_pages = sum(needed) + 3
    page_ids = rng.permutation(num_pages)
    width = max(needed) + 1 if max_pages_per_row is None else max_pages_per_row
    tables = rng.choice([NO_PAGE, 2**31 - 1, num_pages + 5, page_ids[0]], (len(lengths), width))
    for row, count in enumerate(needed):
        tables[row, :count], page_ids = page_ids[:count], page_ids[count:]
    starts = None if query_lens is None else jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32)
    num_tokens = len(lengths) if query_lens is None else sum(query_lens)
    pool = (num_pages, kv_heads, page_size, head_dim)
    arrays = (rng.normal(size=shape) for shape in ((num_tokens, q_heads, head_dim), pool, pool))
    q, k_pages, v_pages = (jnp.asarray(array, dtype) for array in arrays)
    rows = (jnp.asarray(tables, jnp.int32), jnp.asarray(lengths, jnp.int32), starts)
    return poison(PagedInputs(q, k_pages, v_pages, *rows))


def poison(inputs: PagedInputs, value: float = np.nan, sliding_window: int | None = None) -> PagedInputs:
    """The same inputs with `value` in every slot without a live token.

    Pages wholly before the window of their row's first new token count as such. Pages of integers, which
    have no NaN, get their largest instead.

    Examples:
        >>> int(jnp.isnan(poison(paged_inputs(lengths=[5, 2])).v_pages[:, 0, :, 0]).sum())  # 6 * 4 - 7
        17
    """
    return _poisoned(inputs, _slot_positions(inputs, sliding_window) >= 0, value)


def mean_position(inputs: PagedInputs) -> PagedInputs:
    """Keys of 0, and as its value each token's position: the output is the mean position of what was read.

    Examples:
        >>> from paged_jax import paged_attention
        >>> paged_attention(*mean_position(paged_inputs([17, 3])), sliding_window=8)[:, 0, 0].tolist()
        [12.5, 1.0]
    """
    positions = np.maximum(_slot_positions(inputs), 0)[:, None, :, None]
    return _uniform(inputs, np.broadcast_to(positions, inputs.v_pages.shape))


def own(inputs: PagedInputs) -> PagedInputs:
    """Keys of 0, and values that name who was read: even channels the page id, odd ones the kv head.

    Examples:
        >>> from paged_jax import paged_attention
        >>> paged_attention(*own(paged_inputs([17, 3], q_heads=4, kv_heads=2)))[0, :, 1].tolist()
        [0.0, 0.0, 1.0, 1.0]
    """
    page_ids, kv_heads, _, channel = np.indices(inputs.v_pages.shape)
    return _uniform(inputs, np.where(channel % 2 == 0, page_ids, kv_heads))


def check_mean_position(attention: Attention, inputs: PagedInputs, **options: Any) -> None:
    """Every token gets the mean of just the positions that it sees.

    Examples:
        >>> from paged_jax import paged_attention
        >>> check_mean_position(paged_attention, paged_inputs([17, 3]), sliding_window=8)
    """
    _check_uniform("mean position", attention, mean_position(inputs), options)


def check_own(attention: Attention, inputs: PagedInputs, **options: Any) -> None:
    """Every token reads the pages of its own row, and every query head h the kv head h // group.

    Examples:
        >>> from paged_jax import paged_attention
        >>> check_own(paged_attention, paged_inputs([17, 3], q_heads=4, kv_heads=2))
    """
    _check_uniform("page ids and kv heads", attention, own(inputs), options)


def check_poison(attention: Attention, inputs: PagedInputs, **options: Any) -> None:
    """NaN in the slots without a live token changes no bit of the result, log-sum-exp included if asked for.

    In their scales as well, where options give some.

    Examples:
        >>> from paged_jax import paged_attention
        >>> check_poison(paged_attention, paged_inputs([17, 3]), return_lse=True)
    """
    live = _slot_positions(inputs, options.get("sliding_window")) >= 0

    def attend(value: float) -> list[Array]:
        scales = {name: _where_dead(live, value, array) for name, array in _scales(options).items()}
        return jax.tree.leaves(attention(*_poisoned(inputs, live, value), **{**options, **scales}))

    for expected, got in zip(attend(0.0), attend(np.nan), strict=True):
        _check_equal("NaN in slots that hold no live token", got, expected)


def check_twin(
    attention: Attention, inputs: PagedInputs, *, rtol: float | None = None, **options: Any
) -> None:
    """A token's result does not depend on what is none of its business.

    Other page ids must give the same bits. A larger pool and a wider table, and each token alone as a
    decode step, may divide the work differently: they must agree to `rtol` of the token's largest number.

    Args:
        rtol: 0 asks for the same bits. By default 1e-5, or two roundings of a narrower result.

    Examples:
        >>> from paged_jax import paged_attention
        >>> check_twin(paged_attention, paged_inputs([17, 3]))
    """

    def attend(inputs: PagedInputs, options: dict[str, Any]) -> list[Array]:
        return jax.tree.leaves(attention(*inputs, **options))

    def check(what: str, got: list[Array], expected: list[Any], rtol: float) -> None:
        _check_equal(what, got[0], expected[0], rtol)
        for lse in zip(got[1:], expected[1:], strict=True):
            _check_equal(f"{what}, log-sum-exp", *lse, rtol, atol=rtol)

    whole = attend(inputs, options)
    rtol = max(1e-5, 2 * float(jnp.finfo(whole[0].dtype).eps)) if rtol is None else rtol
    num_pages = inputs.k_pages.shape[0]
    new_ids = np.random.default_rng(0).permutation(num_pages)
    check("other page ids", attend(*_renumbered(inputs, options, new_ids, num_pages, 0)), whole, 0.0)
    roomy = _renumbered(inputs, options, 2 * new_ids, 2 * num_pages, 3)
    check("a larger pool and a wider table", attend(*roomy), whole, rtol)
    q, tables = np.asarray(inputs.q), np.asarray(inputs.block_tables)
    results = [np.asarray(array) for array in whole]
    for token, row, position in zip(*_tokens(inputs), strict=True):
        table, length = jnp.asarray(tables[row][None]), jnp.asarray([max(0, position + 1)], jnp.int32)
        alone = inputs._replace(
            q=jnp.asarray(q[token][None]), block_tables=table, lengths=length, query_starts=None
        )
        expected = [array[token][None] for array in results]
        check(f"token {token} alone", attend(alone, options), expected, rtol)


def check_page_table(table: PageTable, pins: ArrayLike | None = None) -> None:
    """Pages are conserved: each is free, or held by just those who say so.

    Args:
        pins: the page ids that the caller has pinned, one entry per pin; with it every count of
            holders must be exact. None: unknown, so a count may exceed the rows that hold the page.

    Examples:
        >>> from paged_jax import PageTable, page_table
        >>> table, _ = page_table.extend(PageTable.create(8, 4, max_rows=2, max_pages_per_row=3), [9, 4])
        >>> check_page_table(table, pins=[])
    """
    tables, lengths, counts = (np.asarray(a) for a in (table.block_tables, table.lengths, table.ref_counts))
    num_free, num_pages, width = int(table.num_free), len(counts), tables.shape[1]
    free, holders = np.asarray(table.free_stack)[:num_free], np.zeros(num_pages, int)

    def expect(holds: Any, what: str) -> None:
        if not np.all(holds):
            raise AssertionError(f"check_page_table: {what}")

    expect(0 <= num_free <= num_pages, f"{num_free=} is not between 0 and {num_pages=}")
    expect((free >= 0) & (free < num_pages), f"of {num_pages} pages, these cannot be free: {free}")
    for row, (length, entries) in enumerate(zip(lengths, tables, strict=True)):
        used = -(-length // table.page_size)
        expect(0 <= used <= width, f"row {row} has length {length}, room for {width * table.page_size}")
        expect(entries[used:] == NO_PAGE, f"row {row} of length {length} holds pages past its end: {entries}")
        kept = entries[:used] != NO_PAGE
        expect(kept[:-1] <= kept[1:], f"row {row} has a hole behind a page that it holds: {entries}")
        held = entries[:used][kept]
        expect((held >= 0) & (held < num_pages), f"of {num_pages} pages, row {row} cannot hold: {held}")
        expect(len(set(held)) == len(held), f"row {row} holds a page twice: {held}")
        holders[held] += 1
    if pins is not None:
        holders += np.bincount(np.asarray(pins, int), minlength=num_pages)
    times_free = np.bincount(free, minlength=num_pages)
    right = counts >= holders if pins is None else counts == holders
    for page in np.flatnonzero(~right | (times_free != (counts == 0))):
        known = f"{'at least ' if pins is None else ''}{holders[page]} holders"
        expect(False, f"page {page} has {known}, counts {counts[page]} and is free {times_free[page]} times")


def _tokens(inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each token that is not padding, its row, and its position: negative where nothing can be attended."""
    lengths = np.asarray(inputs.lengths)
    starts = np.arange(len(lengths) + 1) if inputs.query_starts is None else np.asarray(inputs.query_starts)
    tokens = np.arange(starts[0], starts[-1])
    rows = np.repeat(np.arange(len(lengths)), np.diff(starts))
    return tokens, rows, lengths[rows] - (starts[rows + 1] - tokens)


def _slot_positions(inputs: PagedInputs, window: int | None = None) -> Int[np.ndarray, "pages page_size"]:
    """The position of the token in each slot; -1 where there is none, or the window has left the page."""
    num_pages, _, page_size, _ = inputs.k_pages.shape
    slots = np.full((num_pages, page_size), -1)
    _, rows, positions = _tokens(inputs)
    for row, table in enumerate(np.asarray(inputs.block_tables)):
        position = np.arange(int(inputs.lengths[row]))
        if window is not None and row in rows:
            window_start = max(0, min(positions[rows == row]) + 1 - window)
            position = position[position // page_size >= window_start // page_size]
        page_ids = table[position // page_size]
        held = (page_ids >= 0) & (page_ids < num_pages)
        slots[page_ids[held], position[held] % page_size] = position[held]
    return slots


def _uniform(inputs: PagedInputs, values: np.ndarray) -> PagedInputs:
    q, keys = np.ones(inputs.q.shape, inputs.q.dtype), np.zeros(values.shape)
    k_pages, v_pages = (jnp.asarray(array, inputs.v_pages.dtype) for array in (keys, values))
    return inputs._replace(q=jnp.asarray(q), k_pages=k_pages, v_pages=v_pages)


def _scales(options: dict[str, Any]) -> dict[str, ArrayLike]:
    """Those of quantised pages, [num_pages, kv_heads, page_size], if there are any."""
    return {name: options[name] for name in ("k_scales", "v_scales") if options.get(name) is not None}


def _poisoned(inputs: PagedInputs, live: Bool[np.ndarray, "pages page_size"], value: float) -> PagedInputs:
    k_pages, v_pages = (_where_dead(live, value, pages) for pages in inputs[1:3])
    return inputs._replace(k_pages=k_pages, v_pages=v_pages)


def _where_dead(live: Bool[np.ndarray, "pages page_size"], value: float, pool: ArrayLike) -> Array:
    """The pool, pages or scales, with `value` in the slots that are not live."""
    pool = np.asarray(pool)
    live = live.reshape(live.shape[0], 1, live.shape[1], *[1] * (pool.ndim - 3))
    return jnp.asarray(np.where(live, pool, _as_dtype(value, pool.dtype)))


def _as_dtype(value: float, dtype: np.dtype) -> np.ndarray:
    """The value, and for NaN in integers their largest."""
    is_lost = np.isnan(value) and np.issubdtype(dtype, np.integer)
    return np.asarray(np.iinfo(dtype).max if is_lost else value, dtype)


def _renumbered(
    inputs: PagedInputs, options: dict[str, Any], new_ids: np.ndarray, num_pages: int, added_width: int
) -> tuple[PagedInputs, dict[str, Any]]:
    """Page p at new_ids[p] of a pool of `num_pages`, NaN elsewhere; table entries that name no page stay."""
    tables = np.pad(np.asarray(inputs.block_tables), ((0, 0), (0, added_width)), constant_values=NO_PAGE)
    valid = (tables >= 0) & (tables < len(new_ids))
    tables[valid] = new_ids[tables[valid]]

    def moved(pool: ArrayLike) -> Array:
        pool = np.asarray(pool)
        new = np.full((num_pages, *pool.shape[1:]), _as_dtype(np.nan, pool.dtype))
        new[new_ids] = pool
        return jnp.asarray(new)

    scales = {name: moved(array) for name, array in _scales(options).items()}
    k_pages, v_pages = (moved(pages) for pages in inputs[1:3])
    inputs = inputs._replace(k_pages=k_pages, v_pages=v_pages, block_tables=jnp.asarray(tables))
    return inputs, {**options, **scales}


def _check_uniform(what: str, attention: Attention, inputs: PagedInputs, options: dict[str, Any]) -> None:
    """With keys of 0 every token must give the plain mean of the values that it sees."""
    window = options.get("sliding_window")
    v_pages, tables = np.asarray(inputs.v_pages, np.float64), np.asarray(inputs.block_tables)
    if "v_scales" in (scales := _scales(options)):
        v_pages = v_pages * np.asarray(scales["v_scales"], np.float64)[..., None]
    sinks = options.get("sinks")
    added = 0.0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[:, None]  # beside ones
    page_size, group = v_pages.shape[2], inputs.q.shape[1] // v_pages.shape[1]
    expected = np.zeros(inputs.q.shape)
    for token, row, position in zip(*_tokens(inputs), strict=True):
        seen = np.arange(0 if window is None else max(0, position + 1 - window), position + 1)
        if seen.size:
            values = v_pages[tables[row, seen // page_size], :, seen % page_size]
            expected[token] = np.repeat(values.sum(axis=0), group, axis=0) / (seen.size + added)
    output = jax.tree.leaves(attention(*inputs, **options))[0]
    # One rounding to the dtype of the result, and sums in float32.
    _check_equal(what, output, expected, float(jnp.finfo(output.dtype).eps) / 2 + 1e-6)


def _check_equal(
    what: str, got: ArrayLike, expected: ArrayLike, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Equal per token to `rtol` of the token's largest number, and `atol`; with 0 equal in every bit."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        raise AssertionError(f"{what}: expected shape {expected.shape}, got {got.shape}")
    for token, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.tobytes() == b.tobytes():
            continue
        difference = np.abs(np.float64(a) - np.float64(b))
        limit = rtol * np.max(np.abs(np.float64(b))) + atol
        if rtol == 0 or not np.all(difference <= limit):
            raise AssertionError(f"{what}: token {token} gives\n{a}\nexpected\n{b}")
