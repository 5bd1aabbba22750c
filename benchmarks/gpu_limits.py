"""What the device can do at best: copying, reading, and multiplying matrices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.cli.tune import Timing, time_calls

CALLS = 10  # in each run, so that starting them is not what takes the time


class Limits:
    name, seconds, patience = "limits", 30.0, 60.0
    names = ["copy", "read", "matrix"]  # noqa: RUF012

    def __init__(self, small: bool):
        self._columns, self._side = 8192, 256 if small else 8192
        self._rows = 64 if small else 2**18  # 4 GiB of bfloat16

    def prepare(self, names: Sequence[str], until: float) -> None:
        """Nothing: each makes its own arrays, and they go with it."""

    def run(self, name: str) -> dict[str, Any]:
        if name == "matrix":
            a, b = (
                jax.random.normal(jax.random.key(seed), (self._side, self._side), jnp.bfloat16)
                for seed in range(2)
            )
            timing = time_many(jax.jit(jnp.matmul), a, b)
            return {"seconds": timing.median, "operations_per_second": 2 * self._side**3 / timing.median}
        x = jax.random.normal(jax.random.key(0), (self._rows, self._columns), jnp.bfloat16)
        if name == "copy":
            timing = time_many(jax.jit(lambda x: x + jnp.ones((), x.dtype)), x)
            return {"seconds": timing.median, "bytes_per_second": 2 * x.nbytes / timing.median}
        timing = time_many(jax.jit(lambda x: jnp.max(x, axis=1)), x)
        return {"seconds": timing.median, "bytes_per_second": x.nbytes / timing.median}


def time_many(call: Callable[..., jax.Array], *arguments: jax.Array) -> Timing:
    """Of one of several calls that are started one after the other and awaited together."""

    def run() -> jax.Array:
        for _ in range(CALLS - 1):
            call(*arguments)
        return call(*arguments)

    return time_calls(run, CALLS)
