"""Decode attention of paged_jax and of what else a JAX user has on a CPU, on the same tokens.

    python benchmarks/rivals.py

16 rows of up to 2048 tokens, 32 query heads on 8 kv heads of 128, pages of 16, float32. "full": every row
holds 2048 tokens; "mixed": the rows hold 18 % of that. Each side has the keys and values in its own layout,
made before the clock starts. A side is timed where it agrees with a float64 oracle, and named as wrong
where it does not. Packages that are not installed are listed with the command that installs them.

JAX's own paged kernel has no form for a CPU but Pallas's interpreter, which is checked here and not timed;
its reference, which attends contiguous keys and values, is timed together with the gather that it needs.

The floor is the time of reading the live keys and values once, at the bandwidth measured in the same run.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_step import HEAD_DIM, KV_HEADS, Inputs, attend_head_major, draw
from flax import nnx
from harness import ReadBandwidth, arguments, report, time_in_turns
from jax import Array

from paged_jax import paged_attention

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums of 2048 products in different orders


Attend = tuple[Callable[..., Array], tuple[Any, ...]]
"""A function of some arrays and the lengths, and these arrays."""


def ours(inputs: Inputs) -> Attend:
    return partial(paged_attention, implementation="xla"), tuple(inputs)


def flax_contiguous(inputs: Inputs) -> Attend:
    """What the decode step of nnx.MultiHeadAttention calls on its cache."""

    def attend(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        live = jnp.arange(k.shape[1])[None] < lengths[:, None]
        return nnx.dot_product_attention(q[:, None], k, v, mask=live[:, None, None, :])[:, 0]

    return attend, (inputs.q, inputs.contiguous(inputs.k_pages), inputs.contiguous(inputs.v_pages))


def head_major_contiguous(inputs: Inputs) -> Attend:
    k, v = (inputs.contiguous(pages).swapaxes(1, 2) for pages in (inputs.k_pages, inputs.v_pages))
    return attend_head_major, (inputs.q, k, v)


def jax_reference(inputs: Inputs) -> Attend:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention_reference

    def attend(q: Array, k_pages: Array, v_pages: Array, tables: Array, lengths: Array) -> Array:
        def gather(pages: Array) -> Array:  # [rows, max_length, kv_heads, head_dim]
            return jnp.moveaxis(pages[:, tables], 0, -2).reshape(len(q), -1, len(pages), q.shape[-1])

        return paged_attention_reference(q * inputs.scale, gather(k_pages), gather(v_pages), lengths)

    return attend, _by_kv_head(inputs)


def jax_kernel(inputs: Inputs) -> Attend:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as kernel

    def attend(q: Array, *others: Array) -> Array:
        return kernel(q * inputs.scale, *others, interpret=True)

    return attend, _by_kv_head(inputs)


def _by_kv_head(inputs: Inputs) -> tuple[Array, ...]:
    k_pages, v_pages = (pages.swapaxes(0, 1) for pages in (inputs.k_pages, inputs.v_pages))
    return inputs.q, k_pages, v_pages, inputs.block_tables


def ejkernel(inputs: Inputs) -> Attend:
    operation = importlib.import_module("ejkernel.kernels._xla.page_attention").page_attention

    def attend(q: Array, k_pages: Array, v_pages: Array, tables: Array, lengths: Array) -> Array:
        return operation(q, k_pages, v_pages, lengths, tables, attn_scale=inputs.scale)

    return attend, tuple(inputs)


def levanter(inputs: Inputs) -> Attend:
    named = importlib.import_module("haliax").named
    operation = importlib.import_module("levanter.layers.attention").ragged_paged_attention
    rows, _, head_dim = inputs.q.shape
    num_pages, kv_heads, page_size, _ = inputs.k_pages.shape
    q_axes = ("position", "kv_head", "q_heads_per_group", "head_size")
    starts = jnp.arange(rows + 1, dtype=jnp.int32)

    def attend(q: Array, kv_pages: Array, tables: Array, lengths: Array) -> Array:
        out = operation(
            named(q.reshape(rows, kv_heads, -1, head_dim), q_axes),
            named(kv_pages, ("page", "slot", "kv_head", "head_size")),
            named(lengths, "seq"),
            named(tables, ("seq", "page")),
            named(starts, "seq"),
            jnp.int32(rows),
            sm_scale=inputs.scale,
        )
        return out.rearrange(q_axes).array.reshape(q.shape)

    kv = jnp.stack([inputs.k_pages, inputs.v_pages], axis=2)  # of each head the keys, then the values
    kv = kv.reshape(num_pages, 2 * kv_heads, page_size, head_dim).swapaxes(1, 2)
    return attend, (inputs.q, kv, inputs.block_tables)


def tokamax(inputs: Inputs) -> Attend:
    """Its public function takes no pages; the operation under it does."""
    info = importlib.import_module("tokamax._src.ops.attention.base").PagingInfo
    chunked = importlib.import_module("tokamax._src.ops.attention.xla_chunked")
    importlib.import_module("absl.flags").FLAGS(["tokamax"])  # or it reads the options of this program
    operation = chunked.XlaChunkedDotProductAttention(chunk_size=1)
    num_pages, _, page_size, _ = inputs.k_pages.shape

    def attend(q: Array, k_pages: Array, v_pages: Array, tables: Array, lengths: Array) -> Array:
        filled = jnp.full(num_pages, page_size, jnp.int32)
        paging = info(-(-lengths // page_size), tables, filled)
        return operation(q[:, None], k_pages, v_pages, paging_info=paging)[:, 0]

    k_pages, v_pages = (pages.swapaxes(1, 2) for pages in (inputs.k_pages, inputs.v_pages))
    return attend, (inputs.q, k_pages, v_pages, inputs.block_tables)


class Side(NamedTuple):
    prepare: Callable[[Inputs], Attend]
    cache: str
    package: str = ""  # whose version is recorded; of paged_jax itself, the commit
    requirement: str = ""  # for pip, where paged_jax does not bring the package


OURS = "paged_jax"
SIDES = {
    OURS: Side(ours, "pages"),
    "flax.nnx": Side(flax_contiguous, "contiguous, token-major", "flax"),
    "plain jax.numpy": Side(head_major_contiguous, "contiguous, head-major", "jax"),
    "jax, reference after a gather": Side(jax_reference, "pages", "jax"),
    "ejkernel": Side(ejkernel, "pages", "ejkernel", "ejkernel==0.0.80.3"),
    "levanter": Side(levanter, "pages", "levanter", "levanter==1.2.dev1644"),
    "tokamax": Side(tokamax, "pages", "tokamax", "tokamax==0.0.12"),
}


def oracle(inputs: Inputs, lengths: np.ndarray) -> np.ndarray:
    """Row by row and head by head, in NumPy and float64."""
    q, k_pages, v_pages, tables = (np.asarray(array) for array in inputs)
    group = q.shape[1] // k_pages.shape[1]
    out = np.empty(q.shape)
    for row, length in enumerate(lengths):
        for head in range(q.shape[1]):
            k, v = (
                pages[tables[row], head // group].reshape(-1, q.shape[-1])[:length].astype(np.float64)
                for pages in (k_pages, v_pages)
            )
            scores = k @ q[row, head] * inputs.scale
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v / weights.sum()
    return out


def check(
    inputs: Inputs, batches: Mapping[str, np.ndarray], sides: Mapping[str, Side]
) -> tuple[dict[tuple[str, str], Callable[[], Array]], list[dict[str, Any]]]:
    """What may be timed, by side and batch, and a record of each side."""
    runs, records = {}, []
    expected = {batch: oracle(inputs, lengths) for batch, lengths in batches.items()}
    for name, side in sides.items():
        record: dict[str, Any] = {"side": name, "cache": side.cache, "status": {}, "ms": {}}
        records.append(record)
        try:
            attend, arrays = side.prepare(inputs)
            record["version"] = version(side.package) if side.package else ""
        except ImportError as error:
            if not side.requirement:
                raise
            record |= {"install": f"pip install {side.requirement}", "error": str(error)}
            record["status"] = dict.fromkeys(batches, "not installed")
            continue
        jitted = jax.jit(attend)
        for batch, lengths in batches.items():
            run = partial(jitted, *arrays, jnp.asarray(lengths))
            output = np.asarray(run())
            if np.allclose(output, expected[batch], **TOLERANCE):
                runs[name, batch] = run
                record["status"][batch] = "agrees"
            else:
                record["status"][batch] = f"wrong by {np.abs(output - expected[batch]).max():.2g}"
    if wrong := [status for status in records[0]["status"].values() if status != "agrees"]:
        raise AssertionError(f"{records[0]['side']} differs from the oracle: {wrong}")
    return runs, records


def check_jax_kernel() -> None:
    """In Pallas's interpreter: on fewer tokens, for it is slow."""
    inputs, batches = draw(rows=2, q_heads=8, kv_heads=2, head_dim=64, max_length=256)
    attend, arrays = jax_kernel(inputs)
    for lengths in batches.values():
        output = attend(*arrays, jnp.asarray(lengths))
        np.testing.assert_allclose(output, oracle(inputs, lengths), **TOLERANCE)


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    check_jax_kernel()
    inputs, batches = draw()
    runs, records = check(inputs, batches, SIDES)
    read = ReadBandwidth()
    seconds = time_in_turns({**runs, "read": read}, options.rounds)
    for name, batch in runs:
        next(r for r in records if r["side"] == name)["ms"][batch] = seconds[name, batch] * 1e3
    bandwidth = read.bytes_per_second(seconds["read"])
    token_bytes = 2 * KV_HEADS * HEAD_DIM * inputs.k_pages.dtype.itemsize
    floors = {batch: int(n.sum()) * token_bytes / bandwidth * 1e3 for batch, n in batches.items()}
    result = {
        "benchmark": "rivals",
        "read_bandwidth": bandwidth,
        "tokens": {batch: int(lengths.sum()) for batch, lengths in batches.items()},
        "floor_ms": floors,
        "results": records,
    }
    rows = [
        {
            "ms": record["side"],
            "version": record.get("version", ""),
            "cache": record["cache"],
            **{batch: record["ms"].get(batch, record["status"][batch]) for batch in batches},
        }
        for record in records
    ]
    notes = [
        "floor: " + ", ".join(f"{batch} {floor:.3g}" for batch, floor in floors.items()),
        "JAX's kernel agrees in the interpreter on fewer tokens, and is not timed",
        *(f"{record['install']}: {record['error']}" for record in records if "install" in record),
    ]
    report(options, result, rows, notes)


if __name__ == "__main__":
    main()
