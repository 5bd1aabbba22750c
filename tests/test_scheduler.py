"""The engine's policy alone: who joins, who goes back, and what a run may take. No jax, no device."""

import dataclasses
import random
from collections import Counter

import pytest

from paged_jax.engine.prefix_index import PrefixIndex
from paged_jax.engine.request import SamplingParams, Sequence
from paged_jax.engine.scheduler import Admission, Limits, Scheduler
from paged_jax.engine.text import TextWriter

LIMITS = Limits(
    max_rows=4,
    num_pages=24,
    page_size=4,
    max_length=64,
    sizes=(8, 32),
    steps_per_visit=4,
    draft_tokens=0,
    window=None,
)


def sequence(prompt, num_new: int = 8, arrival: int = 0, index: int = 0, n: int = 1) -> Sequence:
    """`prompt` may be a number: so many tokens that no other prompt has."""
    if isinstance(prompt, int):
        prompt = range(1000 * arrival, 1000 * arrival + prompt)
    return Sequence(
        request_id=str(arrival),
        index=index,
        arrival=arrival,
        prompt_ids=tuple(prompt),
        params=SamplingParams(max_tokens=num_new, n=n),
        seed=0,
        namespace="",
        max_tokens=len(prompt) + num_new,
        stop_token_ids=(),
        writer=TextWriter(None, ()),
    )


def scheduler(index: bool = False, **changes) -> Scheduler:
    limits = dataclasses.replace(LIMITS, **changes)
    return Scheduler(limits, PrefixIndex(limits.page_size) if index else None)


class Device:
    """A page table of sets and counters, and rows that write tokens of their own."""

    def __init__(self, policy: Scheduler):
        self.policy, self.limits = policy, policy.limits
        self.free = list(range(self.limits.num_pages))
        self.holders: Counter[int] = Counter()
        self.tables: dict[int, list[int | None]] = {}
        self.pins: set[int] = set()
        self.visits = self.preemptions = 0
        self.ended: list[Sequence] = []

    def take(self) -> int:
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def drop(self, page: int | None) -> None:
        if page is not None:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)

    def release(self, rows: list[int]) -> None:
        for row in rows:
            for page in self.tables.pop(row):
                self.drop(page)

    def admit(self, admission: Admission) -> None:
        pages = -(-admission.num_held // self.limits.page_size)
        parent = admission.parent
        source = list(admission.page_ids) if parent is None else self.tables[parent.row]
        self.tables[admission.row] = source[:pages]
        self.holders.update(page for page in source[:pages] if page is not None)

    def extend(self, row: int, length: int, count: int) -> bool:
        """As `page_table.extend`, for one row."""
        table, size = self.tables[row], self.limits.page_size
        copies = length % size > 0 and self.holders[table[-1]] > 1
        need = -(-(length + count) // size) - len(table) + copies
        if need > len(self.free):
            return False
        if copies:
            self.drop(table.pop())
        table += [self.take() for _ in range(need)]
        return True

    def run(self) -> None:
        policy, size = self.policy, self.limits.page_size
        plan = policy.next_run()
        if policy.index is not None:
            self.unpin(policy.index.evict(max(0, plan.num_pages - len(self.free))))
        assert sum(plan.num_tokens.values()) <= plan.size
        starts = {row: job.length for row, job in policy.running.items()}
        lengths, filled, going = dict(starts), {row: [] for row in starts}, set(starts)
        for step in range(self.limits.steps_per_visit if plan.decode else 1):
            refused = False
            for row in sorted(going):
                job, count = policy.running[row], plan.num_tokens[row]
                if not self.extend(row, lengths[row], count):
                    # What is decided before the run holds for its first step.
                    assert step > 0
                    refused = True
                    continue
                before, lengths[row] = lengths[row], lengths[row] + count
                filled[row] += self.tables[row][before // size : lengths[row] // size]
                if lengths[row] == job.num_tokens:
                    job.token_ids.append(random.randrange(3))
                    if job.num_tokens == job.max_tokens:
                        going.discard(row)
                first_kept = self.limits.first_kept(lengths[row])
                for page in range(first_kept // size):
                    self.drop(self.tables[row][page])
                    self.tables[row][page] = None
                held = sum(page is not None for page in self.tables[row])
                assert held <= self.limits.most_pages(lengths[row])
            if refused or not going:
                break
        released = []
        for row, job in list(policy.running.items()):
            start = starts[row] // size
            pages = [-1 if page is None else page for page in self.tables[row][start : lengths[row] // size]]
            known = policy.advance(job, lengths[row], pages)
            self.pins |= set(known)
            self.holders.update(known)
            if row not in going:
                released += policy.remove(job)
                self.ended.append(job)
        self.release(released)

    def unpin(self, pages) -> None:
        for page in pages:
            self.pins.remove(page)
            self.drop(page)

    def visit(self) -> None:
        policy = self.policy
        while (victim := policy.preempt(len(self.free))) is not None:
            youngest = max(policy.running.values(), key=lambda job: (job.arrival, job.index))
            assert victim is youngest
            self.release(policy.remove(victim))
            policy.add(victim)
            self.preemptions += 1
        while (admission := policy.admit(len(self.free))) is not None:
            self.admit(admission)
        if policy.running:
            self.run()
        self.visits += 1
        self.check()

    def check(self) -> None:
        holders = Counter(self.pins)
        for table in self.tables.values():
            holders.update(page for page in table if page is not None)
        assert +self.holders == holders
        assert sorted([*self.free, *holders]) == list(range(self.limits.num_pages))
        assert self.tables.keys() == self.policy.running.keys()
        assert self.pins == set(self.policy.pinned())
        used = {page for table in self.tables.values() for page in table}
        assert self.policy.num_evictable == len(self.pins - used)

    def drain(self, limit: int) -> None:
        while self.policy.waiting or self.policy.running:
            self.visit()
            assert self.visits <= limit


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_b63_random_mixes_come_to_an_end(seed, index, window):
    """Prompts with prefixes in common, and samples, in a pool for one or two of them; aborts on the way."""
    random.seed(seed)
    policy = scheduler(index, window=window, num_pages=random.randint(16, 30))
    device, expected = Device(policy), []
    for arrival in range(25):
        prompt = [0] * random.randrange(20) + [random.randrange(3) for _ in range(random.randint(1, 20))]
        num_new, n = random.randint(1, 64 - len(prompt)), random.choice([1, 1, 3])
        policy.check_fits(len(prompt) + num_new, len(prompt))
        for sample in range(n):
            job = sequence(prompt, num_new, arrival, sample, n)
            policy.add(job)
            expected.append(job)
        if random.random() < 0.3:
            device.visit()
        if random.random() < 0.2:
            victim = random.choice([*policy.waiting, *policy.running.values(), *expected[-1:]])
            if victim in expected and victim not in device.ended:
                device.release(policy.remove(victim))
                expected.remove(victim)
    device.drain(limit=25 * 3 * 40)
    assert set(device.ended) == set(expected)
    assert all(job.num_tokens == job.max_tokens for job in expected)
    assert len(device.free) + policy.num_evictable == policy.limits.num_pages
    if index:
        device.unpin(policy.index.clear())
    assert len(device.free) == policy.limits.num_pages


def test_first_come_first_served_and_the_oldest_always_goes_on():
    """Seven rows that need 15 pages each in the end, 24 pages: they end as they came."""
    device = Device(scheduler())
    for arrival in range(7):
        device.policy.add(sequence(30, 30, arrival))
    device.drain(limit=200)
    assert [job.arrival for job in device.ended] == list(range(7))
    assert device.preemptions >= 1


def test_a_request_that_does_not_fit_holds_back_those_after_it():
    policy = scheduler()
    for arrival, length in enumerate((60, 60, 1)):
        policy.add(sequence(length, 2, arrival))
    assert policy.admit(24).sequence.arrival == 0
    assert policy.admit(24) is None  # 15 pages twice
    assert [job.arrival for job in policy.waiting] == [1, 2]


def test_who_goes_back_keeps_its_place():
    policy = scheduler()
    for arrival in range(4):
        policy.add(sequence(8, 30, arrival))
    while policy.admit(24):
        pass
    for job in policy.running.values():
        policy.advance(job, 8, [])
        job.token_ids.append(0)
    assert policy.preempt(4) is None
    assert policy.preempt(3).arrival == 3
    policy.add(sequence(1, 1, 9))
    (row,) = policy.remove(victim := policy.running[3])
    policy.add(victim)
    assert row == 3
    assert [job.arrival for job in policy.waiting] == [3, 9]
    assert (victim.length, victim.row, victim.num_tokens) == (0, None, 9)


def test_the_last_one_is_never_sent_back():
    policy = scheduler()
    policy.add(sequence(8, 30))
    policy.admit(24)
    assert policy.preempt(0) is None


@pytest.mark.parametrize(
    ("prompt", "num_new", "message"),
    [
        (60, 5, "a request of 60 prompt and 5 new tokens is longer than a row of 64; ask for fewer tokens"),
        (42, 20, "42 prompt and 20 new tokens takes 16 pages of 4, and the pool has 15; ask for fewer"),
        (62, 1, "takes 16 pages of 4"),
    ],
)
def test_b62_what_can_never_fit(prompt, num_new, message):
    policy = scheduler(num_pages=15)
    with pytest.raises(ValueError, match=message):
        policy.check_fits(prompt + num_new, prompt)


def test_b62_b64_what_just_fits():
    """The last token is never stored."""
    scheduler(num_pages=15).check_fits(61, 42)
    scheduler(num_pages=1).check_fits(5, 1)
    # 6 positions before, 32 of a step: 38 tokens on 10 pages, or 11 where they begin within a page.
    scheduler(num_pages=11, window=6).check_fits(64, 40)
    with pytest.raises(ValueError, match="takes 11 pages of 4, and the pool has 10"):
        scheduler(num_pages=10, window=6).check_fits(64, 40)


class TestRuns:
    def running(self, *lengths, **changes) -> Scheduler:
        """Rows with prompts of these lengths, none of it in pages."""
        policy = scheduler(num_pages=100, **changes)
        for arrival, length in enumerate(lengths):
            policy.add(sequence(length, 8, arrival))
        while policy.admit(100):
            pass
        return policy

    def test_prompts_share_a_step_in_the_order_they_came(self):
        policy = self.running(20, 30, 5)
        assert policy.next_run() == (32, False, {0: 20, 1: 11, 2: 1}, 5 + 3 + 1)

    def test_every_row_takes_part_in_every_step(self):
        policy = self.running(60, 60, 1, 60)
        assert policy.next_run().num_tokens == {0: 29, 1: 1, 2: 1, 3: 1}

    def test_the_smallest_size_that_holds_the_step(self):
        assert self.running(7, 1).next_run().size == 8
        assert self.running(8, 1).next_run().size == 32

    def test_the_smallest_step_that_holds_the_rows_that_decode(self):
        def size(max_rows: int, running: int) -> int:
            policy = self.running(*[1] * running, max_rows=max_rows)
            return policy.next_run().size

        assert [size(64, running) for running in (1, 16, 17, 32, 33, 64)] == [16, 16, 32, 32, 64, 64]
        assert [size(31, 1), size(33, 17), size(33, 18), size(4, 1)] == [31, 17, 33, 4]

    def test_rows_that_decode(self):
        """Four steps each, but never past the token before the last: 10 to 14 and 4 to 8 take a page each."""
        policy = self.running(10, 4, 3)
        for row, length in enumerate((10, 4, 3)):
            policy.advance(policy.running[row], length, [])
            policy.running[row].token_ids.append(0)
        assert policy.next_run() == (4, True, {0: 1, 1: 1, 2: 1}, 1 + 1 + 1)
        policy.running[2].max_tokens = 5  # one more to store, which has its page
        assert policy.next_run().num_pages == 1 + 1

    def test_a_shared_tail_counts_until_it_is_written(self):
        policy = self.running(6)
        parent = policy.running[0]
        policy.advance(parent, 6, [])
        parent.token_ids.append(0)
        parent.params = SamplingParams(n=2)
        policy.add(sequence(parent.prompt_ids, 8, 0, index=1, n=2))
        admission = policy.admit(100)
        assert (admission.parent, admission.num_held, admission.page_ids) == (parent, 5, ())
        assert policy.next_run().num_pages == 2 + 2  # a copy and a page more each: an upper bound
        for job, length in ((parent, 7), (admission.sequence, 6)):
            policy.advance(job, length, [])
            job.token_ids.append(0)
        assert policy.next_run().num_pages == 1 + 1


class TestSamples:
    def test_the_others_wait_for_the_prompt_of_the_first(self):
        policy = scheduler()
        for index in range(3):
            policy.add(sequence(40, 8, 0, index, n=3))
        policy.add(sequence(4, 8, 1))
        admitted = [policy.admit(24).sequence for _ in range(2)]
        assert [(job.arrival, job.index) for job in admitted] == [(0, 0), (1, 0)]
        assert policy.admit(24) is None
        policy.advance(policy.running[0], 40, [])
        policy.running[0].token_ids.append(0)
        admission = policy.admit(14)
        assert (admission.sequence.index, admission.num_held) == (1, 39)
        assert admission.parent is policy.running[0]

    def test_after_the_window_has_passed_they_read_it_again(self):
        policy = scheduler(window=6, num_pages=40)
        for index in range(2):
            policy.add(sequence(8, 30, 0, index, n=2))
        policy.admit(40)
        parent = policy.running[0]
        parent.token_ids += [0] * 5
        policy.advance(parent, 12, [])
        admission = policy.admit(37)
        assert (admission.parent, admission.num_held) == (None, 0)


class TestRoom:
    def test_b08_cached_pages_count_as_room_once(self):
        """What a request finds in the cache is not there to be evicted for it."""
        policy = scheduler(index=True, num_pages=12)
        policy.add(sequence(range(33), 1))
        policy.admit(12)
        assert policy.advance(policy.running[0], 33, range(9)) == list(range(8))
        policy.remove(policy.running[0])
        assert policy.num_evictable == 8
        policy.add(sequence([*range(16), *range(100, 128)], 5, 1))  # 48 tokens to store at last
        admission = policy.admit(4)
        assert admission.page_ids == (0, 1, 2, 3)
        assert policy.num_evictable == 4
        policy.add(sequence(range(100, 102), 1, 2))
        assert policy.admit(4) is None

    def test_rows_that_are_as_long_as_they_get_need_no_reserve(self):
        """Three rows of four pages in twelve; with one token more each would need a fifth in the end."""
        for num_new, count in ((3, 3), (4, 2)):
            policy = scheduler(num_pages=12)
            for arrival in range(4):
                policy.add(sequence(14, num_new, arrival))
            admitted = 0
            while policy.admit(12) is not None:
                admitted += 1
            assert admitted == count

    def test_forget(self):
        policy = scheduler(index=True)
        for arrival in range(2):
            policy.add(sequence(9, 8, arrival))
            policy.admit(24)
        policy.advance(policy.running[1], 8, [0, 1])
        policy.forget()
        assert not policy.running
        assert [(job.arrival, job.length, job.row) for job in policy.waiting] == [(0, 0, None), (1, 0, None)]
        assert policy.pinned() == []
        assert policy.admit(24).page_ids == ()
