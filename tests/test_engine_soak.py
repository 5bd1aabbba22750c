"""A thousand random requests in a tight pool, with everything that can happen to them."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from engines import check_at_rest, check_engine, make_engine
from engines import quick_compilation as quick_compilation
from tiny import NO_STOPS, VOCAB, tiny_llama

from paged_jax.engine import Delta, SamplingParams
from paged_jax.generate import generate
from paged_jax.models import Llama
from paged_jax.sampling import Sampling

MOST_NEW = 24  # after prompts of up to 40
PER_ORACLE = 64


@dataclass
class Asked:
    prompt: list[int]
    params: SamplingParams
    salt: str
    aborted: bool = False
    deltas: list[list[Delta]] = field(default_factory=list)

    def tokens(self, index: int) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas[index] for token in delta.token_ids)

    @property
    def ended(self) -> bool:
        return all(deltas and deltas[-1].finish_reason for deltas in self.deltas)


def random_request(rng: random.Random, prefixes: list[list[int]]) -> Asked:
    prompt = rng.choice(prefixes)[: rng.randint(0, 28)]
    prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(not prompt, 12))]
    greedy = rng.random() < 0.5
    params = SamplingParams(
        max_tokens=rng.randint(1, MOST_NEW),
        temperature=0.0 if greedy else rng.choice([0.5, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 12]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        seed=rng.randrange(2**32),
        n=rng.choice([1, 1, 1, 2, 3]),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 0, 3]))),
        stop=tuple(
            tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 2])))
            for _ in range(rng.choice([0, 0, 0, 4]))
        ),
        logprobs=rng.random() < 0.3,
    )
    return Asked(prompt, params, rng.choice(["", "", "tenant"]), deltas=[[] for _ in range(params.n)])


def until_stop(tokens: tuple[int, ...], params: SamplingParams) -> tuple[tuple[int, ...], str]:
    for end in range(1, len(tokens) + 1):
        sequences = (tokens[end - len(stop) : end] for stop in params.stop if len(stop) <= end)
        if tokens[end - 1] in params.stop_token_ids or any(found in params.stop for found in sequences):
            return tokens[:end], "stop"
    return tokens, "length"


def check_by_generate(model: Llama, completions: list[tuple[Asked, int]]) -> None:
    """Against `generate`, which knows neither stops of several tokens nor any of the rest."""
    assert len(completions) == PER_ORACLE
    params = [asked.params for asked, _ in completions]
    names = ("temperature", "top_k", "repetition_penalty", "presence_penalty")
    settings = {name: [getattr(each, name) for each in params] for name in names}
    seeds = [(asked.params.seed + index) % 2**32 for asked, index in completions]
    done = generate(
        model,
        [asked.prompt for asked, _ in completions],
        max_new_tokens=[each.max_tokens for each in params],
        sampling=Sampling.create(PER_ORACLE, seed=np.array(seeds), **settings),
        stop_token_ids=NO_STOPS,
        page_size=4,
    )
    for (asked, index), expected in zip(completions, done, strict=True):
        reason = asked.deltas[index][-1].finish_reason
        assert (asked.tokens(index), reason) == until_stop(expected.token_ids, asked.params)


@pytest.mark.parametrize(
    ("count", "window", "changes"),
    [(500, None, {"draft_tokens": 3}), (250, None, {"prefix_cache": False}), (250, 8, {})],
    ids=["prefix cache and drafts", "without", "window"],
)
def test_a_thousand_requests(count, window, changes):
    rng, model = random.Random(count), tiny_llama(sliding_window=window)
    prefixes = [[rng.randrange(VOCAB) for _ in range(28)] for _ in range(4)]
    requests = {str(number): random_request(rng, prefixes) for number in range(count)}
    waiting, live = list(requests), set()
    engine = make_engine(model, **changes)
    for _ in range(20 * count):
        if not (waiting or engine.has_work):
            break
        while waiting and len(live) < rng.choice([1, 8, 12]):
            request_id = waiting.pop()
            asked = requests[request_id]
            engine.submit(asked.prompt, asked.params, request_id=request_id, salt=asked.salt)
            live.add(request_id)
            if rng.random() < 0.05:
                engine.abort(request_id)
                asked.aborted = True
        if live and rng.random() < 0.1:
            request_id = rng.choice(sorted(live))
            engine.abort(request_id)
            requests[request_id].aborted = True
            check_engine(engine)
        for delta in engine.step():
            deltas = requests[delta.request_id].deltas[delta.index]
            assert not (deltas and deltas[-1].finish_reason), "news of a completion that has ended"
            deltas.append(delta)
        check_engine(engine)
        for request_id in [request_id for request_id in live if requests[request_id].ended]:
            live.remove(request_id)
            if rng.random() < 0.1:
                engine.abort(request_id)  # too late
    check_at_rest(engine)

    metrics = engine.metrics
    assert all(asked.ended for asked in requests.values())
    assert metrics.submitted == sum(asked.params.n for asked in requests.values())
    reasons = [deltas[-1].finish_reason for asked in requests.values() for deltas in asked.deltas]
    assert metrics.aborted == reasons.count("abort")
    assert metrics.new_tokens == sum(
        len(asked.tokens(index)) for asked in requests.values() for index in range(asked.params.n)
    )
    # All of it has happened, and often.
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort")) > 20
    # Rows with a window take so few pages that the pool is never tight for four of them.
    assert metrics.preemptions > 20 or window
    assert metrics.cached_tokens > 1000
    for asked in requests.values():
        for index, deltas in enumerate(asked.deltas):
            assert asked.aborted or deltas[-1].finish_reason != "abort"
            scores = [score for delta in deltas for score in delta.logprobs or ()]
            assert len(scores) == (len(asked.tokens(index)) if asked.params.logprobs else 0)

    engine.replace_model(model)
    assert engine.metrics.pages_free == engine.metrics.pages
    finished = [
        (asked, index)
        for asked in requests.values()
        for index in range(asked.params.n)
        if asked.deltas[index][-1].finish_reason != "abort"
    ]
    check_by_generate(model, rng.sample(finished, PER_ORACLE))
