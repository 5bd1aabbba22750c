"""Reported faults of page accounting, prefix caches and admission, by number."""

import numpy as np
import pytest
from engines import check_at_rest, check_engine, finish, joined, make_engine
from engines import quick_compilation as quick_compilation
from tiny import greedy, random_prompts, tiny_llama

from paged_jax.engine import SamplingParams

NEW = 20


def params(max_tokens: int = NEW, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings)


def continued(prompts, num_new: int = NEW, model=None) -> list[tuple[int, ...]]:
    return [greedy(model or tiny_llama(), prompt, num_new) for prompt in prompts]


def texts(outputs) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b02_no_page_is_lost_at_the_end_of_a_request(prefix_cache):
    """200 requests, one after the other, that end before, on and behind the edge of a page."""
    engine = make_engine(prefix_cache=prefix_cache)
    for number, prompt in enumerate(random_prompts(*[5] * 200, seed=2)):
        engine.generate([prompt], params(1 + number % 8))
        metrics = engine.metrics
        assert metrics.pages_free + metrics.pages_cached == 24
        assert prefix_cache or metrics.pages_free == 24
    check_at_rest(engine)


def test_b06_recycled_pages_are_not_found_by_their_old_tokens():
    engine = make_engine()
    old, new, newer = random_prompts(40, 44, 41, seed=6)
    engine.generate([old], params(8))
    engine.generate([new, newer], params(8))  # takes every page
    before = engine.metrics.cached_tokens
    assert texts(engine.generate([old], params())) == continued([old])
    assert engine.metrics.cached_tokens == before
    assert texts(engine.generate([old], params())) == continued([old])
    assert engine.metrics.cached_tokens == before + 36


def test_b07_two_rows_fill_pages_with_the_same_tokens_in_one_step():
    engine = make_engine()
    (prompt,) = random_prompts(12, seed=7)
    assert texts(engine.generate([prompt, prompt], params(8))) == continued([prompt] * 2, 8)
    assert engine.metrics.cached_tokens == 0
    assert engine.metrics.pages_cached == 2 * ((12 + 7) // 4)
    check_at_rest(engine)
    # 16 more pages: those of the first row have to go, and all but one of the second's.
    other = random_prompts(44, seed=8)[0]
    engine.generate([other], params())
    check_at_rest(engine)
    cached = engine.metrics.cached_tokens
    assert texts(engine.generate([[*prompt, 1]], params(4))) == continued([[*prompt, 1]], 4)
    assert engine.metrics.cached_tokens == cached + 12
    check_at_rest(engine)


@pytest.mark.parametrize("length", [48, 31 + 16], ids=["whole chunks", "a chunk that ends in a page"])
def test_b09_the_tail_of_a_prompt_goes_first(length):
    """12 pages are kept; another request takes the 12 that are free, and one of those."""
    engine = make_engine()
    prompt, other = random_prompts(length, 49, seed=9)
    engine.generate([prompt], params(2))
    kept = engine.metrics.pages_cached
    assert kept == 12
    engine.generate([other], params(1))
    engine.generate([[*prompt, 1, 2, 3, 4]], params(1))
    assert engine.metrics.cached_tokens == 4 * (kept - 1)
    check_at_rest(engine)


def test_b13_other_weights_find_no_pages():
    model, other = tiny_llama(), tiny_llama(seed=8)
    engine = make_engine(model)
    prompts = random_prompts(21, 9, seed=13)
    for current in (model, other, model):
        engine.replace_model(current)
        assert engine.metrics.pages_free == 24
        before = engine.metrics.cached_tokens
        assert texts(engine.generate(prompts, params())) == continued(prompts, model=current)
        assert engine.metrics.cached_tokens == before
        check_at_rest(engine)
    engine.submit(prompts[0], params())
    with pytest.raises(ValueError, match="requests are running with the old weights; let them finish first"):
        engine.replace_model(other)
    finish(engine)
    cached = engine.metrics.pages_cached
    for changes, kind in (
        ({"num_layers": 3}, "pages, parameters"),
        ({"sliding_window": 8}, "sliding window"),
        ({"vocab_size": 32}, "vocabulary, parameters"),
        ({"intermediate_size": 64}, "parameters"),
    ):
        with pytest.raises(ValueError, match=f"have another kind of {kind}; make another engine"):
            engine.replace_model(tiny_llama(**changes))
    with pytest.raises(ValueError, match="rows have up to 64 tokens, and the model was made for 32"):
        engine.replace_model(tiny_llama(max_length=32))
    assert engine.metrics.pages_cached == cached


def test_b13_nobody_finds_the_pages_of_another_salt():
    engine = make_engine()
    prompts = random_prompts(21, 9, seed=13)
    cached = []
    for salt in ("", "a", "b", "a", "", "b"):
        before = engine.metrics.cached_tokens
        outputs = engine.generate(prompts, params(2), salt=salt)
        assert texts(outputs) == continued(prompts, 2)
        cached.append(engine.metrics.cached_tokens - before)
    assert cached == [0, 0, 0, 28, 28, 28]


def test_b13_a_salt_may_be_any_text():
    """What a file name or an environment variable gives where its bytes are no UTF-8."""
    engine = make_engine()
    prompts = random_prompts(21, 9, seed=13)
    for cached in (0, 20):
        (output, _) = engine.generate(prompts, params(2), salt="caf\udce9")
        assert texts([output]) == continued(prompts[:1], 2)
        assert engine.metrics.cached_tokens >= cached


def test_b14_chunks_leave_no_trace_in_the_prefix_cache():
    """Alone 25 tokens are read at once or in chunks of 12; beside a longer prompt also in others."""
    prompt, other = random_prompts(25, 31, seed=14)
    found = []
    for step_tokens, prompts in ((32, [prompt]), (12, [prompt]), (32, [other, prompt])):
        engine = make_engine(step_tokens=step_tokens)
        engine.generate(prompts, params(1))
        engine.generate([[*prompt, 1]], params(1))
        found.append(engine.metrics.cached_tokens)
    assert found == [24, 24, 24]


def test_b58_new_tokens_after_a_hit_stand_at_their_own_positions():
    engine, cold = make_engine(), make_engine(prefix_cache=False)
    prompt, more = random_prompts(8, 5, seed=58)
    engine.generate([prompt], params(1))
    for longer in ([*prompt, *more], [*prompt, *[more[0]] * 5]):
        before = engine.metrics.cached_tokens
        (output,) = engine.generate([longer], params(logprobs=True))
        assert engine.metrics.cached_tokens == before + 8
        (expected,) = cold.generate([longer], params(logprobs=True))
        assert output.token_ids == expected.token_ids == continued([longer])[0]
        np.testing.assert_allclose(
            output.completions[0].logprobs, expected.completions[0].logprobs, rtol=0, atol=2e-5
        )


def test_b62_what_can_never_fit_is_refused_and_holds_up_nobody():
    engine = make_engine()
    (prompt,) = random_prompts(9, seed=62)
    engine.submit(prompt, params(), request_id="good")
    with pytest.raises(ValueError, match="20 prompt and 45 new tokens is longer than a row of 64; ask for"):
        engine.submit([1] * 20, params(45))
    with pytest.raises(ValueError, match=r"one or more token ids in \[0, 64\), got \[\]"):
        engine.submit([])
    assert engine.metrics.submitted == 1
    assert joined(finish(engine)["good", 0]) == continued([prompt])[0]

    small = make_engine(num_pages=4)
    for length, num_new, pages in ((20, 1, 5), (15, 10, 6), (1, 17, 5)):
        message = (
            f"{length} prompt and {num_new} new tokens takes {pages} pages of 4, and the pool has 4; ask"
        )
        with pytest.raises(ValueError, match=message):
            small.submit([1] * length, params(num_new))
    small.submit([1], params(16))  # the last token is never stored


@pytest.mark.parametrize("seed", range(12))
def test_b63_random_mixes_come_to_an_end_in_order(seed):
    """Each takes up to two thirds of the pool. All finish, in at most ten times the visits of each alone."""
    rng = np.random.default_rng(seed)
    prompts = random_prompts(*rng.integers(1, 40, size=6), seed=seed)
    engine = make_engine(prefix_cache=bool(seed % 2))
    alone = 0
    for prompt in prompts:
        before = engine.metrics.visits
        engine.generate([prompt], params(24))
        alone += engine.metrics.visits - before
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, params(24), request_id=str(number))
    deltas = finish(engine, limit=10 * alone)
    assert [joined(deltas[str(i), 0]) for i in range(6)] == continued(prompts, 24)
    if not seed % 2:  # after a hit there is less to compute, and more room
        assert engine.metrics.preemptions >= 1


def test_b63_equal_requests_end_in_the_order_in_which_they_came():
    engine = make_engine(prefix_cache=False)
    for number, prompt in enumerate(random_prompts(*[30] * 7, seed=63)):
        engine.submit(prompt, params(30), request_id=str(number))
    ends = []
    while engine.has_work:
        ends += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert ends == [str(number) for number in range(7)]
    assert engine.metrics.preemptions >= 1


@pytest.mark.parametrize("changes", [{}, {"draft_tokens": 3}], ids=str)
def test_b64_a_token_that_is_never_stored_takes_no_page(changes):
    """16 + 17 tokens, of which 32 are stored: 8 pages, and 9 for one more. Guesses take none in the end."""
    engine = make_engine(**changes)
    (prompt,) = random_prompts(16, seed=64)
    for num_new, pages in ((17, 8), (18, 9)):
        engine.replace_model(tiny_llama())
        assert texts(engine.generate([prompt], params(num_new))) == continued([prompt], num_new)
        assert engine.metrics.pages_cached == (16 + num_new - 1) // 4
        held = []
        engine.submit(prompt, params(num_new))
        while engine.has_work:
            engine.step()
            check_engine(engine)
            held.append(engine.metrics.pages_used)
        assert max(held) <= pages


def test_b64_wrong_guesses_are_not_kept():
    """Every page that is found again was written, token for token."""
    engine = make_engine(draft_tokens=3)
    prompts = [[1, 2, 3] * 5, [4, 5] * 6, *random_prompts(11, 17, seed=64)]
    for prompt in prompts:
        (output,) = engine.generate([prompt], params())
        longer, before = [*prompt, *output.token_ids], engine.metrics.cached_tokens
        assert texts(engine.generate([longer], params(4))) == continued([longer], 4)
        assert engine.metrics.cached_tokens - before == (len(longer) - 1) // 4 * 4
    assert engine.metrics.drafted_tokens > engine.metrics.accepted_tokens > 0
    check_at_rest(engine)
