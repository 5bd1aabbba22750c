"""Text generation over a paged cache, the whole loop in one jit.

Prompt tokens, page growth, sampling, ends of rows and the return of their pages all happen on the
device. The state goes in and comes out, so the loop can also run a few steps a call:

    state = start(model, prompts, max_new_tokens=64)
    while not finished(state):
        state = run(model, state, num_steps=8)  # takes the old state's memory
        ...                                     # show what is new in state.tokens
"""

import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from paged_jax import page_table
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import PageTable, pages_for
from paged_jax.ragged_batch import RaggedBatch
from paged_jax.sampling import Sampling, penalize, sample
from paged_jax.under_jit import check_sizes, once_if, power_of_two

FinishReason = Literal["stop", "length", "out_of_pages"]

_RUNNING, _STOP, _LENGTH, _OUT_OF_PAGES = range(4)
_FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "out_of_pages")
MAX_CHUNK = 256
"""Prompt tokens that go through the model at once, at most."""
_NO_LIMIT = jnp.iinfo(jnp.int32).max
_LONGEST_ROW = 1 << 30  # sizes are rounded up to powers of two, and kept in int32


class Decoder(Protocol):
    """What a Flax NNX model has to offer. `paged_jax.models.Llama` does."""

    @property
    def vocab_size(self) -> int: ...

    def __call__(self, tokens: Array, pages: KVPages, batch: RaggedBatch) -> tuple[Array, KVPages]:
        """Hidden states [T, width] of the T tokens of a batch, and the pages with their keys and values."""
        ...

    def logits(self, hidden: Array) -> Array:
        """[n, width] -> [n, vocab]"""
        ...

    def create_pages(self, num_pages: int, page_size: int, dtype: DTypeLike | None = None) -> KVPages:
        """Empty pages for all layers."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """Rows in the middle of being written. All of it lives on the device."""

    table: PageTable
    pages: KVPages
    tokens: Int32[Array, "rows max_tokens"]  # prompt and new tokens
    num_tokens: Int32[Array, " rows"]  # how many of them are known; table.lengths says how many are in pages
    prompt_lens: Int32[Array, " rows"]
    max_tokens: Int32[Array, " rows"]  # where a row ends at the latest
    status: Int32[Array, " rows"]
    least_free: Int32[Array, ""]  # free pages when the most were in use
    sampling: Sampling
    stop_tokens: Int32[Array, " stops"]
    chunk: int = dataclasses.field(metadata={"static": True})  # prompt tokens per step, of all rows together


@dataclass(frozen=True)
class Completion:
    """What became of a prompt.

    `finish_reason` is "stop" after a stop token (the last of `token_ids`), "length" at
    `max_new_tokens`, "out_of_pages" where the pool could not hold the row beside those before it;
    what it has written until then is kept.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None: still running


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 64,
    stop_token_ids: Sequence[int] = (),
    sampling: Sampling | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    dtype: DTypeLike | None = None,
) -> list[Completion]:
    """Continues every prompt; rows end by themselves, and their pages go back to the pool at once.

    Args:
        model: a Flax NNX module with the methods of `Decoder`.
        prompts: token ids, each prompt at least one.
        max_new_tokens: at least one, for all prompts or for each.
        stop_token_ids: a row ends with the first of them that it writes.
        sampling: settings of every row; greedy by default.
        page_size: tokens a page.
        num_pages: in the pool. By default enough for all rows at full length. With fewer, whenever a
            row finds no page, the last running row ends ("out_of_pages") and gives back its own, so
            that those before it go on; the first row always finishes.
        dtype: of the pages, such as jnp.bfloat16 or "int8"; see `KVPages.create`.

    Returns:
        One completion per prompt, in their order.

    Raises:
        TypeError: for a model that lacks one of these methods.
        ValueError: for a prompt that is empty or not of the model's tokens, for settings of another
            number of rows, and for a pool that could not hold one of the rows even alone.
    """
    state = start(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        sampling=sampling,
        page_size=page_size,
        num_pages=num_pages,
        dtype=dtype,
    )
    return completions(run(model, state))


def start(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 64,
    stop_token_ids: Sequence[int] = (),
    sampling: Sampling | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    dtype: DTypeLike | None = None,
) -> Generation:
    """The state before the first step; arguments as for `generate`.

    Sizes that depend on the prompts are rounded up to powers of two, so that other prompts of about
    the same size run without another compilation.
    """
    check_model("generate", model)
    ids = [
        check_prompt("generate", f"prompts[{row}]", prompt, model.vocab_size)
        for row, prompt in enumerate(prompts)
    ]
    rows = len(ids)
    if not rows:
        raise ValueError("generate: needs at least one prompt, got 0 prompts")
    new_tokens = np.asarray(max_new_tokens)
    are_counts = new_tokens.shape in ((), (rows,)) and np.issubdtype(new_tokens.dtype, np.integer)
    if not are_counts or np.any(new_tokens < 1):
        raise ValueError(
            f"generate: max_new_tokens must be at least 1, one number or {rows}, got {max_new_tokens!r}"
        )
    check_sizes("generate", page_size=page_size)
    stop_tokens = as_stop_tokens("generate", stop_token_ids)
    if sampling is not None and sampling.temperature.shape != (rows,):
        raise ValueError(
            f"generate: sampling has shape {sampling.temperature.shape}, and there are {rows} prompts"
        )
    prompt_lens = np.array([prompt.size for prompt in ids], np.int32)
    max_tokens = prompt_lens + new_tokens
    longest = int(max_tokens.max())
    if longest > _LONGEST_ROW:
        raise ValueError(f"generate: a row of {longest} tokens is too long; lower max_new_tokens")
    max_pages_per_row = power_of_two(pages_for(longest, page_size))
    if num_pages is None:
        num_pages = enough_pages(max_tokens, page_size)
    if longest - 1 > num_pages * page_size:  # the last token of a row is never stored
        raise ValueError(
            f"generate: the longest row stores {longest - 1} tokens, prompt and all but the last new one; "
            f"the pool holds {num_pages} pages of {page_size}: {num_pages * page_size}; give it more pages"
        )
    tokens = np.zeros((rows, max_pages_per_row * page_size), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : prompt.size] = prompt
    return Generation(
        table=PageTable.create(num_pages, page_size, rows, max_pages_per_row),
        pages=model.create_pages(num_pages, page_size, dtype),
        tokens=jnp.asarray(tokens),
        num_tokens=jnp.asarray(prompt_lens),
        prompt_lens=jnp.asarray(prompt_lens),
        max_tokens=jnp.asarray(max_tokens.astype(np.int32)),
        status=jnp.full(rows, _RUNNING, jnp.int32),
        least_free=jnp.asarray(num_pages, jnp.int32),
        # A copy: the state is donated, and the caller may want theirs again.
        sampling=Sampling.create(rows) if sampling is None else jax.tree.map(jnp.copy, sampling),
        stop_tokens=jnp.asarray(stop_tokens),
        chunk=min(power_of_two(int(prompt_lens.sum())), MAX_CHUNK),
    )


def check_model(function: str, model: object, protocol: type[Any] = Decoder) -> None:
    """Refuses what does not have all that the protocol asks for.

    Raises:
        TypeError: which says what is missing.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"{function}: model must be a Flax NNX module, got {type(model)}")
    names = [name for name in dir(protocol) if name == "__call__" or not name.startswith("_")]
    missing = [name for name in names if not hasattr(model, name)]
    if missing:
        raise TypeError(
            f"{function}: {type(model).__name__} has no {', '.join(missing)}; "
            f"see {protocol.__module__}.{protocol.__name__} for what a model needs"
        )


def check_prompt(
    function: str, name: str, prompt: Sequence[int], vocab_size: int
) -> Int32[np.ndarray, " tokens"]:
    """The prompt as an array.

    Raises:
        ValueError: if it is not one or more of the model's tokens.
    """
    ids = _token_ids(prompt, vocab_size)
    if ids is None or not ids.size:
        raise ValueError(
            f"{function}: {name} must be one or more token ids in [0, {vocab_size}), "
            f"got {reprlib.repr(prompt)}"
        )
    return ids


def as_stop_tokens(function: str, stop_token_ids: Sequence[int]) -> Int32[np.ndarray, " stops"]:
    """The ids as an array.

    Raises:
        ValueError: for what is no sequence of token ids.
    """
    stops = _token_ids(stop_token_ids, 2**31)
    if stops is None:
        raise ValueError(
            f"{function}: stop_token_ids must be a sequence of token ids, got {reprlib.repr(stop_token_ids)}"
        )
    return stops


def _token_ids(values: Sequence[int], end: int) -> Int32[np.ndarray, " tokens"] | None:
    """None for what is no sequence of ids in [0, end)."""
    try:
        ids = np.asarray(values)
    except ValueError:  # nested, and of different lengths
        return None
    if ids.shape != (0,) and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer)):
        return None
    return None if np.any((ids < 0) | (ids >= end)) else ids.astype(np.int32)


def run(model: Decoder, state: Generation, num_steps: int = _NO_LIMIT) -> Generation:
    """Goes on until every row has ended, or for `num_steps` steps.

    The old state is donated: do not use it again.
    """
    graph, parameters = nnx.split(model)
    return _run(graph, parameters, state, np.int32(num_steps))


def finished(state: Generation) -> bool:
    """Whether every row has ended. Waits for the device."""
    return not bool(jnp.any(state.status == _RUNNING))


def completions(state: Generation) -> list[Completion]:
    """What every row has written so far. Reads the tokens from the device."""
    tokens, num_tokens, prompt_lens, status = jax.device_get(
        (state.tokens, state.num_tokens, state.prompt_lens, state.status)
    )
    return [
        Completion(
            prompt_ids=tuple(row[:prompt_len].tolist()),
            token_ids=tuple(row[prompt_len:end].tolist()),
            finish_reason=_FINISH_REASONS[code],
        )
        for row, end, prompt_len, code in zip(tokens, num_tokens, prompt_lens, status, strict=True)
    ]


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _run(
    graph: nnx.GraphDef[Decoder], parameters: nnx.State, state: Generation, num_steps: Array
) -> Generation:
    model = nnx.merge(graph, parameters)

    def step(state: Generation) -> Generation:
        wanted = jnp.where(state.status == _RUNNING, state.num_tokens - state.table.lengths, 0)
        in_prompt = jnp.any(wanted > 1)
        # Prompts go in chunks, beside rows that are past theirs.
        before = jnp.cumsum(wanted, dtype=jnp.int32) - wanted
        num_tokens = jnp.where(in_prompt, jnp.clip(state.chunk - before, 0, wanted), wanted)
        table, grant = page_table.extend(state.table, num_tokens)
        num_tokens = jnp.where(grant.granted, num_tokens, 0)

        def forward(
            make_batch: Callable[[], RaggedBatch], carry: tuple[Array, KVPages]
        ) -> tuple[Array, KVPages]:
            batch = make_batch()
            hidden, pages = model(state.tokens[batch.rows, batch.positions], carry[1], batch)
            return hidden[batch.last_tokens], pages

        chunk = partial(forward, lambda: RaggedBatch.packed(table, num_tokens, state.chunk))
        decode = partial(forward, lambda: RaggedBatch.decode(table, num_tokens > 0))
        pages = state.pages.copy(grant.copies)
        # One of the two runs. Not under lax.cond, which would copy the pages.
        hidden = jax.eval_shape(decode, (None, pages))[0]
        carry = once_if(in_prompt, chunk, (jnp.zeros(hidden.shape, hidden.dtype), pages))
        hidden, pages = once_if(~in_prompt, decode, carry)
        least_free = jnp.minimum(state.least_free, table.num_free)
        state = dataclasses.replace(state, table=table, pages=pages, least_free=least_free)
        state = _append(state, model.logits(hidden), (num_tokens > 0) & (table.lengths == state.num_tokens))
        return _end_rows(state, ~grant.granted)

    return lax.while_loop(
        lambda carry: (carry[0] < num_steps) & jnp.any(carry[1].status == _RUNNING),
        lambda carry: (carry[0] + 1, step(carry[1])),
        (jnp.zeros((), jnp.int32), state),
    )[1]


def _append(state: Generation, logits: Float[Array, "rows vocab"], ready: Array) -> Generation:
    """Samples the next token of every row whose known tokens are all in pages."""
    logits = penalize(logits, state.sampling, state.tokens, state.prompt_lens, state.num_tokens)
    new = sample(logits, state.sampling, state.num_tokens)
    row = jnp.arange(state.tokens.shape[0], dtype=jnp.int32)
    place = jnp.where(ready, state.num_tokens, state.tokens.shape[1])
    tokens = state.tokens.at[row, place].set(new, mode="drop")
    num_tokens = state.num_tokens + ready.astype(jnp.int32)
    stopped = ready & jnp.any(new[:, None] == state.stop_tokens[None, :], axis=1)
    status = jnp.where(ready & (num_tokens >= state.max_tokens), _LENGTH, state.status)
    status = jnp.where(stopped, _STOP, status)
    return dataclasses.replace(state, tokens=tokens, num_tokens=num_tokens, status=status)


def _end_rows(state: Generation, refused: Array) -> Generation:
    """Returns the pages of ended rows. If a row found none and none come back, the last running row ends."""
    row = jnp.arange(refused.shape[0], dtype=jnp.int32)
    running = state.status == _RUNNING
    stuck = jnp.any(refused) & ~jnp.any(~running & (state.table.lengths > 0))
    last_running = jnp.max(jnp.where(running, row, -1))
    status = jnp.where(stuck & (row == last_running), _OUT_OF_PAGES, state.status)
    table = page_table.release(state.table, status != _RUNNING)
    return dataclasses.replace(state, status=status, table=table)


def enough_pages(max_tokens: Sequence[int] | np.ndarray, page_size: int) -> int:
    """The pool that `start` makes by itself: for all rows at full length, rounded up to a power of two."""
    return power_of_two(int(np.sum(pages_for(np.asarray(max_tokens), page_size))))
