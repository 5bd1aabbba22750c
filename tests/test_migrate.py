"""Moving from JAX's kernel: the same data through both, and the guide that says how."""

import re
from collections.abc import Iterator
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.attention import paged_attention
from paged_jax.migrate import convert_pages

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "migrate.md"
MODULE = "jax.experimental.pallas.ops.gpu.paged_attention"
ROWS, Q_HEADS, KV_HEADS, HEAD_DIM, PAGES, PAGE_SIZE, WIDTH = 4, 6, 2, 16, 20, 4, 4

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


@pytest.fixture
def _as_users_have_it() -> Iterator[None]:
    """JAX's kernel needs promotion; it is skipped where a version of JAX no longer has it."""
    pytest.importorskip(MODULE, reason=f"jax {jax.__version__} has no {MODULE}")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def their_arrays(dtype: str) -> tuple[jax.Array, ...]:
    """Queries that are scaled already, pages, tables and lengths, as that kernel takes them."""
    rng = np.random.default_rng(0)
    shape = (KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM)
    q = rng.normal(size=(ROWS, Q_HEADS, HEAD_DIM)) / HEAD_DIM**0.5
    if dtype == "int8":
        pools = [jnp.asarray(rng.integers(-127, 128, shape), dtype) for _ in range(2)]
        dtype = "float32"
    else:
        pools = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2)]
    tables = rng.permutation(PAGES)[: ROWS * WIDTH].reshape(ROWS, WIDTH)
    lengths = jnp.array([1, 0, 9, WIDTH * PAGE_SIZE], jnp.int32)
    return jnp.asarray(q, dtype), *pools, jnp.asarray(tables, jnp.int32), lengths


# Two orders of the same float32 sums; bfloat16 keeps 8 bits of the result, and of the parts that are merged.
@pytest.mark.usefixtures("_as_users_have_it")
@pytest.mark.parametrize(
    ("dtype", "soft_cap", "tolerance"),
    [("float32", None, 2e-6), ("float32", 1.5, 2e-6), ("int8", None, 2e-6), ("bfloat16", None, 2**-7)],
)
def test_both_compute_the_same(dtype, soft_cap, tolerance):
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as jax_paged_attention

    q, k_pages, v_pages, block_tables, lengths = their_arrays(dtype)
    scales, our_scales = (), {}
    if dtype == "int8":
        rng = np.random.default_rng(1)
        scales = tuple(
            jnp.asarray(rng.uniform(0.5, 2, k_pages.shape[:3]) / 127, jnp.float32) for _ in range(2)
        )
        our_scales = dict(zip(("k_scales", "v_scales"), convert_pages(*scales), strict=True))
    expected = jax_paged_attention(
        q,
        k_pages,
        v_pages,
        block_tables,
        lengths,
        *scales,
        pages_per_compute_block=1,
        k_splits=2,
        attn_logits_soft_cap=soft_cap,
        interpret=True,
    )
    got = paged_attention(
        q,
        *convert_pages(k_pages, v_pages),
        block_tables,
        lengths,
        scale=1.0,
        logits_soft_cap=soft_cap,
        **our_scales,
    )
    assert got.dtype == expected.dtype
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    assert not got[1].any()


@pytest.mark.usefixtures("_as_users_have_it")
def test_no_lengths_are_full_tables():
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as jax_paged_attention

    q, k_pages, v_pages, block_tables, _ = their_arrays("float32")
    expected = jax_paged_attention(q, k_pages, v_pages, block_tables, None, k_splits=1, interpret=True)
    lengths = jnp.full(ROWS, WIDTH * PAGE_SIZE, jnp.int32)
    got = paged_attention(q, *convert_pages(k_pages, v_pages), block_tables, lengths, scale=1.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4)], ids=["pages", "scales"])
def test_every_number_goes_to_its_page(shape):
    k = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    k_pages, v_pages = convert_pages(k, -k)
    for head, page in np.ndindex(shape[:2]):
        chex.assert_trees_all_equal(k_pages[page, head], k[head, page])
    chex.assert_trees_all_equal(v_pages, -k_pages)


@pytest.mark.parametrize(("k_shape", "v_shape"), [((2, 3), (2, 3)), ((2, 3, 4, 5), (2, 3, 4))])
def test_other_shapes_are_refused(k_shape, v_shape):
    came = re.escape(f"k_pages.shape={k_shape}, v_pages.shape={v_shape}")
    with pytest.raises(ValueError, match=f"convert_pages: .*kv_heads, num_pages, page_size.*got {came}"):
        convert_pages(jnp.zeros(k_shape), jnp.zeros(v_shape))


@pytest.mark.usefixtures("_as_users_have_it")
def test_the_guide_runs():
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.M | re.S):
        exec(block, names)
    largest = np.abs(names["before"]).max()
    np.testing.assert_allclose(names["after"], names["before"], rtol=0, atol=2e-6 * largest)
    # A value is wrong by half a step, its largest number / 254; what the keys add is less than that.
    step = np.abs(names["v_pages"]).max() / 127
    np.testing.assert_allclose(names["quantised"], names["before"], rtol=0, atol=step)
    assert names["pages"].num_layers == 1
