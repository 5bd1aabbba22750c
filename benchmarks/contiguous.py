"""A server without pages, to hold the engine against: every request reserves `max_length` contiguous slots.

The model's own projections, norms and MLPs and the package's sampler, over caches
[rows, kv_heads, max_length, head_dim]. It does what it can within that layout: prompts are packed into
chunks together with decoding rows, attention reads a row's slots only up to its length, and the caches are
donated and updated in place in a loop that stays on the device until a row ends. What it cannot do is give
the slots that a request does not use to another one.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from contiguous_model import Cache, forward, layout_step
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from paged_jax.kv_pages import default_dtype
from paged_jax.models import Llama
from paged_jax.sampling import Sampling, penalize, sample
from paged_jax.under_jit import check_sizes


@dataclass(frozen=True)
class Served:
    """What became of one request; times in seconds from the call of `generate`."""

    token_ids: tuple[int, ...]
    first_token_seconds: float
    seconds: float
    wasted_slots: int  # reserved and never written


@dataclass(frozen=True)
class Serving:
    """The requests in the order of their prompts."""

    requests: list[Served]
    seconds: float
    peak_concurrent: int  # most requests that were in rows at once

    @property
    def wasted_slots(self) -> int:
        return sum(request.wasted_slots for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(request.token_ids) for request in self.requests) / self.seconds


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rows:
    tokens: Int32[Array, "rows max_length"]  # prompt and new tokens
    num_tokens: Int32[Array, " rows"]  # how many of them are known
    lengths: Int32[Array, " rows"]  # how many of them are in the cache
    prompt_lens: Int32[Array, " rows"]
    max_tokens: Int32[Array, " rows"]  # where a row ends at the latest
    running: Bool[Array, " rows"]
    sampling: Sampling


class ContiguousServer:
    """`max_rows` requests at a time, each with `max_length` slots of its own from beginning to end."""

    def __init__(
        self,
        model: Llama,
        max_rows: int,
        max_length: int,
        *,
        chunk_sizes: Sequence[int] = (64, 128, 192, 256),
        dtype: DTypeLike | None = None,
    ):
        """
        Args:
            chunk_sizes: tokens of a step that takes up prompts, ascending; one compilation each.
            dtype: of keys and values; float32 on CPU and bfloat16 elsewhere by default.

        Raises:
            ValueError: for sizes below 1, and chunks with no room for a token of every row.
        """
        check_sizes("ContiguousServer", max_rows=max_rows, max_length=max_length)
        if list(chunk_sizes) != sorted(chunk_sizes) or chunk_sizes[-1] <= max_rows:
            raise ValueError(
                "ContiguousServer: chunk_sizes must ascend to more than one token a row, "
                f"got {chunk_sizes=} for {max_rows=}"
            )
        config = model.config
        shape = (max_rows, config.num_kv_heads, max_length, config.head_dim)
        dtype = default_dtype() if dtype is None else dtype
        self._graph, self._parameters = nnx.split(model)
        self._chunk_sizes = tuple(chunk_sizes)
        self._cache: Cache = tuple(
            (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
        )

    @property
    def cache_bytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves(self._cache))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        stop_token_ids: Sequence[int] = (),
        sampling: Sampling | None = None,
        continuous: bool = True,
    ) -> Serving:
        """Continues every prompt.

        Args:
            max_new_tokens: of each prompt.
            sampling: settings of each prompt; greedy by default.
            continuous: a row takes the next request as soon as it is free. Otherwise a batch of requests
                runs until the last of them has ended (static batching).

        Raises:
            ValueError: for a request that does not fit into a row.
        """
        num_rows, _, max_length, _ = self._cache[0][0].shape
        for prompt, limit in zip(prompts, max_new_tokens, strict=True):
            if not prompt or limit < 1 or len(prompt) + limit - 1 > max_length:
                raise ValueError(
                    "ContiguousServer: a request needs at least one token and one new one, and all but the "
                    f"last within {max_length=}, got {len(prompt)} + {limit}"
                )
        sampling = Sampling.create(len(prompts)) if sampling is None else sampling
        queue = _Queue(prompts, np.asarray(max_new_tokens), jax.tree.map(np.asarray, sampling))
        stop_tokens = jnp.asarray(stop_token_ids, jnp.int32)
        rows = _empty_rows(num_rows, max_length + 1)
        served: dict[int, Served] = {}
        first_seconds: dict[int, float] = {}
        request_of: dict[int, int] = {}  # of each row in use
        peak_concurrent = 0
        began = time.perf_counter()
        while queue.waiting or request_of:
            free = [row for row in range(num_rows) if row not in request_of]
            if queue.waiting and free and (continuous or len(free) == num_rows):
                rows, joined = queue.admit(rows, free)
                request_of |= joined
                peak_concurrent = max(peak_concurrent, len(request_of))
            lengths, num_tokens, prompt_lens = jax.device_get(
                (rows.lengths, rows.num_tokens, rows.prompt_lens)
            )
            in_use = list(request_of)
            in_prompt = np.any(lengths[in_use] < prompt_lens[in_use])
            wanted = int(np.sum((num_tokens - lengths)[in_use]))
            rows, self._cache = _run(
                self._graph,
                self._parameters,
                rows,
                self._cache,
                stop_tokens,
                chunk=self._chunk_for(wanted) if in_prompt else None,
            )
            texts, num_tokens, running = jax.device_get((rows.tokens, rows.num_tokens, rows.running))
            now = time.perf_counter() - began
            ended = [row for row in in_use if not running[row]]
            for row in in_use:
                if num_tokens[row] > prompt_lens[row]:
                    first_seconds.setdefault(request_of[row], now)
            for row in ended:
                request = request_of.pop(row)
                served[request] = Served(
                    token_ids=tuple(texts[row, prompt_lens[row] : num_tokens[row]].tolist()),
                    first_token_seconds=first_seconds[request],
                    seconds=now,
                    wasted_slots=max_length - (int(num_tokens[row]) - 1),
                )
        seconds = time.perf_counter() - began
        return Serving([served[request] for request in range(len(prompts))], seconds, peak_concurrent)

    def _chunk_for(self, wanted: int) -> int:
        return next((size for size in self._chunk_sizes if size >= wanted), self._chunk_sizes[-1])


class _Queue:
    """Requests in the order of their numbers, on the host."""

    def __init__(self, prompts: Sequence[Sequence[int]], max_new_tokens: np.ndarray, sampling: Sampling):
        self.waiting = deque(range(len(prompts)))
        self._prompts, self._max_new_tokens, self._sampling = prompts, max_new_tokens, sampling

    def admit(self, rows: _Rows, free: Sequence[int]) -> tuple[_Rows, dict[int, int]]:
        """Puts the next requests into free rows; also returns the request of each such row."""
        num_rows, max_tokens = rows.tokens.shape
        joined = {row: self.waiting.popleft() for row in free[: len(self.waiting)]}
        places, requests = list(joined), list(joined.values())
        mask, tokens = np.zeros(num_rows, bool), np.zeros((num_rows, max_tokens), np.int32)
        mask[places] = True
        prompt_lens = np.zeros(num_rows, np.int32)
        prompt_lens[places] = [len(self._prompts[request]) for request in requests]
        limits = np.zeros(num_rows, np.int32)
        limits[places] = prompt_lens[places] + self._max_new_tokens[requests]
        for row, request in joined.items():
            tokens[row, : prompt_lens[row]] = self._prompts[request]

        def spread(setting: np.ndarray) -> np.ndarray:
            values = np.zeros(num_rows, setting.dtype)
            values[places] = setting[requests]
            return values

        new = _Rows(
            tokens=tokens,
            num_tokens=prompt_lens,
            lengths=np.zeros(num_rows, np.int32),
            prompt_lens=prompt_lens,
            max_tokens=limits,
            running=mask,
            sampling=jax.tree.map(spread, self._sampling),
        )
        return _admit(rows, new, mask), joined


def _empty_rows(num_rows: int, max_tokens: int) -> _Rows:
    def zeros(dtype: DTypeLike) -> Array:
        return jnp.zeros(num_rows, dtype)

    return _Rows(
        tokens=jnp.zeros((num_rows, max_tokens), jnp.int32),
        num_tokens=zeros(jnp.int32),
        lengths=zeros(jnp.int32),
        prompt_lens=zeros(jnp.int32),
        max_tokens=zeros(jnp.int32),
        running=zeros(bool),
        sampling=jax.tree.map(jnp.copy, Sampling.create(num_rows)),
    )


@partial(jax.jit, donate_argnums=0)
def _admit(rows: _Rows, new: _Rows, mask: Bool[Array, " rows"]) -> _Rows:
    def put(old: Array, new: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return jax.tree.map(put, rows, new)


@partial(jax.jit, static_argnames=("graph", "chunk"), donate_argnames=("rows", "cache"))
def _run(
    graph: nnx.GraphDef[Llama],
    parameters: nnx.State,
    rows: _Rows,
    cache: Cache,
    stop_tokens: Int32[Array, " stops"],
    *,
    chunk: int | None,
) -> tuple[_Rows, Cache]:
    """One step of `chunk` packed tokens; without, decode steps until a row ends."""
    model = nnx.merge(graph, parameters)
    num_rows = rows.lengths.shape[0]

    def step(carry: tuple[_Rows, Cache]) -> tuple[_Rows, Cache]:
        rows, cache = carry
        wanted = jnp.where(rows.running, rows.num_tokens - rows.lengths, 0)
        # Decoding rows go first, prompts share the rest.
        of_prompts = jnp.where(wanted > 1, wanted, 0)
        before = jnp.cumsum(of_prompts, dtype=jnp.int32) - of_prompts
        room = (num_rows if chunk is None else chunk) - jnp.sum(wanted == 1, dtype=jnp.int32)
        taken = jnp.where(wanted > 1, jnp.clip(room - before, 0, wanted), wanted)
        lengths = rows.lengths + taken
        layout = layout_step(taken, lengths, chunk, model.config)
        hidden, cache = forward(model, rows.tokens[layout.row, layout.positions], cache, layout)
        ready = (taken > 0) & (lengths == rows.num_tokens)
        rows = dataclasses.replace(rows, lengths=lengths)
        return _append(rows, model.logits(hidden[layout.last_tokens]), ready, stop_tokens), cache

    if chunk is not None:
        return step((rows, cache))
    before = rows.running
    return lax.while_loop(
        lambda carry: jnp.any(before) & jnp.all(carry[0].running == before), step, (rows, cache)
    )


def _append(
    rows: _Rows, logits: Float[Array, "rows vocab"], ready: Bool[Array, " rows"], stop_tokens: Array
) -> _Rows:
    """Samples the next token of every row whose known tokens are all in the cache."""
    logits = penalize(logits, rows.sampling, rows.tokens, rows.prompt_lens, rows.num_tokens)
    new = sample(logits, rows.sampling, rows.num_tokens)
    row = jnp.arange(rows.tokens.shape[0], dtype=jnp.int32)
    tokens = rows.tokens.at[row, jnp.where(ready, rows.num_tokens, rows.tokens.shape[1])].set(
        new, mode="drop"
    )
    num_tokens = rows.num_tokens + ready.astype(jnp.int32)
    ends = jnp.any(new[:, None] == stop_tokens[None, :], axis=1) | (num_tokens >= rows.max_tokens)
    return dataclasses.replace(
        rows, tokens=tokens, num_tokens=num_tokens, running=rows.running & ~(ready & ends)
    )
