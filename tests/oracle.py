"""What paged attention has to give: numpy and float64, one token at a time, no code of the package."""

import math

import numpy as np

FLOAT32_RTOL = 4e-6
"""Logits of the cases reach 20: rounded to float32, and summed over head_dim, they are wrong by up to 2e-6
or so, and so are the weights. Relative to the sum of weight * |value|, which is what gets rounded."""

UNIT_ROUNDOFF = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""One rounding to a narrow dtype; that to float32 is within FLOAT32_RTOL."""

ROUNDINGS = 1.5
"""A narrow result is allowed 1.5 times the error, in root mean square, of the exact one rounded to its dtype.
The weights are rounded to the same dtype before they meet the values: as much again, independent: 1.41."""


def oracle(
    q,
    k_pages,
    v_pages,
    block_tables,
    lengths,
    query_starts=None,
    *,
    scale=None,
    sliding_window=None,
    logits_soft_cap=None,
    sinks=None,
    k_scales=None,
    v_scales=None,
):
    """Output [tokens, q_heads, head_dim] and log-sum-exp [tokens, q_heads], for the same arguments."""
    q, k_pages, v_pages = (np.asarray(array).astype(np.float64) for array in (q, k_pages, v_pages))
    if k_scales is not None:
        k_pages = k_pages * np.asarray(k_scales).astype(np.float64)[..., None]
        v_pages = v_pages * np.asarray(v_scales).astype(np.float64)[..., None]
    block_tables, lengths = np.asarray(block_tables), np.asarray(lengths)
    starts = np.arange(len(lengths) + 1) if query_starts is None else np.asarray(query_starts)
    num_tokens, q_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    scale = 1 / math.sqrt(head_dim) if scale is None else scale

    output, lse = np.zeros(q.shape), np.full((num_tokens, q_heads), -np.inf)
    for row, length in enumerate(lengths):
        for token in range(starts[row], starts[row + 1]):
            position = length - (starts[row + 1] - token)
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = np.arange(first, position + 1)
            if seen.size == 0:
                continue
            pages, slots = block_tables[row, seen // page_size], seen % page_size
            for head in range(q_heads):
                kv_head = head // (q_heads // kv_heads)
                logits = k_pages[pages, kv_head, slots] @ q[token, head] * scale
                if logits_soft_cap is not None:
                    logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
                sink = -np.inf if sinks is None else np.float64(sinks[head])
                top = max(logits.max(), sink)
                weights = np.exp(logits - top)
                total = weights.sum() + np.exp(sink - top)
                output[token, head] = weights @ v_pages[pages, kv_head, slots] / total
                lse[token, head] = top + np.log(total)
    return output, lse


def assert_matches_oracle(output, lse, inputs, *, narrow_weights=None, **options):
    """Holds a result of `paged_attention(*inputs, **options, return_lse=True)` against the oracle.

    `narrow_weights`: the softmax weights were rounded to the dtype of q. None: where q and pages have one.
    """
    exact, exact_lse = oracle(*inputs, **options)
    magnitudes = inputs._replace(v_pages=np.abs(np.asarray(inputs.v_pages).astype(np.float64)))
    summed, _ = oracle(*magnitudes, **options)
    assert output.dtype == inputs.q.dtype
    assert (output.shape, lse.shape) == (exact.shape, exact_lse.shape)
    if narrow_weights is None:
        narrow_weights = inputs.q.dtype == inputs.k_pages.dtype and "k_scales" not in options
    of_result = UNIT_ROUNDOFF[str(output.dtype)]
    of_weights = of_result if narrow_weights else 0.0
    error = np.abs(np.asarray(output).astype(np.float64) - exact)
    bound = (FLOAT32_RTOL + of_weights) * summed + of_result * np.abs(exact)
    assert np.all(error <= bound), f"{np.nanmax(error - bound)=}, {np.argwhere(~(error <= bound))[:5]=}"
    if of_result > 0:
        rounding = exact.astype(output.dtype).astype(np.float64) - exact
        assert np.sum(error**2) <= ROUNDINGS**2 * np.sum(rounding**2)
    np.testing.assert_allclose(lse, exact_lse, rtol=FLOAT32_RTOL, atol=FLOAT32_RTOL)
