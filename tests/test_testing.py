"""The probes accept what is right and catch, each of them, the faults they are there for."""

import dataclasses
import doctest

import jax.numpy as jnp
import numpy as np
import pytest
from cases import attention
from oracle import oracle

import paged_jax.testing
from paged_jax.page_table import NO_PAGE, PageTable
from paged_jax.testing import (
    PagedInputs,
    check_mean_position,
    check_own,
    check_page_table,
    check_poison,
    check_twin,
    paged_inputs,
)

PROBES = (check_mean_position, check_own, check_poison, check_twin)
MIXTURE = paged_inputs([9, 1, 14, 0], [4, 1, 6, 0], q_heads=6, kv_heads=2)
MIXTURE = MIXTURE._replace(q=jnp.pad(MIXTURE.q, ((0, 1), (0, 0), (0, 0)), constant_values=np.nan))
DECODE = paged_inputs([9, 1, 14, 0], q_heads=6, kv_heads=2)


def right(*arrays, **options):
    return oracle(*arrays, **options)[0]


def changed(**changes):
    """Attention that replaces some of its arrays before it works."""

    def attend(*arrays, **options):
        inputs = PagedInputs(*arrays)
        return right(
            *inputs._replace(**{name: change(inputs) for name, change in changes.items()}), **options
        )

    return attend


def heads_tiled(q, *arrays, **options):
    order = np.arange(q.shape[1]).reshape(2, -1).T.ravel()
    return right(q[:, order], *arrays, **options)[:, np.argsort(order)]


def window_of_one_more(*arrays, sliding_window=None):
    return right(*arrays, sliding_window=None if sliding_window is None else sliding_window + 1)


def leaking(*arrays, **options):
    return right(*arrays, **options) + 0 * np.asarray(arrays[2]).sum()


def moved_by(amount):
    def attend(*arrays, **options):
        return right(*arrays, **options) + amount(PagedInputs(*arrays))

    return attend


FAULTS = {
    "the newest token is not seen": (check_mean_position, changed(lengths=lambda i: i.lengths - 1)),
    "window of one more": (check_mean_position, window_of_one_more),
    "pages out of order": (
        check_mean_position,
        changed(block_tables=lambda i: np.roll(i.block_tables, 1, axis=1) % 7),
    ),
    "heads tiled": (check_own, heads_tiled),
    "another row's pages": (
        check_own,
        changed(block_tables=lambda i: i.block_tables[np.array([2, 1, 2, 3])[: len(i.lengths)]]),
    ),
    "page ids": (check_twin, moved_by(lambda i: int(i.block_tables[0, 0]) / 10)),
    "0 * NaN": (check_poison, leaking),
    "capacity": (check_twin, moved_by(lambda i: i.block_tables.shape[1] / 100)),
    "batch": (check_twin, moved_by(lambda i: len(i.q) / 100)),
}


@pytest.mark.parametrize("inputs", [MIXTURE, DECODE], ids=["mixture", "decode"])
@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_accepts_what_is_right(probe, inputs: PagedInputs):
    probe(right, inputs)
    probe(right, inputs, sliding_window=5)


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_accepts_paged_attention(probe):
    probe(attention, MIXTURE, sliding_window=5)


def with_options(inputs: PagedInputs, page_dtype: str | None) -> tuple[PagedInputs, dict]:
    """All that a call may have: scales, in quantised pages or not, with NaN in every slot without a token."""
    live = ~np.isnan(inputs.k_pages[:, :, :, 0])
    scales = np.where(live, np.random.default_rng(1).uniform(0.1, 2.0, live.shape), np.nan).astype(np.float32)
    pages = inputs[1:3]
    if page_dtype is not None:
        pages = [jnp.asarray(np.where(live[..., None], 40 * pool, 127), page_dtype) for pool in pages]
    options = {"k_scales": jnp.asarray(scales), "v_scales": jnp.asarray(1 / scales)}
    options |= {"sinks": jnp.linspace(-1.0, 2.0, inputs.q.shape[1]), "logits_soft_cap": 3.0}
    return inputs._replace(k_pages=pages[0], v_pages=pages[1]), options


@pytest.mark.parametrize(
    ("page_dtype", "return_lse"), [(None, True), ("int8", True), ("float8_e4m3fn", False)]
)
@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_accepts_every_option(probe, page_dtype, return_lse):
    inputs, options = with_options(MIXTURE, page_dtype)
    probe(attention, inputs, sliding_window=5, return_lse=return_lse, **options)


def without(name):
    return lambda *arrays, **options: attention(*arrays, **{**options, name: None})


def scales_by_place(*arrays, k_scales, **options):
    """As if a page's scale depended on where the page lies."""
    return attention(
        *arrays, k_scales=k_scales * jnp.arange(1.0, len(k_scales) + 1)[:, None, None], **options
    )


def dead_scales(*arrays, v_scales, **options):
    return attention(*arrays, v_scales=v_scales, **options) + 0 * v_scales.sum()


def lse_of_the_batch(*arrays, **options):
    output, lse = attention(*arrays, **options)
    return output, lse + len(output) / 100


@pytest.mark.parametrize(
    ("probe", "faulty", "options"),
    [
        (check_mean_position, without("sinks"), {}),
        (check_own, without("sinks"), {}),
        (check_twin, scales_by_place, {}),
        (check_poison, dead_scales, {}),
        (check_twin, lse_of_the_batch, {"return_lse": True}),
    ],
    ids=["sinks, mean", "sinks, own", "scales by page id", "scales of dead slots", "log-sum-exp"],
)
def test_a_probe_catches_faults_of_options(probe, faulty, options):
    inputs, others = with_options(MIXTURE, "int8")
    with pytest.raises(AssertionError, match=r"token \d+|NaN"):
        probe(faulty, inputs, **others, **options)


@pytest.mark.parametrize("inputs", [MIXTURE, DECODE], ids=["mixture", "decode"])
@pytest.mark.parametrize(("probe", "faulty"), FAULTS.values(), ids=FAULTS)
def test_a_probe_catches_its_fault(probe, faulty, inputs: PagedInputs):
    with pytest.raises(AssertionError, match=r"token \d+|NaN"):
        probe(faulty, inputs, sliding_window=5)


def test_the_probes_take_narrow_results():
    inputs = paged_inputs([9, 300], dtype="bfloat16")
    for probe in PROBES:
        probe(attention, inputs)
    with pytest.raises(AssertionError, match="mean position: token 0"):
        check_mean_position(window_of_one_more, inputs, sliding_window=8)


def test_a_result_of_another_shape():
    with pytest.raises(AssertionError, match=r"expected shape \(4, 6, 8\), got \(4, 6\)"):
        check_own(lambda *arrays: right(*arrays)[..., 0], DECODE)


TABLE = PageTable(
    block_tables=jnp.array([[0, 1, 2, -1], [3, -1, -1, -1], [0, 1, 2, -1], [-1, -1, -1, -1]]),
    lengths=jnp.array([9, 4, 9, 0]),
    ref_counts=jnp.array([2, 2, 2, 1, 1, 0, 0, 0]),  # page 4 is pinned
    free_stack=jnp.array([7, 6, 5, 4, 3, 2, 1, 0]),
    num_free=jnp.array(3),
    page_size=4,
)


def altered(table: PageTable, **changes) -> PageTable:
    """Each change is either the first entries of an array, or a dict of some of them."""
    for name, value in changes.items():
        array = np.array(getattr(table, name))
        for at, entry in (value if isinstance(value, dict) else dict(enumerate(value))).items():
            array[at] = entry
        table = dataclasses.replace(table, **{name: jnp.asarray(array)})
    return table


def test_check_page_table_accepts_what_is_right():
    check_page_table(TABLE)
    check_page_table(TABLE, pins=[4])
    check_page_table(PageTable.create(8, 4, max_rows=2, max_pages_per_row=3), pins=[])
    # A window has left the first page of row 0, and all of row 1, whose page is free now.
    dropped = altered(
        TABLE,
        block_tables={(0, 0): NO_PAGE, (1, 0): NO_PAGE},
        ref_counts={0: 1, 3: 0},
        free_stack=[7, 6, 5, 3],
        num_free={(): 4},
    )
    check_page_table(dropped, pins=[4])


@pytest.mark.parametrize(
    ("change", "pins", "message"),
    [
        ({"num_free": {(): 9}}, None, "num_free=9 is not between 0 and num_pages=8"),
        ({"free_stack": [7, 6, 8]}, None, "of 8 pages, these cannot be free"),
        ({"free_stack": [7, 7, 5]}, None, "page 6 has at least 0 holders, counts 0 and is free 0 times"),
        ({"num_free": {(): 2}}, None, "page 5 has at least 0 holders, counts 0 and is free 0 times"),
        (
            {"free_stack": [7, 6, 5, 4], "num_free": {(): 4}},
            None,
            "page 4 has at least 0 holders, counts 1 and is free 1 times",
        ),
        ({"ref_counts": {3: 0}}, None, "page 3 has at least 1 holders, counts 0"),
        ({"ref_counts": {0: 1}}, None, "page 0 has at least 2 holders, counts 1"),
        ({"ref_counts": {3: 2}}, [4], "page 3 has 1 holders, counts 2"),
        ({}, [], "page 4 has 0 holders, counts 1"),
        ({}, [4, 4], "page 4 has 2 holders, counts 1"),
        ({"lengths": {1: 17}}, None, "row 1 has length 17, room for 16"),
        ({"lengths": {0: 8}}, None, "row 0 of length 8 holds pages past its end"),
        ({"lengths": {0: 13}}, None, "row 0 has a hole"),
        ({"block_tables": {(0, 1): NO_PAGE}}, None, "row 0 has a hole"),
        ({"block_tables": {(0, 1): 8}}, None, "of 8 pages, row 0 cannot hold"),
        ({"block_tables": {(0, 1): 0}}, None, "row 0 holds a page twice"),
    ],
)
def test_check_page_table_names_what_is_wrong(change: dict, pins: list[int] | None, message: str):
    with pytest.raises(AssertionError, match=f"^check_page_table: {message}"):
        check_page_table(altered(TABLE, **change), pins)


def test_the_examples_in_the_docstrings():
    results = doctest.testmod(paged_jax.testing)
    assert results.failed == 0
    assert results.attempted > 10
