"""What the engine runs on the device: a few jitted transitions of its state, which they take and return.

The host decides between them, and reads one `Report` after each `run`.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from paged_jax import page_table
from paged_jax.engine.drafts import lookup_drafts
from paged_jax.generate import Decoder
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import NO_PAGE, PageTable
from paged_jax.ragged_batch import RaggedBatch
from paged_jax.sampling import Sampling, penalize, sample

NO_TOKEN = -1


class EngineModel(Decoder, Protocol):
    """A `Decoder` that also says how far it sees."""

    @property
    def max_length(self) -> int:
        """The longest row that the model was made for, in tokens."""
        ...

    @property
    def sliding_window(self) -> int | None:
        """The widest window of all layers, in positions; None where a layer sees everything."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """R sequences side by side: what is known of each, and who owns which page."""

    table: PageTable
    tokens: Int32[Array, "rows max_tokens_per_row"]  # prompt and new tokens
    num_tokens: Int32[Array, " rows"]  # how many are known; table.lengths says how many are in pages
    prompt_lens: Int32[Array, " rows"]
    max_tokens: Int32[Array, " rows"]  # where the row ends at the latest
    running: Bool[Array, " rows"]
    stopped: Bool[Array, " rows"]  # ended with a stop token
    sampling: Sampling
    stop_tokens: Int32[Array, "rows stops"]  # filled up with NO_TOKEN
    logprobs: Bool[Array, " rows"]  # whether they are wanted


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """All that the engine has on the device beside the model's parameters."""

    rows: Rows
    pages: KVPages


class Settings(NamedTuple):
    """A row's own part of `Rows`, as the host sends it: numpy scalars and arrays without the rows' axis."""

    tokens: np.ndarray  # [max_tokens_per_row]
    num_tokens: np.int32
    prompt_lens: np.int32
    max_tokens: np.int32
    sampling: Sampling
    stop_tokens: np.ndarray  # [stops]
    logprobs: np.bool_


class Form(NamedTuple):
    """The shape of a `run`: one compiled program each.

    Attributes:
        size: the most tokens of a step.
        decode: whether each row has one token, or several of them: prompts, drafts to verify.
        drafts: tokens a row that are guessed and verified in each step.
        max_steps: the most steps of one run.
    """

    size: int
    decode: bool
    drafts: int
    max_steps: int

    @property
    def max_new(self) -> int:
        """The most tokens that one run can add to a row."""
        return self.max_steps * (1 + self.drafts)


class Report(NamedTuple):
    """What the host learns from a run, of R rows that gained at most K tokens."""

    num_new: Int32[Array, " rows"]
    new_tokens: Int32[Array, "rows K"]
    logprobs: Float[Array, "rows K"]  # of the new tokens, where a row wants them
    running: Bool[Array, " rows"]
    stopped: Bool[Array, " rows"]
    lengths: Int32[Array, " rows"]
    full_pages: Int32[Array, "rows pages"]  # page ids of the pages that became full, in order
    refused: Bool[Array, " rows"]  # rows that found too few pages in the last step
    num_free: Int32[Array, ""]
    num_steps: Int32[Array, ""]
    num_tokens: Int32[Array, ""]  # that went through the model
    num_drafted: Int32[Array, ""]
    num_accepted: Int32[Array, ""]


def create_rows(
    num_pages: int, page_size: int, max_rows: int, max_pages_per_row: int, num_stops: int
) -> Rows:
    """Empty rows over a pool of free pages."""

    def zeros(dtype: Any) -> Array:
        return jnp.zeros(max_rows, dtype)

    return Rows(
        table=PageTable.create(num_pages, page_size, max_rows, max_pages_per_row),
        tokens=jnp.zeros((max_rows, max_pages_per_row * page_size), jnp.int32),
        num_tokens=zeros(jnp.int32),
        prompt_lens=zeros(jnp.int32),
        max_tokens=zeros(jnp.int32),
        running=zeros(bool),
        stopped=zeros(bool),
        sampling=Sampling.create(max_rows),
        stop_tokens=jnp.full((max_rows, num_stops), NO_TOKEN, jnp.int32),
        logprobs=zeros(bool),
    )


@partial(jax.jit, donate_argnums=0)
def admit(
    rows: Rows, row: Array, settings: Settings, page_ids: Array, num_held: Array, parent: Array
) -> Rows:
    """Puts a sequence into an empty row.

    Args:
        page_ids: [max_pages_per_row], pages that hold its first `num_held` tokens, found in the prefix index.
        parent: or the row of a sibling whose pages hold them; NO_PAGE for none.
    """
    nowhere = rows.table.max_rows
    adopted = page_table.adopt(rows.table, row, page_ids, jnp.where(parent < 0, num_held, 0))
    children = jnp.arange(nowhere, dtype=jnp.int32) == row
    forked = page_table.fork(adopted, jnp.where(children, parent, NO_PAGE))
    table = page_table.truncate(forked, jnp.where(children, num_held, forked.lengths))

    def put(old: Array, new: Any) -> Array:
        return old.at[row].set(new)

    fields = {
        name: jax.tree.map(put, getattr(rows, name), value) for name, value in settings._asdict().items()
    }
    return dataclasses.replace(
        rows, table=table, running=put(rows.running, True), stopped=put(rows.stopped, False), **fields
    )


@partial(jax.jit, donate_argnums=0)
def update(rows: Rows, pinned: Array, released: Array, unpinned: Array) -> tuple[Rows, Array]:
    """Pins pages, empties rows, and unpins pages, in this order. Also returns the number of free pages.

    Args:
        pinned, unpinned: page ids, filled up with NO_PAGE.
        released: bool [R].
    """
    table = page_table.pin(rows.table, pinned)
    table = page_table.release(table, released)
    table = page_table.unpin(table, unpinned)
    rows = dataclasses.replace(rows, table=table, running=rows.running & ~released)
    return rows, table.num_free


@partial(jax.jit, static_argnames=("graph", "form", "window"), donate_argnames="state")
def run(
    graph: nnx.GraphDef[EngineModel],
    parameters: Any,
    state: EngineState,
    num_tokens: Int32[Array, " rows"],
    num_steps: Int32[Array, ""],
    leave_on_end: Bool[Array, ""],
    *,
    form: Form,
    window: int | None,
) -> tuple[EngineState, Report]:
    """Up to `num_steps` steps, fewer when a row finds too few pages, or when all rows have ended.

    Args:
        num_tokens: known tokens of each row that every step takes up; of a row that decodes one.
        leave_on_end: also leave when any row has ended.
        window: positions behind which pages go back.
    """
    model = nnx.merge(graph, parameters)
    num_rows = state.rows.table.max_rows
    before = state.rows
    none = jnp.zeros((), jnp.int32)
    nothing = _Progress(none, none, none, none, jnp.zeros(num_rows, bool))

    def goes_on(carry: tuple[_Progress, EngineState, Array]) -> Array:
        progress, state, _ = carry
        ended = before.running & ~state.rows.running
        leave = jnp.any(progress.refused) | (leave_on_end & jnp.any(ended))
        return (progress.num_steps < num_steps) & jnp.any(state.rows.running) & ~leave

    def step(carry: tuple[_Progress, EngineState, Array]) -> tuple[_Progress, EngineState, Array]:
        progress, state, logprobs = carry
        rows, pages = state.rows, state.pages
        rows, num_drafts = _with_drafts(rows, form.drafts)
        wanted = jnp.where(rows.running, num_tokens + num_drafts, 0)
        table, grant = page_table.extend(rows.table, wanted)
        taken = jnp.where(grant.granted, wanted, 0)
        pages = pages.copy(grant.copies)
        if form.decode:
            batch = RaggedBatch.decode(table, taken > 0, None if form.size == num_rows else form.size)
        else:
            batch = RaggedBatch.packed(table, taken, form.size)
        hidden, pages = model(
            rows.tokens[jnp.minimum(batch.rows, num_rows - 1), batch.positions], pages, batch
        )
        # [R, 1 + drafts]: the last tokens of each row, one of them known and the others drafts
        behind = (
            jnp.minimum(num_drafts, taken)[:, None] - jnp.arange(1 + form.drafts, dtype=jnp.int32)[None, :]
        )
        asked = jnp.maximum(batch.last_tokens[:, None] - behind, 0)
        logits = model.logits(hidden[jnp.minimum(asked, hidden.shape[0] - 1).reshape(-1)])
        ready = (taken > 0) & (table.lengths == rows.num_tokens + num_drafts)
        rows = dataclasses.replace(rows, table=table)
        gained = rows.num_tokens - before.num_tokens
        rows, num_new, new_logprobs = _append(rows, logits, num_drafts, ready)
        place = jnp.where(
            jnp.arange(1 + form.drafts)[None, :] < num_new[:, None], gained[:, None], form.max_new
        )
        place += jnp.arange(1 + form.drafts, dtype=jnp.int32)[None, :]
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        logprobs = logprobs.at[row, place].set(new_logprobs, mode="drop")
        if window is not None:
            # The next token sees the positions from length - window + 1 on.
            rows = dataclasses.replace(
                rows, table=page_table.drop_before(rows.table, rows.table.lengths - (window - 1))
            )
        progress = _Progress(
            num_steps=progress.num_steps + 1,
            num_tokens=progress.num_tokens + jnp.sum(taken, dtype=jnp.int32),
            num_drafted=progress.num_drafted + jnp.sum(jnp.where(ready, num_drafts, 0), dtype=jnp.int32),
            num_accepted=progress.num_accepted + jnp.sum(jnp.maximum(num_new - 1, 0), dtype=jnp.int32),
            refused=~grant.granted,
        )
        return progress, EngineState(rows, pages), logprobs

    logprobs = jnp.zeros((num_rows, form.max_new), jnp.float32)
    progress, state, logprobs = lax.while_loop(goes_on, step, (nothing, state, logprobs))
    rows = state.rows
    page_size, width = rows.table.page_size, rows.tokens.shape[1]
    new = before.num_tokens[:, None] + jnp.arange(form.max_new, dtype=jnp.int32)[None, :]
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    most_pages = max(form.max_new, 0 if form.decode else form.size) // page_size + 1
    first = before.table.lengths // page_size
    page = first[:, None] + jnp.arange(most_pages, dtype=jnp.int32)[None, :]
    is_full = page < (rows.table.lengths // page_size)[:, None]
    page = jnp.minimum(page, rows.table.max_pages_per_row - 1)
    report = Report(
        num_new=rows.num_tokens - before.num_tokens,
        new_tokens=rows.tokens[row, jnp.minimum(new, width - 1)],
        logprobs=logprobs,
        running=rows.running,
        stopped=rows.stopped,
        lengths=rows.table.lengths,
        full_pages=jnp.where(is_full, rows.table.block_tables[row, page], NO_PAGE),
        refused=progress.refused,
        num_free=rows.table.num_free,
        num_steps=progress.num_steps,
        num_tokens=progress.num_tokens,
        num_drafted=progress.num_drafted,
        num_accepted=progress.num_accepted,
    )
    return state, report


class _Progress(NamedTuple):
    num_steps: Array
    num_tokens: Array
    num_drafted: Array
    num_accepted: Array
    refused: Array


def _with_drafts(rows: Rows, drafts: int) -> tuple[Rows, Int32[Array, " rows"]]:
    """Guesses the next tokens of every decoding row and writes them behind its known ones."""
    if drafts == 0:
        return rows, jnp.zeros_like(rows.num_tokens)
    guesses, num_drafts = lookup_drafts(rows.tokens, rows.num_tokens, drafts)
    # The row's last token is sampled, not guessed.
    room = jnp.maximum(rows.max_tokens - rows.num_tokens - 1, 0)
    num_drafts = jnp.where(rows.running, jnp.minimum(num_drafts, room), 0)
    index = jnp.arange(drafts, dtype=jnp.int32)[None, :]
    row = jnp.arange(rows.tokens.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.where(index < num_drafts[:, None], rows.num_tokens[:, None] + index, rows.tokens.shape[1])
    return dataclasses.replace(rows, tokens=rows.tokens.at[row, place].set(guesses, mode="drop")), num_drafts


def _append(
    rows: Rows,
    logits: Float[Array, "queries vocab"],
    num_drafts: Int32[Array, " rows"],
    ready: Bool[Array, " rows"],
) -> tuple[Rows, Int32[Array, " rows"], Float[Array, "rows new"]]:
    """Samples the tokens that follow the known one and each draft; keeps them up to the first wrong draft.

    A token is drawn from its logits, its row's seed and its position alone, so it is the one that would
    have been drawn without drafts: greedy or not, the row stays the same (a special case of Leviathan et
    al. 2023, arXiv:2211.17192, with drafts of probability one).
    """
    num_rows, width = rows.tokens.shape
    new = logits.shape[0] // num_rows
    index = jnp.arange(new, dtype=jnp.int32)[None, :]
    known = rows.num_tokens[:, None] + index  # [R, new], tokens before the one that is drawn
    spread = partial(jnp.repeat, repeats=new, axis=0, total_repeat_length=num_rows * new)
    sampling = jax.tree.map(spread, rows.sampling)
    raw = logits
    logits = penalize(raw, sampling, spread(rows.tokens), spread(rows.prompt_lens), known.reshape(-1))
    drawn = sample(logits, sampling, known.reshape(-1)).reshape(num_rows, new)

    def score() -> Float[Array, "rows new"]:
        chosen = jnp.take_along_axis(raw, drawn.reshape(-1, 1), axis=1)[:, 0].astype(jnp.float32)
        return (chosen - jax.nn.logsumexp(raw.astype(jnp.float32), axis=1)).reshape(num_rows, new)

    logprobs = lax.cond(
        jnp.any(rows.logprobs & ready), score, lambda: jnp.zeros((num_rows, new), jnp.float32)
    )
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    drafts = rows.tokens[row, jnp.minimum(known, width - 1)]
    right = (index < num_drafts[:, None]) & (drafts == drawn)
    stops = jnp.any(drawn[:, :, None] == rows.stop_tokens[:, None, :], axis=2)
    last = (known + 1 >= rows.max_tokens[:, None]) | stops | ~right
    num_new = jnp.where(ready, jnp.argmax(last, axis=1).astype(jnp.int32) + 1, 0)
    place = jnp.where(index < num_new[:, None], known, width)
    num_tokens = rows.num_tokens + num_new
    stopped = ready & jnp.take_along_axis(stops, jnp.maximum(num_new - 1, 0)[:, None], axis=1)[:, 0]
    table = rows.table
    if new > 1:
        table = page_table.truncate(table, jnp.where(ready, num_tokens - 1, table.lengths))
    rows = dataclasses.replace(
        rows,
        table=table,
        tokens=rows.tokens.at[row, place].set(drawn, mode="drop"),
        num_tokens=num_tokens,
        running=rows.running & ~stopped & ~(ready & (num_tokens >= rows.max_tokens)),
        stopped=rows.stopped | stopped,
    )
    return rows, num_new, logprobs
