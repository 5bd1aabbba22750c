"""Who runs, who waits, and who has to give back its pages: the engine's policy, without jax.

Iteration-level scheduling (Yu et al. 2022, "Orca", OSDI 2022): sequences join and leave between steps.
First come, first served. A sequence joins when its known tokens find room; when those that run find
too few pages, the youngest goes back to the queue, where it keeps its place, and later computes its
tokens again (Kwon et al. 2023, arXiv:2309.06180, section 4.5). The oldest always goes on, so all end.
"""

import bisect
from collections.abc import Sequence as PageIds
from dataclasses import dataclass
from typing import NamedTuple

from paged_jax.capacity import pages_for
from paged_jax.engine.prefix_index import Chain, PrefixIndex
from paged_jax.engine.request import Sequence


class Admission(NamedTuple):
    """A sequence that joins a row, with the tokens that it finds in pages already."""

    sequence: Sequence
    row: int
    num_held: int  # tokens
    page_ids: tuple[int, ...]  # that hold them
    parent: Sequence | None  # a sibling that runs, and whose pages hold them


FEWEST_ROWS = 16
"""Steps of fewer tokens have no program of their own: reading the weights takes most of their time."""


class Run(NamedTuple):
    """What the device does next: every running row takes up `num_tokens[row]` tokens a step."""

    size: int  # the most tokens of a step; of one in which all rows decode, the most rows
    decode: bool
    num_tokens: dict[int, int]
    num_pages: int  # that the run may take


@dataclass(frozen=True)
class Limits:
    """The sizes that decisions rest on.

    Attributes:
        sizes: tokens of a packed step, ascending; the last is the budget of a step.
        steps_per_visit: of a run in which all rows decode.
        draft_tokens: guesses that each of those steps may verify in each row.
        window: positions behind which pages go back, or None.
    """

    max_rows: int
    num_pages: int
    page_size: int
    max_length: int
    sizes: tuple[int, ...]
    steps_per_visit: int
    draft_tokens: int
    window: int | None

    @property
    def max_tokens(self) -> int:
        """The most that one run adds to a row that decodes."""
        return self.steps_per_visit * (1 + self.draft_tokens)

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Rows of a step in which all rows decode, ascending: all there are, half of them, and so on."""
        sizes = [self.max_rows]
        while sizes[0] >= 2 * FEWEST_ROWS:
            sizes.insert(0, -(-sizes[0] // 2))
        return tuple(sizes)

    def pages_for(self, num_tokens: int) -> int:
        return pages_for(num_tokens, self.page_size)

    def most_pages(self, num_tokens: int) -> int:
        """The most that a row with so many tokens in pages holds at once, on the way included."""
        pages = self.pages_for(num_tokens)
        if self.window is None:
            return pages
        # A step's tokens are stored before the pages behind the window go.
        return min(pages, self.pages_for(self.window + max(self.sizes[-1], self.max_tokens)) + 1)

    def first_kept(self, length: int) -> int:
        """The first position whose page a row of this length still has."""
        if self.window is None:
            return 0
        return max(0, length - self.window + 1) // self.page_size * self.page_size


class Scheduler:
    """The queue and the rows. `index` is None without a prefix cache."""

    def __init__(self, limits: Limits, index: PrefixIndex | None):
        self.limits = limits
        self.index = index
        self._sequences: set[Sequence] = set()  # all that have not ended
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}

    def pinned(self) -> list[int]:
        """Page ids that the index has a pin on."""
        return [] if self.index is None else self.index.page_ids()

    def forget(self) -> None:
        """All pages are gone: those that have not ended start again from what is known.

        It may come after an error in the middle of any other method.
        """
        self.running = {}
        for sequence in self._sequences:
            sequence.leave_row()
        self._sequences = {sequence for sequence in self._sequences if sequence.finish_reason is None}
        self.waiting = sorted(self._sequences, key=_age)
        if self.index is not None:
            self.index = PrefixIndex(self.limits.page_size)

    @property
    def num_evictable(self) -> int:
        return 0 if self.index is None else self.index.num_evictable

    def check_fits(self, num_tokens: int, prompt_tokens: int) -> None:
        """Raises ValueError for a sequence that could not finish even alone.

        Args:
            num_tokens: prompt and new ones; the last is never stored.
        """
        limits = self.limits
        what = f"a request of {prompt_tokens} prompt and {num_tokens - prompt_tokens} new tokens"
        if num_tokens > limits.max_length:
            raise ValueError(
                f"Engine: {what} is longer than a row of {limits.max_length}; ask for fewer tokens or raise "
                "max_length"
            )
        pages = limits.most_pages(num_tokens - 1)
        if pages > limits.num_pages:
            raise ValueError(
                f"Engine: {what} takes {pages} pages of {limits.page_size}, and the pool has "
                f"{limits.num_pages}; ask for fewer tokens or give it more pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Into the queue, or the row where it is already; once, however often it is added."""
        if sequence in self._sequences:
            return
        self._sequences.add(sequence)
        if sequence.row is None:
            bisect.insort(self.waiting, sequence, key=_age)
        else:
            self.running[sequence.row] = sequence

    def remove(self, sequence: Sequence) -> list[int]:
        """Takes it out of the queue or its row, and returns the row; known pages stay in the prefix index."""
        self._sequences.discard(sequence)
        return self._take_out(sequence)

    def put_back(self, sequence: Sequence) -> list[int]:
        """Out of its row, which is returned, into the queue."""
        row = self._take_out(sequence)
        bisect.insort(self.waiting, sequence, key=_age)
        return row

    def _take_out(self, sequence: Sequence) -> list[int]:
        if sequence.row is None:
            self.waiting.remove(sequence)
            return []
        row = sequence.row
        del self.running[row]
        if self.index is not None and sequence.chain is not None:
            self.index.close(sequence.chain)
        sequence.leave_row()
        return [row]

    def advance(self, sequence: Sequence, length: int, full_pages: PageIds) -> list[int]:
        """A running sequence has so many tokens in pages now. Returns the pages that the index now knows.

        Args:
            full_pages: ids of the pages that were filled on the way, in order, with negative ones where
                there is none: behind the last, or where a window has passed it already.
        """
        limits, chain = self.limits, sequence.chain
        first, last = sequence.length // limits.page_size, length // limits.page_size
        sequence.shares_tail &= length == sequence.length
        sequence.length, sequence.first_kept = length, limits.first_kept(length)
        known: list[int] = []
        if self.index is None or chain is None:
            return known
        tokens = sequence.tokens() if first < last else ()
        for page in range(first, last):
            page_id = int(full_pages[page - first])
            if page_id < 0:
                # A page is missing, and without it what follows cannot be found.
                self.index.close(chain)
                sequence.chain = None
                return known
            self.index.append(chain, tokens[page * limits.page_size : (page + 1) * limits.page_size], page_id)
            known.append(page_id)
        self.index.let_go(chain, min(sequence.first_kept // limits.page_size, chain.num_pages))
        return known

    def preempt(self, num_free: int) -> Sequence | None:
        """Who has to go back to the queue so that the others can take their next step; None when all can."""
        if len(self.running) < 2 or self._next_pages(self.share()) <= num_free + self.num_evictable:
            return None
        return max(self.running.values(), key=_age)

    def admit(self, num_free: int) -> Admission | None:
        """The next sequence that joins, if there is a row and room for what it knows."""
        limits = self.limits
        if len(self.running) == limits.max_rows:
            return None
        # What the running ones still have to take, and a page more for each that grows beyond it.
        taken = sum(
            self._pages_to_come(sequence)
            - self._held_pages(sequence)
            + (self._pages_to_come(sequence) < limits.most_pages(sequence.max_tokens - 1))
            for sequence in self.running.values()
        )
        for sequence in self.waiting:
            parent = self._sibling(sequence)
            if parent is not None and parent.length < len(parent.prompt_ids):
                continue  # it waits for its prompt's pages
            if parent is not None and self._covers(parent, sequence):
                num_held = sequence.num_tokens - 1
                found = limits.pages_for(num_held) - (num_held % limits.page_size > 0)
                page_ids: tuple[int, ...] = ()
                chain = None
                if self.index is not None and parent.chain is not None:
                    chain = self.index.fork(parent.chain, num_held // limits.page_size)
            else:
                parent = None
                chain = self._open(sequence)
                page_ids = () if chain is None else tuple(chain.page_ids)
                found = len(page_ids)
                num_held = found * limits.page_size
            wanted = self._pages_to_come(sequence) - found
            if wanted + taken > num_free + self.num_evictable:
                if self.index is not None and chain is not None:
                    self.index.close(chain)
                return None
            self.waiting.remove(sequence)
            row = min(set(range(limits.max_rows)) - self.running.keys())
            sequence.row, sequence.length, sequence.chain = row, num_held, chain
            sequence.first_kept = 0 if parent is None else parent.first_kept
            sequence.shares_tail = parent is not None
            if parent is not None:
                parent.shares_tail = True
            self.running[row] = sequence
            return Admission(sequence, row, num_held, page_ids, parent)
        return None

    def share(self) -> dict[int, int]:
        """Tokens of each row in the next step: all that decode, and prompts in the order they came."""
        left = self.limits.sizes[-1] - len(self.running)
        tokens = {}
        for row, sequence in sorted(self.running.items(), key=lambda item: _age(item[1])):
            more = min(sequence.wanted - 1, left)
            left -= more
            tokens[row] = 1 + more
        return tokens

    def next_run(self) -> Run:
        tokens = self.share()
        if all(sequence.wanted == 1 for sequence in self.running.values()):
            pages = sum(
                self._grown(sequence, min(self.limits.max_tokens, sequence.max_tokens - 1 - sequence.length))
                for sequence in self.running.values()
            )
            return Run(_smallest(self.limits.decode_sizes, len(tokens)), True, tokens, pages)
        size = _smallest(self.limits.sizes, sum(tokens.values()))
        return Run(size, False, tokens, self._next_pages(tokens))

    def _next_pages(self, tokens: dict[int, int]) -> int:
        return sum(self._grown(self.running[row], count) for row, count in tokens.items())

    def _grown(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that a running sequence takes for so many more tokens."""
        limits = self.limits
        copied = sequence.shares_tail and sequence.length % limits.page_size > 0
        return limits.pages_for(sequence.length + num_tokens) - limits.pages_for(sequence.length) + copied

    def _pages_to_come(self, sequence: Sequence) -> int:
        """What a sequence holds once all it knows, and one token more, are in pages."""
        return self.limits.most_pages(min(sequence.num_tokens + 1, sequence.max_tokens - 1))

    def _held_pages(self, sequence: Sequence) -> int:
        return self.limits.pages_for(sequence.length) - sequence.first_kept // self.limits.page_size

    def _open(self, sequence: Sequence) -> Chain | None:
        if self.index is None:
            return None
        # The last token is computed in any case: its logits are wanted.
        most = (sequence.num_tokens - 1) // self.limits.page_size
        return self.index.open(sequence.tokens(), sequence.namespace, max_pages=most)

    def _sibling(self, sequence: Sequence) -> Sequence | None:
        """A sample of the same request that runs, for one that has written nothing itself yet."""
        if sequence.params.n == 1 or sequence.token_ids:
            return None
        siblings = (other for other in self.running.values() if other.request_id == sequence.request_id)
        return min(siblings, key=_age, default=None)

    def _covers(self, parent: Sequence, child: Sequence) -> bool:
        """Whether the parent still has all pages that the child's last prompt token sees."""
        return parent.first_kept <= self.limits.first_kept(child.num_tokens - 1)


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival, sequence.index


def _smallest(sizes: tuple[int, ...], count: int) -> int:
    return next(size for size in sizes if size >= count)
