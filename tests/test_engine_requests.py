"""Requests: how they end, are taken back and named, and what the metrics count of them."""

import dataclasses
import itertools
import re

import pytest
from engines import check_at_rest, check_engine, finish, joined, make_engine
from engines import quick_compilation as quick_compilation
from tiny import greedy, random_prompts, tiny_llama

from paged_jax.engine import Metrics, SamplingParams

NEW = 20
PROMPTS = random_prompts(9, 6, 20, seed=5)
# 33 tokens in pages of 4, read in two visits or more.
LONG = random_prompts(33, seed=6)[0]


def params(max_tokens: int = NEW, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings)


def continued(prompt, num_new: int = NEW) -> tuple[int, ...]:
    return greedy(tiny_llama(), prompt, num_new)


class TestAbort:
    """B65: at any time, of one sample or of three, beside others, and twice."""

    @pytest.mark.parametrize("prefix_cache", [True, False])
    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize("visits", range(10))
    def test_b65_at_any_time(self, visits, n, prefix_cache):
        """Waiting, while its prompt is read, while the samples join, while they write, and after the end."""
        engine = make_engine(prefix_cache=prefix_cache)
        engine.submit(PROMPTS[0], params(), request_id="survivor")
        victim = engine.submit(LONG, params(15, n=n, temperature=1.0, seed=1))
        deltas = [delta for _ in range(visits) for delta in engine.step()]
        running = {job.request_id for job in engine._core.scheduler.running.values()}
        ended = [delta for delta in deltas if delta.request_id == victim and delta.finish_reason]
        engine.abort(victim)
        check_engine(engine)
        assert engine.metrics.running == ("survivor" in running)
        assert engine.metrics.aborted == n - len(ended)
        engine.abort(victim)
        engine.abort("never heard of")
        assert engine.metrics.aborted == n - len(ended)
        rest = finish(engine)
        own = [delta for delta in deltas if delta.request_id == "survivor"]
        assert joined(own + rest.get(("survivor", 0), [])) == continued(PROMPTS[0])
        for index in range(n):
            last = [delta for delta in deltas if (delta.request_id, delta.index) == (victim, index)]
            last += rest.get((victim, index), [])
            assert [delta.finish_reason for delta in last if delta.finish_reason] == [
                "length" if any(delta.index == index for delta in ended) else "abort"
            ]

    def test_b65_all_states_are_met(self):
        """Of `test_b65_at_any_time`: what a request does after so many visits."""
        engine = make_engine()
        engine.submit(PROMPTS[0], params(), request_id="survivor")
        engine.submit(LONG, params(15, n=3))
        seen = []
        for _ in range(9):
            engine.step()
            jobs = [job for job in engine._core.scheduler.running.values() if job.request_id != "survivor"]
            seen.append((len(jobs), min((job.length for job in jobs), default=0)))
        assert 0 < seen[0][1] < len(LONG)
        assert {count for count, _ in seen} == {0, 1, 3}
        finish(engine)

    def test_b65_those_who_share_pages_keep_them(self):
        """The first sample of a request ends by its own stop; the pages it shares stay with the others."""
        engine = make_engine()
        alone = [
            engine.generate([LONG], params(15, temperature=1.0, seed=seed))[0].token_ids for seed in (1, 2, 3)
        ]
        stop = next(token for token in alone[0] if token not in {*alone[1], *alone[2]})
        sampled = params(15, n=3, temperature=1.0, seed=1, stop_token_ids=(stop,))
        engine.submit(LONG, sampled, request_id="group")
        deltas = finish(engine)
        assert joined(deltas["group", 0]) == alone[0][: alone[0].index(stop) + 1]
        assert [joined(deltas["group", index]) for index in (1, 2)] == alone[1:]

    def test_what_is_taken_back_before_it_ran_leaves_nothing(self):
        engine = make_engine()
        ids = [engine.submit(prompt, params(n=2)) for prompt in PROMPTS]
        for request_id in ids:
            engine.abort(request_id)
        assert engine.metrics.aborted == 6
        assert engine.metrics.visits == 0
        assert [delta.finish_reason for delta in engine.step()] == ["abort"] * 6
        assert engine.metrics.pages_free == 24
        check_at_rest(engine)


class TestSeeds:
    SAMPLED = params(temperature=1.2, seed=5, presence_penalty=0.3)

    @pytest.mark.parametrize(
        "company",
        [
            [],
            [params(temperature=1.0)],
            [params(), params(temperature=0.7, seed=9), params(temperature=1.5, top_k=3)],
            [params(temperature=0.7, n=3), params(temperature=1.5, seed=5), params(temperature=1.5, seed=6)],
        ],
        ids=len,
    )
    def test_b66_a_seeded_request_does_not_see_its_neighbours(self, company):
        """Alone, beside unseeded ones and others of its seed, in another row, and after it was preempted."""
        prompts = [LONG, *PROMPTS][: len(company)]
        engine = make_engine(prefix_cache=False)
        (expected,) = engine.generate([PROMPTS[2]], self.SAMPLED)
        assert expected.token_ids != continued(PROMPTS[2])
        *_, output = engine.generate([*prompts, PROMPTS[2]], [*company, self.SAMPLED])
        assert output.token_ids == expected.token_ids
        output, *_ = engine.generate([PROMPTS[2], *prompts], [self.SAMPLED, *company])
        assert output.token_ids == expected.token_ids

    def test_b66_after_preemption(self):
        engine = make_engine(prefix_cache=False)
        (expected,) = engine.generate([PROMPTS[2]], self.SAMPLED)
        engine.submit(LONG, params(31))
        engine.submit(LONG[::-1], params(31, temperature=0.5))
        request_id = engine.submit(PROMPTS[2], self.SAMPLED)
        assert joined(finish(engine)[request_id, 0]) == expected.token_ids
        assert engine.metrics.preemptions >= 1

    def test_unseeded_requests_differ_and_an_engine_repeats_itself(self):
        sampled = params(temperature=1.5)
        first, second = make_engine(seed=3), make_engine(seed=3)
        outputs = [engine.generate([PROMPTS[0]] * 3, sampled) for engine in (first, second)]
        texts = [[output.token_ids for output in each] for each in outputs]
        assert texts[0] == texts[1]
        assert len(set(texts[0])) == 3
        assert make_engine(seed=4).generate([PROMPTS[0]], sampled)[0].token_ids not in texts[0]


class TestStops:
    """B67. `token_ids` end with the token that completed the stop; of what comes after nothing is left."""

    @pytest.mark.parametrize("place", [0, 1, 2, 5, 6, NEW - 1])
    @pytest.mark.parametrize("form", ["token", "sequence of one", "sequence"])
    @pytest.mark.parametrize("changes", [{}, {"draft_tokens": 3}], ids=str)
    def test_b67_at_any_place(self, changes, form, place):
        """The first token, the last that fits, in the middle of a visit; in the same step as the limit."""
        text = continued(PROMPTS[0])
        ending = text[max(0, place - 2) : place + 1]
        if form == "token":
            stops = {"stop_token_ids": (text[place],)}
            length = text.index(text[place]) + 1
        else:
            ending = ending if form == "sequence" else ending[-1:]
            stops = {"stop": (ending, (64, 65))}
            length = next(
                end
                for end in range(1, NEW + 1)
                if text[:end][-len(ending) :] == ending and end >= len(ending)
            )
        for limit in (NEW, length):
            engine = make_engine(**changes)
            (output,) = engine.generate([PROMPTS[0]], params(limit, logprobs=True, **stops))
            (completion,) = output.completions
            assert completion.token_ids == text[:length]
            assert completion.finish_reason == "stop"
            assert len(completion.logprobs) == length
            assert engine.metrics.new_tokens == length
            # The last token need not be stored; after a stop that the device knows nothing of, it may be.
            pages = {(len(PROMPTS[0]) + length - 1 + stored) // 4 for stored in range(1 + (form != "token"))}
            assert engine.metrics.pages_cached in pages
            check_at_rest(engine)

    def test_b67_in_the_prompt_it_stops_nothing(self):
        """Nor do the last token of the prompt and the first new one together."""
        text = continued(PROMPTS[0])
        stop = (PROMPTS[0][-1], text[0])
        assert stop not in itertools.pairwise(text)
        ids = sorted(set(PROMPTS[0]) - set(text))[:2]
        (output,) = make_engine().generate([PROMPTS[0]], params(stop=(stop,), stop_token_ids=ids))
        assert (output.token_ids, output.completions[0].finish_reason) == (text, "length")

    def test_b67_of_several_rows_each_has_its_own(self):
        texts = [continued(prompt) for prompt in PROMPTS]
        stops = [text[5 + row] for row, text in enumerate(texts)]
        outputs = make_engine().generate(PROMPTS, [params(stop_token_ids=(stop,)) for stop in stops])
        for text, stop, output in zip(texts, stops, outputs, strict=True):
            assert output.token_ids == text[: text.index(stop) + 1]

    def test_b67_pages_after_a_stop_are_not_found(self):
        """The device wrote on until the end of its visit, which nobody may notice."""
        engine = make_engine(steps_per_visit=4, prefix_cache=True)
        text = continued(PROMPTS[0], 24)
        stop = text[:7][-3:]
        engine.generate([PROMPTS[0]], params(24, stop=(stop,)))
        (output,) = engine.generate([[*PROMPTS[0], *text]], params(4))
        assert engine.metrics.cached_tokens <= len(PROMPTS[0]) + 7
        assert output.token_ids == greedy(tiny_llama(), [*PROMPTS[0], *text], 4)


class TestNames:
    def test_b68_scores_of_the_prompt_are_not_offered(self):
        with pytest.raises(TypeError, match="prompt_logprobs"):
            SamplingParams(prompt_logprobs=True)

    def test_b69_outputs_in_the_order_of_the_prompts_every_time(self):
        engine = make_engine()
        for order in ([0, 1, 2], [2, 0, 1], [0, 1, 2]):
            prompts = [PROMPTS[i] for i in order]
            outputs = engine.generate(prompts, [params(4 + i) for i in order])
            assert [output.prompt_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
            assert [output.token_ids for output in outputs] == [continued(PROMPTS[i], 4 + i) for i in order]
            assert len({output.request_id for output in outputs}) == 3

    def test_b69_an_id_is_taken_while_its_request_lives(self):
        engine = make_engine()
        engine.submit(PROMPTS[0], params(), request_id="a")
        for _ in range(3):
            with pytest.raises(ValueError, match="request_id='a' is running; use another id, or none"):
                engine.submit(PROMPTS[1], params(), request_id="a")
            assert engine.metrics.submitted == 1
            engine.step()
        finish(engine)
        engine.submit(PROMPTS[1], params(), request_id="a")
        assert joined(finish(engine)["a", 0]) == continued(PROMPTS[1])

    def test_b69_an_id_that_is_free_again_belongs_to_who_takes_it(self):
        """Whoever reads the end of a stream may ask again under its name, before the loop is left."""
        engine = make_engine()
        for delta in engine.stream(PROMPTS[0], params()):
            if delta.finish_reason:
                engine.submit(PROMPTS[1], params(), request_id=delta.request_id)
        assert joined(finish(engine)[delta.request_id, 0]) == continued(PROMPTS[1])

    def test_b69_ids_of_the_engine_avoid_those_of_callers(self):
        engine = make_engine()
        for number in range(1, 5):
            engine.submit(PROMPTS[0], params(3), request_id=f"request-{number}")
        outputs = engine.generate(PROMPTS, params(3))
        assert [output.token_ids for output in outputs] == [continued(prompt, 3) for prompt in PROMPTS]
        finish(engine)


class TestMetrics:
    def test_counts_of_a_small_workload(self):
        """A prompt of 9 tokens three times: read, found but for its last token, and taken back."""
        engine = make_engine()
        engine.generate([PROMPTS[0]], params(5))
        engine.generate([PROMPTS[0]], params(5, stop_token_ids=continued(PROMPTS[0])[:1]))
        request_id = engine.submit(PROMPTS[0], params(5))
        engine.abort(request_id)
        engine.step()
        metrics = engine.metrics
        assert (metrics.submitted, metrics.finished, metrics.aborted) == (3, 2, 1)
        assert (metrics.prompt_tokens, metrics.cached_tokens) == (18, 8)
        assert metrics.new_tokens == 5 + 1
        assert metrics.computed_tokens == 9 + 4 + 1
        assert metrics.visits == 1 + 1 + 1
        assert metrics.steps == 1 + 4 + 1
        assert (metrics.drafted_tokens, metrics.accepted_tokens, metrics.preemptions) == (0, 0, 0)
        assert (metrics.pages, metrics.pages_cached, metrics.pages_free) == (24, 3, 21)
        assert (metrics.running, metrics.waiting, metrics.peak_running, metrics.wasted_slots) == (0, 0, 1, 0)
        assert 0 < metrics.device_seconds < metrics.seconds
        assert metrics.host_seconds == metrics.seconds - metrics.device_seconds
        assert metrics.step_seconds == metrics.device_seconds / 6

    def test_gauges_while_requests_run(self):
        engine = make_engine()
        for prompt in [*PROMPTS, LONG, LONG]:
            engine.submit(prompt, params())
        engine.step()
        metrics = engine.metrics
        assert metrics.running + metrics.waiting == 5
        assert metrics.waiting >= 1
        assert metrics.pages_used == 24 - metrics.pages_free - metrics.pages_cached > 0
        assert f"{metrics.running} running, {metrics.waiting} waiting, 0 done" in metrics.line()
        metrics.finished = 99  # a copy: whoever reads it cannot change the engine
        assert engine.metrics.finished == 0
        finish(engine)

    def test_prometheus(self):
        engine = make_engine()
        engine.generate(PROMPTS, params(3))
        lines = engine.metrics.prometheus().splitlines()
        sample = re.compile(r'([a-z_]+)(\{[a-z_]+="[^"]*"\})? (-?\d+(?:\.\d+)?(?:e-?\d+)?)')
        names, values = [], {}
        for line in lines:
            if line.startswith("# HELP "):
                names.append(line.split()[2])
                assert len(line.split()) > 3
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                assert name == names[-1]
                assert kind == ("counter" if name.endswith("_total") else "gauge")
            else:
                match = sample.fullmatch(line)
                assert match, line
                assert match[1] == names[-1]
                values[line.rpartition(" ")[0]] = float(match[3])
        assert len(names) == len(set(names)) == len(dataclasses.fields(Metrics))
        assert values["paged_jax_new_tokens_total"] == 9
        assert values["paged_jax_pages"] == 24
        assert engine.metrics.prometheus("other").startswith("# HELP other_submitted_total")
