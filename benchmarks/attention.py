"""Time of one decode step's attention: pages against contiguous caches, full and mixed lengths.

    python benchmarks/attention.py

16 rows of up to 2048 tokens, 32 query heads on 8 kv heads of 128, pages of 16, float32. "full": every
row holds 2048 tokens. "mixed": the rows hold 18 % of that, in pages, and in a contiguous cache of the
full width. "128 each" and so on: every row holds that many. The contiguous caches are read in two
layouts: token-major, as Flax keeps them, and head-major, the best layout we know for a CPU.

The floor is the time of reading the live keys and values once, at the bandwidth measured in the same run.
"""

import jax
import jax.numpy as jnp
import numpy as np
from decode_step import HEAD_DIM, KV_HEADS, ROWS, attend_head_major, draw
from harness import ReadBandwidth, arguments, report, time_in_turns

from paged_jax import paged_attention

EACH = (128, 256, 512, 1024)


def contiguous_token_major(q, k, v, lengths):  # [R, heads, D], [R, max_length, kv_heads, D], ..., [R]
    out = jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lengths)
    return out[:, 0]


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    inputs, batches = draw()
    k_tokens, v_tokens = (inputs.contiguous(pages) for pages in (inputs.k_pages, inputs.v_pages))
    k_heads, v_heads = k_tokens.swapaxes(1, 2), v_tokens.swapaxes(1, 2)
    batches |= {f"{length} each": np.full(ROWS, length) for length in EACH}
    batches = {name: jnp.asarray(lengths.astype(np.int32)) for name, lengths in batches.items()}

    implementations = {
        "paged": (jax.jit(paged_attention), tuple(inputs)),
        "token-major": (jax.jit(contiguous_token_major), (inputs.q, k_tokens, v_tokens)),
        "head-major": (attend_head_major, (inputs.q, k_heads, v_heads)),
    }
    for lengths in batches.values():
        outputs = [run(*inputs, lengths) for run, inputs in implementations.values()]
        for output in outputs[1:]:
            np.testing.assert_allclose(output, outputs[0], rtol=1e-4, atol=1e-5)

    memory = (
        implementations["paged"][0]
        .lower(*implementations["paged"][1], batches["full"])
        .compile()
        .memory_analysis()
    )
    pool_bytes = inputs.k_pages.nbytes + inputs.v_pages.nbytes
    temporary_share = memory.temp_size_in_bytes / pool_bytes

    read = ReadBandwidth()
    runs = {
        (name, batch): lambda run=run, inputs=inputs, lengths=lengths: run(*inputs, lengths)
        for name, (run, inputs) in implementations.items()
        for batch, lengths in batches.items()
    }
    seconds = time_in_turns(runs | {"read": read}, options.rounds)
    bandwidth = read.bytes_per_second(seconds["read"])

    results = []
    for batch, lengths in batches.items():
        tokens = int(lengths.sum())
        milliseconds = {name: seconds[name, batch] * 1e3 for name in implementations}
        results.append(
            {
                "batch": batch,
                "tokens": tokens,
                "floor_ms": tokens * KV_HEADS * HEAD_DIM * 4 * 2 / bandwidth * 1e3,
                "ms": milliseconds,
                "paged_to_token_major": milliseconds["paged"] / milliseconds["token-major"],
                "paged_to_head_major": milliseconds["paged"] / milliseconds["head-major"],
            }
        )
    report(
        options,
        {
            "benchmark": "attention",
            "read_bandwidth": bandwidth,
            "results": results,
            "temporary_bytes": memory.temp_size_in_bytes,
            "temporary_share_of_pool": temporary_share,
        },
        [
            {
                "ms": result["batch"],
                "tokens": result["tokens"],
                "floor": result["floor_ms"],
                **result["ms"],
                "paged / token-m.": result["paged_to_token_major"],
                "paged / head-m.": result["paged_to_head_major"],
            }
            for result in results
        ],
        [
            "token-major and head-major: contiguous caches over the full width",
            "wanted of paged / token-major: at most 0.8 when full, 0.2 when mixed",
            f"temporaries {temporary_share:.2%} of the pool (wanted: under 5 %)",
        ],
    )


if __name__ == "__main__":
    main()
