"""A request continues equally in every engine and in any company, and as `generate` continues it."""

import dataclasses
import functools
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import check_at_rest, check_engine, finish, joined, make_engine, table_of
from engines import quick_compilation as quick_compilation
from tiny import NO_STOPS, forward, greedy, random_prompts, tiny_llama

from paged_jax.engine import Engine, RequestOutput, SamplingParams
from paged_jax.generate import generate
from paged_jax.models import load
from paged_jax.sampling import Sampling

GOLDEN = Path(__file__).parent / "golden"

PROMPTS = random_prompts(9, 1, 20, 33, 16, 17, 30, 5)
NEW = 20
SETTINGS = [
    {},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3},
    {},
    {"temperature": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9},
    {"frequency_penalty": 0.5},
]
PARAMS = [
    SamplingParams(max_tokens=NEW, seed=seed, logprobs=True, **settings)
    for seed, settings in enumerate(SETTINGS)
]
# Programs of its own each: steps of another size, or more or fewer steps a visit.
ENGINES = {
    "plain": {},
    "one step a visit": {"steps_per_visit": 1},
    "16 steps a visit": {"steps_per_visit": 16},
    "small steps": {"step_tokens": 12},
    "drafts": {"draft_tokens": 3},
    # Where steps for 16 and 32 rows are programs of their own.
    "many rows": {"max_rows": 32, "step_tokens": (16, 48)},
}


@functools.cache
def generated(window: int | None = None) -> list[tuple[int, ...]]:
    """The same by `generate`, which has no scheduler, no prefix cache and no drafts."""
    names = {name for settings in SETTINGS for name in settings}
    columns = {name: [getattr(params, name) for params in PARAMS] for name in [*names, "seed"]}
    sampling = Sampling.create(len(PROMPTS), **columns)
    model = tiny_llama(sliding_window=window)
    options = {"max_new_tokens": NEW, "sampling": sampling, "stop_token_ids": NO_STOPS, "page_size": 4}
    return [done.token_ids for done in generate(model, PROMPTS, **options)]


@functools.cache
def recomputed_logprobs(window: int | None = None) -> list[np.ndarray]:
    """Of the tokens of `generated`, in float64."""
    scores = []
    for prompt, tokens in zip(PROMPTS, generated(window), strict=True):
        logits = forward(tiny_llama(sliding_window=window), [*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits[np.arange(NEW), tokens]
        scores.append(chosen - np.logaddexp.reduce(logits, axis=1))
    return scores


def check_outputs(outputs: list[RequestOutput], order=range(8), window: int | None = None):
    """Those of the prompts in this order, equal to what `generate` and the recomputation say."""
    assert [output.prompt_ids for output in outputs] == [tuple(PROMPTS[i]) for i in order]
    assert [output.token_ids for output in outputs] == [generated(window)[i] for i in order]
    assert all(output.completions[0].finish_reason == "length" for output in outputs)
    got = [np.array(output.completions[0].logprobs) for output in outputs]
    chex.assert_trees_all_close(got, [recomputed_logprobs(window)[i] for i in order], rtol=0, atol=2e-5)


def test_generate_and_recomputing_agree():
    """What the other tests rest on."""
    greedy_rows = [i for i, settings in enumerate(SETTINGS) if not settings]
    for i in greedy_rows:
        assert generated()[i] == greedy(tiny_llama(), PROMPTS[i], NEW)
    sampled = [i for i, settings in enumerate(SETTINGS) if settings]
    assert all(generated()[i] != greedy(tiny_llama(), PROMPTS[i], NEW) for i in sampled)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("changes", ENGINES.values(), ids=ENGINES)
def test_twins(changes, prefix_cache):
    """Batched in a pool that is too tight for the batch; again in another order; and each alone."""
    engine = make_engine(prefix_cache=prefix_cache, **changes)
    check_outputs(engine.generate(PROMPTS, PARAMS))
    check_at_rest(engine)
    before = engine.metrics
    assert before.preemptions >= 1
    assert before.peak_running >= 3
    assert (before.accepted_tokens > 0) == ("draft_tokens" in changes)
    order = [7, 3, 0, 6, 2, 4, 1, 5]
    check_outputs(engine.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order]), order)
    preempted = engine.metrics.preemptions
    for i in range(8):
        check_outputs(engine.generate([PROMPTS[i]], PARAMS[i]), [i])
    assert engine.metrics.preemptions == preempted
    assert (engine.metrics.cached_tokens > 0) == prefix_cache
    check_at_rest(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [9, 10, 12])
def test_b16_samples_share_the_pages_of_their_prompt(length, prefix_cache):
    """The last token of the prompt is the first of a page, in the middle of one, the last of one."""
    (prompt,) = random_prompts(length, seed=length)
    params = {"max_tokens": NEW, "temperature": 1.0, "top_k": 40, "presence_penalty": 0.2, "logprobs": True}
    single = make_engine(prefix_cache=False)
    expected = [
        single.generate([prompt], SamplingParams(seed=seed, **params))[0].completions[0] for seed in (5, 6, 7)
    ]
    assert len({completion.token_ids for completion in expected}) == 3

    engine = make_engine(prefix_cache=prefix_cache)
    request_id = engine.submit(prompt, SamplingParams(seed=5, n=3, **params))
    deltas = engine.step()  # the first sample reads the prompt
    deltas += engine.step()  # and the others join it
    table, shared = table_of(engine), (length - 1) // 4
    pages = np.asarray(table.block_tables)[:3]
    assert (pages[:, :shared] == pages[0, :shared]).all()
    assert len(set(pages[:, shared])) == 3
    assert (np.asarray(table.ref_counts)[pages[0, :shared]] == 3 + prefix_cache).all()
    assert engine.metrics.cached_tokens == 2 * (length - 1)
    assert engine.metrics.computed_tokens == length + 3 * 4  # four steps, the last prompt token in the first

    rest = finish(engine)
    for index, completion in enumerate(expected):
        own = [delta for delta in deltas if delta.index == index] + rest[request_id, index]
        assert joined(own) == completion.token_ids
        logprobs = [score for delta in own for score in delta.logprobs]
        chex.assert_trees_all_close(logprobs, list(completion.logprobs), rtol=0, atol=2e-5)
        assert own[-1].finish_reason == "length"


def test_b16_samples_of_many_requests_in_a_tight_pool():
    """More samples than rows, of which some have to give back their pages; each equals the single request."""
    prompts = random_prompts(30, 33, 17, seed=3)
    settings = {"max_tokens": NEW, "temperature": 0.8}
    single = make_engine(prefix_cache=False)
    for engine in (make_engine(prefix_cache=False), make_engine()):
        outputs = engine.generate(prompts, [SamplingParams(n=3, seed=10 * i, **settings) for i in range(3)])
        for i, output in enumerate(outputs):
            for sample, completion in enumerate(output.completions):
                params = SamplingParams(seed=10 * i + sample, **settings)
                assert completion == single.generate([prompts[i]], params)[0].completions[0]
        assert engine.metrics.preemptions >= 1
        check_at_rest(engine)


WINDOW = 8


@pytest.mark.parametrize("changes", [{}, {"prefix_cache": False}, {"draft_tokens": 3}], ids=str)
def test_twins_with_a_sliding_window(changes):
    engine = make_engine(tiny_llama(sliding_window=WINDOW), **changes)
    check_outputs(engine.generate(PROMPTS, PARAMS), window=WINDOW)
    check_at_rest(engine)
    for i in range(8):
        check_outputs(engine.generate([PROMPTS[i]], PARAMS[i]), [i], window=WINDOW)
    assert generated(WINDOW) != generated()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b50_a_row_with_a_window_holds_a_bounded_number_of_pages(prefix_cache):
    """Eight positions lie on three pages at most, however long the row and its prompt are."""
    engine = make_engine(tiny_llama(sliding_window=WINDOW), prefix_cache=prefix_cache)
    for length in (4, 37):
        (prompt,) = random_prompts(length, seed=1)
        engine.submit(prompt, SamplingParams(max_tokens=64 - length), request_id=str(length))
        tokens, held = [], []
        while engine.has_work:
            tokens += [token for delta in engine.step() for token in delta.token_ids]
            held.append(int((np.asarray(table_of(engine).block_tables) >= 0).sum()))
        assert 2 <= max(held) <= 3
        assert tuple(tokens) == greedy(tiny_llama(sliding_window=WINDOW), prompt, 64 - length)
        check_at_rest(engine)
    assert (engine.metrics.pages_cached > 0) == prefix_cache


def test_b58_a_hit_longer_than_the_window():
    """All pages of the row before are found; the row that takes them over keeps those in its window."""
    model = tiny_llama(sliding_window=WINDOW)
    engine = make_engine(model)
    (prompt,) = random_prompts(4, seed=1)
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=30))
    longer = [*prompt, *output.token_ids]
    assert engine.metrics.cached_tokens == 0
    (output,) = engine.generate([longer], SamplingParams(max_tokens=NEW))
    assert output.token_ids == greedy(model, longer, NEW)
    assert engine.metrics.cached_tokens == 32
    check_at_rest(engine)


# Sizes of their own: everything has to be compiled by `warmup`.
OTHER_SIZES = {"max_rows": 32, "num_pages": 64, "step_tokens": 48, "draft_tokens": 2}


@pytest.fixture(scope="module")
def events():
    """Names of what jax traces, lowers and compiles, eagerly as well."""
    names = []

    def listen(name, seconds, **_):
        if name.startswith("/jax/core/compile"):
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def warm(events):
    engine = make_engine(**OTHER_SIZES)
    events.clear()
    engine.warmup(progress=False)
    assert len([name for name in events if "backend_compile" in name]) >= 7
    # One size of step, 16 and 32 rows that decode with and without drafts, two for rows.
    assert engine.metrics.compiles == 7
    return engine


def test_nothing_compiles_after_the_warmup(warm, events):
    events.clear()
    before = warm.metrics
    params = SamplingParams(max_tokens=30, logprobs=True, stop_token_ids=(3,), stop=((5, 6),))
    sampled = dataclasses.replace(params, temperature=0.9, n=3, seed=1, presence_penalty=0.1)
    prompts = random_prompts(*range(1, 34, 2), seed=2)
    warm.generate(prompts + prompts, [params, sampled] * 17)
    warm.submit(prompts[-1], params, request_id="taken back")
    warm.step()
    warm.abort("taken back")
    for _ in warm.stream(prompts[3], sampled):
        pass
    finish(warm)
    metrics = warm.metrics
    for name in ("preemptions", "cached_tokens", "accepted_tokens", "aborted", "visits"):
        assert getattr(metrics, name) > getattr(before, name), name
    assert metrics.compiles == before.compiles
    assert events == []


def test_warming_up_disturbs_nobody(warm):
    prompts = random_prompts(8, 30, seed=2)
    for prompt in prompts:
        warm.submit(prompt, SamplingParams(max_tokens=NEW), request_id=str(len(prompt)))
    deltas = warm.step()
    warm.warmup(progress=False)
    rest = finish(warm)
    for prompt in prompts:
        own = [delta for delta in deltas if delta.request_id == str(len(prompt))]
        assert own
        assert joined(own + rest[str(len(prompt)), 0]) == greedy(tiny_llama(), prompt, NEW)


def test_eight_times_the_requests_of_reserved_rows(warm):
    """The pool has room for 4 rows of 64 tokens, or 64 pages.

    A request of 8 tokens stores 7 and takes two pages: 32 fill the pool.
    """
    slots = warm.metrics.pages * 4
    warm.replace_model(tiny_llama())  # forgets the cached pages
    for prompt in random_prompts(*[6] * 50, seed=4):
        warm.submit(prompt, SamplingParams(max_tokens=2, seed=0))
    preemptions, running = warm.metrics.preemptions, []
    while warm.has_work:
        warm.step()
        check_engine(warm)  # the wasted slots too
        running.append(warm.metrics.running)
    assert warm.metrics.preemptions == preemptions
    assert max(running) == 32 == 8 * (slots // 64)


def test_the_device_decodes_by_itself():
    """With 16 steps a visit, one visit for 16 tokens of every row, beside the one that reads the prompt."""
    engine = make_engine(steps_per_visit=16)
    engine.generate(random_prompts(4, 4, 4, 4), SamplingParams(max_tokens=17))
    assert engine.metrics.visits == 1 + 1
    engine.generate(random_prompts(4, seed=1), SamplingParams(max_tokens=60))
    assert engine.metrics.visits == 2 + 1 + 4
    assert engine.metrics.preemptions == 0


@pytest.mark.slow
def test_smollm2_writes_what_transformers_writes():
    """Real weights and real text: batched in a tight pool, guessing ahead, and again with the pages found."""
    prompts = json.loads((GOLDEN / "smollm2.json").read_text())["prompts"]
    model, tokenizer, _ = load("smollm2-135m", dtype=jnp.float32)
    sizes = {"max_rows": 4, "max_length": 160, "page_size": 16, "num_pages": 12, "step_tokens": (64,)}
    engine = Engine(model, tokenizer, **sizes, draft_tokens=3)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for _ in range(2):
        outputs = engine.generate([prompt["ids"] for prompt in prompts], params)
        for output, prompt in zip(outputs, prompts, strict=True):
            assert output.token_ids == tuple(prompt["new_ids"])
            assert output.text == tokenizer.decode(output.token_ids)
        check_at_rest(engine)
    assert engine.metrics.preemptions >= 1
    assert engine.metrics.accepted_tokens >= 1
    assert engine.metrics.cached_tokens >= 16
