"""The prefix index: reported faults by their number, and any order of operations against a plain model."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.engine import prefix_index
from paged_jax.engine.prefix_index import Chain, PrefixIndex


def run(
    index: PrefixIndex, tokens: Sequence[int], page_ids: Sequence[int], namespace: str = "", found: int = 0
) -> Chain:
    """A row that finds `found` pages and fills these pages with the rest of its full pages of tokens."""
    chain = index.open(tokens, namespace)
    assert chain.num_pages == found
    for number, page_id in enumerate(page_ids, start=found):
        start = number * index.page_size
        index.append(chain, tokens[start : start + index.page_size], page_id)
    assert chain.num_pages == len(tokens) // index.page_size
    return chain


def test_b06_a_page_that_was_evicted_is_not_found_by_its_old_tokens():
    index = PrefixIndex(2)
    index.close(run(index, [1, 2, 3, 4], [0, 1]))
    assert sorted(index.evict(2)) == [0, 1]
    index.close(run(index, [9, 9, 9, 9], [1, 0]))
    assert index.find([1, 2, 3, 4]) == ()
    assert index.find([9, 9, 9, 9]) == (1, 0)


def test_b06_a_page_is_not_filled_anew_before_it_is_forgotten():
    index = PrefixIndex(2)
    index.close(run(index, [1, 2], [0]))
    with pytest.raises(ValueError, match="page_id must be a page that is not known yet, got page_id=0"):
        run(index, [9, 9], [0])
    assert index.find([1, 2]) == (0,)
    assert index.find([9, 9]) == ()


def test_b07_two_rows_fill_pages_with_the_same_tokens():
    index, tokens = PrefixIndex(2), [1, 2, 3, 4]
    first, second = index.open(tokens), index.open(tokens)
    for number in (0, 1):
        for chain, page_id in ((first, number), (second, 4 + number)):
            index.append(chain, tokens[2 * number : 2 * number + 2], page_id)
    assert index.num_pages == 4
    index.close(first)
    assert index.evict(4) == [1, 0]
    assert index.find(tokens) == (4, 5)
    index.close(second)
    assert index.evict(4) == [5, 4]
    assert index.find(tokens) == ()


def test_b08_a_shared_page_counts_once():
    index = PrefixIndex(2)
    first = run(index, [1, 2, 3, 4], [0, 1])
    second = run(index, [1, 2, 5, 6], [2], found=1)
    counts = [(index.num_pages, index.num_evictable)]
    for chain in (first, second):
        index.close(chain)
        counts.append((index.num_pages, index.num_evictable))
    third = index.open([1, 2, 5, 6])
    counts.append((index.num_pages, index.num_evictable))
    index.close(third)
    index.close(third)
    counts.append((index.num_pages, index.num_evictable))
    assert counts == [(3, 0), (3, 1), (3, 3), (3, 1), (3, 3)]


@pytest.mark.parametrize("resumed", [False, True], ids=["in one go", "in two"])
def test_b09_the_tail_of_a_chain_goes_before_its_head(resumed):
    index, tokens = PrefixIndex(2), [1, 2, 3, 4, 5, 6]
    if resumed:
        index.close(run(index, tokens[:4], [0, 1]))
        index.close(run(index, tokens, [2], found=2))
    else:
        index.close(run(index, tokens, [0, 1, 2]))
    assert index.evict(1) == [2]
    assert index.find([*tokens, 7]) == (0, 1)


def test_b09_an_older_chain_goes_first_and_a_hit_makes_it_younger():
    index = PrefixIndex(2)
    for start, page_ids in ((10, [0, 1]), (20, [2, 3]), (30, [4, 5])):
        index.close(run(index, range(start, start + 4), page_ids))
    index.find([20, 21])  # a look changes nothing
    chain = index.open([10, 11, 12, 13])
    assert index.evict(1) == [3]
    index.close(chain)
    assert index.evict(6) == [2, 5, 4, 1, 0]


def test_b09_of_what_a_window_has_passed_the_head_stays_longest():
    index = PrefixIndex(2)
    long = run(index, range(100, 112), [10, 11, 12, 13, 14, 15])
    index.let_go(long, 2)
    index.close(run(index, [1, 2], [0]))
    index.let_go(long, 3)
    index.let_go(long, 1)  # a smaller number takes nothing back
    assert index.num_evictable == 4
    assert index.evict(2) == [0, 12]
    index.close(long)
    assert index.evict(9) == [15, 14, 13, 11, 10]


def test_b10_nothing_is_found_behind_a_hole():
    index, tokens = PrefixIndex(2), [1, 2, 3, 4, 5, 6]
    chain = run(index, tokens, [0, 1, 2])
    index.let_go(chain, 1)
    assert index.evict(3) == [0]
    assert index.find(tokens) == ()
    assert index.open(tokens).num_pages == 0
    run(index, tokens[:2], [3])
    assert index.find(tokens) == (3, 1, 2)


def test_b12_the_same_tokens_after_another_past_are_not_found():
    index = PrefixIndex(2)
    run(index, [1, 2, 7, 8], [0, 1])
    run(index, [3, 4, 9, 9], [2, 3])
    assert index.find([3, 4, 7, 8]) == (2,)
    assert index.find([7, 8]) == ()


def test_b13_a_namespace_finds_its_own_pages_only():
    index, tokens = PrefixIndex(2), [1, 2, 3, 4]
    for number, namespace in enumerate(("", "a", "ab", "\0")):
        run(index, tokens, [2 * number, 2 * number + 1], namespace)
    found = [index.find(tokens, namespace) for namespace in ("", "a", "ab", "\0", "b")]
    assert found == [(0, 1), (2, 3), (4, 5), (6, 7), ()]


def test_b13_new_weights_find_nothing():
    index, tokens = PrefixIndex(2), [1, 2, 3, 4]
    chains = [run(index, tokens, [0, 1]), run(index, tokens, [2, 3], "other"), index.open([])]
    for running in (3, 2, 1):
        with pytest.raises(ValueError, match=f"{running} rows are running"):
            index.clear()
        index.close(chains.pop(0))
    assert index.num_pages == 4
    assert sorted(index.clear()) == [0, 1, 2, 3]
    assert (index.num_pages, index.num_evictable) == (0, 0)
    assert index.find(tokens) == index.find(tokens, "other") == ()


def test_b14_chunks_leave_no_trace_in_the_digests():
    tokens = list(range(12))
    chunked, whole = PrefixIndex(4), PrefixIndex(4)
    chain = chunked.open(tokens)
    for length in (5, 10, 12):
        for number in range(chain.num_pages, length // 4):
            chunked.append(chain, tokens[4 * number : 4 * number + 4], number)
    assert chain.prefix.digest == run(whole, tokens, [0, 1, 2]).prefix.digest
    assert chunked.find(tokens) == whole.find(tokens) == (0, 1, 2)


def test_a_part_of_a_page_is_never_found():
    index = PrefixIndex(4)
    run(index, range(8), [0, 1])
    assert [len(index.find(range(length))) for length in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_a_row_can_be_kept_from_its_last_page():
    index, tokens = PrefixIndex(2), [1, 2, 3, 4]
    index.close(run(index, tokens, [0, 1]))
    chain = index.open(tokens, max_pages=(len(tokens) - 1) // 2)
    assert list(chain.page_ids) == [0]
    assert index.evict(2) == [1]
    index.append(chain, tokens[2:], 7)
    assert index.find(tokens) == (0, 7)


def test_a_fork_goes_on_from_the_pages_it_shares():
    index = PrefixIndex(2)
    parent = run(index, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    child = index.fork(parent, 2)
    index.append(child, [7, 8], 3)
    index.close(parent)
    assert index.evict(4) == [2]
    assert index.find([1, 2, 3, 4, 7, 8]) == (0, 1, 3)
    index.close(child)
    assert index.evict(4) == [3, 1, 0]


def test_tokens_of_any_width_have_digests_of_their_own():
    """Fixed width: no list of tokens is another one cut elsewhere, nor another one modulo 2**32."""
    index = PrefixIndex(2)
    lists = [[1, 0], [0, 1], [2**32, 1], [1, 2**32], [-1, 0], [0, -1], [256, 0], [0, 256]]
    chains = [run(index, tokens, [page_id]) for page_id, tokens in enumerate(lists)]
    assert len({chain.prefix.digest for chain in chains}) == len(lists)
    assert {len(chain.prefix.digest) for chain in chains} == {32}


def test_a_long_row_comes_and_goes():
    """Deeper than Python's stack: nothing may follow a chain by recursion."""
    index, num_pages = PrefixIndex(1), 20_000
    index.close(run(index, range(num_pages), range(num_pages)))
    assert index.evict(num_pages) == list(reversed(range(num_pages)))
    assert index.find([0]) == ()


def test_tokens_of_forgotten_pages_are_not_kept():
    """The head is popular and stays known: what once came after it must not pile up behind it."""
    index, tokens = PrefixIndex(2), [1, 2, 3, 4, 5, 6]
    chain = run(index, tokens, [0, 1, 2])
    last = weakref.ref(chain.prefix)
    index.let_go(chain, 1)
    index.close(chain)
    assert index.evict(2) == [2, 1]
    assert index.find(tokens) == (0,)
    assert last() is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda index, chain, closed: PrefixIndex(0), "page_size must be a positive number"),
        (
            lambda index, chain, closed: index.open([1, 2], max_pages=-1),
            "max_pages must be None or at least 0",
        ),
        (
            lambda index, chain, closed: index.append(chain, [3], 5),
            "only a full page is known, of 2 tokens, got 1",
        ),
        (lambda index, chain, closed: index.append(chain, [3, 4, 5], 5), "of 2 tokens, got 3"),
        (lambda index, chain, closed: index.append(chain, [3, 4], -1), "got page_id=-1"),
        (lambda index, chain, closed: index.append(chain, [3, 4], 0), "got page_id=0"),
        (lambda index, chain, closed: index.append(closed, [3, 4], 5), "append: this chain is closed"),
        (lambda index, chain, closed: index.fork(closed, 1), "fork: this chain is closed"),
        (lambda index, chain, closed: index.fork(chain, 2), "fork: the row has had 1 full pages"),
        (lambda index, chain, closed: index.fork(chain, -1), "fork: the row has had 1 full pages"),
        (lambda index, chain, closed: index.let_go(chain, 2), "had 1 full pages, got num_pages=2"),
    ],
)
def test_a_wrong_argument_changes_nothing(call, message):
    index = PrefixIndex(2)
    closed = run(index, [8, 9], [1])
    index.close(closed)
    chain = run(index, [1, 2], [0])
    with pytest.raises(ValueError, match=message):
        call(index, chain, closed)
    assert (index.num_pages, index.num_evictable, chain.num_pages) == (2, 1, 1)
    index.close(chain)
    assert index.clear() == [1, 0]


TOKENS = st.lists(st.integers(0, 1), max_size=9)
PAGE_OF_TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=2)
NAMESPACES = st.sampled_from(["", "tenant"])


@given(st.lists(st.tuples(TOKENS, NAMESPACES), min_size=1, max_size=12), st.sampled_from([1, 3]))
def test_where_digests_collide_a_hit_is_still_the_right_page(rows, num_digests):
    """What is found is compared with the tokens and their past: a collision costs hits, no more."""
    index, held = PrefixIndex(2), {}

    def colliding(before, tokens):
        return bytes([sum(tokens) % num_digests])

    def check(page_ids, tokens, namespace):
        hits = [held[page_id] for page_id in page_ids]
        assert hits == [(namespace, tokens[: 2 * number]) for number in range(1, len(hits) + 1)]

    with mock.patch.object(prefix_index, "_digest", colliding):
        for tokens, namespace in rows:
            chain = index.open(tokens, namespace)
            check(chain.page_ids, tokens, namespace)
            for end in range(2 * chain.num_pages + 2, len(tokens) + 1, 2):
                index.append(chain, tokens[end - 2 : end], page_id=len(held))
                held[len(held)] = (namespace, tokens[:end])
            index.close(chain)
        for (tokens, _), namespace in product(rows, ("", "tenant")):
            check(index.find(tokens, namespace), tokens, namespace)
        first = next(iter(held.values()), None)
        assert first is None or index.find(first[1], first[0]) == (0,)  # who has a digest first keeps it
        assert sorted(index.clear()) == sorted(held)


@dataclass(eq=False)
class Row:
    """A row as the model sees it: all its full pages, and the number of those it has let go."""

    chain: Chain
    namespace: str
    tokens: list[int]
    page_ids: list[int]
    let_go: int = 0
    given_back_at: int = 0


class Machine(RuleBasedStateMachine):
    """Few tokens, namespaces and pages, so that rows meet."""

    page_size = 2
    choices = st.integers(0, 63)

    @initialize()
    def create(self):
        self.index = PrefixIndex(self.page_size)
        self.rows: list[Row] = []
        self.known: dict[int, tuple[str, list[int]]] = {}  # page id -> what it holds, oldest first
        self.given_back_by: dict[int, Row] = {}
        self.clock = 0

    def users(self, page_id: int) -> int:
        return sum(page_id in row.page_ids[row.let_go :] for row in self.rows)

    def eviction_order(self) -> list[int]:
        def key(page_id: int) -> tuple[int, int]:
            return self.given_back_by[page_id].given_back_at, -len(self.known[page_id][1])

        return sorted((page_id for page_id in self.known if not self.users(page_id)), key=key)

    def found(self, tokens: list[int], namespace: str) -> list[int]:
        page_ids = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            holding = [page for page, held in self.known.items() if held == (namespace, tokens[:end])]
            if not holding:
                break
            page_ids.append(holding[0])
        return page_ids

    def give_back(self, row: Row, page_ids: list[int]) -> None:
        """After the row is known not to use them."""
        self.clock += 1
        for page_id in page_ids:
            if not self.users(page_id):
                self.given_back_by[page_id] = row
                row.given_back_at = self.clock

    def forget(self, page_ids: list[int]) -> None:
        for page_id in page_ids:
            assert not self.users(page_id)
            del self.known[page_id]

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def find(self, tokens, namespace):
        assert list(self.index.find(tokens, namespace)) == self.found(tokens, namespace)

    @rule(tokens=TOKENS, namespace=NAMESPACES, max_pages=st.none() | st.integers(0, 3))
    def open(self, tokens, namespace, max_pages):
        page_ids = self.found(tokens, namespace)[:max_pages]
        chain = self.index.open(tokens, namespace, max_pages)
        assert list(chain.page_ids) == page_ids
        self.rows.append(Row(chain, namespace, tokens[: self.page_size * len(page_ids)], page_ids))

    @precondition(lambda self: self.rows)
    @rule(choice=choices, tokens=PAGE_OF_TOKENS, page_id=st.integers(0, 11))
    def append(self, choice, tokens, page_id):
        row = self.rows[choice % len(self.rows)]
        if page_id in self.known:
            with pytest.raises(ValueError, match="not known yet"):
                self.index.append(row.chain, tokens, page_id)
            return
        self.index.append(row.chain, tokens, page_id)
        row.tokens = row.tokens + tokens
        row.page_ids = [*row.page_ids, page_id]
        self.known[page_id] = (row.namespace, row.tokens)

    @precondition(lambda self: self.rows)
    @rule(choice=choices, fewer=st.sampled_from([0, 0, 1, 2]))
    def fork(self, choice, fewer):
        row = self.rows[choice % len(self.rows)]
        num_pages = max(0, len(row.page_ids) - fewer)
        chain = self.index.fork(row.chain, num_pages)
        tokens, page_ids = row.tokens[: self.page_size * num_pages], row.page_ids[:num_pages]
        self.rows.append(Row(chain, row.namespace, tokens, page_ids, min(row.let_go, num_pages)))

    @precondition(lambda self: self.rows)
    @rule(choice=choices, num_pages=st.integers(0, 4))
    def let_go(self, choice, num_pages):
        row = self.rows[choice % len(self.rows)]
        num_pages = min(num_pages, len(row.page_ids))
        self.index.let_go(row.chain, num_pages)
        before, row.let_go = row.let_go, max(row.let_go, num_pages)
        self.give_back(row, row.page_ids[before : row.let_go])

    @precondition(lambda self: self.rows)
    @rule(choice=choices)
    def close(self, choice):
        row = self.rows.pop(choice % len(self.rows))
        self.index.close(row.chain)
        self.index.close(row.chain)
        self.give_back(row, row.page_ids[row.let_go :])

    @rule(count=st.integers(0, 3))
    def evict(self, count):
        expected = self.eviction_order()[:count]
        assert self.index.evict(count) == expected
        self.forget(expected)

    @rule()
    def clear(self):
        if self.rows:
            with pytest.raises(ValueError, match=f"{len(self.rows)} rows are running"):
                self.index.clear()
        else:
            assert sorted(self.index.clear()) == sorted(self.known)
            self.forget(list(self.known))

    @invariant()
    def counts(self):
        assert self.index.num_pages == len(self.known)
        assert self.index.num_evictable == len(self.eviction_order())
        for row in self.rows:
            assert list(row.chain.page_ids) == row.page_ids[row.let_go :]
            assert row.chain.num_pages == len(row.page_ids)


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
