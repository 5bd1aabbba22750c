"""The simulator of memory: small cases worked by hand, and what holds at every step of a long trace."""

import importlib
import sys
from pathlib import Path

import chex
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
fragmentation = importlib.import_module("fragmentation")
FirstFit, Pages, Request = fragmentation.FirstFit, fragmentation.Pages, fragmentation.Request
simulate = fragmentation.simulate

SMALL = {"capacity": 2048, "max_length": 256, "steps": 150}


@pytest.fixture(scope="module")
def trace():
    random = np.random.default_rng(0)
    prompts, answers = random.integers(1, 128, (2, 100)).tolist()
    return tuple(
        Request(arrival, prompt, prompt + answer)
        for arrival, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    )


@pytest.fixture(scope="module", params=fragmentation.POLICIES)
def series(request, trace):
    return simulate(trace, request.param, **SMALL)


def test_first_fit_takes_the_first_hole_that_is_large_enough():
    memory = FirstFit(160, 160, "oracle")
    for number, final in enumerate((16, 32, 48, 32)):
        assert memory.place(number, 1, final)
    memory.release(0)
    memory.release(2)
    assert [(hole.start, hole.size) for hole in memory.holes()] == [(0, 16), (48, 48), (128, 32)]
    assert memory.place(4, 1, 32)
    assert memory.regions[4].start == 48
    assert memory.free() == 64
    assert memory.largest_hole() == 32
    assert not memory.place(5, 1, 33)
    assert memory.place(6, 1, 16)
    assert memory.regions[6].start == 0


def test_holes_side_by_side_are_one():
    memory = FirstFit(64, 64, "oracle")
    for number in range(4):
        memory.place(number, 1, 16)
    memory.release(1)
    memory.release(2)
    assert [(hole.start, hole.size) for hole in memory.holes()] == [(16, 32)]


def test_a_full_region_is_copied_to_one_of_twice_its_size():
    memory = FirstFit(64, 32, "double")
    assert memory.place(0, 7, 20)
    assert memory.regions[0].size == 8
    assert memory.append([0]) == []
    assert memory.copied == 0
    assert memory.append([0]) == []
    assert (memory.regions[0].start, memory.regions[0].size, memory.regions[0].tokens) == (8, 16, 9)
    assert memory.copied == 8
    assert memory.place(1, 20, 20)
    assert memory.regions[1].start == 24
    memory.regions[0].tokens = 16
    assert memory.append([0]) == [0], "32 slots are free in three pieces, of 8, 8 and 16"
    assert memory.regions[0].size == 16


def test_pages_go_wherever_a_page_is_free():
    memory = Pages(64, 64, margin=0)
    for number in range(4):
        assert memory.place(number, 16, 16)
    memory.release(0)
    memory.release(2)
    assert memory.largest_hole() == memory.free() == 32
    assert memory.place(4, 17, 32)
    np.testing.assert_array_equal(memory.owners(), [4, 1, 4, 3])
    assert memory.append([4]) == []
    assert memory.append([1, 4]) == [1]


def test_the_margin_is_a_page_for_each_that_runs():
    memory = Pages(64, 64, margin=1)
    assert memory.place(0, 16, 32)
    assert memory.place(1, 16, 32)
    assert not memory.place(2, 16, 16)
    memory.release(0)
    assert memory.place(2, 16, 16)


def test_a_hole_too_small_for_the_head_of_the_queue():
    # Six requests of 32 slots fill 192; after three steps every other one has left.
    trace = (*(Request(0, 31 - 4 * (number % 2), 32) for number in range(6)), Request(0, 33, 64))
    sizes = {"capacity": 192, "max_length": 64, "steps": 3}
    first_fit = simulate(trace, "oracle", **sizes)
    np.testing.assert_array_equal(first_fit.free, [0, 0, 96])
    np.testing.assert_array_equal(first_fit.largest_hole, [0, 0, 32])
    np.testing.assert_array_equal(first_fit.fragmented, [False, False, True])
    np.testing.assert_array_equal(first_fit.running, [6, 6, 3])
    pages = simulate(trace, "pages, no margin", **sizes)
    np.testing.assert_array_equal(pages.free, [0, 0, 48])
    np.testing.assert_array_equal(pages.running, [6, 6, 4])
    np.testing.assert_array_equal(pages.completed, [0, 0, 3])


def test_who_goes_back_is_the_youngest_and_keeps_its_tokens():
    # Two pages each fill the pool of six. At step 2 the oldest needs a third.
    trace = (Request(0, 31, 40), Request(0, 30, 34), Request(0, 29, 32))
    series = simulate(trace, "pages, no margin", capacity=96, max_length=48, steps=11)
    np.testing.assert_array_equal(np.flatnonzero(np.diff(series.preempted)) + 1, [2])
    # The youngest has 30 tokens by then, and stores them again at step 5, when the second has left.
    np.testing.assert_array_equal(series.running, [3, 3, 2, 2, 2, 2, 2, 2, 1, 1, 0])
    assert series.recomputed[-1] == 30
    assert series.used[5] == 36 + 30
    assert series.completed[-1] == 3


def test_every_slot_is_counted_once(series):
    parts = np.stack([series.used, series.reserved, series.internal, series.free])
    assert parts.min() >= 0
    np.testing.assert_array_equal(parts.sum(axis=0), series.capacity)
    held = np.sum(series.owners >= 0, axis=1) * fragmentation.PAGE_SIZE
    np.testing.assert_allclose(held, series.capacity - series.free, atol=fragmentation.PAGE_SIZE * 40)
    assert np.all(series.largest_hole <= series.free)


def test_requests_are_where_they_should_be(series, trace):
    arrived = np.minimum(np.arange(SMALL["steps"]) + 1, len(trace))
    np.testing.assert_array_equal(series.running + series.waiting + series.completed, arrived)
    assert series.completed[-1] > 10


@pytest.mark.parametrize("policy", ["pages", "pages, no margin"])
def test_pages_waste_less_than_a_page_a_request_and_never_wait_for_a_hole(policy, trace):
    series = simulate(trace, policy, **SMALL)
    page_size = fragmentation.PAGE_SIZE
    assert np.all(series.reserved + series.internal <= (page_size - 1) * series.running)
    np.testing.assert_array_equal(series.largest_hole, series.free)
    assert not series.fragmented.any()
    np.testing.assert_array_equal(np.sum(series.owners < 0, axis=1) * page_size, series.free)


def test_a_region_of_the_maximum_length_wastes_the_rest(trace):
    series = simulate(trace, "reserve", **SMALL)
    assert series.running.max() == SMALL["capacity"] // SMALL["max_length"]
    np.testing.assert_array_equal(
        series.used + series.reserved + series.internal, series.running * SMALL["max_length"]
    )
    assert not series.fragmented.any(), "holes of one size always fit"


def test_the_oracle_wastes_nothing_inside_but_waits_for_holes(trace):
    series = simulate(trace, "oracle", **SMALL)
    assert not series.internal.any()
    assert series.fragmented.any()
    assert series.preempted[-1] == 0


def test_the_same_trace_gives_the_same_series():
    first, second = (fragmentation.random_trace(seed=3, steps=40) for _ in range(2))
    assert first == second != fragmentation.random_trace(seed=4, steps=40)
    chex.assert_trees_all_equal(*(vars(simulate(trace, "pages", steps=40)) for trace in (first, second)))


def test_traces_fit_the_maximum():
    trace = fragmentation.random_trace()
    assert all(1 <= request.prompt < request.length <= fragmentation.MAX_LENGTH for request in trace)
    assert 190 < np.mean([request.prompt for request in trace]) < 230


@pytest.mark.parametrize(
    ("policy", "capacity", "named"),
    [
        ("pages", 100, "multiple of 16"),
        ("pages", 48, "two requests of 32"),
        ("best fit", 2048, "one of reserve"),
        ("pages", 64, "at most 32 tokens"),
    ],
)
def test_wrong_arguments(policy, capacity, named):
    with pytest.raises(ValueError, match=named):
        simulate((Request(0, 30, 33),), policy, capacity=capacity, max_length=32)
