"""What an engine does, visit by visit: the page table, who is in which row, and what has happened."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from paged_jax.engine.core import EngineCore
from paged_jax.engine.engine import Engine
from paged_jax.engine.metrics import Metrics
from paged_jax.engine.request import FinishReason, Sequence
from paged_jax.engine.steps import Report
from paged_jax.page_table import NO_PAGE, PageTable

MAX_VISITS = 1000
"""Visits that are recorded unless more are asked for."""


@dataclass(frozen=True)
class Joined:
    """A sequence came into a row, with `num_held` of its `num_tokens` known tokens in pages already."""

    row: int
    request_id: str
    sample: int
    num_tokens: int
    num_held: int
    sibling: int | None  # the row of another sample that shares those pages; None: the prefix index knew them


@dataclass(frozen=True)
class Copied:
    """A row was about to write into a page that others hold too, and went on in a copy of its own."""

    row: int
    request_id: str
    sample: int
    source: int  # page ids
    destination: int


@dataclass(frozen=True)
class Left:
    """A sequence gave back its row. It goes on later if it was "preempted", or if the visit has "failed"."""

    row: int
    request_id: str
    sample: int
    reason: FinishReason | Literal["preempted", "failed"]


Event = Joined | Copied | Left


@dataclass(frozen=True)
class Occupant:
    """The sequence in a row: which sample of which request, and the tokens that are known of it."""

    request_id: str
    sample: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Visit:
    """The engine at the end of one visit.

    Attributes:
        table: the engine's page table, its arrays copied to numpy. A page's holders are the rows whose
            tables name it; whatever `ref_counts` has beyond them is the prefix index.
        occupants: of the rows, by row number.
        events: since the visit before, in the order in which they happened.
        metrics: counters since the recording began, gauges as they were.
    """

    table: PageTable
    occupants: dict[int, Occupant]
    events: tuple[Event, ...]
    metrics: Metrics


@dataclass(frozen=True)
class Recording:
    """The visits of an engine, in order; `record` makes it."""

    visits: list[Visit]
    max_visits: int

    @property
    def full(self) -> bool:
        """Whether `max_visits` are there; later ones are not recorded."""
        return len(self.visits) >= self.max_visits


@contextmanager
def record(engine: Engine, max_visits: int = MAX_VISITS) -> Iterator[Recording]:
    """Records the visits of an engine while the block runs, whoever drives it.

    Each visit then copies the page table to the host three times. Outside the block the engine is as it
    was, and pays nothing.

    Args:
        max_visits: visits that are kept, at most; it is the first ones.

    Raises:
        ValueError: if `max_visits` is not positive, or the engine is being recorded already.
    """
    if max_visits < 1:
        raise ValueError(f"record: max_visits must be a positive number, got {max_visits=}")
    with engine._turn():
        core = engine._core
        if isinstance(core, _RecordedCore):
            raise ValueError("record: this engine is being recorded already; end that block first")
        recording = Recording([], max_visits)
        engine._core = _RecordedCore(core, _Recorder(core, recording))
    try:
        yield recording
    finally:
        with engine._turn():
            engine._core = core


class _Recorder:
    """Compares what it sees of a core with what it saw the last time."""

    def __init__(self, core: EngineCore, recording: Recording):
        self._recording = recording
        self._began = core.metrics.copy()
        self._visits = core.metrics.visits
        self._running = dict(core.scheduler.running)
        self._events: list[Event] = []

    def see_rows(self, core: EngineCore, otherwise: Literal["preempted", "failed"] = "preempted") -> None:
        """Who has left and who has joined.

        Args:
            otherwise: why those have left who have not ended.
        """
        running = core.scheduler.running
        for row, job in self._running.items():
            if running.get(row) is not job:
                reason = job.finish_reason or otherwise
                self._events.append(Left(row, job.request_id, job.index, reason))
        for row, job in running.items():
            if self._running.get(row) is not job:
                sibling = _sibling(core, row) if job.length else None
                self._events.append(
                    Joined(row, job.request_id, job.index, job.num_tokens, job.length, sibling)
                )
        self._running = dict(running)

    def see_copies(self, before: PageTable, after: PageTable) -> None:
        """Entries that name another page than before a run: within one, only a copy does that."""
        held = (before.block_tables != NO_PAGE) & (after.block_tables != NO_PAGE)
        for row, entry in np.argwhere(held & (before.block_tables != after.block_tables)).tolist():
            job = self._running[row]
            source, destination = (int(table.block_tables[row, entry]) for table in (before, after))
            self._events.append(Copied(row, job.request_id, job.index, source, destination))

    def end_visit(self, core: EngineCore) -> None:
        """Keeps the visit, unless nothing has happened."""
        metrics = core.metrics
        if self._recording.full or (metrics.visits == self._visits and not self._events):
            return
        self._recording.visits.append(
            Visit(
                table=table_of(core),
                occupants={row: _occupant(job) for row, job in sorted(self._running.items())},
                events=tuple(self._events),
                metrics=metrics.copy().since(self._began),
            )
        )
        self._visits, self._events = metrics.visits, []


class _RecordedCore(EngineCore):
    """Stands in for a core while it is recorded. The two share all attributes, so that it can go any time."""

    __slots__ = ("_joined", "_recorder")  # beside what is shared

    def __init__(self, core: EngineCore, recorder: _Recorder):
        self.__dict__ = core.__dict__
        self._recorder = recorder

    def visit(self) -> None:
        otherwise: Literal["preempted", "failed"] = "failed"
        try:
            super().visit()
            otherwise = "preempted"
        finally:
            self._recorder.see_rows(self, otherwise)
            self._recorder.end_visit(self)

    def _join(self) -> None:
        super()._join()
        self._recorder.see_rows(self)
        self._joined = table_of(self)

    def _read(self, report: Report) -> None:
        # Those that have ended still have their pages.
        self._recorder.see_copies(self._joined, table_of(self))
        super()._read(report)


def table_of(core: EngineCore) -> PageTable:
    """The page table as it is now, its arrays copied to numpy."""
    return jax.tree.map(np.array, core._runner.state.rows.table)


def _sibling(core: EngineCore, row: int) -> int | None:
    """The row of another sample of the same request that has pages of this one."""
    running, tables = core.scheduler.running, np.asarray(core._runner.state.rows.table.block_tables)
    shares = np.any((tables == tables[row]) & (tables != NO_PAGE), axis=1)
    return next(
        (
            other
            for other, job in sorted(running.items())
            if other != row and job.request_id == running[row].request_id and shares[other]
        ),
        None,
    )


def _occupant(job: Sequence) -> Occupant:
    return Occupant(job.request_id, job.index, len(job.prompt_ids), len(job.token_ids))
