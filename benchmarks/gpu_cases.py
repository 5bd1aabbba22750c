"""Correctness on the device: the cases of the tests, and larger ones, against float64 on the host."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_child import Programs

from paged_jax.attention import paged_attention_implementation
from paged_jax.kv_pages import quantise
from paged_jax.testing import PagedInputs

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from cases import CASES, Case, attention
from oracle import ROUNDINGS, assert_matches_oracle, oracle

KINDS = ("bfloat16", "float16", "int8", "float8_e4m3fn")
"""Dtypes of the pages; those of 8 bits are met by bfloat16 queries."""

REPEATS = 10

LARGE_CASES = [
    Case("decode in splits", (3000, 17, 0, 900), heads=(8, 2), head_dim=128, page_size=16),
    Case("splits, window", (2500, 700), heads=(8, 2), head_dim=128, page_size=64, sliding_window=900),
    Case("splits, sinks", (2000,), heads=(4, 1), head_dim=64, page_size=16, sinks=True, logits_soft_cap=9.0),
    Case("mixture in splits", (2100, 40, 1), (3, 1, 1), heads=(8, 1), head_dim=128, page_size=16),
    Case("prefill over tiles", (200, 131), (200, 131), heads=(8, 2), head_dim=128, page_size=16),
    Case("prefill of chunks", (500, 300), (90, 130), heads=(4, 2), head_dim=128, page_size=64),
    Case("prefill, head_dim 256", (150,), (150,), heads=(4, 1), head_dim=256, page_size=32),
    Case("prefill, pages of 256", (300, 40), (120, 40), heads=(2, 1), head_dim=64, page_size=256),
    Case("prefill, group of 71", (40,), (40,), heads=(71, 1), head_dim=64, page_size=16),
    Case(
        "prefill, everything",
        (400, 0, 90, 50),
        (150, 0, 1, 50),
        heads=(8, 2),
        head_dim=128,
        page_size=16,
        num_padding=5,
        gain=3.0,
        sliding_window=100,
        logits_soft_cap=8.0,
        sinks=True,
    ),
]
"""What the cases of the tests are too small for: several splits, and tiles of two warpgroups."""


def for_kernel(case: Case) -> Case:
    """The case with sizes that the kernel takes; where pages grow, so do the rows."""
    grown = math.ceil(8 / case.page_size)
    return dataclasses.replace(
        case,
        lengths=tuple(length * grown for length in case.lengths),
        page_size=case.page_size * grown + -case.page_size * grown % 8,
        sliding_window=case.sliding_window and case.sliding_window * grown,
        head_dim=case.head_dim + -case.head_dim % 16,
    )


_quantise = jax.jit(quantise, static_argnums=1)


def on_the_host() -> contextlib.AbstractContextManager[Any]:
    """Many small operations of many shapes: a GPU would spend its time compiling them."""
    try:
        return jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return contextlib.nullcontext()


def call_of(case: Case, kind: str, dead: float) -> tuple[PagedInputs, dict[str, Any]]:
    """The case's arrays, in numpy, and options with pages of a kind; `dead` as in `Case.call`."""
    narrow = kind in ("bfloat16", "float16")
    with on_the_host():
        call = dataclasses.replace(case, dtype=kind if narrow else "float32", page_dtype=None).call(dead)
        inputs, options = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, call)
        if narrow:
            return inputs, options
        (k_pages, k_scales), (v_pages, v_scales) = (
            jax.device_get(_quantise(pages, kind)) for pages in (inputs.k_pages, inputs.v_pages)
        )
    inputs = inputs._replace(q=inputs.q.astype(jnp.bfloat16), k_pages=k_pages, v_pages=v_pages)
    return inputs, options | {"k_scales": k_scales, "v_scales": v_scales}


class Correctness:
    name, seconds, patience = "correctness", 0.0, 30.0

    def __init__(self, small: bool):
        self._small = small
        cases = CASES[::14] if small else [*CASES, *LARGE_CASES]
        self._implementation = "xla" if small else paged_attention_implementation("mosaic_hopper").name
        self._cases = {f"{kind}: {case.name}": (for_kernel(case), kind) for kind in KINDS for case in cases}

    @property
    def names(self) -> list[str]:
        return list(self._cases)

    def prepare(self, names: Sequence[str], until: float) -> None:
        def trace(name: str) -> Any:
            inputs, options = call_of(*self._cases[name], dead=np.nan)
            return attention.trace(*inputs, **options, return_lse=True, implementation=self._implementation)

        self._programs = Programs({name: partial(trace, name) for name in names}, until, ahead=32)

    def run(self, name: str) -> dict[str, Any]:
        case, kind = self._cases[name]
        program = self._programs[name]
        inputs, options = call_of(case, kind, dead=np.nan)
        output, lse = jax.device_get(program.call(*inputs, **traced(options)))
        failures = []
        try:
            assert_matches_oracle(output, lse, inputs, narrow_weights=True, **options)
        except AssertionError as error:
            failures.append(" ".join(str(error).split())[:300])
        zeros, zero_options = call_of(case, kind, dead=0.0)
        clean = program.call(*zeros, **traced(zero_options))
        if not same_bits((output, lse), clean):
            failures.append("what stands in dead slots changes the result")
        if not all(self._repeats(program.call, inputs, options, (output, lse))):
            failures.append("not the same bits every time")
        return {
            "passed": not failures,
            "failures": failures,
            "roundings": roundings(output, oracle(*inputs, **options)[0]),
            "compile_seconds": program.compile_seconds,
        }

    def _repeats(self, call: Any, inputs: PagedInputs, options: dict[str, Any], expected: Any) -> list[bool]:
        same = []
        for _ in range(REPEATS):
            jax.block_until_ready(self._fill_memory())
            same.append(same_bits(expected, call(*inputs, **traced(options))))
        return same

    @cached_property
    def _fill_memory(self) -> Any:
        """Leaves NaN in memory that is free again: what reads it before writing it gives itself away."""
        sizes = [2**power for power in range(6, 12 if self._small else 24) for _ in range(3)]
        return jax.jit(lambda: [jnp.full(size, jnp.nan, jnp.float32) for size in sizes])


def traced(options: dict[str, Any]) -> dict[str, Any]:
    """Without the options that a program is compiled for."""
    return {
        name: value for name, value in options.items() if name not in ("sliding_window", "logits_soft_cap")
    }


def same_bits(first: Any, second: Any) -> bool:
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def roundings(output: Any, exact: Any) -> float | None:
    """The error in root mean square, in units of that of rounding the exact result to its dtype.

    None where it is not a number, or nothing is rounded.
    """
    exact = np.asarray(exact, np.float64)
    rounding = exact.astype(output.dtype).astype(np.float64) - exact
    error = np.asarray(output).astype(np.float64) - exact
    if not np.any(rounding) or not np.all(np.isfinite(error)):
        return None
    return float(np.sqrt(np.sum(error**2) / np.sum(rounding**2)))


def worst_roundings(found: Sequence[float | None]) -> dict[str, Any]:
    """The largest of these errors, and whether it is one that an exact sum could have."""
    worst = None if None in found else max(error for error in found if error is not None)
    return {"roundings": worst, "passed": worst is not None and worst <= ROUNDINGS}
