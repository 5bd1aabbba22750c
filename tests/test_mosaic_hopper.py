"""The GPU kernel gives the oracle's numbers in Pallas's interpreter, without races, and lowers for CUDA."""

import dataclasses
import importlib
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case, attention
from chex import assert_trees_all_equal
from oracle import assert_matches_oracle

from paged_jax.attention import KernelConfig
from paged_jax.testing import PagedInputs, check_own, mean_position, paged_inputs, poison

if jax.__version_info__ < (0, 11):
    pytest.skip("the interpreter of Mosaic GPU needs jax >= 0.11", allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
kernel_resources = importlib.import_module("kernel_resources")
CALLS = kernel_resources.calls()

kernel = partial(attention, implementation="mosaic_hopper")
check = partial(assert_matches_oracle, narrow_weights=True)
bfloat16_inputs = partial(paged_inputs, dtype="bfloat16", head_dim=64, page_size=16)


@pytest.fixture
def interpreter():
    """Kernels run on CPU; a race between their warpgroups fails the test."""
    jax.config.update("jax_disable_most_optimizations", True)  # at these sizes compiling is most of the time
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    assert not get_races().races_found


def for_kernel(case: Case) -> Case:
    """The case with the nearest sizes and dtypes that the kernel takes; short rows grow with their pages."""
    grown = math.ceil(8 / case.page_size) if max(case.lengths) < 60 else 1
    return dataclasses.replace(
        case,
        lengths=tuple(length * grown for length in case.lengths),
        page_size=math.ceil(case.page_size / 8) * 8,
        sliding_window=case.sliding_window and case.sliding_window * grown,
        head_dim=math.ceil(case.head_dim / 16) * 16,
        dtype="float16" if case.dtype == "float16" else "bfloat16",
        page_dtype="int8" if case.page_dtype == "int8" else None,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle_whatever_the_contract_leaves_open(case: Case, interpreter):
    inputs, options = for_kernel(case).call()
    output, lse = kernel(*inputs, **options, return_lse=True)
    check(output, lse, inputs, **options)
    inputs, options = for_kernel(case).call(dead=0.0)
    assert_trees_all_equal((output, lse), kernel(*inputs, **options, return_lse=True), strict=True)


CONFIGS = [
    (KernelConfig(tile_tokens=1, kv_step=16, stages=1), None),
    (KernelConfig(tile_tokens=5, kv_step=48, stages=3, num_splits=2), None),
    (KernelConfig(tile_tokens=9, kv_step=32, stages=2, num_splits=5), "int8"),
    (KernelConfig(tile_tokens=18, kv_step=64, stages=2, compute_warpgroups=2), "int8"),
    (KernelConfig(tile_tokens=16, kv_step=128, stages=1, compute_warpgroups=2, num_splits=3), None),
]


@pytest.mark.parametrize(("config", "page_dtype"), CONFIGS, ids=str)
def test_any_config_matches_the_oracle(config: KernelConfig, page_dtype: str | None, interpreter):
    case = Case(
        "everything",
        (130, 0, 9, 1),
        (21, 0, 9, 1),
        heads=(7, 1),
        head_dim=32,
        page_size=16,
        dtype="bfloat16",
        page_dtype=page_dtype,
        num_padding=2,
        gain=3.0,
        scale=0.3,
        sliding_window=50,
        logits_soft_cap=3.0,
        sinks=True,
    )
    inputs, options = case.call()
    output, lse = kernel(*inputs, **options, return_lse=True, tiling=config)
    check(output, lse, inputs, **options)


def assert_means(expected: list[float], inputs: PagedInputs, **options):
    """The mean position that each token sees, in all heads and channels."""
    output = kernel(*mean_position(inputs), **options).astype(jnp.float32)
    exact = np.broadcast_to(np.reshape(expected, (-1, 1, 1)), output.shape)
    np.testing.assert_allclose(output, exact, rtol=2**-8)


@pytest.mark.parametrize("page_size", [8, 24, 256])
def test_any_page_size(page_size: int, interpreter):
    """Lengths on, before and after the edges of pages and of steps; the tables' tails are stale."""
    lengths = [1, page_size - 1, page_size, page_size + 1, 3 * page_size // 2]
    inputs = paged_inputs(
        lengths,
        page_size=page_size,
        q_heads=1,
        kv_heads=1,
        head_dim=16,
        dtype="bfloat16",
        max_pages_per_row=7,
    )
    assert_means([(length - 1) / 2 for length in lengths], inputs)


@pytest.mark.parametrize(
    ("window", "num_splits", "expected"), [(8, 3, [12.5, 2.0, 65.5]), (1, 1, [16.0, 4.0, 69.0])]
)
def test_a_window_starts_in_mid_page_and_pages_before_it_are_not_read(
    window: int, num_splits: int, expected: list[float], interpreter
):
    inputs = bfloat16_inputs([17, 5, 70], page_size=8, q_heads=2, kv_heads=2, head_dim=16)
    tables = np.array(inputs.block_tables)
    for row, length in enumerate([17, 5, 70]):
        tables[row, : max(length - window, 0) // 8] = -1
    inputs = poison(mean_position(inputs), np.nan, window)._replace(block_tables=jnp.asarray(tables))
    config = KernelConfig(tile_tokens=1, kv_step=16, stages=2, num_splits=num_splits)
    output = kernel(*inputs, sliding_window=window, tiling=config).astype(jnp.float32)
    np.testing.assert_allclose(output[:, 0, 0], expected, rtol=2**-8)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(71, 1), (3, 3)])
def test_heads_of_any_group(q_heads: int, kv_heads: int, interpreter):
    """71 do not fit one warpgroup's rows."""
    inputs = bfloat16_inputs([20, 40], [2, 1], q_heads=q_heads, kv_heads=kv_heads)
    check_own(kernel, inputs)
    output, lse = kernel(*inputs, return_lse=True)
    check(output, lse, inputs)


def test_a_group_that_no_tile_holds(interpreter):
    inputs = bfloat16_inputs([20, 3], q_heads=130, kv_heads=1, head_dim=16)
    output, lse = kernel(*inputs, return_lse=True)
    check(output, lse, inputs)


def test_more_queries_than_tokens(interpreter):
    """Under jit, where it is not refused: the queries are the last tokens, so the first have no position."""
    inputs = mean_position(bfloat16_inputs([3, 7], [5, 2]))
    output, lse = kernel(*inputs, return_lse=True)
    np.testing.assert_allclose(output[:, 0, 0].astype(jnp.float32), [0, 0, 0, 0.5, 1, 2.5, 3], rtol=2**-8)
    np.testing.assert_allclose(lse[:, 0], [-np.inf, -np.inf, *np.log([1, 2, 3, 6, 7])], rtol=1e-5)


def test_empty_splits(interpreter):
    config = KernelConfig(tile_tokens=1, kv_step=16, stages=2, num_splits=16)
    inputs = mean_position(bfloat16_inputs([3, 0, 100], q_heads=1, kv_heads=1, head_dim=16))
    output, lse = kernel(*inputs, return_lse=True, tiling=config)
    np.testing.assert_allclose(output[:, 0, 0].astype(jnp.float32), [1.0, 0.0, 49.5], rtol=2**-8)
    np.testing.assert_allclose(lse[:, 0], [math.log(3), -np.inf, math.log(100)], rtol=1e-5)


def test_a_sink_counts_once(interpreter):
    inputs = mean_position(bfloat16_inputs([4, 32], q_heads=2, kv_heads=2, head_dim=16))
    config = KernelConfig(tile_tokens=1, kv_step=16, stages=2, num_splits=4)
    sinks = jnp.full(2, math.log(4))
    output, lse = kernel(*inputs, sinks=sinks, return_lse=True, tiling=config)
    np.testing.assert_allclose(output[:, 0, 0].astype(jnp.float32), [0.75, 15.5 * 32 / 36], rtol=2**-8)
    np.testing.assert_allclose(lse[:, 0], np.log([8, 36]), rtol=1e-5)


def test_nan_in_a_query_stays_in_its_token(interpreter):
    inputs = bfloat16_inputs([6, 9, 3], [2, 3, 1])
    inputs = inputs._replace(q=inputs.q.at[3].set(jnp.nan))
    output, lse = kernel(*inputs, return_lse=True)
    np.testing.assert_array_equal(np.isnan(output.astype(jnp.float32)).all(axis=(1, 2)), np.arange(6) == 3)
    np.testing.assert_array_equal(np.isnan(lse).all(axis=1), np.arange(6) == 3)


def test_a_row_does_not_notice_its_batch(interpreter):
    """Bit by bit, alone and beside others, on other pages, in a wider table and a larger pool."""
    batch, alone = bfloat16_inputs([17, 0, 90, 33]), bfloat16_inputs([90], seed=1)
    mine, its = np.asarray(batch.block_tables)[2, :6], np.asarray(alone.block_tables)[0, :6]
    batch = batch._replace(
        q=batch.q.at[2].set(alone.q[0]),
        k_pages=batch.k_pages.at[mine].set(alone.k_pages[its]),
        v_pages=batch.v_pages.at[mine].set(alone.v_pages[its]),
    )
    config = KernelConfig(tile_tokens=1, kv_step=32, stages=2)
    expected = kernel(*alone, return_lse=True, tiling=config)
    for got, right in zip(kernel(*batch, return_lse=True, tiling=config), expected, strict=True):
        np.testing.assert_array_equal(got[2], right[0])


@pytest.mark.parametrize(("page_dtype", "page_size"), [("int8", 8), ("float8_e4m3fn", 16), ("int8", 64)])
def test_scales_of_quantised_pages(page_dtype: str, page_size: int, interpreter):
    """Powers of two as scales: of the values the mean is exact, and of the keys so are the logits."""
    inputs = paged_inputs(
        [6, 21],
        page_size=page_size,
        q_heads=1,
        kv_heads=1,
        head_dim=16,
        dtype="bfloat16",
        max_pages_per_row=5,
    )
    live = np.asarray(~jnp.isnan(inputs.k_pages[..., 0].astype(jnp.float32)))
    position = np.asarray(mean_position(inputs).v_pages[..., 0].astype(jnp.float32))
    powers = jnp.asarray(np.where(live, 2.0 ** (position % 4), np.nan), jnp.float32)
    dead = 99 if page_dtype == "int8" else np.nan
    ones = jnp.broadcast_to(jnp.asarray(np.where(live, 1, dead), page_dtype)[..., None], inputs.v_pages.shape)
    inputs = inputs._replace(q=jnp.full_like(inputs.q, 1 / 16), k_pages=ones, v_pages=ones)
    output, lse = kernel(*inputs, scale=0.5, return_lse=True, k_scales=powers, v_scales=powers)
    check(output, lse, inputs, scale=0.5, k_scales=powers, v_scales=powers)


def lower(call):
    function, arguments = kernel_resources.shapes_of(call)
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


NARROW = (
    "decode, pages of 32",
    "decode in splits, pages of 8",
    "mixed, head_dim 80, int8",
    "prefill, head_dim 128",
)


@pytest.mark.parametrize(
    "name", [name if name in NARROW else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)
def test_lowers_for_cuda_without_a_gpu(name: str):
    text = lower(CALLS[name]).as_text()
    assert "mosaic_gpu" in text


def test_b56_lowers_with_x64():
    function, arguments = kernel_resources.shapes_of(CALLS["mixed, head_dim 80, int8"])
    with jax.enable_x64(True):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_no_copy_of_the_pool():
    """Padded heads, quantised pages, pools past 2**31 elements: the pools go to the kernel as they are."""
    for name in ("decode, head_dim 80", "decode, head_dim 112, int8"):
        call = dataclasses.replace(CALLS[name], context=1 << 17, rows=128, tokens=128)
        function, arguments = kernel_resources.shapes_of(call)
        assert math.prod(arguments[1].shape) > 2**31
        pool = arguments[1].shape
        jaxpr = jax.make_jaxpr(function)(*arguments)
        made = [
            eqn.primitive.name
            for sub in jax.tree.leaves(list(_all_jaxprs(jaxpr.jaxpr)))
            for eqn in sub.eqns
            for out in eqn.outvars
            if getattr(out.aval, "shape", None) == pool
        ]
        assert made == []
        assert "mosaic_gpu" in lower(call).as_text()


def _all_jaxprs(jaxpr):
    yield jaxpr
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            if hasattr(value, "jaxpr") and eqn.primitive.name in ("jit", "pjit"):
                yield from _all_jaxprs(value.jaxpr)


@pytest.mark.slow
def test_registers_and_shared_memory_off_line():
    """Compiled to code for Hopper, a decode step spills nothing and leaves room for a second block."""
    script = BENCHMARKS / "kernel_resources.py"
    run = subprocess.run(
        [sys.executable, script, "decode,", "head_dim", "128"], capture_output=True, text=True, check=False
    )
    if run.returncode == 2:
        pytest.skip(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 0, run.stderr
    assert "2 a processor" in run.stdout.splitlines()[0]
