"""Which pages hold which tokens: a row that starts with known tokens takes their pages over.

A full page is found by the digest of all tokens up to its end, chained page by page from a namespace
(a Merkle chain, BLAKE2b of RFC 7693), and what is found is compared with the tokens themselves. This
is policy alone. The page table counts the holders: the engine pins each page that is appended here
and takes the pin back when the page is forgotten.
"""

import struct
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from weakref import WeakValueDictionary


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class _Prefix:
    """The tokens from a namespace on to the end of one page; one object for all who have them in common."""

    before: "_Prefix | str"  # of a first page: the namespace
    tokens: tuple[int, ...]  # of its last page
    digest: bytes
    page_ids: dict[int, None] = field(default_factory=dict)  # that hold those tokens, in the order they came


@dataclass(eq=False, repr=False, slots=True)
class Chain:
    """What one row knows of its pages. `PrefixIndex.open` makes it, and only the index changes it.

    Attributes:
        page_ids: the full pages that the row uses, in order, without those it has let go.
    """

    prefix: _Prefix | str | None  # where the next page comes in; None: closed
    page_ids: deque[int] = field(default_factory=deque)
    num_let_go: int = 0
    evictable: dict[int, None] = field(default_factory=dict)  # pages given back here; the last goes first

    @property
    def num_pages(self) -> int:
        """Full pages of the row so far, those it has let go included."""
        return self.num_let_go + len(self.page_ids)


@dataclass(eq=False, slots=True)
class _Page:
    prefix: _Prefix
    users: int  # rows
    given_back: Chain | None = None  # without users: the chain of the last one


class PrefixIndex:
    """Full pages by the tokens they hold, each in use by a number of rows or evictable.

    The pages given back by one row are evicted tail first, for a prefix is worth nothing without its first
    page, and rows in the order in which they last gave one back. Every operation takes constant time for
    each page that it touches.
    """

    def __init__(self, page_size: int):
        """Raises ValueError if `page_size`, the tokens of a full page, is not positive."""
        if page_size < 1:
            raise ValueError(f"PrefixIndex: page_size must be a positive number of tokens, got {page_size=}")
        self.page_size = page_size
        # A prefix lives as long as a page, a longer prefix or an open chain refers to it: where a page in
        # the middle is gone, what comes after is found again once that page is back.
        self._prefixes: WeakValueDictionary[bytes, _Prefix] = WeakValueDictionary()
        self._pages: dict[int, _Page] = {}
        # Those with evictable pages, the next to lose one first.
        self._chains: OrderedDict[Chain, None] = OrderedDict()
        self._num_evictable = 0
        self._num_open = 0

    @property
    def num_pages(self) -> int:
        """Pages that are known, in use or not; each counts once however many rows share it."""
        return len(self._pages)

    @property
    def num_evictable(self) -> int:
        """Pages that are known and in use by no row."""
        return self._num_evictable

    def page_ids(self) -> list[int]:
        """The pages that are known, each once."""
        return list(self._pages)

    def find(self, tokens: Sequence[int], namespace: str = "") -> tuple[int, ...]:
        """The pages of the longest run of full pages, from the first on, that hold these tokens.

        Changes nothing, not even the order of eviction.

        Args:
            namespace: what besides the tokens decides about keys and values, and who may share them: model,
                adapter, salt of a tenant. Pages are found under the very namespace they came with.
        """
        return tuple(next(iter(prefix.page_ids)) for prefix in self._run(tokens, namespace))

    def open(self, tokens: Sequence[int], namespace: str = "", max_pages: int | None = None) -> Chain:
        """Starts a row with the pages that `find` finds, at most `max_pages` of them, now in use by it.

        A row has to compute at least its last token: `max_pages=(len(tokens) - 1) // page_size`.

        Raises:
            ValueError: if `max_pages` is negative.
        """
        if max_pages is not None and max_pages < 0:
            raise ValueError(f"open: max_pages must be None or at least 0, got {max_pages=}")
        chain = Chain(namespace)
        for prefix in islice(self._run(tokens, namespace), max_pages):
            chain.prefix = prefix
            self._use(chain, next(iter(prefix.page_ids)))
        self._num_open += 1
        return chain

    def append(self, chain: Chain, page_tokens: Sequence[int], page_id: int) -> None:
        """The row's next page is full, and known from now on, in use by the row: pin it.

        Another page may hold the same prefix, filled by another row at the same time; both stay known.

        Raises:
            ValueError: if the chain is closed, the page is known already, or its tokens do not fill it.
        """
        if chain.prefix is None:
            raise ValueError("append: this chain is closed, open another for the row")
        if page_id < 0 or page_id in self._pages:
            raise ValueError(
                f"append: page_id must be a page that is not known yet, got {page_id=}; "
                "a known page stays pinned, and is given to nobody, until evict returns it"
            )
        if len(page_tokens) != self.page_size:
            raise ValueError(
                f"append: only a full page is known, of {self.page_size} tokens, got {len(page_tokens)}"
            )
        prefix = self._after(chain.prefix, tuple(page_tokens))
        # Should another prefix have the same digest, it stays the one to be found.
        self._prefixes.setdefault(prefix.digest, prefix)
        prefix.page_ids[page_id] = None
        self._pages[page_id] = _Page(prefix, users=1)
        chain.prefix = prefix
        chain.page_ids.append(page_id)

    def fork(self, chain: Chain, num_pages: int) -> Chain:
        """The chain of a row that shares the first `num_pages` pages of this one's row, but for those let go.

        Raises:
            ValueError: if the chain is closed, or its row has not had so many full pages.
        """
        if chain.prefix is None:
            raise ValueError("fork: this chain is closed, fork a row before it ends")
        if not 0 <= num_pages <= chain.num_pages:
            raise ValueError(f"fork: the row has had {chain.num_pages} full pages, got {num_pages=}")
        prefix = chain.prefix
        for _ in range(chain.num_pages - num_pages):
            assert isinstance(prefix, _Prefix)
            prefix = prefix.before
        child = Chain(prefix, num_let_go=min(num_pages, chain.num_let_go))
        for page_id in islice(chain.page_ids, num_pages - child.num_let_go):
            self._use(child, page_id)
        self._num_open += 1
        return child

    def let_go(self, chain: Chain, num_pages: int) -> None:
        """The row no longer uses its first `num_pages` pages: a sliding window has passed them.

        Raises:
            ValueError: if the row has not had so many full pages.
        """
        if num_pages > chain.num_pages:
            raise ValueError(
                f"let_go: the row has had {chain.num_pages} full pages, got {num_pages=}; "
                "append a full page before the window passes it"
            )
        while chain.num_let_go < num_pages:
            self._give_back(chain, chain.page_ids.popleft())
            chain.num_let_go += 1

    def close(self, chain: Chain) -> None:
        """The row has ended and uses none of its pages any more. Closing again changes nothing."""
        if chain.prefix is None:
            return
        self.let_go(chain, chain.num_pages)
        chain.prefix = None
        self._num_open -= 1

    def evict(self, count: int) -> list[int]:
        """Forgets up to `count` pages that no row uses and returns their ids in that order: unpin them."""
        evicted: list[int] = []
        while len(evicted) < count and self._chains:
            chain = next(iter(self._chains))
            page_id, _ = chain.evictable.popitem()
            self._took_one_of(chain)
            del self._pages.pop(page_id).prefix.page_ids[page_id]
            evicted.append(page_id)
        return evicted

    def clear(self) -> list[int]:
        """Forgets all pages and returns their ids: unpin them. For when the weights change.

        Raises:
            ValueError: if a chain is open, for its row would append pages of both weights.
        """
        if self._num_open:
            raise ValueError(f"clear: {self._num_open} rows are running, close their chains first")
        return self.evict(self.num_pages)

    def _run(self, tokens: Sequence[int], namespace: str) -> Iterator[_Prefix]:
        """The prefixes of these tokens that a page holds, up to the first that none does."""
        prefix: _Prefix | str = namespace
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            prefix = self._after(prefix, tuple(tokens[end - self.page_size : end]))
            if not prefix.page_ids:
                return
            yield prefix

    def _after(self, before: _Prefix | str, tokens: tuple[int, ...]) -> _Prefix:
        """The prefix that is one page longer: the one that is known, or a new one that is not yet."""
        digest = _digest(before, tokens)
        known = self._prefixes.get(digest)
        if known is not None and known.before == before and known.tokens == tokens:
            return known
        return _Prefix(before, tokens, digest)

    def _use(self, chain: Chain, page_id: int) -> None:
        page = self._pages[page_id]
        if page.given_back is not None:
            del page.given_back.evictable[page_id]
            self._took_one_of(page.given_back)
            page.given_back = None
        page.users += 1
        chain.page_ids.append(page_id)

    def _give_back(self, chain: Chain, page_id: int) -> None:
        page = self._pages[page_id]
        page.users -= 1
        if page.users == 0:
            page.given_back = chain
            chain.evictable[page_id] = None
            self._chains[chain] = None
            self._chains.move_to_end(chain)
            self._num_evictable += 1

    def _took_one_of(self, chain: Chain) -> None:
        """An evictable page of the chain is in use again, or evicted."""
        self._num_evictable -= 1
        if not chain.evictable:
            del self._chains[chain]


def _digest(before: _Prefix | str, tokens: tuple[int, ...]) -> bytes:
    """256 bits. Every part has its own width or its own hash: no two chains are one string of bytes."""
    if isinstance(before, str):
        start = blake2b(before.encode("utf-8", "surrogatepass"), digest_size=32, person=b"namespace").digest()
    else:
        start = before.digest
    return blake2b(start + struct.pack(f"<{len(tokens)}q", *tokens), digest_size=32, person=b"page").digest()
