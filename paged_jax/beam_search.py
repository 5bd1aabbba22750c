"""Beam search over a paged cache, the whole loop in one jit: beams share the pages of their common tokens.

The prompt is computed once. From then on every step forks the beams' rows out of their parents' and lets
go of the parents, which moves no key and no value; only a partly filled last page that two beams
continue differently is copied, when it is written.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from paged_jax import page_table
from paged_jax.generate import MAX_CHUNK, Decoder, as_stop_tokens, check_model, check_prompt
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import NO_PAGE, PageTable, pages_for
from paged_jax.ragged_batch import RaggedBatch
from paged_jax.under_jit import check_sizes, power_of_two


@dataclass(frozen=True)
class Beam:
    """One hypothesis.

    `finish_reason` is "stop" after a stop token (the last of `token_ids`), "length" at `max_new_tokens`.
    """

    token_ids: tuple[int, ...]
    log_probability: float  # the sum over token_ids, given the prompt
    score: float  # log_probability / len(token_ids) ** length_penalty
    finish_reason: Literal["stop", "length"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Hypotheses:
    """Those that have ended, best first. Where there is none, score and log-probability are -inf."""

    scores: Float[Array, " beams"]
    log_probs: Float[Array, " beams"]
    tokens: Int32[Array, "beams max_tokens"]
    num_tokens: Int32[Array, " beams"]
    stopped: Bool[Array, " beams"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Search:
    """B beams, best first, in the first B of 2 B rows; the others are empty between steps."""

    table: PageTable
    pages: KVPages
    log_probs: Float[Array, " beams"]  # -inf where there is no beam
    tokens: Int32[Array, "beams max_tokens"]
    num_tokens: Int32[Array, ""]  # new tokens of every beam; all but the last are in pages
    ended: _Hypotheses
    least_free: Int32[Array, ""]  # free pages when the most were in use


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rules:
    max_tokens: Int32[Array, ""]
    length_penalty: Float[Array, ""]
    stop_tokens: Int32[Array, " stops"]


def beam_search(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    beam_width: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    stop_token_ids: Sequence[int] = (),
    page_size: int = 16,
    num_pages: int | None = None,
    dtype: DTypeLike | None = None,
) -> list[Beam]:
    """The most probable continuations of a prompt that a search of limited width finds.

    A candidate is a running beam and one more token, ranked by the sum of its tokens' log-probabilities. In
    every step:

    - of the best `beam_width` candidates, those that end in a stop token become hypotheses, as all of them do
      at `max_new_tokens`;
    - the best `beam_width` hypotheses so far are kept, by score:
      sum of log-probabilities / number of new tokens ** length_penalty, the stop token counted;
    - the best `beam_width` candidates without a stop token are the next running beams.

    The search ends when no running beam can still beat the worst of `beam_width` hypotheses, were all its
    further tokens certain. This is the beam search of Hugging Face transformers with early_stopping="never";
    the division by a power of the length is that of Wu et al. 2016 (arXiv:1609.08144, section 7) without
    its constant.

    A beam of width 1 is greedy generation up to the first stop token; with a length penalty above 0 it
    may go on behind it, and find something better.

    Args:
        model: a Flax NNX module with the methods of `paged_jax.generate.Decoder`.
        prompt_ids: at least one token.
        beam_width: running beams, and hypotheses kept.
        max_new_tokens: where every beam ends at the latest.
        length_penalty: above 0 favours long hypotheses, below 0 short ones; 0 compares plain sums.
        stop_token_ids: a hypothesis ends with the first of them.
        page_size: tokens a page.
        num_pages: in the pool. With P prompt tokens, at least
            P // page_size + beam_width * (ceil((P + max_new_tokens - 1) / page_size) - P // page_size):
            the full pages of the prompt once, and all others for each beam. That many are always enough, and
            by default it is that many, rounded up to a power of two.
        dtype: of the pages; see `KVPages.create`.

    Returns:
        `beam_width` beams, the best score first; fewer only where no more continuations exist.

    Raises:
        TypeError: for a model that lacks one of these methods.
        ValueError: for an empty prompt or tokens that are not the model's, for a size below 1, a length
            penalty that is not finite, and a pool below the bound.
    """
    check_model("beam_search", model)
    graph, parameters = nnx.split(model)
    arguments = _start(
        model,
        prompt_ids,
        beam_width=beam_width,
        max_new_tokens=max_new_tokens,
        length_penalty=length_penalty,
        stop_token_ids=stop_token_ids,
        page_size=page_size,
        num_pages=num_pages,
        dtype=dtype,
    )
    return _beams(_run(graph, parameters, *arguments).ended)


def _start(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    beam_width: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    stop_token_ids: Sequence[int] = (),
    page_size: int = 16,
    num_pages: int | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[_Search, _Rules, np.ndarray, np.int32]:
    """The state before the first step, the rules, and the prompt with its padding and its length.

    Sizes that depend on the prompt are powers of two: prompts of about the same size compile nothing new.
    """
    prompt = check_prompt("beam_search", "prompt_ids", prompt_ids, model.vocab_size)
    check_sizes("beam_search", beam_width=beam_width, max_new_tokens=max_new_tokens, page_size=page_size)
    stop_tokens = as_stop_tokens("beam_search", stop_token_ids)
    if not abs(length_penalty) * math.log2(max_new_tokens + 1) < 100:  # scores are in float32
        raise ValueError(
            f"beam_search: max_new_tokens ** length_penalty must be of a moderate size, got {length_penalty=}"
        )
    shared = prompt.size // page_size
    longest = pages_for(prompt.size + max_new_tokens - 1, page_size)  # the last token is never stored
    enough = shared + beam_width * (longest - shared)
    num_pages = power_of_two(enough) if num_pages is None else num_pages
    if num_pages < enough:
        raise ValueError(
            f"beam_search: {beam_width} beams of {prompt.size} + {max_new_tokens} tokens may need {enough} "
            f"pages of {page_size}, got {num_pages=}; give the pool at least {enough}"
        )
    tokens = jnp.zeros((beam_width, power_of_two(max_new_tokens)), jnp.int32)
    no_score = jnp.full(beam_width, -jnp.inf, jnp.float32)
    state = _Search(
        table=PageTable.create(num_pages, page_size, 2 * beam_width, power_of_two(longest)),
        pages=model.create_pages(num_pages, page_size, dtype),
        log_probs=no_score.at[0].set(0),  # the prompt itself is the first beam
        tokens=tokens,
        num_tokens=jnp.zeros((), jnp.int32),
        ended=_Hypotheses(
            scores=jnp.copy(no_score),
            log_probs=no_score,
            tokens=jnp.copy(tokens),
            num_tokens=jnp.zeros(beam_width, jnp.int32),
            stopped=jnp.zeros(beam_width, bool),
        ),
        least_free=jnp.asarray(num_pages, jnp.int32),
    )
    rules = _Rules(
        max_tokens=jnp.asarray(max_new_tokens, jnp.int32),
        length_penalty=jnp.asarray(length_penalty, jnp.float32),
        stop_tokens=jnp.asarray(np.unique(stop_tokens), jnp.int32),
    )
    padded = np.zeros(power_of_two(prompt.size), np.int32)
    padded[: prompt.size] = prompt
    return state, rules, padded, np.int32(prompt.size)


def _beams(ended: _Hypotheses) -> list[Beam]:
    ended = jax.device_get(ended)
    return [
        Beam(
            token_ids=tuple(ended.tokens[i, : ended.num_tokens[i]].tolist()),
            log_probability=float(ended.log_probs[i]),
            score=float(ended.scores[i]),
            finish_reason="stop" if ended.stopped[i] else "length",
        )
        for i in np.flatnonzero(ended.log_probs > -np.inf)
    ]


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _run(
    graph: nnx.GraphDef[Decoder],
    parameters: nnx.State,
    state: _Search,
    rules: _Rules,
    prompt: Int32[Array, " max_prompt"],
    prompt_len: Int32[Array, ""],
) -> _Search:
    model = nnx.merge(graph, parameters)
    state, hidden = _prefill(model, state, prompt, prompt_len)
    state, parents = _choose(state, rules, model.logits(hidden))

    def step(carry: tuple[_Search, Array]) -> tuple[_Search, Array]:
        state, hidden = _advance(model, *carry)
        return _choose(state, rules, model.logits(hidden))

    return lax.while_loop(lambda carry: _can_improve(carry[0], rules), step, (state, parents))[0]


def _prefill(
    model: Decoder, state: _Search, prompt: Int32[Array, " max_prompt"], prompt_len: Int32[Array, ""]
) -> tuple[_Search, Float[Array, "beams width"]]:
    """Puts the prompt into row 0, and returns what follows it as the hidden state of every beam."""
    beams, chunk = state.log_probs.shape[0], min(prompt.shape[0], MAX_CHUNK)

    def compute(table: PageTable, pages: KVPages) -> tuple[PageTable, KVPages, Array]:
        num_tokens = jnp.zeros_like(table.lengths)
        num_tokens = num_tokens.at[0].set(jnp.minimum(prompt_len - table.lengths[0], chunk))
        table, _ = page_table.extend(table, num_tokens)
        batch = RaggedBatch.packed(_first_rows(table, 1), num_tokens[:1], chunk)
        hidden, pages = model(prompt[batch.positions], pages, batch)
        return table, pages, hidden[batch.last_tokens]

    table, pages, hidden = lax.while_loop(
        lambda carry: carry[0].lengths[0] < prompt_len,
        lambda carry: compute(*carry[:2]),
        (state.table, state.pages, _zeros_like(jax.eval_shape(compute, state.table, state.pages)[2])),
    )
    state = dataclasses.replace(state, table=table, pages=pages, least_free=table.num_free)
    return state, jnp.broadcast_to(hidden, (beams, hidden.shape[1]))


def _choose(
    state: _Search, rules: _Rules, logits: Float[Array, "beams vocab"]
) -> tuple[_Search, Int32[Array, " beams"]]:
    """The next beams by what they have written, not yet moved in the table, and whose row each continues."""
    beams, vocab = logits.shape
    candidates = state.log_probs[:, None] + jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # However many of a beam's candidates are stops, there are `beams` others among so many.
    enough = min((1 + rules.stop_tokens.shape[0]) * beams, beams * vocab)
    log_probs, index = lax.top_k(candidates.reshape(-1), enough)
    parents, new = (index // vocab).astype(jnp.int32), (index % vocab).astype(jnp.int32)
    stops = jnp.any(new[:, None] == rules.stop_tokens[None, :], axis=1)

    num_tokens = state.num_tokens + 1
    best = slice(beams)
    ends = (stops[best] | (num_tokens >= rules.max_tokens)) & (log_probs[best] > -jnp.inf)
    score = log_probs[best] / num_tokens.astype(jnp.float32) ** rules.length_penalty
    just_ended = _Hypotheses(
        scores=jnp.where(ends, score, -jnp.inf),
        log_probs=jnp.where(ends, log_probs[best], -jnp.inf),
        tokens=state.tokens[parents[best]].at[:, state.num_tokens].set(new[best]),
        num_tokens=jnp.broadcast_to(num_tokens, (beams,)),
        stopped=stops[best],
    )
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), state.ended, just_ended)
    kept = lax.top_k(both.scores, beams)[1]

    log_probs, chosen = lax.top_k(jnp.where(stops, -jnp.inf, log_probs), beams)
    parents, new = parents[chosen], new[chosen]
    state = dataclasses.replace(
        state,
        log_probs=log_probs,
        tokens=state.tokens[parents].at[:, state.num_tokens].set(new),
        num_tokens=num_tokens,
        ended=jax.tree.map(lambda field: field[kept], both),
    )
    return state, jnp.where(log_probs > -jnp.inf, parents, NO_PAGE)


def _can_improve(state: _Search, rules: _Rules) -> Bool[Array, ""]:
    """Whether the best running beam could become a hypothesis worth keeping."""
    # A sum is negative, and better the more it is divided by: the best length is one end of the range.
    best_length = jnp.where(rules.length_penalty > 0, rules.max_tokens, state.num_tokens + 1)
    best_score = state.log_probs[0] / best_length.astype(jnp.float32) ** rules.length_penalty
    return (state.num_tokens < rules.max_tokens) & (best_score > state.ended.scores[-1])


def _advance(
    model: Decoder, state: _Search, parents: Int32[Array, " beams"]
) -> tuple[_Search, Float[Array, "beams width"]]:
    """Moves every beam to the pages of its parent's row, and computes its last token."""
    beams = parents.shape[0]
    no_parents = jnp.full(beams, NO_PAGE, jnp.int32)
    table = page_table.fork(state.table, jnp.concatenate([no_parents, parents]))
    table = page_table.release(table, jnp.arange(2 * beams, dtype=jnp.int32) < beams)
    # The children are in the second half, the first is empty: change places.
    table = dataclasses.replace(
        table,
        block_tables=jnp.roll(table.block_tables, beams, axis=0),
        lengths=jnp.roll(table.lengths, beams),
    )
    running = table.lengths > 0
    table, grant = page_table.extend(table, running.astype(jnp.int32))
    batch = RaggedBatch.decode(_first_rows(table, beams), running[:beams])
    hidden, pages = model(state.tokens[:, state.num_tokens - 1], state.pages.copy(grant.copies), batch)
    least_free = jnp.minimum(state.least_free, table.num_free)
    return dataclasses.replace(state, table=table, pages=pages, least_free=least_free), hidden


def _first_rows(table: PageTable, rows: int) -> PageTable:
    """The same pool, seen by a batch of fewer rows."""
    return dataclasses.replace(table, block_tables=table.block_tables[:rows], lengths=table.lengths[:rows])


def _zeros_like(shape: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(shape.shape, shape.dtype)
