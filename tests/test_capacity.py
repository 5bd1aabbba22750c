"""The memory arithmetic against the bytes of real arrays and against the course's exercises."""

import gc
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax import page_table
from paged_jax.capacity import (
    Plan,
    TokenShape,
    check_memory,
    format_size,
    memory_budget,
    pages_in_budget,
    parse_size,
    pool_bytes,
    table_bytes,
)
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import PageTable

KiB, MiB, GiB = 2**10, 2**20, 2**30
LLAMA_3_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Device:
    """As much of a `jax.Device` as the arithmetic looks at."""

    memory: int | None
    in_use: int = 0
    platform: str = "gpu"

    def memory_stats(self):
        return None if self.memory is None else {"bytes_limit": self.memory, "bytes_in_use": self.in_use}


def real_bytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("layers", "pages", "heads", "page_size", "head_dim", "rows", "width"),
    [(1, 1, 1, 1, 1, 1, 1), (2, 5, 3, 4, 8, 3, 7), (3, 16, 1, 16, 64, 5, 2)],
)
def test_formula_is_the_bytes_of_the_arrays(dtype, layers, pages, heads, page_size, head_dim, rows, width):
    kv = KVPages.create(layers, pages, heads, page_size, head_dim, jnp.dtype(dtype))
    table = PageTable.create(pages, page_size, rows, width)
    token = TokenShape(layers, heads, head_dim, dtype).num_bytes
    assert table_bytes(pages, rows, width) == real_bytes(table)
    assert pool_bytes(token, pages, page_size, rows, width) == real_bytes((kv, table))


def test_exercise_1_three_quarters_of_a_reservation_are_wasted():
    plan = Plan(128 * KiB, page_size=16, max_length=2048, lengths=(200, 600, 150, 1050))
    assert plan.contiguous_slots * plan.bytes_per_token == 1 * GiB
    assert plan.used_slots * plan.bytes_per_token == 250 * MiB
    assert round(plan.contiguous_waste, 3) == 0.756
    assert plan.paged_slots == 16 * (13 + 38 + 10 + 66)
    assert plan.paged_waste == 1 - 2000 / 2032


def test_exercise_3_pages_hold_eight_times_as_many_requests():
    held = Plan(128 * KiB, page_size=16, max_length=4096, lengths=(500,)).concurrency(32 * GiB)
    assert (held.contiguous, held.paged, held.ratio, held.num_pages) == (64, 512, 8.0, 16384)
    assert held.table_bytes == table_bytes(16384, 512, 256)


@given(
    page_size=st.integers(1, 64),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    spare=st.integers(0, 10**7),
)
def test_concurrency_is_the_most_that_fits(page_size, lengths, spare):
    plan = Plan(bytes_per_token=3, page_size=page_size, max_length=300, lengths=tuple(lengths))
    pool = 3 * (300 + page_size) + spare
    held = plan.concurrency(pool)
    assert held.contiguous * 300 * 3 <= pool < (held.contiguous + 1) * 300 * 3
    assert held.num_pages * page_size * 3 <= pool < (held.num_pages + 1) * page_size * 3
    pages_per_request = plan.paged_slots / page_size / len(lengths)
    assert held.paged * pages_per_request <= held.num_pages < (held.paged + 1) * pages_per_request


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes_per_token": 0}, "bytes_per_token must be a positive integer, got 0"),
        ({"page_size": -1}, "page_size must be a positive integer, got -1"),
        ({"max_length": True}, "max_length must be a positive integer, got True"),
        ({"lengths": ()}, "at least one length"),
        ({"lengths": (3, 0)}, r"lengths\[1\] must be a positive integer, got 0"),
        ({"lengths": (3, 101)}, "a request of 101 tokens is longer than the maximum of 100"),
    ],
)
def test_plan_refuses_wrong_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"bytes_per_token": 1, "page_size": 1, "max_length": 100, "lengths": (1,)} | change)


def test_a_pool_smaller_than_one_request_is_refused():
    plan = Plan(KiB, page_size=16, max_length=100, lengths=(10,))
    assert plan.concurrency(112 * KiB).contiguous == 1
    with pytest.raises(ValueError, match=r"a pool of 111 KiB .* 100 tokens, which takes 112 KiB"):
        plan.concurrency(111 * KiB)


@given(
    budget=st.integers(10**5, 10**9),
    token=st.integers(1, 500),
    page_size=st.integers(1, 64),
    rows=st.integers(1, 9),
    headroom=st.sampled_from([0, 0.05, 0.5]),
)
def test_pages_in_budget_are_the_most_that_fit(budget, token, page_size, rows, headroom):
    num_pages = pages_in_budget(budget, token, page_size, rows, 1, headroom=headroom)
    usable = budget * (1 - headroom)
    assert pool_bytes(token, num_pages, page_size, rows, 1) <= usable
    assert pool_bytes(token, num_pages + 1, page_size, rows, 1) > usable - 1


@pytest.mark.parametrize("width", [1, 8])
def test_budget_for_one_row_is_the_smallest(width):
    needed = pool_bytes(KiB, width, 16, max_rows=4, max_pages_per_row=width)
    assert pages_in_budget(needed, KiB, 16, 4, width, headroom=0) == width
    with pytest.raises(ValueError, match=rf"one row of {width} pages takes {format_size(needed)}"):
        pages_in_budget(needed - 1, KiB, 16, 4, width, headroom=0)


@pytest.mark.parametrize("headroom", [-0.1, 1])
def test_headroom_is_a_share(headroom):
    with pytest.raises(ValueError, match="headroom must be a share of the budget"):
        pages_in_budget(GiB, KiB, 16, 1, 1, headroom=headroom)


def test_b75_half_of_the_device_fits_with_headroom():
    device = Device(memory=8 * MiB, in_use=2 * MiB)
    budget = memory_budget(0.5, device)
    assert budget == 3 * MiB
    shape = TokenShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32")
    num_pages = pages_in_budget(budget, shape.num_bytes, page_size=16, max_rows=4, max_pages_per_row=8)

    state = KVPages.create(2, num_pages, 2, 16, 32, jnp.float32), PageTable.create(num_pages, 16, 4, 8)
    assert real_bytes(state) == pool_bytes(shape.num_bytes, num_pages, 16, 4, 8)
    assert 0.94 * budget < real_bytes(state) <= 0.95 * budget


@pytest.mark.parametrize("device", [Device(memory=GiB, in_use=GiB // 2), jax.devices("cpu")[0]], ids=str)
def test_b75_ten_times_the_device_is_refused_before_allocation(device):
    before = len(jax.live_arrays())
    check_memory(MiB, device)
    with pytest.raises(ValueError, match=r"TiB are wanted and the device .* has .*take fewer pages"):
        check_memory(10 * 2**40 * 2**10, device)
    assert len(jax.live_arrays()) == before


def test_b75_only_free_memory_counts():
    device = Device(memory=GiB, in_use=GiB // 2)
    check_memory(GiB // 2, device)
    with pytest.raises(ValueError, match=r"wanted and the device .* has 512 MiB"):
        check_memory(GiB // 2 + 1, device)


def test_b75_unknown_memory_is_not_guessed():
    with pytest.raises(ValueError, match="does not report its memory: give the budget in bytes"):
        memory_budget(0.5, Device(memory=None, platform="cpu"))
    check_memory(2**70, Device(memory=None))


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, 10])
def test_b75_fraction_is_of_the_device(fraction):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        memory_budget(fraction, Device(memory=GiB))


@pytest.mark.usefixtures("quick_collection")
def test_b75_five_pools_leave_nothing_behind():
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(kv, table):
        table, grant = page_table.extend(table, jnp.ones(2, jnp.int32))
        page_ids, slots = page_table.locate(table, jnp.arange(2, dtype=jnp.int32), table.lengths - 1)
        new = jnp.ones((2, 1, 4), jnp.float32)
        return kv.copy(grant.copies).write(0, new, new, page_ids, slots), table

    def run() -> int:
        state = KVPages.create(1, 8, 1, 4, 4, jnp.float32), PageTable.create(8, 4, 2, 4)
        for _ in range(3):
            state = step(*state)
        assert int(state[1].num_free) == 6
        del state
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    baseline = run()
    assert [run() for _ in range(5)] == [baseline] * 5


@pytest.mark.parametrize(
    ("config", "dtype", "num_bytes"),
    [
        (LLAMA_3_8B, None, 128 * KiB),
        (LLAMA_3_8B, "float32", 256 * KiB),
        (LLAMA_3_8B, "int8", 66 * KiB),  # 128 + 4 bytes per head, of keys and of values
        (LLAMA_3_8B | {"torch_dtype": None}, None, 128 * KiB),
        (LLAMA_3_8B | {"dtype": "float32"}, None, 256 * KiB),
        (LLAMA_3_8B | {"num_key_value_heads": None}, None, 512 * KiB),
        (LLAMA_3_8B | {"head_dim": 64}, None, 64 * KiB),
        ({"text_config": LLAMA_3_8B, "vision_config": {}}, None, 128 * KiB),
        ({"text_config": LLAMA_3_8B | {"torch_dtype": None}, "dtype": "float32"}, None, 256 * KiB),
        (LLAMA_3_8B | {"torch_dtype": "torch.float32"}, None, 256 * KiB),
    ],
)
def test_token_shape_of_a_config(config, dtype, num_bytes):
    assert TokenShape.from_config(config, dtype).num_bytes == num_bytes


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, ValueError, "num_hidden_layers must be a positive integer, got None"),
        (
            LLAMA_3_8B | {"hidden_size": "wide"},
            ValueError,
            "hidden_size must be a positive integer, got 'wide'",
        ),
        (LLAMA_3_8B | {"num_attention_heads": 0}, ValueError, "num_attention_heads must be a positive"),
        (LLAMA_3_8B | {"num_key_value_heads": -8}, ValueError, "num_kv_heads must be a positive"),
        (LLAMA_3_8B | {"torch_dtype": "int4"}, ValueError, "dtype must be one of .*, got 'int4'"),
        ({"text_config": 5}, ValueError, "text_config must be an object, got 5"),
        (LLAMA_3_8B | {"kv_lora_rank": 512}, NotImplementedError, "multi-head latent attention"),
    ],
)
def test_token_shape_refuses(config, error, message):
    with pytest.raises(error, match=message):
        TokenShape.from_config(config)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("128KiB", 131072),
        ("128 kib", 131072),
        ("1.5GB", 1_500_000_000),
        ("0.1KB", 100),
        (" 32GiB ", 32 * GiB),
        ("2TiB", 2 * 2**40),
        ("3MB", 3_000_000),
        ("1.1KiB", 1126),
    ],
)
def test_parse_size(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "0", "0.1", "-1", "1e3", "12XB", "1,5GB", "4K", "1.GB", "٣KiB", "1 2"]
)
def test_parse_size_refuses(text):
    with pytest.raises(ValueError, match=r"expected a size such as 4096, 128KiB or 1\.5GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (131072, "128 KiB"),
        (1_500_000_000, "1.4 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_format_size(num_bytes, text):
    assert format_size(num_bytes) == text
