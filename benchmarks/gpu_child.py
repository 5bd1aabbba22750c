"""The process that uses the GPU: sections of items one after the other, each item reported as it ends."""

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from gpu_supervisor import send


class Section(Protocol):
    """Items that share what `prepare` makes for them."""

    name: str
    seconds: float  # its share of the time that is left, beside those of later ones; 0: it is never cut short
    patience: float  # seconds without a result, after which an item counts as hanging

    @property
    def names(self) -> list[str]:
        """Of the items; the same ones in every process."""

    def prepare(self, names: Sequence[str], until: float) -> None:
        """Makes arrays and compiles what these items run, as far as there is time."""

    def run(self, name: str) -> dict[str, Any]:
        """The result of an item; NoTimeError if it was not prepared."""


class NoTimeError(Exception):
    """It would have taken longer than there is time."""


def run_sections(sections: Sequence[Callable[[], Section]], skip: int, seconds: float) -> None:
    """Runs the items from number `skip` on; exits with status 3 once the GPU no longer works.

    Raises:
        NotImplementedError: if the kernel cannot run here.
    """
    ends_at = time.monotonic() + seconds
    made = [make() for make in sections]
    send(items={section.name: len(section.names) for section in made})
    place = 0
    while made:
        share = made[0].seconds / (sum(section.seconds for section in made) or 1)
        section = made.pop(0)
        todo = section.names[max(0, skip - place) :]
        place += len(section.names)
        now = time.monotonic()
        _run_section(section, todo, place - len(todo), now + (ends_at - now) * (share or 1))
        del section
        gc.collect()
    send(done=True)


def _run_section(section: Section, todo: list[str], first: int, until: float) -> None:
    """Runs these items, the first of which has number `first` among those of all sections."""

    def doing(what: str, item: str | None, resume: int, patience: float) -> None:
        send(doing=what, section=section.name, item=item, resume=resume, patience=patience)

    def result(item: str | None, found: dict[str, Any]) -> None:
        send(section=section.name, item=item, result=found)
        if "failure" in found:
            exit_if_broken()

    if not todo:
        return
    doing("preparing", None, first + len(todo), 120)
    try:
        section.prepare(todo, until)
    except Exception as error:
        result(None, {"failure": describe(error)})
        return
    for place, name in enumerate(todo, first):
        if section.seconds and time.monotonic() > until:
            result(None, {"skipped": f"no time from {name} on"})
            return
        doing("running", name, place + 1, section.patience)
        try:
            found = section.run(name)
        except NoTimeError:
            found = {"skipped": "no time to compile it"}
        except Exception as error:
            found = {"failure": describe(error)}
        result(name, found)


def describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 1500 else f"{text[:1000]} ... {text[-500:]}"


def exit_if_broken() -> None:
    """After a fault in a kernel nothing works any more in this process."""
    try:
        working = float(jnp.sum(jnp.ones(8) + 1)) == 16
    except Exception as error:
        print(describe(error), flush=True)
        working = False
    if not working:
        os._exit(3)


class Program(NamedTuple):
    """Compiled, and the seconds that took, lowering included."""

    call: Callable[..., Any]
    compile_seconds: float


class Programs:
    """Compiles on all processors, and keeps an error for whoever asks for that program."""

    def __init__(self, trace: Mapping[Any, Callable[[], Any]], until: float, ahead: int | None = None):
        """
        Args:
            trace: by key, what gives the result of `jax.jit(...).trace`; called on this thread, in order.
            until: when no more programs are begun.
            ahead: how many are begun before the first is asked for, and kept going. None: all, and they are
                awaited, so that no compiler disturbs what is timed.
        """
        self._waiting = list(trace.items())
        self._until = until
        self._ahead = len(trace) if ahead is None else ahead
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._begun: dict[Any, Future[Program]] = {}
        self._errors: dict[Any, Exception] = {}
        self._begin()
        if ahead is None:
            wait(self._begun.values())

    def _begin(self) -> None:
        running = sum(not future.done() for future in self._begun.values())
        for _ in range(self._ahead - running):
            if not self._waiting or time.monotonic() > self._until:
                return
            key, trace = self._waiting.pop(0)
            began = time.perf_counter()
            try:
                lowered = trace().lower()
            except Exception as error:
                self._errors[key] = error
            else:
                self._begun[key] = self._pool.submit(self._compile, lowered, time.perf_counter() - began)
            send(note=f"lowered {key}")

    @staticmethod
    def _compile(lowered: Any, lowering_seconds: float) -> Program:
        began = time.perf_counter()
        program = lowered.compile()
        send(note="compiled")
        return Program(program, lowering_seconds + time.perf_counter() - began)

    def __getitem__(self, key: Any) -> Program:
        self._begin()
        if key in self._errors:
            raise self._errors[key]
        if key not in self._begun:
            raise NoTimeError
        return self._begun[key].result()
