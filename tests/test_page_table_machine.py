"""Every transition of the page table, in any order, against a model made of lists and counters."""

from collections import Counter
from dataclasses import dataclass

import jax
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax import page_table
from paged_jax.page_table import NO_PAGE, PageTable

EXTEND = jax.jit(page_table.extend)
RELEASE = jax.jit(page_table.release)
FORK = jax.jit(page_table.fork)
ADOPT = jax.jit(page_table.adopt)
PIN = jax.jit(page_table.pin)
UNPIN = jax.jit(page_table.unpin)
TRUNCATE = jax.jit(page_table.truncate)
DROP_BEFORE = jax.jit(page_table.drop_before)
LOCATE = jax.jit(page_table.locate)
SUMMARY = jax.jit(page_table.summary)

MOST_ROWS = 8  # every draw is made for this many rows; a smaller table uses the first of them
PINS_AT_ONCE = 4
HUGE = 2**31 - 1


def for_each_row(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(values, min_size=MOST_ROWS, max_size=MOST_ROWS)


CHOICE = st.integers(0, 63)  # of one from a list of any size
ANY_COUNTS = for_each_row(st.sampled_from([0, 1, 2, 3, 5, 8, 21, -1, HUGE, -HUGE - 1]))
ANY_POSITIONS = for_each_row(st.integers(-2, 24) | st.just(HUGE))
ANY_PAGES = for_each_row(st.integers(-3, 14))
ANY_ROWS = for_each_row(st.integers(-2, MOST_ROWS))


@dataclass
class Fresh:
    """A page that the model takes without choosing which."""


class Model:
    """The page table as its documentation tells it: one row after the other, nothing clever."""

    def __init__(self, num_pages: int, page_size: int, rows: int, width: int):
        self.num_pages, self.page_size, self.width = num_pages, page_size, width
        self.rows: list[list] = [[] for _ in range(rows)]  # page ids, None where dropped
        self.lengths = [0] * rows
        self.pins: Counter = Counter()

    def holders(self, page) -> int:
        return sum(page in row for row in self.rows) + self.pins[page]

    def used(self) -> set:
        return {page for page in range(self.num_pages) if self.holders(page)}

    def pages(self, tokens: int) -> int:
        return len(range(0, tokens, self.page_size))

    def extend(self, num_tokens: list[int]) -> tuple[list[bool], list]:
        """Takes `Fresh` pages; whoever knows their ids puts them in."""
        free, stopped = self.num_pages - len(self.used()), False
        granted, copies = [], []
        for row, more in enumerate(num_tokens):
            length, pages = self.lengths[row], self.rows[row]
            writes_tail = more > 0 and length % self.page_size > 0
            copy = writes_tail and self.holders(pages[-1]) > 1
            need = self.pages(length + more) - len(pages) + copy
            never = (
                more < 0 or length + more > self.width * self.page_size or (writes_tail and pages[-1] is None)
            )
            granted.append(not never and (need == 0 or (not stopped and need <= free)))
            copies.append(None)
            if granted[row]:
                if copy:
                    copies[row] = pages[-1]
                    pages.pop()
                pages += [Fresh() for _ in range(need)]
                self.lengths[row] += more
                free -= need
            elif not never:
                stopped = True
        return granted, copies

    def fork(self, parents: list[int]) -> None:
        before = [(list(pages), length) for pages, length in zip(self.rows, self.lengths, strict=True)]
        for row, parent in enumerate(parents):
            if before[row][1] == 0 and 0 <= parent < len(self.rows):
                self.rows[row], self.lengths[row] = list(before[parent][0]), before[parent][1]

    def adopt(self, row: int, page_ids: list[int], num_tokens: int) -> None:
        if not (0 <= row < len(self.rows) and 0 <= num_tokens <= self.width * self.page_size):
            return
        pages = page_ids[: self.pages(num_tokens)]
        if self.lengths[row] == 0 and len(set(pages)) == len(pages) and set(pages) <= self.used():
            self.rows[row], self.lengths[row] = pages, num_tokens

    def truncate(self, row: int, length: int) -> None:
        self.lengths[row] = min(self.lengths[row], max(length, 0))
        del self.rows[row][self.pages(self.lengths[row]) :]

    def drop_before(self, row: int, position: int) -> None:
        for logical_page in range(len(self.rows[row])):
            if (logical_page + 1) * self.page_size <= min(position, self.lengths[row]):
                self.rows[row][logical_page] = None


def pick(values: list, choice: int):
    return values[choice % len(values)]


class Machine(RuleBasedStateMachine):
    """Six rows; wide enough that rows run into the end of their tables and of the pool."""

    num_pages, page_size, num_rows, width = 12, 4, 6, 5

    @initialize()
    def create(self):
        self.table = PageTable.create(self.num_pages, self.page_size, self.num_rows, self.width)
        self.model = Model(self.num_pages, self.page_size, self.num_rows, self.width)

    def array(self, values: list[int]) -> np.ndarray:
        return np.array(values[: self.num_rows], np.int32)

    def rows_in_use(self, yes: bool = True) -> list[int]:
        return [row for row, length in enumerate(self.model.lengths) if (length > 0) == yes]

    def can_share(self) -> bool:
        return bool(self.rows_in_use()) and bool(self.rows_in_use(False))

    @rule(num_tokens=ANY_COUNTS)
    def extend(self, num_tokens):
        num_tokens = num_tokens[: self.num_rows]
        free_before = set(range(self.num_pages)) - self.model.used()
        granted, copies = self.model.extend(num_tokens)
        self.table, grant = EXTEND(self.table, self.array(num_tokens))
        assert grant.granted.tolist() == granted

        taken = []
        for pages, entries, source, pair in zip(
            self.model.rows, self.table.block_tables.tolist(), copies, grant.copies.tolist(), strict=True
        ):
            fresh = [index for index, page in enumerate(pages) if isinstance(page, Fresh)]
            taken += [entries[index] for index in fresh]
            assert pair == ([NO_PAGE, NO_PAGE] if source is None else [source, entries[fresh[0]]])
            for index in fresh:
                pages[index] = entries[index]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= free_before

    @rule(active=for_each_row(st.booleans()))
    def decode(self, active):
        self.extend([int(yes) for yes in active])

    @rule(number=st.integers(1, 9), choice=CHOICE)
    def prefill(self, number, choice):
        self.extend([number * (row == choice % self.num_rows) for row in range(MOST_ROWS)])

    @rule(rows_mask=for_each_row(st.integers(0, 3)))
    def release(self, rows_mask):
        rows_mask = self.array(rows_mask) == 3
        self.table = RELEASE(self.table, rows_mask)
        for row in np.flatnonzero(rows_mask):
            self.model.truncate(row, 0)

    @rule(parents=ANY_ROWS)
    def fork(self, parents):
        parents = parents[: self.num_rows]
        self.table = FORK(self.table, self.array(parents))
        self.model.fork(parents)

    @precondition(can_share)
    @rule(child=CHOICE, parent=CHOICE)
    def fork_one(self, child, parent):
        parents = [NO_PAGE] * self.num_rows
        parents[pick(self.rows_in_use(False), child)] = pick(self.rows_in_use(), parent)
        self.fork(parents)

    @rule(row=st.integers(-2, MOST_ROWS), pages=ANY_PAGES, num_tokens=st.integers(-2, 22) | st.just(HUGE))
    def adopt(self, row, pages, num_tokens):
        self.table = ADOPT(self.table, row, np.array(pages), num_tokens)
        self.model.adopt(row, pages, num_tokens)

    @precondition(can_share)
    @rule(row=CHOICE, source=CHOICE, num_tokens=CHOICE, fault=st.integers(0, 7))
    def adopt_a_prefix(self, row, source, num_tokens, fault):
        source = pick(self.rows_in_use(), source)
        pages = [NO_PAGE if page is None else page for page in self.model.rows[source]]
        row, num_tokens = pick(self.rows_in_use(False), row), num_tokens % self.model.lengths[source] + 1
        if fault == 1:
            row -= self.num_rows  # the same row, if the number wrapped
        elif fault == 2:
            pages[1:2] = pages[:1]
        elif fault == 3:
            num_tokens += self.width * self.page_size
        self.adopt(row, pages + list(range(MOST_ROWS - len(pages))), num_tokens)

    @rule(pages=ANY_PAGES)
    def pin(self, pages):
        pages = pages[:PINS_AT_ONCE]
        self.table = PIN(self.table, np.array(pages))
        used = self.model.used()
        self.model.pins.update(page for page in pages if page in used)

    @rule(choices=st.lists(CHOICE, max_size=PINS_AT_ONCE), others=ANY_PAGES)
    def unpin(self, choices, others):
        """Only what was pinned, and pages that are free or do not exist."""
        others = [page for page in others if page not in self.model.used()]
        pages = []
        for choice in choices:
            if pinned := sorted(self.model.pins.elements()):
                pages.append(pick(pinned, choice))
                self.model.pins[pages[-1]] -= 1
        pages = (pages + others + [NO_PAGE] * PINS_AT_ONCE)[:PINS_AT_ONCE]
        self.table = UNPIN(self.table, np.array(pages))

    @rule(cuts=for_each_row(st.sampled_from([0, 0, 1, 3, 6, -2, HUGE])))
    def truncate(self, cuts):
        lengths = [length - cut for length, cut in zip(self.model.lengths, cuts, strict=False)]
        self.table = TRUNCATE(self.table, self.array(lengths))
        for row, length in enumerate(lengths):
            self.model.truncate(row, length)

    @rule(positions=ANY_POSITIONS)
    def drop_before(self, positions):
        self.table = DROP_BEFORE(self.table, self.array(positions))
        for row, position in enumerate(positions[: self.num_rows]):
            self.model.drop_before(row, position)

    @rule(row=st.integers(-2, MOST_ROWS))
    def locate(self, row):
        positions = list(range(-2, self.width * self.page_size + 2))
        page_ids, slots = LOCATE(self.table, np.full(len(positions), row), np.array(positions))
        for position, address in zip(
            positions, zip(page_ids.tolist(), slots.tolist(), strict=True), strict=True
        ):
            page = None
            if 0 <= row < self.num_rows and 0 <= position < self.model.lengths[row]:
                page = self.model.rows[row][position // self.page_size]
            assert address == ((NO_PAGE, 0) if page is None else (page, position % self.page_size))

    @invariant()
    def ledger(self):
        """Every page is free once or held as often as it is counted."""
        table = jax.device_get(self.table)
        free = table.free_stack[: int(table.num_free)].tolist()
        held = Counter(page for row in table.block_tables.tolist() for page in row if page != NO_PAGE)
        held += self.model.pins
        assert table.ref_counts.tolist() == [held[page] for page in range(self.num_pages)]
        assert sorted(free) == [page for page in range(self.num_pages) if held[page] == 0]
        for row in table.block_tables:
            assert np.unique(row[row != NO_PAGE]).size == np.sum(row != NO_PAGE)

    @invariant()
    def equals_the_model(self):
        table, summary = jax.device_get((self.table, SUMMARY(self.table)))
        assert table.lengths.tolist() == summary.lengths.tolist() == self.model.lengths
        for entries, pages in zip(table.block_tables.tolist(), self.model.rows, strict=True):
            expected = [NO_PAGE if page is None else page for page in pages]
            assert entries == expected + [NO_PAGE] * (self.width - len(pages))
        assert summary.num_free == self.num_pages - len(self.model.used())
        held = [sum(page is not None for page in pages) for pages in self.model.rows]
        assert summary.pages_per_row.tolist() == held


class OneTokenPages(Machine):
    """Page size 1: no page is ever partly filled, so none is ever copied."""

    num_pages, page_size, num_rows, width = 9, 1, 4, 4


class MoreRowsThanPages(Machine):
    """Most requests are refused, and the rows crowd onto shared pages."""

    num_pages, page_size, num_rows, width = 5, 3, 8, 3


TestMachine = Machine.TestCase
TestOneTokenPages = OneTokenPages.TestCase
TestMoreRowsThanPages = MoreRowsThanPages.TestCase
TestMachine.settings = settings(max_examples=250, stateful_step_count=50)
TestOneTokenPages.settings = TestMoreRowsThanPages.settings = settings(
    max_examples=100, stateful_step_count=40
)
