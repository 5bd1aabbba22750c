"""A recording against the engine itself: the same pages, rows and counts at every visit."""

from collections import Counter

import chex
import pytest
from engines import check_at_rest, finish, make_engine, table_of
from engines import quick_compilation as quick_compilation
from recorded import look, recorded_run, requests
from tiny import random_prompts

from paged_jax.engine import SamplingParams, record
from paged_jax.engine.core import EngineCore
from paged_jax.engine.recording import Copied, Joined, Left
from paged_jax.testing import check_page_table


def events(recording, kind):
    return [event for visit in recording.visits for event in visit.events if isinstance(event, kind)]


def test_every_visit_is_the_engine_as_it_was():
    recording, seen = recorded_run()
    assert len(recording.visits) == len(seen) == recording.visits[-1].metrics.visits > 30
    for visit, expected in zip(recording.visits, seen, strict=True):
        chex.assert_trees_all_equal(visit.table, expected.table)
        check_page_table(visit.table, pins=expected.pinned)
        assert visit.occupants == expected.occupants
        assert set(visit.table.lengths.nonzero()[0]) == set(visit.occupants)
        assert visit.metrics.pages_free == visit.table.num_free


def test_something_of_everything_happens():
    """What the other tests rest on."""
    recording, _ = recorded_run()
    joined = events(recording, Joined)
    assert any(event.num_held and event.sibling is None for event in joined)
    assert any(event.num_held and event.sibling is not None for event in joined)
    assert {event.reason for event in events(recording, Left)} == {"length", "preempted"}
    assert len(events(recording, Copied)) > 3


def test_events_are_what_the_metrics_count():
    recording, _ = recorded_run()
    metrics, joined = recording.visits[-1].metrics, events(recording, Joined)
    reasons = Counter(event.reason for event in events(recording, Left))
    assert sum(event.num_tokens for event in joined) == metrics.prompt_tokens
    assert sum(event.num_held for event in joined) == metrics.cached_tokens
    assert reasons == {"length": metrics.finished, "preempted": metrics.preemptions}
    assert len(joined) == metrics.submitted + metrics.preemptions
    for visit in recording.visits:
        assert visit.metrics.running == len(visit.occupants)


def test_events_lead_from_one_visit_to_the_next():
    """Who is in which row follows from who has joined and left."""
    rows: dict[int, tuple[str, int]] = {}
    for visit in recorded_run().recording.visits:
        for event in visit.events:
            who = (event.request_id, event.sample)
            if isinstance(event, Joined):
                assert event.row not in rows
                rows[event.row] = who
            elif isinstance(event, Left):
                assert rows.pop(event.row) == who
            else:
                assert rows[event.row] == who
        assert rows == {row: (one.request_id, one.sample) for row, one in visit.occupants.items()}


def test_a_copy_takes_the_place_of_the_shared_page():
    recording, _ = recorded_run()
    for visit in recording.visits:
        for event in visit.events:
            if isinstance(event, Copied) and event.row in visit.occupants:
                held = visit.table.block_tables[event.row]
                assert event.destination in held
                assert event.source not in held


@pytest.mark.parametrize(("length", "copies"), [(9, 0), (10, 2), (11, 2)])
def test_samples_copy_the_page_that_their_prompt_has_begun(length, copies):
    """All but the prompt's last token is shared: of 8 tokens no page is partly filled, of 9 one is."""
    engine = make_engine()
    (prompt,) = random_prompts(length, seed=length)
    with record(engine) as recording:
        engine.generate([prompt], SamplingParams(max_tokens=9, n=3, temperature=1.0))
    assert [event.sibling is None for event in events(recording, Joined)] == [True, False, False]
    assert [event.num_held for event in events(recording, Joined)] == [0, length - 1, length - 1]
    found = events(recording, Copied)
    assert len(found) == copies
    if copies:
        assert len({event.source for event in found}) == 1
        assert len({event.destination for event in found} | {found[0].source}) == 3


def test_a_recorded_engine_writes_the_same_and_is_itself_again():
    prompts, params = zip(*requests(), strict=True)
    plain, engine = make_engine(), make_engine()
    with record(engine) as recording:
        outputs = engine.generate(prompts, params)
    assert [output.completions for output in outputs] == [
        output.completions for output in plain.generate(prompts, params)
    ]
    assert type(engine._core) is EngineCore
    assert vars(engine._core).keys() == vars(plain._core).keys()
    visits = list(recording.visits)
    engine.generate([prompts[0]], params[0])
    assert recording.visits == visits
    check_at_rest(engine)


def test_a_recording_begins_in_the_middle():
    """With the rows that run and the counters at zero."""
    engine = make_engine()
    for prompt in random_prompts(9, 20):
        engine.submit(prompt, SamplingParams(max_tokens=30))
    engine.step()
    before = engine.metrics
    with record(engine) as recording:
        engine.step()
        expected = look(engine)
    (visit,) = recording.visits
    assert visit.events == ()
    assert visit.occupants == expected.occupants
    assert len(visit.occupants) == 2
    assert visit.metrics == engine.metrics.since(before)
    finish(engine)


def test_nothing_is_recorded_where_nothing_happens():
    engine = make_engine()
    with record(engine) as recording:
        engine.step()
    assert recording.visits == []


def test_requests_that_are_taken_back():
    engine = make_engine()
    with record(engine) as recording:
        name = engine.submit(random_prompts(9)[0], SamplingParams(max_tokens=30))
        engine.step()
        engine.abort(name)
        engine.step()
    assert recording.visits[-1].events == (Left(0, name, 0, "abort"),)
    assert recording.visits[-1].occupants == {}
    assert recording.visits[-1].metrics.aborted == 1


def test_a_visit_that_fails(monkeypatch):
    """Everybody goes back to the queue, and comes again."""

    def fail(*_, **__):
        raise RuntimeError("no device")

    engine = make_engine()
    with record(engine) as recording:
        name = engine.submit(random_prompts(9)[0], SamplingParams(max_tokens=30))
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine._core._runner, "run", fail)
            with pytest.raises(RuntimeError, match="no device"):
                engine.step()
        assert recording.visits[-1].events == (Left(0, name, 0, "failed"),)
        assert recording.visits[-1].table.num_free == table_of(engine).num_pages
        finish(engine)
    assert [type(event) for event in events(recording, Joined | Left)] == [Joined, Left, Joined, Left]


def test_only_so_many_visits_are_kept():
    engine = make_engine()
    with record(engine, max_visits=2) as recording:
        assert not recording.full
        engine.generate(random_prompts(9), SamplingParams(max_tokens=30))
    assert recording.full
    assert [visit.metrics.visits for visit in recording.visits] == [1, 2]


def test_what_cannot_be_recorded_is_refused():
    engine = make_engine()
    with pytest.raises(ValueError, match="max_visits must be a positive number, got max_visits=0"):
        record(engine, max_visits=0).__enter__()
    with record(engine), pytest.raises(ValueError, match="is being recorded already"):
        record(engine).__enter__()
    assert type(engine._core) is EngineCore
