"""The pictures of the documentation: their data are the page table's and the benchmarks', and they exist."""

import importlib
import itertools
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from engines import quick_compilation as quick_compilation
from matplotlib.colors import to_hex
from PIL import Image

from paged_jax.page_table import PageTable
from paged_jax.testing import check_page_table

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "docs" / "pictures"), str(ROOT / "benchmarks")]
block_table, copy_on_write, draw, memory, pool_life, pool_picture, style, timings = map(
    importlib.import_module,
    ("block_table", "copy_on_write", "draw", "memory", "pool_life", "pool_picture", "style", "timings"),
)

ENVIRONMENT = {"environment": {"device": "a machine", "cores": 2, "jax": "1.2.3"}}


@pytest.fixture(scope="module")
def moments():
    return pool_picture.moments()


def words(path: Path) -> list[str]:
    """What is written in an SVG: matplotlib repeats its letters in comments."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(), re.DOTALL)


def test_a_pools_life_is_that_of_its_page_table(monkeypatch):
    """Every state conserves pages, and the moments show these states."""
    seen = []

    def checked(table, num_tokens, extend=pool_life._extend):
        table, grant = extend(table, num_tokens)
        check_page_table(table)
        seen.append(table)
        return table, grant

    monkeypatch.setattr(pool_life, "_extend", checked)
    requests = [pool_life.Request(1, 0, 5, 6), pool_life.Request(2, 1, 6, 4, samples=2)]
    found = pool_life.live(PageTable.create(12, 4, 3, 4), requests)
    assert len(found) == len(seen)
    for moment, table in zip(found, seen, strict=True):
        np.testing.assert_array_equal(moment.block_tables, table.block_tables)
        np.testing.assert_array_equal(moment.lengths, table.lengths)
        counts = [len(owners) for owners in moment.owners(12)]
        np.testing.assert_array_equal(counts, table.ref_counts)
        assert counts.count(0) == moment.num_free
        held = [tokens for tokens, count in zip(moment.fill(4, 12), counts, strict=True) if count]
        assert all(1 <= tokens <= 4 for tokens in held)
    forks = [moment for moment in found if moment.forked]
    assert [moment.lengths.tolist() for moment in forks] == [[7, 6, 6]]
    assert found[-1].num_free == 12


def test_the_pool_gets_busy_shares_reuses_and_empties(moments):
    num_free = [moment.num_free for moment in moments]
    assert min(num_free) < 0.25 * pool_picture.NUM_PAGES
    assert num_free[-1] == pool_picture.NUM_PAGES
    assert any(moment.waiting for moment in moments)
    owners = [moment.owners(pool_picture.NUM_PAGES) for moment in moments]
    assert any(len(rows) == 2 for of_moment in owners for rows in of_moment)
    assert max(len(rows) for of_moment in owners for rows in of_moment) <= pool_picture.MOST_OWNERS
    first_page = {rows for of_moment in owners for rows in of_moment[:1] if rows}
    assert len(first_page) > 1  # one page, several owners in turn


def test_the_grid_has_the_colours_of_the_owners(moments):
    scenes = pool_picture.scenes(moments)
    scene = scenes[pool_picture._most_shared(scenes)]
    board = pool_picture.Board(
        pool_picture.NUM_PAGES, pool_picture.PAGE_SIZE, pool_picture.ROWS, pool_picture.PAGES_PER_ROW
    )
    board.show(scene)
    fill = scene.moment.fill(pool_picture.PAGE_SIZE, pool_picture.NUM_PAGES)
    for page, owners, tokens in zip(
        board.pages, scene.moment.owners(pool_picture.NUM_PAGES), fill, strict=True
    ):
        drawn = [part for _, part in page._parts if part.get_width() > 0]
        if owners:  # what is free may still fade
            assert [to_hex(part.get_facecolor()) for part in drawn] == [style.COLOURS[row] for row in owners]
            heights = [part.get_height() / pool_picture.SIDE for part in drawn]
            np.testing.assert_allclose(heights, tokens / pool_picture.PAGE_SIZE)


def test_given_back_pages_fade_to_nothing(moments):
    scenes = pool_picture.scenes(moments)
    faded = 0
    for before, after in itertools.pairwise(scenes):
        for old, new, owners in zip(
            before.cells, after.cells, after.moment.owners(pool_picture.NUM_PAGES), strict=True
        ):
            if owners:
                assert (new.owners, new.strength) == (owners, 1.0)
            else:
                assert new.strength < old.strength or new.strength == 0
                faded += old.strength == 1.0
    assert faded > 20


def test_the_animation_loops_in_time(moments, tmp_path):
    scenes = pool_picture.scenes(moments)
    shown = [*scenes[3:7], scenes[-1]]
    pool_picture.animate(tmp_path / "pool.gif", shown)
    with Image.open(tmp_path / "pool.gif") as image:
        assert image.info["loop"] == 0
        durations, corners, middles = [], [], []
        for frame in range(image.n_frames):
            image.seek(frame)
            durations.append(image.info["duration"])
            rgba = image.convert("RGBA")
            corners.append(rgba.getpixel((0, 0))[3])
            middles.append(to_hex(np.array(rgba.getpixel((60, 110))[:3]) / 255))
    assert durations == [pool_picture.MILLISECONDS] * 4 + [pool_picture.PAUSE]
    assert set(corners) == {0}  # transparent
    assert middles == [style.BLUE] * 4 + [style.EMPTY]  # page 0: of the first row, and free


def test_the_pools_picture_is_the_same_bytes_each_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        pool_picture.still(tmp_path / name)
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes()
    assert b"<dc:date>" not in drawn


def test_block_table_shows_what_locate_says(tmp_path):
    block_table.draw(tmp_path / "block_table.svg")
    drawn = words(tmp_path / "block_table.svg")
    assert "Token 9: logical page 9 // 4 = 2, slot 9 % 4 = 1." in drawn
    assert "table[2] = 14: its key and value are in page 14, slot 1." in drawn
    for position in range(10):
        assert str(position) in drawn


def test_copy_on_write_shows_the_copies_of_extend(tmp_path):
    before, forked, written = copy_on_write.stages()
    assert before.table.ref_counts.tolist() == [1, 1, 0]
    assert forked.table.ref_counts.tolist() == [2, 2, 0]
    assert written.table.ref_counts.tolist() == [2, 1, 1]
    assert (before.copies, forked.copies, written.copies) == ([], [], [(1, 2)])
    assert copy_on_write.owners(written.table) == ([[0, 1], [0], [1]], [4, 2, 3])
    copy_on_write.draw(tmp_path / "copy_on_write.svg")
    drawn = words(tmp_path / "copy_on_write.svg")
    assert [drawn.count(held) for held in ("free", "1 holder", "2 holders")] == [2, 4, 3]


def test_waste_is_the_share_of_the_simulated_slots(tmp_path):
    trace = memory.random_trace(0, 60)
    series = memory.simulate(trace, "reserve", capacity=8192, steps=60)
    found = memory.shares(series)
    np.testing.assert_allclose(sum(found.values()), 1.0)
    np.testing.assert_allclose(found["tokens"], series.used / 8192)
    assert found["held, empty"][-1] > 0.5
    memory.draw_waste(tmp_path / "waste.svg", steps=60)
    assert any(text.startswith("held, empty ") for text in words(tmp_path / "waste.svg"))


def test_fragmentation_shows_a_request_that_waits_beside_enough_free_slots(tmp_path):
    moment = memory.find_moment(memory.random_trace(0, 240, memory.MAP_RATE), steps=240)
    step, first_fit = moment.step, moment.first_fit
    assert first_fit.largest_hole[step] < moment.wanted <= first_fit.free[step]
    memory.draw_fragmentation(tmp_path / "fragmentation.svg", moment)
    text = (
        f"{first_fit.free[step]} slots free, at most {first_fit.largest_hole[step]} in one piece: "
        f"a request of {moment.wanted} waits"
    )
    assert text in words(tmp_path / "fragmentation.svg")


def test_a_maps_cells_have_their_owners_colour():
    owners = np.array([7, 7, -1, 3, 9, -1, 7, *range(20, 26)])
    colours = memory.map_colours(owners)
    assert colours[:7] == [
        *(style.COLOURS[0], style.COLOURS[0], style.EMPTY, style.COLOURS[1]),
        *(style.COLOURS[2], style.EMPTY, style.COLOURS[0]),
    ]
    assert all(a != b for a, b in itertools.pairwise(colours[6:]))


def test_throughput_marks_where_reserved_rows_run_out(tmp_path):
    found = ENVIRONMENT | {
        "max_length": 512,
        "results": [
            {"server": server, "rows": rows, "tokens_per_second": 10.0 * rows}
            for server, most in (("engine", 16), ("contiguous", 4))
            for rows in (1, 4, 16)
            if rows <= most
        ],
    }
    assert timings.rates(found, "contiguous") == [(1, 10.0), (4, 40.0)]
    timings.draw_throughput(tmp_path / "throughput.svg", found)
    drawn = words(tmp_path / "throughput.svg")
    assert "the memory is full at 4" in drawn
    assert "a machine, 2 cores, jax 1.2.3" in drawn


def test_attention_time_is_drawn_over_the_tokens(tmp_path, monkeypatch):
    lines, line = [], timings._line
    monkeypatch.setattr(
        timings, "_line", lambda axes, points, colour: (lines.append(points), line(axes, points, colour))
    )
    found = ENVIRONMENT | {
        "results": [
            {"batch": "x", "tokens": tokens, "floor_ms": 1.0, "ms": {name: tokens * ms for name, ms in names}}
            for names in [(("paged", 1.0), ("token-major", 3.0), ("head-major", 2.0))]
            for tokens in (4096, 700, 2048)
        ]
    }
    timings.draw_attention_time(tmp_path / "attention_time.svg", found)
    assert lines == [[(tokens, tokens * ms) for tokens in (700, 2048, 4096)] for ms in (3.0, 2.0, 1.0)]
    assert {"0", "1024", "2048", "4096", "pages"} <= set(words(tmp_path / "attention_time.svg"))


def test_allocator_time_has_a_line_for_each_number_of_rows(tmp_path):
    micros = {"1024": 10.0, "16384": 10.0, "131072": 10.0}
    found = ENVIRONMENT | {
        "results": [
            {"step": step, "rows": rows, "microseconds": micros}
            for step, rows in (("append", 5), ("grow and release", 16), ("argmin per page", 64))
        ]
    }
    timings.draw_allocator_time(tmp_path / "allocator_time.svg", found)
    drawn = words(tmp_path / "allocator_time.svg")
    assert {"16 rows", "64 rows, an", "argmin a page", "131072"} <= set(drawn)
    assert "5 rows" not in drawn


def test_the_naive_allocator_gives_the_lowest_free_pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_setaffinity", lambda *_: None)  # it would pin the other tests too
        patch.delitem(sys.modules, "page_table", raising=False)
        benchmark = importlib.import_module("page_table")
    holders, pages = benchmark.argmin_per_page((jnp.array([1, 0, 2, 0, 0]), jnp.zeros(2, jnp.int32)))
    assert pages.tolist() == [1, 3]
    assert holders.tolist() == [1, 0, 2, 0, 0]


def test_every_picture_is_there_and_used():
    """In docs/images by `draw.py` and nothing else, and named in a page; pool.svg stands in for pool.gif."""
    there = {path.name for path in draw.IMAGES.iterdir()}
    assert there == set(draw.PICTURES)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    unused = [name for name in draw.PICTURES if f"images/{name}" not in text and name != "pool.svg"]
    assert not unused
    assert (draw.IMAGES / "pool.gif").stat().st_size < 500_000
