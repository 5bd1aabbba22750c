"""The sizes that the GPU kernel is given: refused where they cannot be, and chosen so that a GPU is full."""

import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from paged_jax.attention import KernelConfig, Tiling, paged_attention, paged_attention_implementation
from paged_jax.attention.kernel_config import (
    PROCESSORS,
    SHARED_MEMORY_OF_TWO,
    Problem,
    choose_config,
    problem_of,
    unsupported,
)
from paged_jax.testing import paged_inputs

DECODE = Problem(
    num_tokens=32,
    num_rows=32,
    kv_heads=8,
    group=4,
    head_dim=128,
    page_size=16,
    max_pages_per_row=256,
    q_dtype="bfloat16",
    page_dtype="bfloat16",
    quantised=False,
    decode=True,
)
INT8 = {"page_dtype": "int8", "quantised": True}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tile_tokens": 0}, "tile_tokens must be at least 1, got tile_tokens=0"),
        ({"num_splits": -1}, "num_splits must be at least 1, got num_splits=-1"),
        ({"kv_step": 24}, "kv_step must be a multiple of 16 of at most 256, got kv_step=24"),
        ({"kv_step": 272}, "kv_step must be a multiple of 16 of at most 256, got kv_step=272"),
        ({"compute_warpgroups": 3}, "compute_warpgroups must be 1 or 2, got 3"),
    ],
)
def test_sizes_that_no_kernel_has(sizes: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(f"KernelConfig: {message}")):
        KernelConfig(**{"tile_tokens": 1, "kv_step": 64, "stages": 2} | sizes)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (KernelConfig(17, 64, 2), {}, "64 rows a warpgroup = 64, got tile_tokens=17 of 4 heads = 68"),
        (KernelConfig(1, 64, 2), {"page_size": 48}, "or divide a page, got kv_step=64, page_size=48"),
        (KernelConfig(1, 64, 7), {}, "needs 248576 bytes of shared memory and a block has 232448"),
    ],
)
def test_sizes_that_do_not_fit_the_call(config: KernelConfig, change: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        config.check(DECODE._replace(**change))


def problems() -> list[Problem]:
    found = []
    head_dims, page_sizes = (16, 64, 80, 96, 112, 128, 192, 256), (8, 24, *range(16, 257, 16))
    sizes = itertools.product(head_dims, page_sizes, (False, True))
    for head_dim, page_size, quantised in sizes:
        pages = {"head_dim": head_dim, "page_size": page_size, **(INT8 if quantised else {})}
        for group in (1, 4, 7, 16, 71, 128):
            for tokens, rows, decode in ((1, 1, True), (64, 64, True), (100, 64, False), (4096, 3, False)):
                calls = {"group": group, "num_tokens": tokens, "num_rows": rows, "decode": decode}
                found.append(DECODE._replace(**pages, **calls))
    return found


def test_what_is_chosen_fits():
    for problem in problems():
        assert unsupported(problem) is None
        config = choose_config(problem)
        config.check(problem)
        assert config.stages >= 2
        assert config.tile_tokens == 1 or not problem.decode


def test_two_blocks_share_a_processor_where_the_accumulators_leave_room():
    for head_dim in (64, 80, 96, 112, 128):
        problem = DECODE._replace(head_dim=head_dim)
        config = choose_config(problem)
        assert config.compute_warpgroups == 1
        assert config.shared_memory(problem) <= SHARED_MEMORY_OF_TWO


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 20, 31])
def test_few_long_rows_are_split_until_every_processor_has_work(rows: int):
    config = choose_config(DECODE._replace(num_tokens=rows, num_rows=rows, max_pages_per_row=2048))
    assert rows * 8 * config.num_splits >= 0.85 * PROCESSORS


def test_rows_that_fill_the_processors_are_not_split():
    assert choose_config(DECODE).num_splits == 1
    assert choose_config(DECODE._replace(num_rows=256, num_tokens=256)).num_splits == 1


def test_short_rows_are_not_split_to_pieces():
    problem = DECODE._replace(num_rows=1, num_tokens=1, kv_heads=1, max_pages_per_row=4)
    assert choose_config(problem).num_splits <= 2


def test_prompts_have_two_warpgroups_and_decoding_beside_them_does_not():
    assert choose_config(DECODE._replace(num_tokens=4096, decode=False)).compute_warpgroups == 2
    beside = choose_config(DECODE._replace(num_tokens=40, decode=False))
    assert beside.compute_warpgroups == 1
    assert beside.tile_rows(DECODE.group) == 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q_dtype": "float32"}, "queries of bfloat16 or float16, not float32"),
        ({"page_dtype": "float16"}, "pages of bfloat16, or int8 and float8_e4m3fn with scales, not float16"),
        ({"quantised": True}, "pages of bfloat16, or int8 and float8_e4m3fn with scales, not bfloat16"),
        ({"head_dim": 72}, "a multiple of 16, up to 256, not 72"),
        ({"head_dim": 512}, "a multiple of 16, up to 256, not 512"),
        ({"page_size": 4}, "pages of 8, 24, and multiples of 16 up to 256 slots, not 4"),
        ({"page_size": 40}, "pages of 8, 24, and multiples of 16 up to 256 slots, not 40"),
        ({"page_size": 512}, "pages of 8, 24, and multiples of 16 up to 256 slots, not 512"),
    ],
)
def test_what_the_kernel_does_not_take(change: dict, reason: str):
    assert unsupported(DECODE) is None
    assert reason in unsupported(DECODE._replace(**change))


def test_the_arguments_say_the_problem():
    inputs = paged_inputs([3, 40], page_size=16, q_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16")
    q, k_pages, _, tables, _, starts = inputs
    assert problem_of(q, k_pages, tables, starts, None) == Problem(
        2, 2, 2, 4, 64, 16, tables.shape[1], jnp.bfloat16, jnp.bfloat16, quantised=False, decode=True
    )


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="here it may run")
def test_asked_for_by_name_where_it_cannot_run():
    inputs = paged_inputs([3, 40], page_size=16, head_dim=64, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match=f"mosaic_hopper cannot run this.*{jax.default_backend()}"):
        paged_attention(*inputs, implementation="mosaic_hopper")
    with pytest.raises(NotImplementedError, match="mosaic_hopper cannot run this"):
        paged_attention(*inputs, tiling=KernelConfig(1, 64, 2))
    choice = paged_attention_implementation(problem=DECODE)
    assert choice.name == "xla"
    assert "mosaic_hopper is not taken" in choice.reason


@pytest.mark.parametrize(
    ("capability", "version", "change", "name", "reason"),
    [
        ("9.0", (0, 11, 0), {}, "mosaic_hopper", "the kernel for this GPU"),
        ("9.0", (0, 12, 1), INT8, "mosaic_hopper", "the kernel for this GPU"),
        ("9.0", (0, 10, 2), {}, "xla", "needs jax >= 0.11"),
        ("8.0", (0, 11, 0), {}, "xla", "'A GPU' of compute capability 8.0"),
        ("9.0", (0, 11, 0), {"q_dtype": "float32"}, "xla", "queries of bfloat16 or float16, not float32"),
    ],
)
def test_what_is_chosen_on_a_gpu(
    capability: str, version: tuple, change: dict, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
):
    device = SimpleNamespace(compute_capability=capability, device_kind="A GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "__version_info__", version)
    problem = DECODE._replace(**change)
    choice = paged_attention_implementation(problem=problem)
    assert choice.name == name
    assert reason in choice.reason
    if name == "mosaic_hopper":
        assert paged_attention_implementation(name, problem).reason == "asked for by name"
    else:
        with pytest.raises(NotImplementedError, match=reason):
            paged_attention_implementation("mosaic_hopper", problem)


def test_a_tiling_chooses_its_implementation():
    inputs = paged_inputs([3, 40], page_size=16, head_dim=64)
    with pytest.raises(ValueError, match='tiling belongs to implementation="xla" as a Tiling'):
        paged_attention(*inputs, implementation="xla", tiling=KernelConfig(1, 64, 2))
    paged_attention(*inputs, tiling=Tiling(1, 1))
