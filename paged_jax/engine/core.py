"""Visits: the host looks at what has been written, decides who runs, and sends the device off again."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.typing import DTypeLike

from paged_jax.engine.metrics import Metrics
from paged_jax.engine.model_runner import ModelRunner
from paged_jax.engine.prefix_index import PrefixIndex
from paged_jax.engine.request import FinishReason, News
from paged_jax.engine.request import Sequence as Job
from paged_jax.engine.scheduler import Limits, Scheduler
from paged_jax.engine.steps import EngineModel, Form, Report


class EngineCore:
    """The scheduler, the device, and the metrics, without callers: no queue of requests, no threads."""

    def __init__(
        self,
        model: EngineModel,
        limits: Limits,
        *,
        num_stops: int,
        dtype: DTypeLike | None,
        prefix_cache: bool,
    ):
        self.limits = limits
        self.scheduler = Scheduler(limits, PrefixIndex(limits.page_size) if prefix_cache else None)
        self.metrics = Metrics(pages=limits.num_pages, pages_free=limits.num_pages)
        self._runner = ModelRunner(
            model,
            self.metrics,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_rows=limits.max_rows,
            max_pages_per_row=limits.pages_for(limits.max_length),
            num_stops=num_stops,
            dtype=dtype,
        )
        self._num_free = limits.num_pages
        self._short_of_pages = False  # the last run, which had drafts
        self.news: deque[News] = deque()  # what visits have brought, until somebody takes it

    def visit(self) -> None:
        """Lets sequences join, runs some steps, and reads what came of them: `news`.

        After an error no token is lost: whatever ran is back in the queue, and begins again from its
        known tokens.
        """
        began = time.perf_counter()
        try:
            self._join()
            if self.scheduler.running:
                self._run()
        except BaseException:
            self.recover()
            raise
        finally:
            self.metrics.seconds += time.perf_counter() - began
            self._gauge()

    def add(self, job: Job) -> None:
        """Puts a sequence in the queue."""
        try:
            self.scheduler.add(job)
        except BaseException:
            self.recover()
            raise

    def remove(self, jobs: Iterable[Job]) -> None:
        """Takes sequences out of the queue and the rows; their pages are free afterwards."""
        try:
            if rows := [row for job in jobs for row in self.scheduler.remove(job)]:
                self._change(released=rows)
        except BaseException:
            self.recover()
            raise
        finally:
            self._gauge()

    def recover(self) -> None:
        """A new pool, and everybody back in the queue."""
        self.scheduler.forget()
        self._runner.reset()
        self._num_free = self.limits.num_pages

    def warm_up(self) -> tuple[int, Iterator[str]]:
        """The number of programs, and an iterator that compiles one after each name that it yields."""
        limits = self.limits
        forms = [Form(size, False, 0, 1) for size in limits.sizes]
        forms += [self._decode_form(size, limits.draft_tokens) for size in limits.decode_sizes]
        forms += [self._decode_form(size, 0) for size in limits.decode_sizes if limits.draft_tokens]
        return 1 + len(forms), self._runner.warm_up(forms)

    def replace_model(self, model: EngineModel) -> None:
        """Other weights; nothing may be running. Cached pages are forgotten."""
        self._runner.replace_model(model)
        if self.scheduler.index is not None:
            self._change(unpinned=self.scheduler.index.clear())
        self._gauge()

    def device_state(self) -> list[Any]:
        """The leaves of the `EngineState`."""
        return self._runner.leaves()

    def restore(self, device_state: list[Any], pinned: list[int], jobs: Iterable[Job]) -> None:
        """Takes over the device state of another core of the same sizes, and the sequences in its rows."""
        self._runner.restore(device_state)
        self.scheduler.forget()
        self._num_free = int(self._runner.update(unpinned=pinned))
        unfinished = [job for job in jobs if job.finish_reason is None]
        self.metrics.submitted += len(unfinished)
        for job in unfinished:
            self.scheduler.add(job)
        self._gauge()

    def _join(self) -> None:
        """Makes room where it is short, and lets those join for whom there is some."""
        scheduler, metrics = self.scheduler, self.metrics
        while (victim := scheduler.preempt(self._num_free)) is not None:
            row = scheduler.put_back(victim)
            metrics.preemptions += 1
            self._change(released=row)
        while (admission := scheduler.admit(self._num_free)) is not None:
            self._runner.admit(admission)
            metrics.prompt_tokens += admission.sequence.num_tokens
            metrics.cached_tokens += admission.num_held
        metrics.peak_running = max(metrics.peak_running, len(scheduler.running))

    def _run(self) -> None:
        scheduler, metrics = self.scheduler, self.metrics
        plan = scheduler.next_run()
        if (missing := plan.num_pages - self._num_free) > 0 and scheduler.index is not None:
            self._change(unpinned=scheduler.index.evict(missing))
        if plan.decode:
            # Without guesses a row may still find the page that it needs.
            form = self._decode_form(plan.size, 0 if self._short_of_pages else self.limits.draft_tokens)
        else:
            form = Form(plan.size, False, 0, 1)
        began = time.perf_counter()
        report = self._runner.run(form, plan.num_tokens, form.max_steps, bool(scheduler.waiting))
        metrics.device_seconds += time.perf_counter() - began
        metrics.visits += 1
        metrics.steps += int(report.num_steps)
        metrics.steps_by_size[form.size] = metrics.steps_by_size.get(form.size, 0) + int(report.num_steps)
        metrics.computed_tokens += int(report.num_tokens)
        metrics.drafted_tokens += int(report.num_drafted)
        metrics.accepted_tokens += int(report.num_accepted)
        self._num_free = int(report.num_free)
        used = self.limits.num_pages - self._num_free - scheduler.num_evictable
        metrics.peak_pages = max(metrics.peak_pages, used)
        self._short_of_pages = form.drafts > 0 and bool(report.refused.any())
        self._read(report)

    def _decode_form(self, rows: int, drafts: int) -> Form:
        return Form(rows * (1 + drafts), drafts == 0, drafts, self.limits.steps_per_visit)

    def _read(self, report: Report) -> None:
        """Takes over what a run has written, keeps its full pages, and lets go of rows that have ended."""
        scheduler, metrics = self.scheduler, self.metrics
        pinned: list[int] = []
        released: list[int] = []
        for row, job in list(scheduler.running.items()):
            new = report.new_tokens[row, : report.num_new[row]].tolist()
            ended_by_token = bool(report.stopped[row])
            writer = job.writer.copy()
            read, text, stopped = writer.push(new[:-1] if ended_by_token else new)
            reason: FinishReason | None = None
            if stopped:
                new, reason = new[:read], "stop"
            elif not report.running[row]:
                rest, stopped = writer.finish(new[-1] if ended_by_token else None)
                text += rest
                reason = "stop" if ended_by_token or stopped else "length"
            scores = report.logprobs[row, : len(new)].tolist() if job.params.logprobs else []
            # Nothing has changed so far: after an error, from a tokenizer say, the job goes on as it was.
            if new or reason:
                self.news.append(News(job, new, text, scores, reason))
            job.writer, job.finish_reason = writer, reason
            job.token_ids += new
            job.logprobs += scores
            length = min(int(report.lengths[row]), job.num_tokens)
            pinned += scheduler.advance(job, length, report.full_pages[row].tolist())
            if reason:
                released += scheduler.remove(job)
            metrics.new_tokens += len(new)
            metrics.finished += reason is not None
        if pinned or released:
            self._change(pinned=pinned, released=released)

    def _change(self, **changes: Sequence[int]) -> None:
        """Pins, empties rows, unpins; waits for the number of free pages only where it may have grown."""
        num_free = self._runner.update(**changes)
        if changes.get("released") or changes.get("unpinned"):
            self._num_free = int(num_free)

    def _gauge(self) -> None:
        scheduler, metrics = self.scheduler, self.metrics
        metrics.running, metrics.waiting = len(scheduler.running), len(scheduler.waiting)
        metrics.pages_free, metrics.pages_cached = self._num_free, scheduler.num_evictable
        metrics.wasted_slots = sum(-job.length % self.limits.page_size for job in scheduler.running.values())
