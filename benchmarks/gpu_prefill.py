"""Prompts: one long row, and chunks of prompts beside rows that decode."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from gpu_cases import roundings, worst_roundings
from gpu_child import Programs
from gpu_decode import HEAD_DIM, KV_HEADS, Q_HEADS, exact_row, token_bytes
from jax import Array

from paged_jax.cli.tune import COLD_BYTES, attend_repeatedly, iterations_for, random_inputs, time_calls
from paged_jax.testing import PagedInputs


class Prompts(NamedTuple):
    """New tokens and lengths of all rows, and how large the pool is at least."""

    query_lens: tuple[int, ...]
    lengths: tuple[int, ...]
    page_size: int = 16
    pool_bytes: int = COLD_BYTES

    @property
    def operations(self) -> int:
        """Of both products, counting just the keys that each token sees."""
        pairs = sum(
            n * length - n * (n - 1) // 2 for n, length in zip(self.query_lens, self.lengths, strict=True)
        )
        return 4 * Q_HEADS * HEAD_DIM * pairs

    @property
    def bytes(self) -> int:
        """Of keys and values, each read once."""
        return sum(self.lengths) * token_bytes("bfloat16")

    def draw(self) -> PagedInputs:
        return random_inputs(
            self.lengths,
            self.query_lens,
            q_heads=Q_HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=self.page_size,
            pool_bytes=self.pool_bytes,
        )


PROMPTS = {
    "8192 tokens": Prompts((8192,), (8192,)),
    "32768 tokens": Prompts((32768,), (32768,)),
    "2048 tokens": Prompts((2048,), (2048,)),
    "8192 tokens, pages of 64": Prompts((8192,), (8192,), 64),
    "4 prompts of 2048": Prompts((2048,) * 4, (2048,) * 4),
    "4 chunks of 1024 up to 8192, 32 rows decode at 4096": Prompts(
        (1024,) * 4 + (1,) * 32, (8192,) * 4 + (4096,) * 32
    ),
    "a chunk of 256 up to 4096, 31 rows decode at 4096": Prompts((256,) + (1,) * 31, (4096,) * 32),
}
SMALL_PROMPTS = {"mixed": Prompts((20, 1), (40, 30), pool_bytes=0)}


class Prefill:
    name, seconds, patience = "prefill", 50.0, 45.0

    def __init__(self, small: bool):
        self._prompts = SMALL_PROMPTS if small else PROMPTS
        self._implementation = "xla" if small else "mosaic_hopper"

    @property
    def names(self) -> list[str]:
        return list(self._prompts)

    def prepare(self, names: Sequence[str], until: float) -> None:
        self._programs = Programs({name: partial(self._trace, name) for name in names}, until)

    def _trace(self, name: str) -> Any:
        prompts = self._prompts[name]
        repeatedly = partial(
            attend_repeatedly, iterations=self._iterations(prompts), implementation=self._implementation
        )
        return jax.jit(repeatedly).trace(jax.eval_shape(prompts.draw))

    def _iterations(self, prompts: Prompts) -> int:
        return iterations_for(prompts.bytes, prompts.operations)

    def run(self, name: str) -> dict[str, Any]:
        prompts = self._prompts[name]
        program = self._programs[name]
        inputs = prompts.draw()
        first, _ = program.call(inputs)
        iterations = self._iterations(prompts)
        timing = time_calls(lambda: program.call(inputs), iterations)
        return {
            "tokens": sum(prompts.query_lens),
            "operations": prompts.operations,
            "bytes": prompts.bytes,
            "seconds": timing.median,
            "fastest": timing.fastest,
            "slowest": timing.slowest,
            "operations_per_second": prompts.operations / timing.median,
            **worst_roundings(roundings_of_tokens(inputs, first, prompts)),
            "iterations": iterations,
            "compile_seconds": program.compile_seconds,
        }


def roundings_of_tokens(inputs: PagedInputs, output: Array, prompts: Prompts) -> list[float | None]:
    """Errors of tokens at the start, in the middle and at the end, in units of that of rounding."""
    rows = np.repeat(np.arange(len(prompts.query_lens)), prompts.query_lens)
    starts = np.cumsum([0, *prompts.query_lens])
    found = []
    for token in sorted({1, len(rows) // 2 - 1, len(rows) // 3, len(rows) - 1}):
        row = rows[token]
        length = prompts.lengths[row] - (starts[row + 1] - token) + 1
        exact = exact_row(
            inputs.q[token],
            (inputs.k_pages, inputs.v_pages, None, None),
            inputs.block_tables[row],
            np.int32(length),
            page_size=prompts.page_size,
        )
        found.append(roundings(np.asarray(output[token]), exact))
    return found
