"""Time of writing a step's keys and values, over the size of the pool.

    python benchmarks/kv_write.py

A decode step of 16 rows and a chunk of 256 tokens, 8 kv heads of 128, pages of 16, inside a jitted
loop on donated pages. A pool eight times as large may cost at most 1.2 times as much: anything that
copies the pool would show here.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, report, time_in_turns
from jax import lax

from paged_jax import KVPages

KV_HEADS, PAGE_SIZE, HEAD_DIM = 8, 16, 128
POOL_PAGES = (256, 2048)  # 2 * 16 MiB and 2 * 128 MiB in float32
STEPS = 50


@partial(jax.jit, donate_argnums=0)
def loop(pages: KVPages, k: jax.Array, v: jax.Array, page_ids: jax.Array, slots: jax.Array) -> KVPages:
    # Values that change from step to step keep the compiler from lifting the write out of the loop.
    return lax.fori_loop(
        0, STEPS, lambda i, pages: pages.write(0, k + i.astype(k.dtype), v, page_ids, slots), pages
    )


class Run:
    def __init__(self, num_pages: int, tokens: int):
        rng = np.random.default_rng(0)
        self.pages = KVPages.create(1, num_pages, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype=jnp.float32)
        self.num_pages = num_pages
        k, v = rng.standard_normal((2, tokens, KV_HEADS, HEAD_DIM)).astype(np.float32)
        if tokens == 16:  # one token in a page of its own row each
            page_ids, slots = rng.permutation(num_pages)[:tokens], rng.integers(PAGE_SIZE, size=tokens)
        else:  # a prompt fills pages one after the other
            page_ids = np.repeat(rng.permutation(num_pages)[: tokens // PAGE_SIZE], PAGE_SIZE)
            slots = np.tile(np.arange(PAGE_SIZE), tokens // PAGE_SIZE)
        self.step = tuple(jnp.asarray(x) for x in (k, v, page_ids.astype(np.int32), slots.astype(np.int32)))

    def __call__(self) -> jax.Array:
        self.pages = loop(self.pages, *self.step)
        return self.pages.k_pages[0]

    def check(self) -> None:
        self()
        _, v, page_ids, slots = self.step
        expected = np.zeros((self.num_pages, KV_HEADS, PAGE_SIZE, HEAD_DIM), np.float32)
        for token, (page_id, slot) in enumerate(zip(page_ids, slots, strict=True)):
            expected[page_id, :, slot] = v[token]
        np.testing.assert_array_equal(self.pages.v_pages[0], expected)


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    runs = {(tokens, pages): Run(pages, tokens) for tokens in (16, 256) for pages in POOL_PAGES}
    for run in runs.values():
        run.check()
    seconds = time_in_turns(runs, options.rounds)
    results = []
    for tokens in (16, 256):
        micros = {pages: seconds[tokens, pages] / STEPS * 1e6 for pages in POOL_PAGES}
        ratio = micros[POOL_PAGES[-1]] / micros[POOL_PAGES[0]]
        results.append({"tokens": tokens, "microseconds": micros, "largest_to_smallest": ratio})
    worst = max(result["largest_to_smallest"] for result in results)
    page_bytes = 2 * KV_HEADS * PAGE_SIZE * HEAD_DIM * 4
    report(
        options,
        {
            "benchmark": "kv_write",
            "pool_bytes": [pages * page_bytes for pages in POOL_PAGES],
            "results": results,
            "worst_largest_to_smallest": worst,
        },
        [
            {"tokens": r["tokens"]}
            | {f"{p * page_bytes >> 20} MiB pool, us": t for p, t in r["microseconds"].items()}
            | {"ratio": r["largest_to_smallest"]}
            for r in results
        ],
        [f"an 8 times larger pool takes at most {worst:.2f} times as long (wanted: at most 1.2)"],
    )


if __name__ == "__main__":
    main()
