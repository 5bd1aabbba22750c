"""What happens in a small pool: requests come, grow, fork and end, by the transitions of the page table."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import page_table
from paged_jax.page_table import NO_PAGE, PageTable

NOBODY = -1


@dataclass(frozen=True)
class Request:
    number: int
    arrives: int  # at which step
    prompt: int  # tokens
    new: int  # tokens to write
    samples: int = 1  # 2: a second row continues the same prompt


@dataclass(frozen=True)
class Moment:
    """The pool after one step."""

    block_tables: np.ndarray  # int32 [rows, max_pages_per_row]
    lengths: np.ndarray  # int32 [rows]
    requests: tuple[int, ...]  # number of each row's request, or NOBODY
    waiting: tuple[int, ...]  # numbers, in the order of the queue
    num_free: int
    event: str  # in words, or nothing
    forked: bool

    def owners(self, num_pages: int) -> list[tuple[int, ...]]:
        """The rows that hold each page, as the block tables name them."""
        owners: list[tuple[int, ...]] = [() for _ in range(num_pages)]
        for row, page_ids in enumerate(self.block_tables):
            for page_id in page_ids[page_ids != NO_PAGE].tolist():
                owners[page_id] += (row,)
        return owners

    def fill(self, page_size: int, num_pages: int) -> list[int]:
        """Tokens in each page."""
        tokens = [0] * num_pages
        for page_ids, length in zip(self.block_tables, self.lengths, strict=True):
            for logical_page, page_id in enumerate(page_ids[page_ids != NO_PAGE].tolist()):
                tokens[page_id] = max(tokens[page_id], min(page_size, int(length) - logical_page * page_size))
        return tokens


_extend, _release, _fork = (jax.jit(f) for f in (page_table.extend, page_table.release, page_table.fork))


def live(table: PageTable, requests: Sequence[Request], most_steps: int = 1000) -> list[Moment]:
    """Steps until every request has come and gone; the last moment is an empty pool again."""
    arriving, queue = deque(sorted(requests, key=lambda request: request.arrives)), deque[Request]()
    running: dict[int, Request] = {}
    ends: dict[int, int] = {}  # length at which a row's request is done
    moments: list[Moment] = []
    for step in range(most_steps):
        event = ""
        done = [row for row in sorted(running) if int(table.lengths[row]) >= ends[row]]
        if done:
            table = _release(table, jnp.isin(jnp.arange(table.max_rows), jnp.asarray(done)))
            for row in done:
                request = running.pop(row)
                event = f"request {request.number} has ended: its pages are free again"
                if request in running.values():
                    event = f"one row of request {request.number} has ended: what it shared stays"
        while arriving and arriving[0].arrives <= step:
            queue.append(arriving.popleft())
        free_rows = [row for row in range(table.max_rows) if row not in running]

        parents = np.full(table.max_rows, NOBODY, np.int32)
        for row, request in list(running.items()):
            twins = sum(other is request for other in running.values())
            if twins < request.samples and ends[row] - int(table.lengths[row]) == request.new and free_rows:
                child = free_rows.pop(0)
                parents[child] = row
                running[child], ends[child] = request, ends[row] - request.new // 3  # the shorter sample
                event = f"request {request.number} forks: its two rows share all full pages"
        table = _fork(table, parents)

        room = int(table.num_free)
        while queue and free_rows:
            pages = page_table.pages_for(queue[0].prompt, table.page_size)
            # The running rows may want a page each, and a request with two samples a second row.
            if pages + table.max_rows > room or queue[0].samples > len(free_rows):
                break
            request, row, room = queue.popleft(), free_rows.pop(0), room - pages
            running[row], ends[row] = request, request.prompt + request.new
            event = event or f"request {request.number} comes in: pages for its prompt, and no more"
        wanted = np.zeros(table.max_rows, np.int32)
        for row, request in running.items():
            just_forked = row in parents or parents[row] != NOBODY  # shown before they write on
            wanted[row] = 0 if just_forked else 1 if table.lengths[row] else request.prompt
        table, _ = _extend(table, wanted)
        moments.append(
            Moment(
                np.asarray(table.block_tables),
                np.asarray(table.lengths),
                tuple(running[row].number if row in running else NOBODY for row in range(table.max_rows)),
                tuple(request.number for request in queue),
                int(table.num_free),
                event,
                bool(np.any(parents != NOBODY)),
            )
        )
        if not (arriving or queue or running):
            break
    return moments
