"""A recording as one HTML page, which needs nothing but a browser.

The data is JSON: what each visit has changed, so that its size follows what happens, not the pool.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from paged_jax.engine.recording import Copied, Event, Joined, Recording
from paged_jax.page_table import NO_PAGE

MAX_PAGES = 4096
"""The largest pool that is shown: more than a person looks at."""

_MARK = "RECORDING"  # where the data goes in the template


def write_replay(recording: Recording, path: str | os.PathLike[str], title: str = "A recorded run") -> None:
    """Writes a page that replays the recording: `as_html` in a file, whole or not at all.

    Raises:
        ValueError: as `as_html`.
        OSError: if the file cannot be written.
    """
    with replacing(path) as file:
        file.write(as_html(recording, title))


def as_html(recording: Recording, title: str = "A recorded run") -> str:
    """The page: pool, rows and events of every visit, with a slider. It loads nothing from elsewhere.

    Raises:
        ValueError: if nothing was recorded, or the pool has more than `MAX_PAGES` pages.
    """
    data = json.dumps(as_dict(recording, title), separators=(",", ":"))
    template = resources.files("paged_jax.cli").joinpath("replay.html").read_text(encoding="utf-8")
    # All that could end a script element, or begin a comment in one, begins with it.
    return template.replace(_MARK, data.replace("<", "\\u003c"))


def as_dict(recording: Recording, title: str = "A recorded run") -> dict[str, Any]:
    """For JSON. Before the first visit all rows are empty and all pages are free.

    A visit's "rows" are those that have changed, as [row, request, sample, prompt tokens, new tokens, length]
    or [row] for one that is empty now; "entries" are [row, logical page, page id] of the block tables;
    "refs" are [page id, holders].

    Raises:
        ValueError: if nothing was recorded, or the pool has more than `MAX_PAGES` pages.
    """
    if not recording.visits:
        raise ValueError("replay: nothing was recorded; run requests inside the block of record()")
    first = recording.visits[0].table
    check_pages(first.num_pages)
    requests: dict[str, int] = {}

    def name(request_id: str) -> int:
        return requests.setdefault(request_id, len(requests))

    tables, counts = np.full_like(first.block_tables, NO_PAGE), np.zeros_like(first.ref_counts)
    rows: list[list[int]] = [[row] for row in range(first.max_rows)]
    visits = []
    for visit in recording.visits:
        table, metrics, before = visit.table, visit.metrics, rows
        rows = [[row] for row in range(first.max_rows)]
        for row, one in visit.occupants.items():
            sizes = [one.prompt_tokens, one.new_tokens, int(table.lengths[row])]
            rows[row] += [name(one.request_id), one.sample, *sizes]
        visits.append(
            {
                "rows": [now for now, then in zip(rows, before, strict=True) if now != then],
                "entries": _changes(tables, np.asarray(table.block_tables)),
                "refs": _changes(counts, np.asarray(table.ref_counts)),
                "events": [_event(event, name(event.request_id)) for event in visit.events],
                "waiting": metrics.waiting,
                "preemptions": metrics.preemptions,
                "prompt_tokens": metrics.prompt_tokens,
                "cached_tokens": metrics.cached_tokens,
                "new_tokens": metrics.new_tokens,
            }
        )
        tables, counts = np.asarray(table.block_tables), np.asarray(table.ref_counts)
    return {
        "title": title,
        "page_size": first.page_size,
        "num_pages": first.num_pages,
        "max_rows": first.max_rows,
        "requests": list(requests),
        "visits": visits,
    }


def check_pages(num_pages: int) -> None:
    """Raises ValueError for a pool that is not shown."""
    if num_pages > MAX_PAGES:
        raise ValueError(f"replay: a pool of at most {MAX_PAGES} pages can be shown, got {num_pages}")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file that takes the place of `path` when the block ends, and is gone if it fails.

    Raises:
        OSError: at once, if nothing can be written there.
    """
    path = Path(os.path.realpath(path))
    draft = path.with_name(f".{os.getpid()}.draft")
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(path.stat().st_mode):
                raise OSError(errno.EINVAL, "Not a regular file")
        file = draft.open("x", encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with file:
            yield file
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def _changes(before: np.ndarray, after: np.ndarray) -> list[list[int]]:
    """[*index, value] of every entry that is another now."""
    changed = before != after
    return np.column_stack([np.argwhere(changed), after[changed]]).tolist()


def _event(event: Event, request: int) -> list[Any]:
    who = [event.row, request, event.sample]
    if isinstance(event, Joined):
        return ["joined", *who, event.num_tokens, event.num_held, event.sibling]
    if isinstance(event, Copied):
        return ["copied", *who, event.source, event.destination]
    return ["left", *who, event.reason]
