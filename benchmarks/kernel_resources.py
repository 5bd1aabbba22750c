"""Registers, spills and shared memory of the GPU kernel, in every configuration that is chosen by itself.

    python benchmarks/kernel_resources.py            # all, two minutes
    python benchmarks/kernel_resources.py decode     # those with this word in their name

Compiles for Hopper on any machine, without a GPU; `offline_compile` says what has to be installed,
and nothing is compiled where it is not. Exit status 1 if anything spills, 2 if nothing could be compiled.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offline_compile import Compiler, MissingPartError, Resources

RESULT = Path(__file__).parent / "results" / "kernel_resources.json"
REGISTERS, SHARED_MEMORY, RESERVED = 65536, 233472, 1024  # of a processor of Hopper; of each block on it
DRIVER_BLOCKS = 32


@dataclasses.dataclass(frozen=True)
class Call:
    """Shapes and options of a call of paged attention."""

    tokens: int
    rows: int
    decode: bool = False
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = 16
    context: int = 4096
    dtype: str = "bfloat16"
    page_dtype: str | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None


DECODE = Call(tokens=32, rows=32, decode=True)
SPLIT = Call(tokens=2, rows=2, decode=True, context=32768)
MIXED = Call(tokens=256, rows=32)
PREFILL = Call(tokens=4096, rows=2)
KINDS = {"decode": DECODE, "decode in splits": SPLIT, "mixed": MIXED, "prefill": PREFILL}


def calls() -> dict[str, Call]:
    found = {}
    for kind, call in KINDS.items():

        def add(words: str, kind: str = kind, call: Call = call, **changes: Any) -> None:
            found[f"{kind}, {words}"] = dataclasses.replace(call, **changes)

        for head_dim in (64, 80, 96, 112, 128, 192, 256):
            add(f"head_dim {head_dim}", head_dim=head_dim)
            add(f"head_dim {head_dim}, int8", head_dim=head_dim, page_dtype="int8")
        for page_size in (8, 32, 48, 64, 128, 256):
            add(f"pages of {page_size}", page_size=page_size)
        for head_dim in (64, 128, 256):
            add(f"head_dim {head_dim}, window", head_dim=head_dim, sliding_window=1024)
            add(f"head_dim {head_dim}, soft cap", head_dim=head_dim, logits_soft_cap=30.0)
        add("float16", dtype="float16")
        add("float8", page_dtype="float8_e4m3fn")
        for group in (1, 7, 16, 71):
            add(f"group of {group}", heads=(4 * group, 4))
    return found


def shapes_of(call: Call) -> tuple[Callable, tuple[Any, ...]]:
    """The attention of a call as a function, its config chosen by itself, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    from paged_jax.attention.mosaic_hopper import mosaic_hopper_attention

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    q_heads, kv_heads = call.heads
    width = call.context // call.page_size
    num_pages = call.rows * width
    q = array(call.tokens, q_heads, call.head_dim, dtype=call.dtype)
    pool = array(num_pages, kv_heads, call.page_size, call.head_dim, dtype=call.page_dtype or call.dtype)
    scales = None if call.page_dtype is None else array(*pool.shape[:3], dtype=jnp.float32)
    starts = None if call.decode else array(call.rows + 1)

    def attend(*arguments: Any) -> Any:
        *arrays, k_scales, v_scales = arguments
        return mosaic_hopper_attention(
            *arrays,
            scale=call.head_dim**-0.5,
            sliding_window=call.sliding_window,
            logits_soft_cap=call.logits_soft_cap,
            sinks=None,
            k_scales=k_scales,
            v_scales=v_scales,
        )

    return attend, (q, pool, pool, array(call.rows, width), array(call.rows), starts, scales, scales)


def config_of(arguments: tuple[Any, ...]) -> Any:
    """The config that is chosen for them."""
    from paged_jax.attention.kernel_config import choose_config, problem_of

    q, k_pages, _, tables, _, starts, k_scales, _ = arguments
    return choose_config(problem_of(q, k_pages, tables, starts, k_scales))


def blocks_per_processor(resources: Resources) -> int:
    """How many blocks' registers and shared memory fit on one processor."""
    registers = -(-resources.registers // 8) * 8 * resources.threads
    # One byte of static shared memory comes with every kernel, and 128 are the least that is given.
    shared_memory = -(-(resources.shared_memory + 1) // 128) * 128 + RESERVED
    return min(REGISTERS // registers, SHARED_MEMORY // shared_memory, DRIVER_BLOCKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only calls with all these words in their name")
    parser.add_argument("--output", type=Path, help="write the JSON to this file")
    options = parser.parse_args()
    try:
        compiler = Compiler()
    except MissingPartError as error:
        print(f"nothing compiled: {error} not installed", file=sys.stderr)
        sys.exit(2)

    import jax

    chosen = {name: call for name, call in calls().items() if all(word in name for word in options.words)}
    results = []
    for name, call in chosen.items():
        function, arguments = shapes_of(call)
        config, resources = config_of(arguments), compiler(function, *arguments)
        blocks = blocks_per_processor(resources)
        results.append(
            {
                "call": name,
                **dataclasses.asdict(config),
                **dataclasses.asdict(resources),
                "blocks_per_processor": blocks,
            }
        )
        print(
            f"{name:40} {resources.registers:4} registers, {resources.spilled_bytes:3} B spilled, "
            f"{resources.shared_memory:6} B shared, {blocks} a processor"
        )
    result = {"jax": jax.__version__, "target": "sm_90a", "kernels": results}
    if options.output or not options.words:
        (options.output or RESULT).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(kernel["spilled_bytes"] for kernel in results))


if __name__ == "__main__":
    main()
