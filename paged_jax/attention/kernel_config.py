"""Sizes of a kernel's pieces of work: what they must satisfy, and which ones the shapes call for.

Nothing here depends on an architecture except the constants of the table below; nothing imports Pallas.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

WARPGROUP_ROWS = 64
"""Rows of one matrix instruction of a Hopper warpgroup."""

SHARED_MEMORY = 232_448
"""Bytes of shared memory a block may have on Hopper (227 KiB)."""

SHARED_MEMORY_OF_TWO = 115_712
"""Bytes each of two blocks may have on one processor: half of 228 KiB, less the 1 KiB the driver keeps."""

PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200."""

OVERHEAD = 2560
"""Bytes for barriers, and for buffers to begin at multiples of 1024."""

SPLIT_OVERHEAD = 128
"""Tokens that could be read in the time a split takes to start, to drain, and to be merged."""

MOST_SPLITS = 64

CONVERTED_STAGES = 2
"""Steps of quantised pages that stand converted in shared memory: one in use, one being made."""


class Problem(NamedTuple):
    """What is known of a call when it is compiled."""

    num_tokens: int
    num_rows: int
    kv_heads: int
    group: int  # query heads that share a kv head
    head_dim: int
    page_size: int
    max_pages_per_row: int
    q_dtype: DTypeLike
    page_dtype: DTypeLike
    quantised: bool  # the pages have scales
    decode: bool  # one token a row


def problem_of(
    q: Array, k_pages: Array, block_tables: Array, query_starts: Array | None, k_scales: Array | None
) -> Problem:
    """The arguments of `paged_attention`, or anything with their shapes and dtypes."""
    num_tokens, q_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    return Problem(
        num_tokens=num_tokens,
        num_rows=block_tables.shape[0],
        kv_heads=kv_heads,
        group=q_heads // kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_pages_per_row=block_tables.shape[1],
        q_dtype=q.dtype,
        page_dtype=k_pages.dtype,
        quantised=k_scales is not None,
        decode=query_starts is None,
    )


@dataclass(frozen=True)
class KernelConfig:
    """Sizes of the GPU kernel's pieces of work. With the same ones, a row has the same bits in any batch.

    Raises:
        ValueError: if a size is not positive, or not one that the matrix instructions take.
    """

    tile_tokens: int  # query tokens a tile; with the heads of their group they are its rows
    kv_step: int  # keys and values a step, a multiple of 16
    stages: int  # steps in flight between memory and the matrix units
    compute_warpgroups: int = 1  # of 64 rows each
    num_splits: int = 1  # parts a tile's kv range is cut into, merged by log-sum-exp

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"KernelConfig: {name} must be at least 1, got {name}={value}")
        if self.kv_step % 16 or self.kv_step > 256:
            raise ValueError(
                f"KernelConfig: kv_step must be a multiple of 16 of at most 256, got kv_step={self.kv_step}"
            )
        if self.compute_warpgroups > 2:
            raise ValueError(
                f"KernelConfig: compute_warpgroups must be 1 or 2, got {self.compute_warpgroups}"
            )

    def heads_per_tile(self, group: int) -> int:
        """Query heads of a kv head in a tile: the whole group, or an even part where it has too many rows."""
        parts = math.ceil(group / (WARPGROUP_ROWS * self.compute_warpgroups))
        return math.ceil(group / parts)

    def tile_rows(self, group: int) -> int:
        """Rows of a tile that are read and written: of one warpgroup just the used ones, in eights."""
        if self.compute_warpgroups > 1:
            return WARPGROUP_ROWS * self.compute_warpgroups
        return math.ceil(self.tile_tokens * self.heads_per_tile(group) / 8) * 8

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of shared memory a block takes."""
        q_tile = WARPGROUP_ROWS * self.compute_warpgroups * problem.head_dim * 2
        step = 2 * self.kv_step * problem.head_dim  # elements of keys and values
        if problem.quantised:
            pages = step * (2 * CONVERTED_STAGES + self.stages)
            scales = 2 * 4 * self.kv_step * (self.stages + CONVERTED_STAGES)
        else:
            pages, scales = step * 2 * self.stages, 0
        lse = 4 * WARPGROUP_ROWS * self.compute_warpgroups
        return q_tile + pages + scales + lse + OVERHEAD

    def check(self, problem: Problem) -> None:
        """Refuses a config that the problem cannot be cut into.

        Raises:
            ValueError: naming the sizes, and the bytes of shared memory where there are too many.
        """
        rows = self.tile_tokens * self.heads_per_tile(problem.group)
        limit = WARPGROUP_ROWS * self.compute_warpgroups
        if rows > limit:
            raise ValueError(
                f"KernelConfig: a tile has at most 64 rows a warpgroup = {limit}, got tile_tokens="
                f"{self.tile_tokens} of {self.heads_per_tile(problem.group)} heads = {rows}"
            )
        if self.kv_step % problem.page_size and problem.page_size % self.kv_step:
            raise ValueError(
                "KernelConfig: kv_step must hold whole pages, or divide a page, "
                f"got kv_step={self.kv_step}, page_size={problem.page_size}"
            )
        if (needed := self.shared_memory(problem)) > SHARED_MEMORY:
            raise ValueError(
                f"KernelConfig: needs {needed} bytes of shared memory and a block has {SHARED_MEMORY}; "
                f"use fewer stages or a smaller kv_step, got {self}"
            )


def unsupported(problem: Problem) -> str | None:
    """Why the kernel does not take this call; None if it does."""
    q_dtype, page_dtype = jnp.dtype(problem.q_dtype), jnp.dtype(problem.page_dtype)
    if q_dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes queries of bfloat16 or float16, not {q_dtype}"
    if page_dtype not in ((jnp.int8, jnp.float8_e4m3fn) if problem.quantised else (q_dtype,)):
        return f"it takes pages of {q_dtype}, or int8 and float8_e4m3fn with scales, not {page_dtype}"
    if problem.head_dim % 16 or problem.head_dim > 256:
        return f"it takes a head_dim that is a multiple of 16, up to 256, not {problem.head_dim}"
    if not _kv_steps(problem.page_size):
        return f"it takes pages of 8, 24, and multiples of 16 up to 256 slots, not {problem.page_size}"
    return None


def _kv_steps(page_size: int) -> list[int]:
    """The steps that hold whole pages or divide one, and that the matrix instructions take."""
    if (page_size % 16 and page_size not in (8, 24)) or page_size > 256:
        return []  # other multiples of 8 need steps that are too long for wide heads
    return [step for step in range(16, 129, 16) if step % page_size == 0 or page_size % step == 0]


def choose_config(problem: Problem) -> KernelConfig:
    """The config that the shapes call for; docs/concepts/kernel.md has the reasons.

    Rows that decode, alone or nearly so, are bound by memory: one warpgroup of 64 rows computes, steps are
    short enough that two blocks share a processor, and one's copies hide the other's arithmetic.
    Prompts are bound by arithmetic: 128 rows share each key that is read.
    """
    query_tokens = 1 if problem.decode else max(1, problem.num_tokens // problem.num_rows)
    compute_warpgroups = 1 if query_tokens * problem.group <= WARPGROUP_ROWS else 2
    heads_per_tile = KernelConfig(1, 16, 1, compute_warpgroups).heads_per_tile(problem.group)
    tile_tokens = max(1, WARPGROUP_ROWS * compute_warpgroups // heads_per_tile)
    if problem.decode:
        tile_tokens = 1
    elif compute_warpgroups == 1:  # not a whole tile for each row that decodes beside another's prompt
        tile_tokens = min(tile_tokens, max(2 * query_tokens, 8 // heads_per_tile))
    two_blocks = compute_warpgroups == 1 and problem.head_dim <= (112 if problem.quantised else 128)
    if two_blocks:
        target = 64 if problem.head_dim <= 64 and not problem.quantised else 32
    else:
        target = 128 if compute_warpgroups == 2 and problem.head_dim <= 128 and not problem.quantised else 64
    budget = SHARED_MEMORY_OF_TWO if two_blocks else SHARED_MEMORY

    def config(kv_step: int, stages: int, num_splits: int = 1) -> KernelConfig:
        return KernelConfig(tile_tokens, kv_step, stages, compute_warpgroups, num_splits)

    def most_stages(kv_step: int) -> int:
        fit = (n for n in range(1, 9) if config(kv_step, n).shared_memory(problem) <= budget)
        return max(fit, default=0)

    def distance(kv_step: int) -> float:
        """From the target in doublings; one that is no multiple of 32 has narrow shared memory patterns."""
        return abs(math.log2(kv_step / target)) + (kv_step % 32 > 0)

    # One stage to load while another is worked on.
    kv_step = min((step for step in _kv_steps(problem.page_size) if most_stages(step) > 1), key=distance)
    tiles = problem.num_tokens
    if tile_tokens > 1:
        tiles = problem.num_tokens // tile_tokens + min(problem.num_rows, problem.num_tokens)
    blocks = tiles * problem.kv_heads * math.ceil(problem.group / heads_per_tile)
    at_once = PROCESSORS * (2 if two_blocks else 1)
    capacity = problem.max_pages_per_row * problem.page_size

    def duration(num_splits: int) -> float:
        """Of the longest rows there can be, in tokens: blocks that have no place wait for the next wave."""
        waves = math.ceil(blocks * num_splits / at_once)
        return waves * (capacity / num_splits + SPLIT_OVERHEAD)

    num_splits = min(range(1, min(MOST_SPLITS, math.ceil(capacity / kv_step)) + 1), key=duration)
    return config(kv_step, most_stages(kv_step), num_splits)
