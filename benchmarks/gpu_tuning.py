"""Candidate configs of the kernel against the one that is chosen, and where the time of a call goes."""

from collections.abc import Sequence
from typing import Any

import jax
from gpu_rivals import SMALL_TASKS, TASKS, Task

from paged_jax.attention import Tiling, paged_attention
from paged_jax.attention.kernel_config import problem_of
from paged_jax.cli.tune import COLD_BYTES, candidates, try_tilings
from paged_jax.testing import PagedInputs

TUNED = (
    "decode 32 x 4096",
    "decode 1 x 131072",
    "prefill 8192",
    "decode 32 x 4096, pages of 64",
    "prefill 2048",
)
MOST_CANDIDATES = 12


class Tuning:
    name, seconds, patience = "tuning", 70.0, 60.0

    def __init__(self, small: bool):
        tasks = SMALL_TASKS if small else {n: TASKS[n] for n in TUNED}
        self._pool_bytes = 0 if small else COLD_BYTES
        self._drawn: tuple[str, PagedInputs] | None = None
        self._trials = {}
        for name, task in tasks.items():
            tilings = [Tiling(1, 2), Tiling(1, 1)] if small else _candidates(task)
            for tiling in tilings:
                self._trials[f"{name}: {tiling}"] = (name, task, tiling, tiling == tilings[0])

    @property
    def names(self) -> list[str]:
        return list(self._trials)

    def prepare(self, names: Sequence[str], until: float) -> None:
        """Nothing: a config that does not compile must not keep the others from being timed."""

    def run(self, name: str) -> dict[str, Any]:
        task_name, task, tiling, chosen = self._trials[name]
        if self._drawn is None or self._drawn[0] != task_name:
            self._drawn = None
            self._drawn = task_name, task.draw(self._pool_bytes)
        (trial,) = try_tilings(self._drawn[1], [tiling], task.calls)
        if trial.timing is None:
            return {"task": task_name, "failure": trial.failure}
        return {
            "task": task_name,
            "chosen": chosen,
            "config": vars(tiling),
            "seconds": trial.timing.median,
            **task.rate(trial.timing.median),
        }


def _candidates(task: Task) -> list[Any]:
    inputs = jax.eval_shape(task.draw)
    problem = problem_of(*inputs[:2], inputs.block_tables, inputs.query_starts, None)
    return candidates(problem)[:MOST_CANDIDATES]


class Kernels:
    """Where the time of one call goes, by the profiler: the kernel itself, and what lays out its work."""

    name, seconds, patience = "kernels", 15.0, 45.0

    def __init__(self, small: bool):
        self._small = small
        self._tasks = SMALL_TASKS if small else {name: TASKS[name] for name in TUNED}

    @property
    def names(self) -> list[str]:
        return list(self._tasks)

    def prepare(self, names: Sequence[str], until: float) -> None:
        """Nothing."""

    def run(self, name: str) -> dict[str, Any]:
        if self._small:
            raise NotImplementedError("the profiler needs a GPU")
        from jax.experimental.mosaic.gpu import profiler

        inputs = self._tasks[name].draw(COLD_BYTES)
        call = jax.jit(lambda inputs: paged_attention(*inputs, implementation="mosaic_hopper"))
        _, kernels = profiler.measure(call, aggregate=False)(inputs)
        return {"microseconds": [(kernel, 1e3 * milliseconds) for kernel, milliseconds in kernels or ()]}
