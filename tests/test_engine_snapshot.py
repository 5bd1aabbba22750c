"""An engine that is stopped in the middle and goes on elsewhere."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from engines import check_engine, finish, joined, make_engine
from engines import quick_compilation as quick_compilation
from tiny import random_prompts, tiny_llama

from paged_jax.engine import SamplingParams

PROMPTS = random_prompts(9, 30, 2, 17, 9, 5, seed=3)
PARAMS = [
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=20, temperature=0.9, seed=4, logprobs=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=5, n=2),
    SamplingParams(max_tokens=12, stop=((1, 2),), presence_penalty=0.5),
    SamplingParams(max_tokens=15, temperature=1.1),
    SamplingParams(max_tokens=8, repetition_penalty=1.2),
]


def submit_all(engine) -> None:
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.submit(prompt, params, request_id=f"r{number}", salt="s")


def written(engine) -> dict:
    return {key: (joined(deltas), deltas[-1].finish_reason) for key, deltas in finish(engine).items()}


@pytest.fixture(scope="module")
def uninterrupted() -> dict:
    engine = make_engine()
    submit_all(engine)
    return written(engine)


@pytest.mark.parametrize("visits", [0, 1, 3, 6])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_goes_on_as_if_nothing_had_happened(visits, prefix_cache, uninterrupted):
    engine = make_engine(prefix_cache=prefix_cache)
    submit_all(engine)
    before: dict = {}
    for _ in range(visits):
        for delta in engine.step():
            before.setdefault((delta.request_id, delta.index), []).append(delta)
    snapshot = jax.device_get(engine.snapshot())
    running = engine.metrics.running
    assert (running > 0) == (visits > 0)

    later = make_engine(prefix_cache=prefix_cache)
    later.generate(random_prompts(20, 20, seed=9), SamplingParams(max_tokens=8))  # it may have lived before
    later.restore(snapshot)
    check_engine(later)
    assert later.metrics.running == running
    after = finish(later)
    together = {key: joined([*before.get(key, []), *after.get(key, [])]) for key in {*before, *after}}
    assert together == {key: tokens for key, (tokens, _) in uninterrupted.items()}


def test_through_orbax(tmp_path, uninterrupted):
    engine = make_engine()
    submit_all(engine)
    deltas = engine.step()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "engine", engine.snapshot())
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "engine")
    assert written(engine).keys() == uninterrupted.keys()  # the first one goes on as well
    later = make_engine()
    later.restore(found)
    after = finish(later)
    for key, (tokens, reason) in uninterrupted.items():
        own = [delta for delta in deltas if (delta.request_id, delta.index) == key]
        assert joined([*own, *after[key]]) == tokens
        assert after[key][-1].finish_reason == reason


def test_what_nobody_has_read_comes_later():
    """Of those who step, and of two streams: one that has brought its request to the end."""
    engine = make_engine()
    engine.submit(PROMPTS[4], SamplingParams(max_tokens=3, logprobs=True), request_id="submitted")
    read = engine.stream(PROMPTS[0], PARAMS[0])
    unread = engine.stream(PROMPTS[2], SamplingParams(max_tokens=12, temperature=np.float32(0.5)))
    begun = next(unread)
    list(read)
    later = make_engine()
    later.restore(jax.device_get(engine.snapshot()))
    found = finish(later)
    assert joined([begun, *found[begun.request_id, 0]]) == joined([begun, *unread])
    assert len(joined(found["submitted", 0])) == 3
    assert found == {(begun.request_id, 0): found[begun.request_id, 0], **finish(engine)}


def test_later_requests_draw_as_if_nothing_had_happened():
    settings = SamplingParams(max_tokens=20, temperature=1.5)
    engine, later = make_engine(), make_engine()
    engine.generate(PROMPTS[:2], settings)
    later.restore(jax.device_get(engine.snapshot()))
    expected, got = (each.generate(PROMPTS[:1], settings)[0].token_ids for each in (engine, later))
    assert got == expected


def test_of_another_engine_is_refused():
    snapshot = make_engine().snapshot()
    with pytest.raises(ValueError, match="another model or other arguments"):
        make_engine(num_pages=23).restore(snapshot)
    with pytest.raises(ValueError, match="another model or other arguments"):
        make_engine(tiny_llama(num_layers=1)).restore(snapshot)
    with pytest.raises(ValueError, match="not the host's part"):
        make_engine().restore({**snapshot, "host": np.zeros(4, np.uint8)})
    busy = make_engine()
    busy.submit(PROMPTS[0], PARAMS[0])
    with pytest.raises(ValueError, match="without requests"):
        busy.restore(snapshot)
    assert written(busy)
