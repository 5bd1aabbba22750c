"""Time of one decode step's attention by the dtype of the pages, in a small and a large pool.

    python benchmarks/page_dtypes.py

16 rows of 512 tokens, 32 query heads on 8 kv heads of 128, pages of 16, queries in float32. The rows hold
the same tokens in both pools, so the larger one may not cost more; where XLA converts the whole pool
before it reads some of it, it does.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, report, time_in_turns

from paged_jax import KVPages, paged_attention

ROWS, LENGTH, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 16, 512, 32, 8, 128, 16
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
POOLS = (512, 4096)  # pages; the rows hold 512


def run(dtype: str, num_pages: int) -> partial[jax.Array]:
    """The step, after one check against the reference on the same pages."""
    pages = KVPages.create(
        num_layers=1,
        num_pages=num_pages,
        num_kv_heads=KV_HEADS,
        page_size=PAGE_SIZE,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )
    tables = np.random.default_rng(0).permutation(num_pages)[: ROWS * LENGTH // PAGE_SIZE]
    tables = jnp.asarray(tables.reshape(ROWS, -1).astype(np.int32))
    k, v = jax.random.normal(jax.random.key(0), (2, ROWS * LENGTH, KV_HEADS, HEAD_DIM))
    slots = jnp.tile(jnp.arange(PAGE_SIZE), tables.size)
    pages = pages.write(0, k, v, jnp.repeat(tables.ravel(), PAGE_SIZE), slots)
    q = jax.random.normal(jax.random.key(1), (ROWS, Q_HEADS, HEAD_DIM))
    scales = {}
    if pages.k_scales is not None and pages.v_scales is not None:
        scales = {"k_scales": pages.k_scales[0], "v_scales": pages.v_scales[0]}
    inputs = q, pages.k_pages[0], pages.v_pages[0], tables, jnp.full(ROWS, LENGTH, jnp.int32)
    step = partial(jax.jit(partial(paged_attention, implementation="xla")), *inputs, **scales)
    expected = paged_attention(*inputs, **scales, implementation="reference")
    np.testing.assert_allclose(step(), expected, rtol=1e-4, atol=1e-5)
    return step


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    runs = {(dtype, pages): run(dtype, pages) for dtype in DTYPES for pages in POOLS}
    seconds = time_in_turns(runs, options.rounds)
    results = []
    for dtype in DTYPES:
        milliseconds = {pages: seconds[dtype, pages] * 1e3 for pages in POOLS}
        ratio = milliseconds[POOLS[-1]] / milliseconds[POOLS[0]]
        results.append({"dtype": dtype, "milliseconds": milliseconds, "largest_to_smallest": ratio})
    rows = [
        {
            "ms": result["dtype"],
            **{f"{pages} pages": time for pages, time in result["milliseconds"].items()},
            "largest / smallest": result["largest_to_smallest"],
        }
        for result in results
    ]
    report(options, {"benchmark": "page_dtypes", "results": results}, rows, [])


if __name__ == "__main__":
    main()
