"""What callers have asked for and have not yet been given: the one thing that all threads share."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paged_jax.engine.request import Delta, News, RequestOutput
from paged_jax.engine.request import Sequence as Job


@dataclass(eq=False)
class Request:
    """The samples of one prompt, and where their deltas go."""

    jobs: list[Job]
    inbox: deque[Delta] | None  # None: `Engine.step` returns its deltas

    def __post_init__(self) -> None:
        self.unfinished = sum(job.finish_reason is None for job in self.jobs)  # in what has been delivered

    @property
    def request_id(self) -> str:
        return self.jobs[0].request_id

    @property
    def finished(self) -> bool:
        return self.unfinished == 0

    def output(self) -> RequestOutput:
        completions = tuple(job.completion() for job in self.jobs)
        return RequestOutput(self.request_id, self.jobs[0].prompt_ids, completions)


class Registry:
    """Those that have not finished, and deltas that nobody has read.

    Every method holds the lock, for a moment. The lock is reentrant: a stream that nobody reads any more is
    taken back by the garbage collector, in any thread at any time.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.incoming: deque[Job] = deque()  # that no visit has seen yet
        self._by_id: dict[str, Request] = {}
        self._readers: weakref.WeakSet[Request] = weakref.WeakSet()  # those with an inbox
        self._aborted: set[Request] = set()
        self._undelivered: list[Delta] = []
        self._arrivals = 0

    def __bool__(self) -> bool:
        """Whether any has not finished, or has deltas for `Engine.step`."""
        with self.lock:
            return bool(self._by_id or self._undelivered)

    def get(self, request_id: str) -> Request | None:
        with self.lock:
            return self._by_id.get(request_id)

    def add(
        self, request_id: str | None, inbox: deque[Delta] | None, make_jobs: Callable[[str, int], list[Job]]
    ) -> Request:
        """A new one.

        Args:
            request_id: None takes one that is free.
            make_jobs: makes its jobs of its id and of how many have come before.

        Raises:
            ValueError: for an id that is no text, or belongs to another.
        """
        if not isinstance(request_id, str | None):
            raise ValueError(f"Engine: request_id must be a text, got {request_id!r}")
        with self.lock:
            if request_id is None:
                names = (f"request-{number}" for number in itertools.count(self._arrivals))
                request_id = next(name for name in names if name not in self._by_id)
            if request_id in self._by_id:
                raise ValueError(f"Engine: {request_id=} is running; use another id, or none to get one")
            request = Request(make_jobs(request_id, self._arrivals), inbox)
            self._arrivals += 1
            self._by_id[request_id] = request
            if inbox is not None:
                self._readers.add(request)
            self.incoming += request.jobs
            return request

    def abort(self, requests: Iterable[Request]) -> None:
        """Those that have finished are left alone, and so is a later one of the same id."""
        with self.lock:
            self._aborted |= {
                request for request in requests if self._by_id.get(request.request_id) is request
            }

    @property
    def any_aborted(self) -> bool:
        return bool(self._aborted)

    def take_aborted(self) -> tuple[list[Job], list[Job]]:
        """The unfinished jobs of all that was aborted, and those of them that a visit has seen already."""
        with self.lock:
            aborted, self._aborted = self._aborted, set()
            jobs = [job for request in aborted for job in request.jobs if not job.finish_reason]
            queued = set(self.incoming)
            self.incoming = deque(job for job in self.incoming if job not in jobs)
            for job in jobs:
                job.finish_reason = "abort"
            return jobs, [job for job in jobs if job not in queued]

    def deliver(self, news: deque[News]) -> None:
        """Passes on all news, each once."""
        while news:
            job, token_ids, text, logprobs, finish_reason = news[0]
            delta = Delta(
                job.request_id,
                job.index,
                tuple(token_ids),
                text if job.writer.has_text else None,
                tuple(logprobs) if job.params.logprobs else None,
                finish_reason,
            )
            with self.lock:
                request = self._by_id[job.request_id]
                news.popleft()
                (self._undelivered if request.inbox is None else request.inbox).append(delta)
                request.unfinished -= finish_reason is not None  # and not before: now nothing is to come
                if request.finished:
                    del self._by_id[job.request_id]

    def take_undelivered(self) -> list[Delta]:
        """What `Engine.step` returns."""
        with self.lock:
            deltas, self._undelivered = self._undelivered, []
            return deltas

    def state(self) -> tuple[list[Job], list[Delta], int]:
        """For a snapshot: the jobs, all deltas that nobody has read, and how many requests have come."""
        with self.lock:
            jobs = [job for request in self._by_id.values() for job in request.jobs]
            readers = sorted(self._readers, key=lambda request: request.jobs[0].arrival)
            unread = [delta for request in readers for delta in request.inbox or ()]
            return jobs, [*self._undelivered, *unread], self._arrivals

    def restore(self, jobs: Iterable[Job], undelivered: list[Delta], arrivals: int) -> None:
        """Takes over what `state` has given; `Engine.step` returns all of it."""
        by_id: dict[str, list[Job]] = {}
        for job in jobs:
            by_id.setdefault(job.request_id, []).append(job)
        with self.lock:
            self._by_id = {request_id: Request(own, None) for request_id, own in by_id.items()}
            self._undelivered, self._arrivals = undelivered, arrivals
