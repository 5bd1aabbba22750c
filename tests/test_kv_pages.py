"""The pool keeps what was written, touches nothing else, and is never copied."""

import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paged_jax import page_table
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import NO_PAGE, PageTable
from paged_jax.ragged_batch import RaggedBatch

LAYERS, PAGES, HEADS, PAGE_SIZE, HEAD_DIM = 2, 8, 2, 4, 3

gather = jax.jit(KVPages.gather, static_argnums=1)


def pools(dtype=jnp.float32, seed: int = 0) -> KVPages:
    """Pools in which every number is different."""
    rng = np.random.default_rng(seed)
    kv = KVPages.create(LAYERS, PAGES, HEADS, PAGE_SIZE, HEAD_DIM, dtype)
    return jax.tree.map(lambda pool: jnp.asarray(30 * rng.normal(size=pool.shape)).astype(pool.dtype), kv)


def new(tokens: int, dtype=jnp.float32, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, tokens, HEADS, HEAD_DIM))
    return jnp.asarray(k, dtype), jnp.asarray(v, dtype)


def ids(*numbers: int) -> jax.Array:
    return jnp.array(numbers, jnp.int32)


# What is written


def test_gather_gives_back_what_was_written_in_chunks():
    block_table, (k, v), kv = ids(5, 0, 3, NO_PAGE), new(10), pools()
    token, write = 0, jax.jit(KVPages.write, static_argnums=1)
    for chunk in (3, 5, 2):
        at = jnp.arange(token, token + chunk, dtype=jnp.int32)
        kv = write(kv, 1, k[at], v[at], block_table[at // 4], at % 4)
        token += chunk
    for pool, written in ((kv.k_pages[1], k), (kv.v_pages[1], v)):
        for t in range(10):
            chex.assert_trees_all_equal(pool[(5, 0, 3)[t // 4], :, t % 4], written[t])
    zeros = jnp.zeros((6, HEADS, HEAD_DIM))
    expected = (jnp.concatenate([k, zeros]), jnp.concatenate([v, zeros]))
    chex.assert_trees_all_equal(gather(kv, 1, block_table, 10), expected)
    chex.assert_trees_all_equal((kv.k_pages[0], kv.v_pages[0]), (pools().k_pages[0], pools().v_pages[0]))


def test_narrow_integers_in_a_pool_with_more_pages_than_they_count():
    (k, v), kv = new(2), KVPages.create(1, 200, HEADS, 4, HEAD_DIM)
    expected = kv.write(0, k, v, ids(2, NO_PAGE), ids(1, 0))
    chex.assert_trees_all_equal(kv.write(0, k, v, jnp.int8([2, NO_PAGE]), jnp.uint8([1, 0])), expected)


@pytest.mark.parametrize("x64", [False, True])
def test_wide_integers_address_the_same_slots(x64):
    (k, v), kv = new(2), pools()
    expected = kv.copy([[5, 6]]).write(0, k, v, ids(2, 6), ids(1, 0))
    with jax.enable_x64(x64):
        result = kv.copy(np.array([[5, 6]])).write(0, k, v, np.array([2, 6]), np.array([1, 0]))
        chex.assert_trees_all_equal(result, expected)
        rows = result.gather(0, np.array([2, 6]), np.int64(5))
    chex.assert_trees_all_equal(rows, expected.gather(0, ids(2, 6), 5))


def test_gather_is_zero_where_a_page_was_dropped_and_in_an_empty_row():
    kv = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan).at[3].set(1.0), pools())
    k, v = gather(kv, 0, ids(NO_PAGE, 3, 5), 8)
    assert k[:, 0, 0].tolist() == v[:, 1, 2].tolist() == [0] * 4 + [1] * 4 + [0] * 4
    k, v = gather(kv, 0, ids(NO_PAGE, NO_PAGE), 0)
    assert k.shape == (8, HEADS, HEAD_DIM)
    assert not k.any()
    assert not v.any()


def test_b52_all_else_keeps_its_bits():
    (k, v), where = new(1), (ids(2), ids(1))

    def write(kv):
        return kv.write(0, k, v, *where)

    def in_a_scan(kv):
        return lax.scan(lambda kv, _: (write(kv), None), kv, length=3)[0]

    old = jax.tree.map(np.array, pools())
    expected = jax.tree.map(np.array, old)
    expected.k_pages[0][2, :, 1], expected.v_pages[0][2, :, 1] = k[0], v[0]
    for step in (write, jax.jit(write), in_a_scan, jax.jit(in_a_scan)):
        kept = pools()
        chex.assert_trees_all_equal(step(kept), expected)
        chex.assert_trees_all_equal(kept, old)
        chex.assert_trees_all_equal(jax.jit(step, donate_argnums=0)(pools()), expected)


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("computed", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_b53_what_is_written_is_cast_to_the_dtype_of_the_pages(stored, computed):
    k, v = new(2, computed)
    kv = pools(stored).write(1, k, v, ids(7, 4), ids(3, 0))
    for pool, written in ((kv.k_pages[1], k), (kv.v_pages[1], v)):
        assert pool.dtype == stored
        chex.assert_trees_all_equal(pool[ids(7, 4), :, ids(3, 0)], written.astype(stored))


def test_padding_is_not_stored():
    k, v = new(3)
    kv = pools().write(
        0, k.at[1:].set(jnp.nan), v.at[1:].set(jnp.nan), ids(2, NO_PAGE, NO_PAGE), ids(3, 0, 3)
    )
    chex.assert_trees_all_equal(kv, pools().write(0, k[:1], v[:1], ids(2), ids(3)))
    k, v = new(0)
    chex.assert_trees_all_equal(pools().write(0, k, v, ids(), ids()), pools())


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_copy_moves_whole_pages_of_every_layer_with_their_scales(dtype):
    kv = pools(dtype)
    assert len(jax.tree.leaves(kv)) == (2 if dtype == "float32" else 4) * LAYERS
    copied = jax.jit(KVPages.copy)(kv, ids(NO_PAGE, NO_PAGE, 0, 7, 0, 1, 5, 6).reshape(4, 2))
    for old, pool in zip(jax.tree.leaves(kv), jax.tree.leaves(copied), strict=True):
        chex.assert_trees_all_equal(pool, old.at[ids(7, 1, 6)].set(old[ids(0, 0, 5)]))
    chex.assert_trees_all_equal(kv.copy(np.full((3, 2), NO_PAGE)), kv)
    chex.assert_trees_all_equal(kv.copy(np.zeros((0, 2), int)), kv)


def test_eager_copies_compile_once():
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compilations.append(event))
    for _ in range(2):
        compilations.clear()
        pools().copy(np.array([[0, 1]]))
    assert not [event for event in compilations if "backend_compile" in event]


# Wrong arguments


WRITES = {
    "k has a head too few": ("k", {"k": (2, HEADS - 1, HEAD_DIM)}),
    "k has no tokens axis": ("k", {"k": (HEADS, HEAD_DIM)}),
    "v has another width": ("v", {"v": (2, HEADS, HEAD_DIM + 1)}),
    "v has a token too many": ("v", {"v": (3, HEADS, HEAD_DIM)}),
    "slots has a number too few": ("slots", {"slots": (1,)}),
    "page_ids has a number too many": ("k", {"page_ids": (3,)}),
    "page_ids is a column": ("page_ids", {"page_ids": (2, 1)}),
    "page_ids is a number": ("page_ids", {"page_ids": ()}),
}


@pytest.mark.parametrize(("blamed", "shapes"), WRITES.values(), ids=WRITES)
def test_shapes_that_do_not_fit_the_pages_raise(blamed, shapes):
    shapes = {"k": (2, HEADS, HEAD_DIM), "v": (2, HEADS, HEAD_DIM), "page_ids": (2,), "slots": (2,)} | shapes
    numbers = {"page_ids": jnp.int32, "slots": jnp.int32}
    arguments = {name: jnp.zeros(shape, numbers.get(name, jnp.float32)) for name, shape in shapes.items()}
    came = re.escape(str(list(shapes[blamed])))
    with pytest.raises(ValueError, match=f"KVPages.write: {blamed} must have shape .*, got {came}$"):
        pools().write(0, **arguments)


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_does_not_exist_raises(layer):
    with pytest.raises(ValueError, match=f"KVPages.write: layer must be in .0, 2., got layer={layer}"):
        pools().write(layer, *new(1), ids(0), ids(0))


@pytest.mark.parametrize("copies", [np.zeros(2, int), np.zeros((1, 3), int), np.zeros((1, 2))])
def test_copies_that_are_no_pairs_raise(copies):
    with pytest.raises(
        ValueError, match=r"KVPages.copy: copies must be an integer array of shape \[any, 2\]"
    ):
        pools().copy(copies)


@pytest.mark.parametrize("size", ["num_layers", "num_pages", "num_kv_heads", "page_size", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None])
def test_sizes_are_positive_integers(size, value):
    sizes = {"num_layers": 1, "num_pages": 1, "num_kv_heads": 1, "page_size": 1, "head_dim": 1} | {
        size: value
    }
    with pytest.raises(ValueError, match=f"{size} must be a positive integer, got {size}={value!r}"):
        KVPages.create(**sizes)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(bool, "bool"), (jnp.int32, "int32"), (jnp.float8_e5m2, "float8_e5m2"), ("int7", "int7")],
)
def test_a_dtype_that_pages_cannot_have_raises(dtype, name):
    with pytest.raises(ValueError, match=f"dtype must be one of .*, int8, float8_e4m3fn, got {name}$"):
        KVPages.create(1, 1, 1, 1, 1, dtype)


# Memory


State = tuple[PageTable, KVPages, jax.Array]


def write_one_token(table: PageTable, kv: KVPages, x: jax.Array) -> State:
    return table, kv.write(0, x, x, table.block_tables[:, 0], table.lengths), x


def decode_step(table: PageTable, kv: KVPages, x: jax.Array) -> State:
    """One token per row that has room; shared pages are copied, and what was written is read."""
    table, grant = page_table.extend(table, jnp.ones(table.max_rows, jnp.int32))
    kv = kv.copy(grant.copies)
    batch = RaggedBatch.decode(table, grant.granted)
    for layer in range(kv.num_layers):
        kv = kv.write(layer, x, x, batch.page_ids, batch.slots)
        k, v = kv.gather(layer, batch.block_tables[0], batch.lengths[0])
        x = x + jnp.mean(k * v, axis=0, keepdims=True)
    return table, kv, x


def decode_loop(*state) -> State:
    """Sixteen steps; rows that have become long are let go after each."""

    def step(state: State, _) -> tuple[State, None]:
        table, kv, x = decode_step(*state)
        return (page_table.release(table, table.lengths > 100), kv, x), None

    return lax.scan(step, state, length=16)[0]


# Not float8: on CPU XLA converts the whole pool.
@pytest.mark.parametrize(("dtype", "num_pages"), [("float32", 1024), ("int8", 4096)])
@pytest.mark.parametrize("step", [write_one_token, decode_step, decode_loop])
def test_b72_a_donated_pool_of_256_mb_is_updated_in_place(step, dtype, num_pages):
    table, kv = jax.eval_shape(
        lambda: (PageTable.create(num_pages, 16, 8, 32), KVPages.create(4, num_pages, 8, 16, 64, dtype))
    )
    pool_bytes = sum(pool.size * pool.dtype.itemsize for pool in jax.tree.leaves(kv))
    assert pool_bytes >= 256 * 2**20
    x = jax.ShapeDtypeStruct((8, 8, 64), jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        memory = jax.jit(step, donate_argnums=(0, 1)).lower(table, kv, x).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes


@pytest.mark.parametrize("create", [KVPages.create, jax.jit(KVPages.create, static_argnums=range(6))])
@pytest.mark.parametrize(("dtype", "num_buffers"), [(None, 6), ("int8", 12)])
def test_b73_no_buffer_is_used_twice(create, dtype, num_buffers):
    kv = create(3, 4, 1, 4, 2, dtype)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kv)]
    assert len(buffers) == num_buffers == len(set(buffers))
    assert jax.jit(lambda kv: kv, donate_argnums=0)(kv).num_layers == 3


def test_b73_two_branches_of_one_state_do_not_disturb_each_other():
    kv, step = pools(), jax.jit(KVPages.write, static_argnums=1)
    branches = [step(kv, 0, *new(1, seed=seed), ids(2), ids(seed)) for seed in (1, 2)]
    for seed, branch in zip((1, 2), branches, strict=True):
        expected = kv.k_pages[0].at[2, :, seed].set(new(1, seed=seed)[0][0])
        chex.assert_trees_all_equal(branch.k_pages[0], expected)
