"""Contiguous regions against pages: the same requests in the same memory, slot by slot.

    python benchmarks/fragmentation.py

A simulation, without a model and without a clock: in each step every running request stores one more
token, requests that have written all leave, and the queue's head joins as long as it finds room (first
come, first served). Prompts are stored in the step in which a request joins. Memory is counted in token
slots, and there are always more requests than it holds.

    reserve           a region of the maximum length for each request
    oracle            first fit, regions of each request's final length, which no server knows beforehand
    double            first fit, regions that are copied to twice their size when they are full
    pages             the page table of paged_jax; who joins leaves a page free for each request that runs,
                      as the engine's scheduler does
    pages, no margin  whoever finds room joins

When a request of the last three cannot grow, the youngest one gives up its memory, goes back to the front
of the queue, and later stores its tokens again. `--rounds` is the number of traces, each with its own seed.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from harness import arguments, report

from paged_jax import PageTable, page_table
from paged_jax.capacity import pages_for
from paged_jax.testing import check_page_table

PAGE_SIZE = 16
CAPACITY = 32768  # slots: 4 GiB of a model that keeps 128 KiB a token
MAX_LENGTH = 2048
MAX_ROWS = 256  # of the page table: more than ever run
STEPS = 2000
WARMUP = 400  # steps until memory has filled up with requests of all ages; not counted in means
POLICIES = ("reserve", "oracle", "double", "pages", "pages, no margin")


@dataclass(frozen=True)
class Request:
    arrival: int  # step
    prompt: int  # tokens
    length: int  # tokens in the end, the prompt included


@dataclass(frozen=True)
class Series:
    """What `simulate` saw after each of S steps. All in token slots, requests or tokens.

    `used + reserved + internal + free == capacity` at every step.
    """

    capacity: int
    used: np.ndarray  # [S] slots that hold a token
    reserved: np.ndarray  # [S] slots held for tokens that their request will still write
    internal: np.ndarray  # [S] slots held that no token will ever fill: internal fragmentation
    free: np.ndarray  # [S] slots held by nobody
    largest_hole: np.ndarray  # [S] the most slots that one request could be given; of pages all that are free
    fragmented: np.ndarray  # [S] bool: the queue's head waits although enough slots are free
    running: np.ndarray  # [S] requests
    waiting: np.ndarray  # [S] requests
    completed: np.ndarray  # [S] requests so far
    preempted: np.ndarray  # [S] requests so far, each time counted
    recomputed: np.ndarray  # [S] tokens so far that were stored again after that
    copied: np.ndarray  # [S] tokens so far that were moved to a larger region
    owners: np.ndarray  # [S, capacity // PAGE_SIZE] number of the request that holds each 16th slot, or -1


class Memory(Protocol):
    """Places requests, known by their number in the trace, in a range of slots."""

    copied: int

    def need(self, length: int, final: int) -> int:
        """Free slots that let a request join with so many tokens that ends with `final`."""
        ...

    def place(self, number: int, length: int, final: int) -> bool:
        """Takes them if they can be had."""
        ...

    def append(self, numbers: list[int]) -> list[int]:
        """Room for one more token each. Returns those that got none."""
        ...

    def release(self, number: int) -> None: ...

    def held(self) -> dict[int, int]:
        """Slots of each request."""
        ...

    def free(self) -> int: ...

    def largest_hole(self) -> int: ...

    def owners(self) -> np.ndarray: ...


@dataclass
class Region:
    start: int
    size: int
    tokens: int = 0


class FirstFit:
    """Contiguous regions, each in the first hole that is large enough (Knuth, TAOCP vol. 1, 2.5)."""

    def __init__(self, capacity: int, max_length: int, policy: str):
        self.capacity, self.max_length, self.policy = capacity, max_length, policy
        self.regions: dict[int, Region] = {}
        self.copied = 0

    def holes(self) -> Iterable[Region]:
        """Free ranges in the order of their addresses."""
        end = 0
        for region in sorted(self.regions.values(), key=lambda region: region.start):
            if region.start > end:
                yield Region(end, region.start - end)
            end = region.start + region.size
        if end < self.capacity:
            yield Region(end, self.capacity - end)

    def need(self, length: int, final: int) -> int:
        if self.policy == "reserve":
            return self.max_length
        if self.policy == "oracle":
            return final
        return min(1 << length.bit_length(), self.max_length)  # the next power of two above length

    def place(self, number: int, length: int, final: int) -> bool:
        size = self.need(length, final)
        for hole in self.holes():
            if hole.size >= size:
                self.regions[number] = Region(hole.start, size, length)
                return True
        return False

    def append(self, numbers: list[int]) -> list[int]:
        refused = []
        for number in numbers:
            old = self.regions[number]
            if old.tokens < old.size:
                old.tokens += 1
            elif self.place(number, old.tokens, self.max_length):  # beside the old one, which is read
                self.copied += old.tokens
                self.regions[number].tokens += 1
            else:
                refused.append(number)
        return refused

    def release(self, number: int) -> None:
        del self.regions[number]

    def held(self) -> dict[int, int]:
        return {number: region.size for number, region in self.regions.items()}

    def free(self) -> int:
        return self.capacity - sum(region.size for region in self.regions.values())

    def largest_hole(self) -> int:
        return max((hole.size for hole in self.holes()), default=0)

    def owners(self) -> np.ndarray:
        slots = np.full(self.capacity, -1, np.int32)
        for number, region in self.regions.items():
            slots[region.start : region.start + region.size] = number
        return slots[::PAGE_SIZE]


class Pages:
    """The page table itself, a row for each request that runs.

    `margin`: pages that stay free for each of them when another one joins.
    """

    copied = 0

    def __init__(self, capacity: int, max_length: int, margin: int):
        num_pages, width = capacity // PAGE_SIZE, pages_for(max_length, PAGE_SIZE)
        self.table = PageTable.create(num_pages, PAGE_SIZE, min(MAX_ROWS, num_pages), width)
        self.margin = margin
        self.rows: dict[int, int] = {}

    def need(self, length: int, final: int) -> int:
        return (pages_for(length, PAGE_SIZE) + self.margin * len(self.rows)) * PAGE_SIZE

    def place(self, number: int, length: int, final: int) -> bool:
        if self.free() < self.need(length, final):
            return False
        row = min(set(range(self.table.max_rows)) - set(self.rows.values()))
        assert self._extend({row: length})[row]
        self.rows[number] = row
        return True

    def append(self, numbers: list[int]) -> list[int]:
        granted = self._extend({self.rows[number]: 1 for number in numbers})
        return [number for number in numbers if not granted[self.rows[number]]]

    def release(self, number: int) -> None:
        mask = np.zeros(self.table.max_rows, bool)
        mask[self.rows.pop(number)] = True
        self.table = release(self.table, mask)

    def held(self) -> dict[int, int]:
        pages = np.sum(np.asarray(self.table.block_tables) != page_table.NO_PAGE, axis=1) * PAGE_SIZE
        return {number: int(pages[row]) for number, row in self.rows.items()}

    def free(self) -> int:
        return int(self.table.num_free) * PAGE_SIZE

    def largest_hole(self) -> int:
        return self.free()

    def owners(self) -> np.ndarray:
        owners = np.full(self.table.num_pages, -1, np.int32)
        tables = np.asarray(self.table.block_tables)
        for number, row in self.rows.items():
            owners[tables[row][tables[row] != page_table.NO_PAGE]] = number
        return owners

    def _extend(self, num_tokens: dict[int, int]) -> np.ndarray:
        wanted = np.zeros(self.table.max_rows, np.int32)
        wanted[list(num_tokens)] = list(num_tokens.values())
        self.table, granted = extend(self.table, wanted)
        return np.asarray(granted)


@partial(jax.jit, donate_argnums=0)
def extend(table: PageTable, num_tokens: jax.Array) -> tuple[PageTable, jax.Array]:
    table, grant = page_table.extend(table, num_tokens)
    return table, grant.granted


release = jax.jit(page_table.release, donate_argnums=0)


def random_trace(seed: int = 0, steps: int = STEPS, rate: float = 0.6) -> tuple[Request, ...]:
    """`rate` requests a step (a Poisson process); prompts and answers of lognormal length, median 128 tokens.

    The mean is 211 tokens each. Whatever would pass `MAX_LENGTH` is cut off.
    """
    random = np.random.default_rng(seed)
    arrivals = np.repeat(np.arange(steps), random.poisson(rate, steps))
    prompts, answers = np.ceil(random.lognormal(np.log(128), 1.0, (2, arrivals.size))).astype(int)
    prompts = np.minimum(prompts, MAX_LENGTH - 1)
    lengths = np.minimum(prompts + answers, MAX_LENGTH)
    return tuple(Request(*map(int, request)) for request in zip(arrivals, prompts, lengths, strict=True))


def simulate(
    trace: tuple[Request, ...],
    policy: str,
    *,
    capacity: int = CAPACITY,
    max_length: int = MAX_LENGTH,
    steps: int = STEPS,
) -> Series:
    """Serves the trace, sorted by arrival, from `capacity` slots under one of `POLICIES`.

    Raises:
        ValueError: for a policy that there is not, a request longer than `max_length`, and a capacity that
            is no multiple of the page size, or too small to copy a region of `max_length`.
    """
    if policy not in POLICIES:
        raise ValueError(f"simulate: policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if capacity % PAGE_SIZE or capacity < 2 * max_length:
        raise ValueError(
            f"simulate: capacity must be a multiple of {PAGE_SIZE} and hold two requests of {max_length}, "
            f"got {capacity}"
        )
    if (longest := max((request.length for request in trace), default=0)) > max_length:
        raise ValueError(f"simulate: requests must have at most {max_length} tokens, got one of {longest}")
    memory: Memory
    if policy.startswith("pages"):
        memory = Pages(capacity, max_length, margin=int(policy == "pages"))
    else:
        memory = FirstFit(capacity, max_length, policy)
    lengths = {number: request.prompt for number, request in enumerate(trace)}  # tokens so far
    running: list[int] = []  # the oldest first
    waiting: deque[int] = deque()
    arriving = deque(lengths)
    completed = preempted = recomputed = 0
    seen: list[tuple[Any, ...]] = []
    for step in range(steps):
        for number in [number for number in running if lengths[number] == trace[number].length]:
            running.remove(number)
            memory.release(number)
            completed += 1
        while arriving and trace[arriving[0]].arrival <= step:
            waiting.append(arriving.popleft())

        refused = memory.append(running)
        grown = set(running)
        while refused:
            youngest = running.pop()
            memory.release(youngest)
            waiting.appendleft(youngest)
            preempted += 1
            recomputed += lengths[youngest]
            grown.discard(youngest)
            refused = memory.append([number for number in refused if number != youngest])
        for number in grown:
            lengths[number] += 1

        while waiting and memory.place(waiting[0], lengths[waiting[0]], trace[waiting[0]].length):
            running.append(waiting.popleft())

        head = waiting[0] if waiting else None
        free = memory.free()
        held = memory.held()
        needed = {number: min(size, trace[number].length) for number, size in held.items()}
        used = sum(lengths[number] for number in running)
        seen.append(
            (
                used,
                sum(needed.values()) - used,
                sum(held.values()) - sum(needed.values()),
                free,
                memory.largest_hole(),
                head is not None and free >= memory.need(lengths[head], trace[head].length),
                len(running),
                len(waiting),
                completed,
                preempted,
                recomputed,
                memory.copied,
                memory.owners(),
            )
        )
    if isinstance(memory, Pages):
        check_page_table(memory.table)
    return Series(capacity, *map(np.asarray, zip(*seen, strict=True)))


def summarise(series: Series) -> dict[str, Any]:
    """Means over the steps after `WARMUP`, and counts of the whole run."""
    late = slice(WARMUP, None)
    shares = {
        name: float(np.mean(getattr(series, name)[late])) / series.capacity
        for name in ("used", "reserved", "internal", "free")
    }
    waits = series.fragmented[late]
    holes = series.largest_hole[late][waits] / series.free[late][waits]
    return {
        **shares,
        "running": float(np.mean(series.running[late])),
        "fragmented": float(np.mean(waits)),  # share of the steps
        "hole_share": float(np.mean(holes)) if waits.any() else 1.0,  # of what is free, in those steps
        "completed": int(series.completed[-1]),
        "preempted": int(series.preempted[-1]),
        "recomputed": int(series.recomputed[-1]),
        "copied": int(series.copied[-1]),
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    traces = [random_trace(seed) for seed in range(options.rounds)]
    results, table = [], []
    for policy in POLICIES:
        each = [summarise(simulate(trace, policy)) for trace in traces]
        mean = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
        results.append({"policy": policy, "mean": mean, "traces": each})
        columns = {"in use": "used", "not yet": "reserved", "wasted": "internal", "free": "free"}
        columns |= {"requests": "running", "finished": "completed", "sent back": "preempted"}
        table.append({"policy": policy} | {title: f"{mean[name]:.3g}" for title, name in columns.items()})
    waits = {result["policy"]: result["mean"] for result in results}["oracle"]
    report(
        options,
        {
            "benchmark": "fragmentation",
            "capacity": CAPACITY,
            "max_length": MAX_LENGTH,
            "page_size": PAGE_SIZE,
            "steps": STEPS,
            "results": results,
        },
        table,
        [
            f"The oracle's next request waits although enough slots are free in {waits['fragmented']:.1%} of "
            f"the steps; the largest hole is then {waits['hole_share']:.1%} of what is free."
        ],
    )


if __name__ == "__main__":
    main()
