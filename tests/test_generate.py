"""The generation loop against a model that recomputes everything, and what becomes of its pages."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import NO_STOPS, VOCAB, forward, greedy, random_prompts, tiny_llama

import paged_jax.generate as generate_module
from paged_jax.beam_search import beam_search
from paged_jax.generate import Completion, Generation, completions, finished, generate, run, start
from paged_jax.models import load
from paged_jax.sampling import Sampling, penalize, sample
from paged_jax.testing import check_page_table

GOLDEN = Path(__file__).parent / "golden"

NEW = 12
# Three rows of up to 32 tokens in 4-token pages, prompts of 17 to 32 tokens together: one compilation.
PROMPTS = random_prompts(9, 1, 20)
SMALL = {"page_size": 4, "max_new_tokens": NEW, "stop_token_ids": NO_STOPS}
TIGHT = {**SMALL, "num_pages": 8}
# The second prompt is longer than a step takes (256), so the row before it decodes while it is read.
LONG_PROMPTS = random_prompts(5, 300, 16, 31)
LONG = {"page_size": 16, "max_new_tokens": NEW, "stop_token_ids": NO_STOPS}


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    """At these sizes compiling is all the time there is."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def texts(done: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in done]


def reasons(done: Sequence[Completion]) -> list[str | None]:
    return [completion.finish_reason for completion in done]


def continued(prompts, model=None) -> list[tuple[int, ...]]:
    """What each prompt alone becomes when every step computes everything anew."""
    return [greedy(model or tiny_llama(), prompt, NEW) for prompt in prompts]


def beginnings(prompts, lengths) -> list[tuple[int, ...]]:
    return [text[:length] for text, length in zip(continued(prompts), lengths, strict=True)]


def run_in_steps(state: Generation, num_steps: int = 1, limit: int = 100) -> tuple[list[Completion], int]:
    """Runs to the end, `num_steps` a call, and returns the number of calls too.

    After each no page is lost and no token taken back, and in the end all pages are free.
    """
    before = texts(completions(state))
    for calls in range(limit):
        if finished(state):
            assert int(state.table.num_free) == state.table.num_pages
            return completions(state), calls
        state = run(tiny_llama(), state, num_steps)
        check_page_table(state.table, pins=[])
        after = texts(completions(state))
        for old, new in zip(before, after, strict=True):
            assert new[: len(old)] == old
            assert len(new) <= len(old) + num_steps
        before = after
    raise AssertionError(f"not finished after {limit} calls")


class TestEqualsRecomputingEverything:
    def test_prompts_of_all_lengths(self):
        done = generate(tiny_llama(), LONG_PROMPTS, **LONG)
        assert [completion.prompt_ids for completion in done] == [tuple(prompt) for prompt in LONG_PROMPTS]
        assert texts(done) == continued(LONG_PROMPTS)
        assert reasons(done) == ["length"] * 4

    @pytest.mark.parametrize("num_steps", [1, 3, 8])
    def test_a_few_steps_a_call(self, num_steps):
        done, calls = run_in_steps(start(tiny_llama(), LONG_PROMPTS, **LONG), num_steps)
        assert texts(done) == continued(LONG_PROMPTS)
        assert calls == -(-(2 + NEW - 1) // num_steps)  # 352 prompt tokens take two steps

    def test_a_row_that_ends_while_others_are_read(self):
        done = generate(tiny_llama(), LONG_PROMPTS, **{**LONG, "max_new_tokens": [1, NEW, NEW, NEW]})
        assert texts(done) == beginnings(LONG_PROMPTS, [1, NEW, NEW, NEW])

    def test_a_limit_for_each_row(self):
        done = generate(tiny_llama(), PROMPTS, **{**SMALL, "max_new_tokens": [3, NEW, 1]})
        assert texts(done) == beginnings(PROMPTS, [3, NEW, 1])
        assert reasons(done) == ["length"] * 3

    def test_b60_b64_alone_in_pools_of_all_sizes(self):
        """16 + 17 tokens in 16-token pages: the last one is never stored, so two pages are enough."""
        prompt = LONG_PROMPTS[2]
        expected = greedy(tiny_llama(), prompt, 17)
        for num_pages, limit in ((2, 17), (3, 17), (64, 90)):
            (done,) = generate(tiny_llama(), [prompt], num_pages=num_pages, max_new_tokens=limit)
            assert (done.token_ids[:17], done.finish_reason) == (expected, "length")
            assert len(done.token_ids) == limit

    def test_window_biases_and_tied_embeddings(self):
        options = {"attention_bias": True, "mlp_bias": True, "tie_embeddings": True}
        model, unlimited = tiny_llama(seed=1, sliding_window=4, **options), tiny_llama(seed=1, **options)
        assert texts(generate(model, PROMPTS, **SMALL)) == continued(PROMPTS, model)
        assert continued(PROMPTS, model) != continued(PROMPTS, unlimited)

    def test_b56_x64(self):
        settings = {"temperature": [0, 0.9, 1.4], "top_p": 0.95, "repetition_penalty": [1, 1.2, 1]}
        expected = generate(tiny_llama(), PROMPTS, sampling=Sampling.create(3, **settings), **SMALL)
        with jax.enable_x64(True):
            got = generate(tiny_llama(), PROMPTS, sampling=Sampling.create(3, **settings), **SMALL)
        assert got == expected
        assert got[0].token_ids == continued(PROMPTS)[0]

    def test_b69_outputs_in_the_order_of_the_prompts(self):
        expected = continued(PROMPTS)
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]):
            done = generate(tiny_llama(), [PROMPTS[row] for row in order], **SMALL)
            assert [completion.prompt_ids for completion in done] == [tuple(PROMPTS[row]) for row in order]
            assert texts(done) == [expected[row] for row in order]

    def test_what_the_pages_held_before_is_never_seen(self):
        state = start(tiny_llama(), PROMPTS, **SMALL)
        pages = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), state.pages)
        state = run(tiny_llama(), dataclasses.replace(state, pages=pages))
        assert texts(completions(state)) == continued(PROMPTS)


class TestTooFewPages:
    def test_rows_that_do_not_fit_say_so(self):
        """Eight pages for three rows that would need five each in the end.

        Step 1 takes two pages a row, step 2 wants one more each: there is none for the last row, and it ends.
        Step 10 wants a fifth page each: there is none, the second row ends, the first goes on a step later.
        """
        prompts = random_prompts(8, 8, 8)
        done, calls = run_in_steps(start(tiny_llama(), prompts, **TIGHT))
        assert reasons(done) == ["length", "out_of_pages", "out_of_pages"]
        assert texts(done) == beginnings(prompts, [NEW, 9, 1])
        assert calls == NEW + 1

    def test_the_last_row_makes_room_for_those_before_it(self):
        """20 + 1 tokens take six pages, 11 more would take three: the third row ends without a word.

        In step 6 only the first row wants a page. The second needs none and holds two, but comes after it.
        """
        prompts = random_prompts(20, 1, 11)
        done, calls = run_in_steps(start(tiny_llama(), prompts, **TIGHT))
        assert reasons(done) == ["length", "out_of_pages", "out_of_pages"]
        assert texts(done) == beginnings(prompts, [NEW, 6, 0])
        assert calls == NEW + 1

    def test_a_row_waits_for_the_pages_of_one_that_has_just_ended(self):
        """Step 4 ends the third row. In step 12 the second finds no page, but the first reaches its end."""
        prompts = random_prompts(4, 6, 10)
        done, calls = run_in_steps(start(tiny_llama(), prompts, **TIGHT))
        assert reasons(done) == ["length", "length", "out_of_pages"]
        assert texts(done) == beginnings(prompts, [NEW, NEW, 3])
        assert calls == NEW + 1

    @pytest.mark.parametrize("seed", range(12))
    def test_b63_random_mixes_come_to_an_end(self, seed):
        """How far a row gets depends on those before it, what it writes on none. Each alone would fit."""
        rng = np.random.default_rng(seed)
        lengths = rng.permutation([rng.integers(9, 19), *rng.integers(4, 7, size=2)])
        prompts = random_prompts(*lengths, seed=seed)
        done, _ = run_in_steps(start(tiny_llama(), prompts, **TIGHT), limit=NEW + len(prompts))
        for completion, full in zip(done, continued(prompts), strict=True):
            assert completion.finish_reason == ("length" if completion.token_ids == full else "out_of_pages")
            assert completion.token_ids == full[: len(completion.token_ids)]
        assert reasons(done)[0] == "length"
        assert "out_of_pages" in reasons(done)

    def test_b62_a_row_that_could_never_fit_is_refused_at_the_start(self):
        """Otherwise it would take all pages from rows that fit, and then end as well."""
        arguments = {"page_size": 4, "num_pages": 4, "max_new_tokens": [10, 2]}
        for length, stored in ((15, 24), (20, 29), (8, 17)):
            with pytest.raises(ValueError, match=rf"stores {stored} tokens.*holds 4 pages of 4: 16; give"):
                start(tiny_llama(), random_prompts(length, 3), **arguments)
        start(tiny_llama(), random_prompts(7, 3), **arguments)


class TestStops:
    @pytest.mark.parametrize("num_steps", [1, 4, 100])
    @pytest.mark.parametrize("place", [0, 1, 2, 5, NEW - 1])
    def test_b67_nothing_after_a_stop(self, place, num_steps):
        """The first token, the last that fits, in the middle of a call; two stops, one of another row."""
        full = continued(PROMPTS)
        for row in range(3):
            stops = (full[row][place], full[row - 1][-2])
            state = start(tiny_llama(), PROMPTS, **{**SMALL, "stop_token_ids": stops})
            done, _ = run_in_steps(state, num_steps)
            for completion, text in zip(done, full, strict=True):
                ends = [i + 1 for i, token in enumerate(text) if token in stops]
                assert completion.token_ids == text[: min(ends, default=NEW)]
                assert completion.finish_reason == ("stop" if ends else "length")

    def test_b67_in_the_same_step_as_the_limit(self):
        full = continued(PROMPTS)
        for row, text in enumerate(full):
            limit = text.index(text[5]) + 1
            limits = np.where(np.arange(3) == row, limit, NEW).tolist()
            arguments = {"page_size": 4, "max_new_tokens": limits, "stop_token_ids": (text[5], VOCAB)}
            done = generate(tiny_llama(), PROMPTS, **arguments)[row]
            assert (done.token_ids, done.finish_reason) == (text[:limit], "stop")

    def test_b67_in_the_prompt_it_stops_nothing(self):
        full = continued(PROMPTS)
        stops = sorted(set(PROMPTS[2]) - {token for text in full for token in text})[-2:]
        assert texts(generate(tiny_llama(), PROMPTS, **{**SMALL, "stop_token_ids": stops})) == full


class TestSampledRows:
    def run(self, order=(0, 1, 2), prompts=PROMPTS, arguments=SMALL, **changes) -> list[Completion]:
        """Completions of the prompts in their order, run in another one."""
        settings = {"temperature": [0, 0.7, 1.5], "top_k": [0, 20, 0], "repetition_penalty": [1, 1.3, 1]}
        settings = {**settings, "seed": [1, 2, 3], **changes}
        sampling = Sampling.create(3, **{name: np.take(values, order) for name, values in settings.items()})
        done = generate(tiny_llama(), [prompts[row] for row in order], sampling=sampling, **arguments)
        return [done[order.index(row)] for row in range(3)]

    def test_equals_sampling_from_recomputed_logits(self):
        """The draw belongs to the position of the new token, the penalty to all tokens before it."""
        settings = {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.3, "seed": 5}
        settings |= {"presence_penalty": 0.4, "frequency_penalty": 0.3}
        sampling = Sampling.create(1, **settings)

        @jax.jit
        def choose(logits, tokens, prompt_length, length):
            logits = penalize(logits, sampling, tokens, prompt_length, length)
            return sample(logits, sampling, length)

        expected = []
        for prompt in PROMPTS:
            ids = np.zeros((1, 32), np.int32)
            ids[0, : len(prompt)] = prompt
            for length in range(len(prompt), len(prompt) + NEW):
                logits = forward(tiny_llama(), ids[0, :length].tolist())[-1:].astype(np.float32)
                lengths = (np.array([len(prompt)], np.int32), np.array([length], np.int32))
                ids[0, length] = choose(logits, ids, *lengths)[0]
            expected.append(tuple(ids[0, len(prompt) : len(prompt) + NEW].tolist()))
        assert texts(self.run(**{name: [value] * 3 for name, value in settings.items()})) == expected

    def test_b66_a_row_does_not_depend_on_its_neighbours(self):
        expected = self.run()
        assert expected[0].token_ids == continued(PROMPTS)[0]
        assert all(a != b for a, b in zip(texts(expected)[1:], continued(PROMPTS)[1:], strict=True))
        assert self.run((2, 0, 1)) == self.run((1, 2, 0)) == expected
        assert self.run(temperature=[0, 0, 1.5], seed=[0, 0, 3])[2] == expected[2]
        assert self.run(prompts=[*random_prompts(13, 5, seed=1), PROMPTS[2]])[2] == expected[2]

    def test_b66_nor_on_waiting_for_pages(self):
        """As in `test_a_row_waits_for_the_pages_of_one_that_has_just_ended`."""
        prompts, temperature = random_prompts(4, 6, 10), [1.0, 1.2, 1.5]
        roomy = self.run(prompts=prompts, temperature=temperature)
        tight = self.run(prompts=prompts, temperature=temperature, arguments=TIGHT)
        assert tight[:2] == roomy[:2]
        assert (tight[2].token_ids, tight[2].finish_reason) == (roomy[2].token_ids[:3], "out_of_pages")

    def test_the_seed_decides(self):
        settings = {"temperature": [1.5] * 3, "top_k": [0] * 3, "repetition_penalty": [1] * 3}
        same, again, other = self.run(prompts=[PROMPTS[0]] * 3, seed=[4, 4, 5], **settings)
        assert same == again != other

    def test_repetition_penalty_covers_prompt_and_new_tokens(self):
        """So strong that no token comes twice, and none of the prompt."""
        done = self.run(temperature=[0] * 3, repetition_penalty=[1e6] * 3)
        for prompt, text in zip(PROMPTS, texts(done), strict=True):
            assert len({*prompt, *text}) == len(set(prompt)) + NEW

    def test_b73_settings_can_be_used_again(self):
        sampling = Sampling.create(3, temperature=1.0)
        first = generate(tiny_llama(), PROMPTS, sampling=sampling, **SMALL)
        assert generate(tiny_llama(), PROMPTS, sampling=sampling, **SMALL) == first


class TestMemoryAndCompilation:
    def test_b72_temporaries_are_small_and_the_pool_is_updated_in_place(self):
        state = start(tiny_llama(), PROMPTS, **{**SMALL, "num_pages": 4096})
        pool = sum(leaf.nbytes for leaf in jax.tree.leaves(state.pages))
        arguments = (*nnx.split(tiny_llama()), state, np.int32(1))
        memory = generate_module._run.lower(*arguments).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool
        assert memory.temp_size_in_bytes < 0.05 * pool

    def test_the_old_state_is_given_away(self):
        state = start(tiny_llama(), PROMPTS, **SMALL)
        run(tiny_llama(), state, 1)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))

    def test_no_step_changes_nothing(self):
        state = run(tiny_llama(), start(tiny_llama(), PROMPTS, **SMALL), 0)
        assert completions(state) == [Completion(tuple(prompt), (), None) for prompt in PROMPTS]
        assert not finished(state)

    def test_other_prompts_and_settings_of_one_size_compile_nothing(self):
        def generate_in_steps(lengths, stops, limits, **settings):
            sampling = Sampling.create(3, **settings)
            arguments = {"max_new_tokens": limits, "stop_token_ids": stops, "sampling": sampling}
            run_in_steps(start(tiny_llama(), random_prompts(*lengths), page_size=4, **arguments), 7)

        generate_in_steps((9, 1, 12), (1, 2), NEW)
        compilations = []

        def listen(event, *_, **__):
            if "backend_compile" in event:
                compilations.append(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            settings = {"temperature": [0, 1.0, 0.5], "top_p": 0.9, "repetition_penalty": 1.1}
            generate_in_steps((17, 1, 1), (3, 4), 13, **settings)
            generate_in_steps((7, 12, 8), (5, 6), [5, 20, 1], **settings)
            assert not compilations
            jax.jit(lambda x: x + 1).lower(1.0).compile()
            assert compilations
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": []}, "got 0 prompts"),
        ({"prompts": [[1, 2], []]}, r"prompts\[1\] must be one or more token ids in \[0, 64\), got \[\]"),
        ({"prompts": [[1, 64]]}, r"prompts\[0\] must be .* got \[1, 64\]"),
        ({"prompts": [[-1, 2]]}, r"prompts\[0\] must be .* got \[-1, 2\]"),
        ({"prompts": [[1.0, 2.0]]}, r"prompts\[0\] must be .* got \[1.0, 2.0\]"),
        ({"prompts": ["text"]}, r"prompts\[0\] must be .* got 'text'"),
        ({"prompts": [1, 2]}, r"prompts\[0\] must be .* got 1"),
        ({"prompts": [[[1], [2, 3]]]}, r"prompts\[0\] must be .* got \[\[1\], \[2, 3\]\]"),
        ({"prompts": [[64] * 1000]}, r"prompts\[0\] must be .* got \[64, 64, 64, 64, 64, 64, \.\.\.\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": [3, 0]}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": 2.7}, "max_new_tokens must be at least 1, .* got 2.7"),
        ({"max_new_tokens": True}, "max_new_tokens must be at least 1, .* got True"),
        ({"max_new_tokens": 2**31 - 5}, "a row of 2147483645 tokens is too long; lower max_new_tokens"),
        ({"page_size": 2.0}, "page_size must be a positive integer, got page_size=2.0"),
        ({"stop_token_ids": [15.5]}, r"stop_token_ids must be a sequence of token ids, got \[15.5\]"),
        ({"stop_token_ids": [2**32 + 15]}, "stop_token_ids must be a sequence of token ids, got"),
        ({"max_new_tokens": [3, 3, 3]}, "one number or 2"),
        ({"page_size": 0}, "page_size=0"),
        ({"num_pages": 0}, "holds 0 pages of 16"),
        ({"num_pages": -1}, "holds -1 pages of 16"),
        ({"stop_token_ids": 2}, "stop_token_ids must be a sequence of token ids, got 2"),
        ({"sampling": Sampling.create(3)}, r"sampling has shape \(3,\), and there are 2 prompts"),
        ({"dtype": jnp.int16}, "dtype must be one of .*int8.*, got int16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_llama(), **{"prompts": [[1, 2], [3]], **wrong})


@pytest.mark.slow
def test_smollm2_writes_what_transformers_writes():
    """Prompts of 1 to 120 tokens, 330 together, as rows of one batch."""
    prompts = json.loads((GOLDEN / "smollm2.json").read_text())["prompts"]
    model, tokenizer, _ = load("smollm2-135m", dtype=jnp.float32)
    done = generate(model, [prompt["ids"] for prompt in prompts], max_new_tokens=24)
    assert texts(done) == [tuple(prompt["new_ids"]) for prompt in prompts]
    (story,) = (row for row, prompt in zip(done, prompts, strict=True) if prompt["name"] == "story")
    assert tokenizer.decode(story.prompt_ids) == "Once upon a time, there was a little"
    assert tokenizer.decode(story.token_ids) == (
        " girl named Emma who loved to play in the sun."
        " She would often go to the beach and play with her friends."
    )


class Half(nnx.Module):
    """Not a whole model."""

    vocab_size = 64

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Half(), r"Half has no __call__, create_pages; see paged_jax\.generate\.Decoder"),
        (len, "model must be a Flax NNX module, got <class 'builtin_function_or_method'>"),
    ],
    ids=["half", "function"],
)
def test_a_model_that_is_none(model, message):
    with pytest.raises(TypeError, match=f"generate: {message}"):
        generate(model, [[1, 2]])
    with pytest.raises(TypeError, match=f"beam_search: {message}"):
        beam_search(model, [1, 2], beam_width=2, max_new_tokens=3)
