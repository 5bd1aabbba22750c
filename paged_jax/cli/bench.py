"""A workload of random requests through the engine, and what it took."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from paged_jax.engine import Engine, Metrics, SamplingParams


@dataclass(frozen=True)
class Workload:
    """Requests that are all there at the start: prompts of random tokens, and how many new ones to write."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @classmethod
    def random(
        cls,
        requests: int,
        vocab_size: int,
        prompt_tokens: tuple[int, int] = (8, 256),
        new_tokens: tuple[int, int] = (16, 128),
        seed: int = 0,
    ) -> "Workload":
        """Lengths are drawn evenly between two bounds, both included."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(*prompt_tokens, size=requests, endpoint=True)
        return cls(
            prompts=tuple(tuple(rng.integers(vocab_size, size=length).tolist()) for length in lengths),
            new_tokens=tuple(rng.integers(*new_tokens, size=requests, endpoint=True).tolist()),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and new ones."""
        return max(len(p) + n for p, n in zip(self.prompts, self.new_tokens, strict=True))


@dataclass(frozen=True)
class Served:
    """What became of a workload. Times are in seconds, from the moment when all requests were handed in."""

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    first_token: tuple[float, ...]  # of each request
    between_tokens: tuple[float, ...]  # of each request, on average
    metrics: Metrics  # of this workload alone, counters and peaks
    peak_wasted_slots: int
    peak_wasted_slots_per_row: float

    def as_dict(self) -> dict[str, Any]:
        metrics = self.metrics
        new_tokens = sum(map(len, self.token_ids))
        return {
            "tokens_per_second": new_tokens / self.seconds,
            "requests": len(self.token_ids),
            "new_tokens": new_tokens,
            "peak_concurrent": metrics.peak_running,
            "wasted_slots": self.peak_wasted_slots,
            "wasted_slots_per_row": self.peak_wasted_slots_per_row,
            "peak_pages": metrics.peak_pages,
            "compiles_after_warmup": metrics.compiles,
            "host_seconds": metrics.host_seconds,
            "seconds": self.seconds,
            "time_to_first_token": spread(self.first_token),
            "inter_token_time": spread(self.between_tokens),
            "preemptions": metrics.preemptions,
            "visits": metrics.visits,
            "steps": metrics.steps,
            "steps_by_size": metrics.steps_by_size,
            "computed_tokens": metrics.computed_tokens,
            "cached_tokens": metrics.cached_tokens,
            "accepted_tokens": metrics.accepted_tokens,
        }


def serve(engine: Engine, workload: Workload, on_visit: Callable[[Metrics], None] | None = None) -> Served:
    """Runs a workload through an idle engine, greedily and past end tokens: every length is as asked."""
    before = engine.metrics
    began = time.perf_counter()
    rows = {
        engine.submit(prompt, SamplingParams(max_tokens=new, ignore_eos=True)): row
        for row, (prompt, new) in enumerate(zip(workload.prompts, workload.new_tokens, strict=True))
    }
    first, last = np.zeros(len(rows)), np.zeros(len(rows))
    tokens: list[tuple[int, ...]] = [() for _ in rows]
    wasted, wasted_per_row = 0, 0.0
    while engine.has_work:
        deltas = engine.step()
        now = time.perf_counter() - began
        for delta in deltas:
            row = rows[delta.request_id]
            first[row] = first[row] or now
            last[row] = now
            tokens[row] += delta.token_ids
        metrics = engine.metrics
        wasted = max(wasted, metrics.wasted_slots)
        wasted_per_row = max(wasted_per_row, metrics.wasted_slots / max(metrics.running, 1))
        if on_visit is not None:
            on_visit(metrics)
    seconds = time.perf_counter() - began
    between = [
        (end - start) / (len(ids) - 1)
        for start, end, ids in zip(first, last, tokens, strict=True)
        if len(ids) > 1
    ]
    return Served(
        seconds,
        tuple(tokens),
        tuple(first.tolist()),
        tuple(between),
        engine.metrics.since(before),
        wasted,
        wasted_per_row,
    )


def as_text(served: Served) -> Table:
    """The result, a fact a line."""
    found, metrics = served.as_dict(), served.metrics
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("tokens", f"{metrics.prompt_tokens} read, {found['new_tokens']} written")
    table.add_row("time", f"{served.seconds:.1f} s, {found['tokens_per_second']:.1f} tokens/s")
    for name, key in (("first token", "time_to_first_token"), ("between tokens", "inter_token_time")):
        times = found[key]
        table.add_row(name, f"{1000 * times['median']:.0f} ms (median), {1000 * times['p90']:.0f} ms (90 %)")
    table.add_row("rows", f"{metrics.peak_running} at once, {metrics.preemptions} preempted")
    table.add_row("pages", f"{metrics.peak_pages} of {metrics.pages} used at once")
    table.add_row("wasted", f"{served.peak_wasted_slots_per_row:.1f} slots a row at most")
    share = metrics.host_seconds / metrics.seconds if metrics.seconds else 0.0
    table.add_row("host", f"{share:.1%} of the time, {metrics.visits} visits for {metrics.steps} steps")
    return table


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and what 90 % stay below; zeros where there is nothing."""
    median, p90 = np.quantile(values, [0.5, 0.9]).tolist() if values else (0.0, 0.0)
    return {"median": median, "p90": p90}
