"""A recorded run in which rows share, copy and lose pages, and the engine's own state after each visit."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from engines import make_engine, table_of
from tiny import random_prompts

from paged_jax.engine import Recording, SamplingParams, record
from paged_jax.engine.recording import Occupant
from paged_jax.page_table import PageTable


class Seen(NamedTuple):
    """An engine, asked itself after a visit."""

    table: PageTable
    pinned: list[int]
    occupants: dict[int, Occupant]


class Run(NamedTuple):
    recording: Recording
    seen: list[Seen]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Every other begins with the same nine tokens; every third wants three samples."""
    start, *rest = random_prompts(9, 3, 14, 20, 5, 9, 2, 30, 7, 11)
    return [
        (
            [*start, *prompt] if number % 2 else prompt,
            SamplingParams(max_tokens=12 + 2 * number, temperature=1.0, n=3 if number % 3 == 1 else 1),
        )
        for number, prompt in enumerate(rest)
    ]


def look(engine) -> Seen:
    running = engine._core.scheduler.running
    return Seen(
        jax.tree.map(np.array, table_of(engine)),
        engine._core.scheduler.pinned(),
        {
            row: Occupant(job.request_id, job.index, len(job.prompt_ids), len(job.token_ids))
            for row, job in running.items()
        },
    )


@functools.cache
def recorded_run() -> Run:
    engine = make_engine()
    seen = []
    with record(engine) as recording:
        for prompt, params in requests():
            engine.submit(prompt, params)
        while engine.has_work:
            engine.step()
            seen.append(look(engine))
    return Run(recording, seen)
