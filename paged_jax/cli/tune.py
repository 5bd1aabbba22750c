"""Times of the GPU kernel in different configs, so that one can be chosen by measurement."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike
from rich.table import Table

from paged_jax.attention import KernelConfig, Tiling, paged_attention
from paged_jax.attention.kernel_config import WARPGROUP_ROWS, Problem, choose_config, problem_of
from paged_jax.testing import PagedInputs

COLD_BYTES = 1 << 29
"""Keys and values of successive calls: far more than any cache holds."""

_PAGE_SHIFT = 7919  # a prime, so that other pages follow whatever the size of the pool
_MOST_ITERATIONS = 500
_FASTEST_CALL = 1e-5  # seconds: no call of a few kernels takes less


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over several runs of many calls each."""

    median: float
    fastest: float
    slowest: float


class Trial(NamedTuple):
    """What became of one config."""

    tiling: KernelConfig | Tiling
    timing: Timing | None
    failure: str | None  # why there is no timing


def attend_repeatedly(inputs: PagedInputs, iterations: int, **options: Any) -> tuple[Array, Array]:
    """The outputs of the first and the last of `iterations` calls, each on the output before as its queries.

    No call can be left out, and each reads pages of its own choice, so that no cache holds them already. What
    depends on lengths alone may be computed once for all, as it is for the layers of a model.
    """
    num_pages = inputs.k_pages.shape[0]
    first: Any = paged_attention(*inputs, **options)

    def again(i: Array, q: Any) -> Any:
        tables = (inputs.block_tables + i * _PAGE_SHIFT) % num_pages
        return paged_attention(*inputs._replace(q=q, block_tables=tables), **options)

    return first, lax.fori_loop(1, iterations, again, first)


def iterations_for(num_bytes: float, operations: float = 0.0, *, seconds: float = 0.03) -> int:
    """How many calls take about so long on a large GPU, of 4 TB/s and 700 TFLOP/s."""
    floor = max(num_bytes / 4e12, operations / 7e14, _FASTEST_CALL)
    return min(_MOST_ITERATIONS, max(2, round(seconds / floor)))


def time_calls(run: Callable[[], Any], calls: int = 1, *, rounds: int = 5, seconds: float = 0.5) -> Timing:
    """Runs it once to warm up, then up to `rounds` times while so many seconds last; `calls`: in each run."""
    jax.block_until_ready(run())
    times: list[float] = []
    while not times or (len(times) < rounds and sum(times) < seconds):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return Timing(*(pick(times) / calls for pick in (statistics.median, min, max)))


def candidates(problem: Problem) -> list[KernelConfig]:
    """Configs that the problem can be cut into, first the one that is chosen without measuring.

    The others differ from it in one size, then in two.
    """
    chosen = choose_config(problem)
    splits = {chosen.num_splits * 2, max(1, chosen.num_splits // 2), chosen.num_splits}
    found = {}
    for warpgroups in (1, 2):
        heads = KernelConfig(1, 16, 1, warpgroups).heads_per_tile(problem.group)
        if problem.decode and warpgroups > 1 and problem.group <= WARPGROUP_ROWS:
            continue  # one token's heads leave nothing to do for a second warpgroup
        tile_tokens = 1 if problem.decode else max(1, WARPGROUP_ROWS * warpgroups // heads)
        for kv_step in sorted({16, 32, 48, 64, 96, 128, chosen.kv_step}):
            for stages in sorted({2, 3, 4, 6, 8, chosen.stages}):
                for num_splits in splits:
                    config = KernelConfig(tile_tokens, kv_step, stages, warpgroups, num_splits)
                    if _fits(config, problem):
                        found[config] = _differences(config, chosen)
    near = [config for config, differences in found.items() if differences <= 2]
    return [chosen, *sorted((c for c in near if c != chosen), key=found.__getitem__)]


def _fits(config: KernelConfig, problem: Problem) -> bool:
    try:
        config.check(problem)
    except ValueError:
        return False
    return True


def _differences(config: KernelConfig, chosen: KernelConfig) -> int:
    """In how many sizes they differ; the tokens of a tile follow from the number of warpgroups."""
    names = ("kv_step", "stages", "compute_warpgroups", "num_splits")
    return sum(getattr(config, name) != getattr(chosen, name) for name in names)


def random_inputs(
    lengths: Sequence[int],
    query_lens: Sequence[int] | None,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: DTypeLike = jnp.bfloat16,
    pool_bytes: int,
    seed: int = 0,
) -> PagedInputs:
    """Rows of random keys and values in shuffled pages of a pool of at least `pool_bytes`.

    Args:
        query_lens: as in `paged_jax.testing.paged_inputs`.
    """
    width = max(-(-length // page_size) for length in lengths)
    page_bytes = 2 * kv_heads * page_size * head_dim * jnp.dtype(dtype).itemsize
    num_pages = max(len(lengths) * width, pool_bytes // page_bytes)
    tables = np.random.default_rng(seed).permutation(num_pages)[: len(lengths) * width]
    num_tokens = len(lengths) if query_lens is None else sum(query_lens)
    keys = jax.random.split(jax.random.key(seed), 3)
    pool = (num_pages, kv_heads, page_size, head_dim)
    q, k_pages, v_pages = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, ((num_tokens, q_heads, head_dim), pool, pool), strict=True)
    )
    return PagedInputs(
        q,
        k_pages,
        v_pages,
        jnp.asarray(tables.reshape(len(lengths), width), jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        None if query_lens is None else jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32),
    )


class HeadShape(NamedTuple):
    """The heads of a model's attention."""

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Of a layer's keys and values in bfloat16."""
        return 2 * 2 * self.kv_heads * self.head_dim


def tune(
    heads: HeadShape, rows: int, length: int, step_tokens: int, page_size: int
) -> dict[str, tuple[int, list[Trial]]]:
    """Trials of the two kinds of call that an engine makes, each with the bytes that one call reads.

    Args:
        length: of all rows.
        step_tokens: new tokens of a step that takes up one row's prompt while the others decode.
    """
    chunk = min(length, max(1, step_tokens - (rows - 1)))
    kinds = {"decode": None, f"{chunk} tokens of one prompt, the others decode": [chunk] + [1] * (rows - 1)}
    num_bytes = rows * length * heads.token_bytes
    found = {}
    for name, query_lens in kinds.items():
        inputs = random_inputs(
            [length] * rows, query_lens, **heads._asdict(), page_size=page_size, pool_bytes=COLD_BYTES
        )
        configs = candidates(problem_of(*inputs[:2], inputs.block_tables, inputs.query_starts, None))
        found[name] = num_bytes, try_tilings(inputs, configs, iterations_for(num_bytes))
    return found


def try_tilings(
    inputs: PagedInputs, tilings: Sequence[KernelConfig | Tiling], iterations: int
) -> list[Trial]:
    """Times `paged_attention` with each; one that does not compile or run has its reason instead."""
    trials = []
    for tiling in tilings:
        run = jax.jit(partial(attend_repeatedly, iterations=iterations, tiling=tiling))
        try:
            trials.append(Trial(tiling, time_calls(partial(run, inputs), iterations), None))
        except (RuntimeError, ValueError) as error:  # jax's own errors are of the first
            trials.append(Trial(tiling, None, str(error).splitlines()[0]))
    return trials


def as_text(title: str, trials: Sequence[Trial], num_bytes: int) -> Table:
    """The trials from the fastest to the slowest, then the failures; marked, what is chosen by the shapes.

    `num_bytes`: of keys and values that one call reads.
    """
    table = Table(title=title, box=None, title_justify="left")
    for name in (*asdict(trials[0].tiling), "us", "GB/s"):
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    table.add_column()
    for trial in sorted(trials, key=lambda trial: trial.timing.median if trial.timing else math.inf):
        sizes = map(str, asdict(trial.tiling).values())
        if trial.timing is None:
            table.add_row(*sizes, "", "", trial.failure)
        else:
            seconds = trial.timing.median
            note = "chosen" if trial is trials[0] else ""
            table.add_row(*sizes, f"{seconds * 1e6:.1f}", f"{num_bytes / seconds / 1e9:.0f}", note)
    return table


def as_dict(trials: Sequence[Trial], num_bytes: int) -> dict[str, Any]:
    """The trials in the order in which they were made, and the fastest config."""
    return {
        "bytes": num_bytes,
        "trials": [
            {"config": asdict(trial.tiling), "failure": trial.failure}
            | ({} if trial.timing is None else {"seconds": asdict(trial.timing)})
            for trial in trials
        ],
        "fastest": asdict(fastest(trials).tiling),
    }


def fastest(trials: Sequence[Trial]) -> Trial:
    """The one with the smallest median.

    Raises:
        RuntimeError: if none of them ran.
    """
    ran = [(trial.timing.median, place) for place, trial in enumerate(trials) if trial.timing]
    if not ran:
        raise RuntimeError(f"no config ran: {trials[0].failure}")
    return trials[min(ran)[1]]
