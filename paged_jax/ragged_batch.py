"""One step's tokens of all rows, laid out once and used by every layer."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, Int32

from paged_jax.page_table import PageTable, locate
from paged_jax.under_jit import as_int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """T tokens of R rows: which row and position each has, and where its keys and values go.

    The tokens are the last ones of their rows: `page_table.extend` has already made room for them.
    Padding tokens have row R, position -1 and page id NO_PAGE; nothing of them is stored.
    """

    block_tables: Int32[Array, "rows max_pages_per_row"]  # [R, M]; [T, M], one for each token, to decode
    lengths: Int32[Array, " rows"]  # of them, with this step's tokens; 0 for a row that has none in this step
    query_starts: Int32[Array, " rows+1"] | None  # row r owns tokens query_starts[r]:query_starts[r + 1]
    last_tokens: Int32[Array, " rows"]  # [R] where each row's last token stands; any index if it has none
    rows: Int32[Array, " tokens"]  # [T]
    positions: Int32[Array, " tokens"]  # [T]
    page_ids: Int32[Array, " tokens"]  # [T]
    slots: Int32[Array, " tokens"]  # [T]
    num_pages: int = dataclasses.field(metadata={"static": True})  # of the pool that the ids belong to
    page_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def packed(cls, table: PageTable, num_tokens: Int[ArrayLike, " rows"], size: int) -> "RaggedBatch":
        """The last `num_tokens[r]` tokens of every row, one row after the other, padded to `size` tokens.

        For prefill, chunks of it, and mixtures with decoding rows. A row that `extend` refused gets 0:
        its last tokens are old ones.

        Raises:
            ValueError: outside jit, if the numbers are negative, exceed a row's length or sum to more
                than `size`. Under jit, numbers are cut to the lengths, and the first row
                that does not fit gets none, nor do those after it.
        """
        num_tokens = as_int32("RaggedBatch.packed", "num_tokens", num_tokens, table.lengths.shape)
        counts = jnp.clip(num_tokens, 0, table.lengths)
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        if not isinstance(ends, jax.core.Tracer) and (ends[-1] > size or jnp.any(counts != num_tokens)):
            raise ValueError(
                f"RaggedBatch.packed: needs 0 <= num_tokens <= lengths and a sum of at most {size=}, got "
                f"num_tokens={num_tokens.tolist()}, lengths={table.lengths.tolist()}"
            )
        counts = jnp.where(ends <= size, counts, 0)
        ends = jnp.cumsum(counts, dtype=jnp.int32)

        token = jnp.arange(size, dtype=jnp.int32)
        rows = jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
        live = token < ends[-1]
        row = jnp.minimum(rows, table.max_rows - 1)
        positions = jnp.where(live, table.lengths[row] - (ends[row] - token), -1)
        page_ids, slots = locate(table, rows, positions)
        return cls(
            block_tables=table.block_tables,
            lengths=jnp.where(counts > 0, table.lengths, 0),
            query_starts=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
            last_tokens=jnp.maximum(ends - 1, 0),
            rows=rows,
            positions=positions,
            page_ids=page_ids,
            slots=slots,
            num_pages=table.num_pages,
            page_size=table.page_size,
        )

    @classmethod
    def decode(
        cls, table: PageTable, active: Bool[ArrayLike, " rows"], size: int | None = None
    ) -> "RaggedBatch":
        """The last token of every active row.

        Args:
            size: at most so many rows are active, and only they are computed: token t is that of the t-th
                active row. Without it, token r is that of row r, and padding where the row is not active.

        Raises:
            ValueError: if `active` is not a bool array of shape [R], or `size` is not positive; outside jit,
                if more rows than `size` are active. Under jit, those after them have no token.
        """
        if size is not None and size < 1:
            raise ValueError(
                f"RaggedBatch.decode: size must be at least 1, or None for all rows, got {size=}"
            )
        active = jnp.asarray(active)
        if active.dtype != bool or active.shape != table.lengths.shape:
            raise ValueError(
                f"RaggedBatch.decode: active must be a bool array of shape {list(table.lengths.shape)}, "
                f"got {active.dtype} {list(active.shape)}"
            )
        active &= table.lengths > 0
        places = jnp.arange(table.max_rows, dtype=jnp.int32)
        rows = jnp.where(active, places, table.max_rows)
        if size is not None:
            places = jnp.cumsum(active, dtype=jnp.int32) - 1
            if not isinstance(places, jax.core.Tracer) and places[-1] >= size:
                raise ValueError(f"RaggedBatch.decode: {int(places[-1]) + 1} rows are active, for {size=}")
            rows = jnp.nonzero(active, size=size, fill_value=table.max_rows)[0].astype(jnp.int32)
            places = jnp.clip(places, 0, size - 1)
        row = jnp.minimum(rows, table.max_rows - 1)
        lengths = jnp.where(rows < table.max_rows, table.lengths[row], 0)
        page_ids, slots = locate(table, rows, lengths - 1)
        return cls(
            block_tables=table.block_tables if size is None else table.block_tables[row],
            lengths=lengths,
            query_starts=None,
            last_tokens=places,
            rows=rows,
            positions=lengths - 1,
            page_ids=page_ids,
            slots=slots,
            num_pages=table.num_pages,
            page_size=table.page_size,
        )
