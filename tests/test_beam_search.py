"""Beam search against full forwards, against trying everything, and what becomes of its pages."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import quick_compilation as quick_compilation
from flax import nnx
from tiny import NO_STOPS, forward, greedy, random_prompts, tiny_llama

import paged_jax.beam_search as module
from paged_jax import page_table
from paged_jax.beam_search import Beam, beam_search
from paged_jax.generate import generate
from paged_jax.testing import check_page_table

PENALTIES = [1.0, 0.0, -1.5, 2.5]
(PROMPT,) = random_prompts(32)
WIDTH, NEW = 3, 8
# Prompts of 26 to 32 tokens: one compilation.
SMALL = {"beam_width": WIDTH, "max_new_tokens": NEW, "page_size": 4, "stop_token_ids": NO_STOPS}
# Sums of eight log-probabilities down to -20, each wrong by a few roundings of a logit.
ATOL = 2e-5


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    """At these sizes compiling is all the time there is."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def final_state(prompt: list[int], **arguments):
    """What a search ends in."""
    return module._run(*nnx.split(tiny_llama()), *module._start(tiny_llama(), prompt, **arguments))


def log_probabilities(model, ids: list[int]) -> np.ndarray:
    logits = forward(model, ids)[-1]
    return logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()


def searched(model, prompt: list[int], penalty: float, stops, width=WIDTH, max_new=NEW) -> list[tuple]:
    """(ids, sum, score) of the hypotheses. Never ends early: ending early must lose nothing."""
    running, ended = [((), 0.0)], []
    for length in range(1, max_new + 1):
        candidates = [
            ((*ids, token), total + log_probability)
            for ids, total in running
            for token, log_probability in enumerate(log_probabilities(model, prompt + list(ids)))
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        totals = [total for _, total in candidates[: (1 + len(stops)) * width + 1]]
        assert min(-np.diff(totals)) > ATOL, "too close for float32: take other prompts"
        ended += [
            (ids, total, total / length**penalty)
            for ids, total in candidates[:width]
            if ids[-1] in stops or length == max_new
        ]
        ended.sort(key=lambda hypothesis: -hypothesis[2])
        del ended[width:]
        running = [candidate for candidate in candidates if candidate[0][-1] not in stops][:width]
    return ended


def assert_same(beams: list[Beam], expected: list[tuple], stops=()):
    assert [beam.token_ids for beam in beams] == [ids for ids, _, _ in expected]
    sums, scores = ([hypothesis[i] for hypothesis in expected] for i in (1, 2))
    chex.assert_trees_all_close([beam.log_probability for beam in beams], sums, rtol=0, atol=ATOL)
    chex.assert_trees_all_close([beam.score for beam in beams], scores, rtol=1e-5, atol=0)
    reasons = ["stop" if ids[-1] in stops else "length" for ids, _, _ in expected]
    assert [beam.finish_reason for beam in beams] == reasons


class TestEqualsRecomputingEverything:
    @pytest.mark.parametrize("penalty", PENALTIES)
    @pytest.mark.parametrize("length", [26, 28, 31])
    def test_without_stops(self, length, penalty):
        prompt = PROMPT[:length]
        beams = beam_search(tiny_llama(), prompt, length_penalty=penalty, **SMALL)
        assert_same(beams, searched(tiny_llama(), prompt, penalty, ()))

    @pytest.mark.parametrize("stops", [(17, 30), (19, 36), (30, 51)])
    def test_with_stops(self, stops):
        """Tokens that beams write: with one length penalty or another, some end while others go on."""
        reasons = set()
        for penalty in PENALTIES:
            arguments = {**SMALL, "stop_token_ids": stops, "length_penalty": penalty}
            beams = beam_search(tiny_llama(), PROMPT[:30], **arguments)
            assert_same(beams, searched(tiny_llama(), PROMPT[:30], penalty, stops), stops)
            reasons.add(tuple(beam.finish_reason for beam in beams))
        assert len(reasons) > 1

    @pytest.mark.parametrize("penalty", PENALTIES)
    def test_a_beam_that_is_wide_enough_finds_the_best_of_all(self, penalty):
        """Four tokens, of which one stops: 36 sequences of three, 3 of two, 1 of one; fewer than 48."""
        model, prompt, stop = tiny_llama(vocab_size=4), [1, 3, 0, 2, 2], 2
        every = {}
        for ids in itertools.product(range(4), repeat=3):
            ids = ids[: ids.index(stop) + 1] if stop in ids else ids
            total = sum(
                log_probabilities(model, prompt + list(ids[:i]))[token] for i, token in enumerate(ids)
            )
            every[ids] = (ids, total, total / len(ids) ** penalty)
        assert len(every) == 40
        beams = beam_search(
            model, prompt, beam_width=48, max_new_tokens=3, length_penalty=penalty, stop_token_ids=[stop]
        )
        assert_same(beams, sorted(every.values(), key=lambda hypothesis: -hypothesis[2]), (stop,))

    def test_a_prompt_of_several_chunks(self):
        (prompt,) = random_prompts(300, seed=3)
        assert_same(beam_search(tiny_llama(), prompt, **SMALL), searched(tiny_llama(), prompt, 1.0, ()))

    def test_x64(self):
        with jax.enable_x64(True):
            beams = beam_search(tiny_llama(), PROMPT, **SMALL)
        assert_same(beams, searched(tiny_llama(), PROMPT, 1.0, ()))


class TestWidthOne:
    @pytest.mark.parametrize("place", [0, 2, NEW - 1, None])
    def test_is_greedy(self, place):
        full = greedy(tiny_llama(), PROMPT, NEW)
        stops = NO_STOPS if place is None else (full[place], NO_STOPS[0])
        arguments = {"max_new_tokens": NEW, "page_size": 4, "stop_token_ids": stops}
        (beam,) = beam_search(tiny_llama(), PROMPT, beam_width=1, length_penalty=0.0, **arguments)
        (expected,) = generate(tiny_llama(), [PROMPT], **arguments)
        assert (beam.token_ids, beam.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert len(expected.token_ids) == (NEW if place is None else full.index(full[place]) + 1)


class TestEnd:
    def test_early_when_no_beam_can_get_better(self):
        """Sums only fall: without a length penalty nothing beats three good hypotheses of 2, 2 and 3."""
        arguments = {**SMALL, "stop_token_ids": (17, 51)}
        state = final_state(PROMPT[:30], **arguments, length_penalty=0.0)
        assert sorted(state.ended.num_tokens.tolist()) == [2, 2, 3]
        assert state.num_tokens == 3
        assert final_state(PROMPT[:30], **arguments, length_penalty=2.5).num_tokens == NEW

    def test_the_last_token_is_not_computed(self):
        state = final_state(PROMPT, **SMALL)
        assert state.num_tokens == NEW
        assert state.table.lengths.max() == len(PROMPT) + NEW - 1


class TestPages:
    @pytest.mark.parametrize(("length", "max_new", "width"), [(32, 8, 3), (5, 13, 3)])
    def test_the_bound_is_enough_and_nothing_is_lost(self, length, max_new, width):
        arguments = {**SMALL, "beam_width": width, "max_new_tokens": max_new}
        bound = length // 4 + width * (-(-(length + max_new - 1) // 4) - length // 4)
        tight, roomy = (final_state(PROMPT[:length], **arguments, num_pages=n) for n in (bound, None))
        chex.assert_trees_all_equal(tight.ended, roomy.ended)
        assert tight.table.num_pages == bound < roomy.table.num_pages
        for state in (tight, roomy):
            check_page_table(state.table, pins=[])
            assert state.table.num_pages - state.least_free <= bound
            assert page_table.release(state.table, np.ones(2 * width, bool)).num_free == state.table.num_pages
        with pytest.raises(ValueError, match=rf"may need {bound} pages of 4, got num_pages={bound - 1}"):
            beam_search(tiny_llama(), PROMPT[:length], **arguments, num_pages=bound - 1)

    def test_the_pages_of_the_prompt_are_shared(self):
        state = final_state(PROMPT, **SMALL)
        prompt_pages = len(PROMPT) // 4
        assert state.table.num_pages - state.least_free < WIDTH * prompt_pages
        tables = np.asarray(state.table.block_tables)[:WIDTH, :prompt_pages]
        chex.assert_trees_all_equal(tables, np.broadcast_to(tables[0], tables.shape))
        assert np.all(np.asarray(state.table.ref_counts)[tables[0]] == WIDTH)

    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    def test_b16_a_shared_tail_is_copied_before_it_is_written(self, dtype):
        """Six tokens in pages of four, three children; then twice two of the first and one of the second."""
        prompt, rows, first_pages, contents = PROMPT[:6], [PROMPT[:6]], set(), []
        steps = [([0, 0, 0], [11, 12, 13]), ([0, 0, 1], [21, 22, 23]), ([0, 0, 1], [31, 32, 33])]
        states = advanced(prompt, steps, dtype)
        for (parents, new), (state, logits) in zip(steps, states, strict=True):
            rows = [[*rows[parent], token] for parent, token in zip(parents, new, strict=True)]
            check_page_table(state.table, pins=[])
            tables = np.asarray(state.table.block_tables)[:3]
            first_pages |= set(tables[:, 0])
            contents.append(held(state.pages, tables[0, 0]))
            assert len(set(tables[:, (len(rows[0]) - 1) // 4])) == 3
            if dtype == "float32":
                expected = np.stack([forward(tiny_llama(), row)[-1] for row in rows])
                chex.assert_trees_all_close(logits, expected, rtol=0, atol=ATOL)
        assert len(first_pages) == 1
        chex.assert_trees_all_equal(*contents)
        for row, shared in zip(rows, logits, strict=True):
            alone = [([0], [token]) for token in row[len(prompt) :]]
            *_, (_, unshared) = advanced(prompt, alone, dtype)
            chex.assert_trees_all_close(shared, unshared[0], rtol=0, atol=ATOL)
        table = state.table
        for row in (1, 0, 2):
            table = page_table.release(table, np.arange(6) == row)
            check_page_table(table, pins=[])
        assert table.num_free == table.num_pages

    def test_b72_temporaries_are_small_and_the_pool_is_updated_in_place(self):
        arguments = module._start(tiny_llama(), PROMPT, **SMALL, num_pages=4096)
        pool = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[0].pages))
        memory = module._run.lower(*nnx.split(tiny_llama()), *arguments).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool
        assert memory.temp_size_in_bytes < 0.05 * pool


def held(pages, page: int):
    """The keys, values and scales in one page of every layer."""
    return jax.tree.map(lambda pool: np.asarray(pool[page]), pages)


def advanced(prompt: list[int], steps, dtype: str):
    """For each (parents, new tokens), the state after it and the logits of every beam."""
    model, width = tiny_llama(), len(steps[0][0])
    state, _, ids, length = module._start(
        model, prompt, **{**SMALL, "beam_width": width, "num_pages": 16, "dtype": dtype}
    )
    state, _ = _prefill(model, state, jnp.asarray(ids), length)
    for num_tokens, (parents, new) in enumerate(steps, 1):
        tokens = jnp.zeros_like(state.tokens).at[:, num_tokens - 1].set(jnp.asarray(new, jnp.int32))
        state = dataclasses.replace(state, tokens=tokens, num_tokens=jnp.int32(num_tokens))
        state, hidden = _advance(model, state, jnp.asarray(parents, jnp.int32))
        yield state, np.float64(model.logits(hidden))


_prefill, _advance = (nnx.jit(function) for function in (module._prefill, module._advance))


def test_other_prompts_and_limits_of_one_size_compile_nothing():
    beam_search(tiny_llama(), PROMPT, **SMALL)
    compilations = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        arguments = {**SMALL, "stop_token_ids": (3, 9), "max_new_tokens": 5, "length_penalty": 0.3}
        beam_search(tiny_llama(), PROMPT[:29], **arguments)
        assert not compilations
        jax.jit(lambda x: x + 1).lower(1.0).compile()
        assert compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_ids": []}, r"one or more token ids in \[0, 64\), got \[\]"),
        ({"prompt_ids": [1, 64]}, r"got \[1, 64\]"),
        ({"prompt_ids": [-1]}, r"got \[-1\]"),
        ({"prompt_ids": [[1, 2]]}, r"got \[\[1, 2\]\]"),
        ({"prompt_ids": "text"}, "got 'text'"),
        ({"prompt_ids": [1.0]}, r"got \[1.0\]"),
        ({"beam_width": 0}, "beam_width=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0"),
        ({"page_size": 0}, "page_size=0"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"length_penalty": float("inf")}, "length_penalty=inf"),
        ({"length_penalty": -1000.0}, "of a moderate size, got length_penalty=-1000.0"),
        ({"stop_token_ids": [2**32]}, "stop_token_ids must be a sequence of token ids"),
        ({"stop_token_ids": 2}, "stop_token_ids must be a sequence of token ids, got 2"),
        ({"num_pages": 1}, "2 beams of 2 [+] 3 tokens may need 2 pages of 16, got num_pages=1"),
        ({"dtype": jnp.int32}, "dtype must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments(wrong, message):
    arguments = {"prompt_ids": [1, 2], "beam_width": 2, "max_new_tokens": 3, **wrong}
    with pytest.raises(ValueError, match=message):
        beam_search(tiny_llama(), **arguments)
