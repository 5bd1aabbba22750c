"""The course's Exercise 2 out of the real page table: as data, as text, as a picture."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from paged_jax import page_table
from paged_jax.cli.plot import plot
from paged_jax.cli.trace import MAX_PAGES, as_text, trace
from paged_jax.page_table import PageTable

PNG = b"\x89PNG\r\n\x1a\n"


def text_of(traced) -> str:
    console = Console(width=80, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(as_text(traced))
    return capture.get()


def test_exercise_2():
    traced = trace(page_size=4, tokens=9, steps=4)
    assert traced.start.block_tables.tolist() == [[7, 2, 14, page_table.NO_PAGE]]
    # token, logical page, slot, page id, taken, block table, wasted slots, free pages
    assert [tuple(vars(step).values()) for step in traced.steps] == [
        (9, 2, 1, 14, False, (7, 2, 14), 2, 13),
        (10, 2, 2, 14, False, (7, 2, 14), 1, 13),
        (11, 2, 3, 14, False, (7, 2, 14), 0, 13),
        (12, 3, 0, 9, True, (7, 2, 14, 9), 3, 12),
    ]
    assert traced.end.lengths.tolist() == [13]


@pytest.mark.parametrize(("page_size", "tokens", "steps"), [(1, 0, 5), (3, 7, 9), (5, 10, 1), (4, 150, 6)])
def test_steps_follow_from_the_positions(page_size, tokens, steps):
    order = [7, 2, 14, 9, 0, 1, 3, 4, 5, 6, 8, 10, 11, 12, 13, *range(15, 40)]
    traced = trace(page_size, tokens, steps)
    for position, step in enumerate(traced.steps, start=tokens):
        pages = position // page_size + 1
        assert step.token == position
        assert (step.logical_page, step.slot) == divmod(position, page_size)
        assert step.block_table == tuple(order[:pages])
        assert step.page_id == order[pages - 1]
        assert step.taken == (position % page_size == 0)
        assert step.wasted_slots == pages * page_size - position - 1
        assert step.free_pages == traced.end.num_pages - pages


def test_chosen_pages_come_first_and_the_pool_grows_to_hold_them():
    traced = trace(page_size=1, tokens=2, steps=3, free_pages=[20, 1])
    assert traced.steps[-1].block_table == (20, 1, 0, 2, 3)
    assert traced.end.num_pages == 21
    assert trace(page_size=1, tokens=0, steps=0, free_pages=[], num_pages=2).end.num_pages == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"page_size": 0}, "page_size must be from 1 to"),
        ({"page_size": 2**40}, "page_size must be from 1 to"),
        ({"tokens": -1}, "tokens must be from 0 to"),
        ({"steps": -1}, "steps must be from 0 to"),
        ({"num_pages": 0}, "num_pages must be from 1 to"),
        ({"free_pages": [3, -1]}, "a page of free_pages must be from 0 to"),
        ({"free_pages": [3, 3]}, "free_pages must name each page once"),
        ({"page_size": 1, "tokens": MAX_PAGES - 3}, f"a pool of {MAX_PAGES + 1} pages is needed"),
    ],
)
def test_wrong_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        trace(**{"page_size": 4, "tokens": 9, "steps": 4} | arguments)


def test_as_dict_is_json():
    found = json.loads(json.dumps(trace(4, 9, 4).as_dict()))
    assert found["block_table"] == [7, 2, 14]
    assert (found["tokens"], found["wasted_slots"], found["free_pages"]) == (9, 3, 13)
    assert [step["page_id"] for step in found["steps"]] == [14, 14, 14, 9]
    assert [step["taken"] for step in found["steps"]] == [False, False, False, True]


def test_text_reads_like_the_exercise():
    lines = [" ".join(line.split()) for line in text_of(trace(4, 9, 4)).splitlines()]
    assert "2 8 14" in lines
    assert "9 9 // 4 = 2 9 % 4 = 1 14 [7, 2, 14] 2 13" in lines
    assert "12 12 // 4 = 3 12 % 4 = 0 9 new [7, 2, 14, 9] 3 12" in lines


def test_text_of_a_long_row_keeps_to_one_line_a_token():
    text = text_of(trace(page_size=2, tokens=1500, steps=3))
    assert max(map(len, text.splitlines())) <= 80
    assert "1502   1502 // 2 = 751  1502 % 2 = 0  751 new  [..., 750, 751]" in text


def test_text_of_an_empty_row():
    assert "0 // 4 = 0" in text_of(trace(4, tokens=0, steps=1))


def test_plot_shows_pages_slots_and_translation(tmp_path):
    plot(trace(4, 9, 4).end, tmp_path / "pool.svg")
    drawn = (tmp_path / "pool.svg").read_text()
    texts = [part.split(" -->")[0] for part in drawn.split("<!-- ")[1:]]
    assert "13 tokens in 4 of 16 pages" in texts
    assert any(text.startswith("token 12:") and text.endswith("page 9, slot 0") for text in texts)
    in_page_order = [text for text in texts if text in {f"logical {n}" for n in range(4)}]
    assert in_page_order == ["logical 1", "logical 0", "logical 3", "logical 2"]  # pages 2, 7, 9, 14
    for position in range(13):
        assert str(position) in texts


def test_plot_colours_rows_and_marks_shared_and_pinned_pages(tmp_path):
    @jax.jit
    def build(table: PageTable) -> PageTable:
        table, _ = page_table.extend(table, jnp.asarray([8, 0, 6], jnp.int32))
        table = page_table.fork(table, jnp.asarray([-1, 0, -1], jnp.int32))
        table = page_table.pin(table, jnp.asarray([3], jnp.int32))
        return page_table.release(table, jnp.asarray([False, False, True]))

    table = build(PageTable.create(12, 4, 3, 4))
    plot(table, tmp_path / "pool.svg")
    drawn = (tmp_path / "pool.svg").read_text()
    assert "<!-- row 0 -->" in drawn
    assert "<!-- row 1 -->" in drawn
    assert "<!-- row 2 -->" not in drawn
    assert drawn.count(", x2 -->") == 2
    assert drawn.count("<!-- pinned -->") == 1
    assert "#2f6db5" in drawn


@pytest.mark.parametrize(
    "table", [PageTable.create(600, 16, 2, 8), PageTable.create(1, 7, 1, 1)], ids=["600", "1"]
)
def test_plot_takes_any_pool_and_writes_png_by_default(table, tmp_path):
    table, _ = jax.jit(page_table.extend)(table, jnp.full(table.max_rows, 7, jnp.int32))
    plot(table, tmp_path / "pool")
    assert (tmp_path / "pool").read_bytes().startswith(PNG)


def test_plot_names_the_extra_that_brings_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'paged-jax\[plot\]'"):
        plot(trace(4, 1, 0).end, tmp_path / "pool.png")
