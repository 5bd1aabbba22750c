"""`Engine`: requests go in, text comes out, one pool of pages serves them all."""

import asyncio
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from paged_jax.engine.core import EngineCore
from paged_jax.engine.metrics import Metrics
from paged_jax.engine.registry import Registry, Request
from paged_jax.engine.request import Delta, News, RequestOutput, SamplingParams
from paged_jax.engine.request import Sequence as Job
from paged_jax.engine.sizes import limits_of
from paged_jax.engine.snapshot import from_bytes, to_bytes
from paged_jax.engine.steps import EngineModel
from paged_jax.engine.text import TextWriter
from paged_jax.generate import check_model, check_prompt
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.under_jit import check_sizes

Prompt = str | Sequence[int]


class Engine:
    """Serves many requests from one model and one pool of pages.

    Rows join and leave between visits of the host; between them the device runs whole steps by itself.
    All methods may be called from any thread; one thread at a time drives the device.

    Args:
        model: a Flax NNX module with the methods of `EngineModel`, such as `paged_jax.models.Llama`.
        tokenizer: turns text into token ids and back; without one, prompts and completions are token ids.
        max_rows: requests that run at the same time, at most.
        max_length: tokens of a request, prompt and new ones, at most. Default: what the model was made for.
        page_size: tokens a page.
        num_pages: of the pool.
        memory: or the memory for it: "4GiB", a number of bytes, or a fraction below or equal to 1.0 of the
            device memory that is free now. By default 0.9 of it; on a device that does not report its memory,
            such as the CPU, enough for all rows at full length, but no more than a quarter of the machine's.
        dtype: of the pages; see `KVPages.create`.
        step_tokens: the most tokens that go through the model in one step while prompts are read, or a
            list of such sizes, of which the smallest that suffices is taken: each is a program to compile.
        steps_per_visit: steps that the device runs by itself while all rows write.
        prefix_cache: keep full pages for requests that begin with the same tokens.
        draft_tokens: tokens a row that are guessed from its own text and verified in each step
            (prompt lookup). What is written stays the same; it is faster where text repeats itself. 0: none.
        max_stop_tokens: token ids, the tokenizer's own included, that can end one request.
        seed: of the seeds of requests that have none.

    Raises:
        TypeError: for a model that lacks something of an `EngineModel`.
        ValueError: for sizes that do not fit together, and for more memory than there is.
    """

    def __init__(
        self,
        model: EngineModel,
        tokenizer: Tokenizer | None = None,
        *,
        max_rows: int = 16,
        max_length: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        memory: str | int | float | None = None,
        dtype: DTypeLike | None = None,
        step_tokens: int | Sequence[int] = 256,
        steps_per_visit: int = 8,
        prefix_cache: bool = True,
        draft_tokens: int = 0,
        max_stop_tokens: int = 16,
        seed: int = 0,
    ):
        check_model("Engine", model, EngineModel)
        check_sizes("Engine", max_stop_tokens=max_stop_tokens)
        limits = limits_of(
            model,
            max_rows=max_rows,
            max_length=max_length,
            page_size=page_size,
            num_pages=num_pages,
            memory=memory,
            dtype=dtype,
            step_tokens=step_tokens,
            steps_per_visit=steps_per_visit,
            draft_tokens=draft_tokens,
        )
        self._core = EngineCore(
            model, limits, num_stops=max_stop_tokens, dtype=dtype, prefix_cache=prefix_cache
        )
        self._model = model
        self._tokenizer = tokenizer
        self._num_stops = max_stop_tokens
        self._seed = seed
        self._version = 0  # of the weights

        self._requests = Registry()
        self._drive = threading.Lock()  # over all else, during a visit
        self._next = threading.Lock()  # of the thread that drives next

    # Asking

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        salt: str = "",
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continues every prompt and returns the outputs in the order of the prompts.

        Args:
            params: for all prompts or for each.
            salt: requests share cached pages with those of the same salt only.
            progress: show a line of metrics on stderr while it goes on.

        Raises:
            ValueError: for a prompt or parameters that cannot be run; nothing has started then.
        """
        if isinstance(prompts, str):
            raise ValueError(f"generate: prompts must be several, got one text; use [{prompts[:20]!r}]")
        prompts = list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise ValueError(f"generate: got {len(prompts)} prompts and {len(each)} SamplingParams")
        checked = [self._check(prompt, one, salt) for prompt, one in zip(prompts, each, strict=True)]
        requests = [self._enqueue(ids, one, None, salt, deque()) for ids, one in checked]
        try:
            with Console(stderr=True).status("") if progress else nullcontext() as status:
                for request in requests:
                    while not request.finished:
                        self._wait(request)
                        if status:
                            status.update(self.metrics.line())
        finally:
            self._abort(requests)
        return [request.output() for request in requests]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: str = "",
    ) -> str:
        """Puts a request in the queue, for callers who drive the engine with `step`. Returns its id.

        Raises:
            ValueError: for a prompt or parameters that cannot be run, and for the id of a request that
                has not finished; nothing has changed then.
        """
        ids, params = self._check(prompt, params or SamplingParams(), salt)
        return self._enqueue(ids, params, request_id, salt, None).request_id

    def step(self) -> list[Delta]:
        """One visit: what was submitted may join, the device runs a few steps, and new tokens come back.

        Returns:
            What is new of all submitted requests; requests of `generate` and `stream` get theirs there.
        """
        with self._turn():
            self._visit()
            return self._requests.take_undelivered()

    @property
    def has_work(self) -> bool:
        """Whether any request has not finished, or has news that `step` has not returned."""
        return bool(self._requests)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = ""
    ) -> Iterator[Delta]:
        """The deltas of one request, as they come. Leaving the loop early takes the request back."""
        ids, params = self._check(prompt, params or SamplingParams(), salt)
        return self._stream(ids, params, salt)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = ""
    ) -> AsyncIterator[Delta]:
        """As `stream`, for asyncio: many may be read at the same time, and share their steps."""
        ids, params = self._check(prompt, params or SamplingParams(), salt)
        request = self._enqueue(ids, params, None, salt, deque())
        try:
            while not request.finished or request.inbox:
                for delta in await asyncio.to_thread(self._wait, request):
                    yield delta
        finally:
            self._abort([request])

    def abort(self, request_id: str) -> None:
        """Takes a request back, wherever it is; what is not there any more is left alone.

        Its pages are free when the current visit ends, and at once when there is none.
        """
        request = self._requests.get(request_id)
        self._abort([] if request is None else [request])

    def warmup(self, progress: bool = True) -> None:
        """Compiles all that the engine will ever run, with a progress bar on stderr.

        With jax's persistent compilation cache (`jax_compilation_cache_dir`) it is quick the next time.
        """
        columns = (TextColumn("compiling {task.description}"), BarColumn(), MofNCompleteColumn())
        console = Console(stderr=True)
        with self._turn(), Progress(*columns, console=console, transient=True, disable=not progress) as bar:
            total, names = self._core.warm_up()
            task = bar.add_task("", total=total)
            try:
                for number, name in enumerate(names):
                    bar.update(task, completed=number, description=name)
            except BaseException:
                self._core.recover()
                raise

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._core.limits.page_size

    @property
    def metrics(self) -> Metrics:
        """Counters and gauges, as they are now."""
        return self._core.metrics.copy()

    def replace_model(self, model: EngineModel) -> None:
        """Goes on with other weights of the same architecture. Cached pages are forgotten.

        Raises:
            TypeError: for a model that lacks something of an `EngineModel`.
            ValueError: while requests are running or waiting, and for a model of another architecture.
        """
        check_model("Engine", model, EngineModel)
        with self._turn():
            if self.has_work:
                raise ValueError("Engine: requests are running with the old weights; let them finish first")
            if model.max_length < self._core.limits.max_length:
                raise ValueError(
                    f"Engine: rows have up to {self._core.limits.max_length} tokens, and the model was made "
                    f"for {model.max_length}; make another engine"
                )
            self._core.replace_model(model)
            self._version += 1
            self._model = model

    def snapshot(self) -> dict[str, Any]:
        """All that it takes to go on later, as arrays: a pytree for orbax or any other checkpointer.

        "device" holds the leaves of the `EngineState`, "host" the queue, the rows' records, and the deltas
        that nobody has read. The arrays are the engine's own and gone with its next visit: save them before.
        The weights are not in it.
        """
        with self._turn():
            jobs, unread, arrivals = self._requests.state()
            host = to_bytes(jobs, unread, pinned=self._core.scheduler.pinned(), arrivals=arrivals)
            return {"device": self._core.device_state(), "host": host}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Goes on from a `snapshot` of an engine with the same model and arguments.

        Rows continue where they were; `step` returns their deltas, whoever had asked for them. The
        prefix cache begins empty.

        Raises:
            ValueError: if this engine has requests, or the snapshot comes from one of other sizes.
        """
        jobs, unread, host = from_bytes(snapshot["host"], self._writer)
        for job in jobs:
            job.namespace = self._namespace(job.namespace.partition(":")[2])
        with self._turn():
            if self.has_work:
                raise ValueError("Engine: restore needs an engine without requests")
            self._core.restore(snapshot["device"], host["pinned"], jobs)
            self._requests.restore(jobs, unread, host["arrivals"])

    # Requests

    def _check(
        self, prompt: Prompt, params: SamplingParams, salt: str
    ) -> tuple[tuple[int, ...], SamplingParams]:
        """Whether it can be run, before anything changes."""
        if not isinstance(params, SamplingParams) or not isinstance(salt, str):
            raise ValueError(
                f"Engine: params must be SamplingParams and salt a text, got {params!r}, {salt=}"
            )
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("Engine: without a tokenizer a prompt must be token ids, got a text")
            prompt = self._tokenizer.encode(prompt)
        ids = tuple(check_prompt("Engine", "a prompt", prompt, self._model.vocab_size).tolist())
        if self._tokenizer is None and any(isinstance(stop, str) for stop in params.stop):
            raise ValueError(f"Engine: stop texts need a tokenizer, got {params.stop=}")
        if len(stops := self._stop_tokens(params)) > self._num_stops:
            raise ValueError(
                f"Engine: {len(stops)} stop tokens, the tokenizer's own included, are more than "
                f"{self._num_stops}; raise max_stop_tokens"
            )
        self._core.scheduler.check_fits(len(ids) + params.max_tokens, len(ids))
        return ids, params

    def _stop_tokens(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if self._tokenizer is None or params.ignore_eos else self._tokenizer.eos_token_ids
        return tuple(dict.fromkeys((*own, *params.stop_token_ids)))

    def _enqueue(
        self,
        ids: tuple[int, ...],
        params: SamplingParams,
        request_id: str | None,
        salt: str,
        inbox: deque[Delta] | None,
    ) -> Request:

        def make_jobs(request_id: str, arrival: int) -> list[Job]:
            seed = params.seed
            if seed is None:
                seed = random.Random(f"{self._seed} {arrival}").getrandbits(32)
            return [
                Job(
                    request_id=request_id,
                    index=index,
                    arrival=arrival,
                    prompt_ids=ids,
                    params=params,
                    seed=(seed + index) % 2**32,
                    namespace=self._namespace(salt),
                    max_tokens=len(ids) + params.max_tokens,
                    stop_token_ids=self._stop_tokens(params),
                    writer=self._writer(params),
                )
                for index in range(params.n)
            ]

        with self._requests.lock:
            request = self._requests.add(request_id, inbox, make_jobs)
            self._core.metrics.submitted += params.n
            return request

    def _writer(self, params: SamplingParams) -> TextWriter:
        return TextWriter(self._tokenizer.stream() if self._tokenizer else None, params.stop)

    def _namespace(self, salt: str) -> str:
        return f"{self._version}:{salt}"

    def _stream(self, ids: tuple[int, ...], params: SamplingParams, salt: str) -> Iterator[Delta]:
        request = self._enqueue(ids, params, None, salt, deque())
        try:
            while not request.finished or request.inbox:
                yield from self._wait(request)
        finally:
            self._abort([request])

    def _wait(self, request: Request) -> list[Delta]:
        """Drives the engine until there is news of the request, unless another thread has done so."""
        assert request.inbox is not None
        while not (request.inbox or request.finished):
            with self._turn():
                if not (request.inbox or request.finished):
                    self._visit()
        return [request.inbox.popleft() for _ in range(len(request.inbox))]

    def _abort(self, requests: Sequence[Request]) -> None:
        self._requests.abort(requests)
        self._settle()

    def _settle(self) -> None:
        """Ends what was aborted, unless somebody drives, who does this afterwards."""
        while self._requests.any_aborted and self._drive.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._drive.release()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """To drive. A thread that waits for its turn goes before one that comes back for another."""
        with self._next:
            self._drive.acquire()
        try:
            yield
        finally:
            self._drive.release()
            self._settle()

    # Visits, by whoever holds the lock

    def _visit(self) -> None:
        self._take_back()
        incoming = self._requests.incoming
        for _ in range(len(incoming)):
            self._core.add(incoming[0])
            incoming.popleft()
        try:
            self._core.visit()
        finally:
            self._requests.deliver(self._core.news)

    def _take_back(self) -> None:
        """Ends what was aborted."""
        jobs, seen = self._requests.take_aborted()
        try:
            self._core.remove(seen)
        finally:
            for job in jobs:
                self._core.metrics.aborted += 1
                self._core.news.append(News(job, [], job.writer.finish()[0], [], "abort"))
            self._requests.deliver(self._core.news)
