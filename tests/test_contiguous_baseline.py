"""The server without pages writes what `generate` writes, and counts what it reserves in vain."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import quick_compilation as quick_compilation
from tiny import greedy, random_prompts, tiny_llama

from paged_jax.generate import generate
from paged_jax.sampling import Sampling

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
contiguous = importlib.import_module("contiguous")

PROMPTS = random_prompts(9, 1, 20, 30, 5, 12)
LIMITS = [12, 3, 7, 1, 12, 5]
ROWS, LENGTH = 2, 34


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    """At these sizes compiling is all the time there is."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def server():
    return contiguous.ContiguousServer(tiny_llama(), ROWS, LENGTH, chunk_sizes=(8, 16))


def expected() -> list[tuple[int, ...]]:
    return [greedy(tiny_llama(), prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


def texts(done) -> list[tuple[int, ...]]:
    return [request.token_ids for request in done]


@pytest.mark.parametrize("continuous", [True, False])
def test_writes_what_generate_writes(server, continuous):
    """Six requests through two rows, some longer than a chunk; the second time the caches are not fresh."""
    assert texts(generate(tiny_llama(), PROMPTS, max_new_tokens=LIMITS)) == expected()
    for _ in range(2):
        serving = server.generate(PROMPTS, LIMITS, continuous=continuous)
        assert texts(serving.requests) == expected()


def test_samples_and_stops_as_generate_does(server):
    settings = {"temperature": [0, 0.9, 1.2, 1, 0, 1], "repetition_penalty": 1.2, "seed": list(range(6))}
    stops = (expected()[0][4], 5)
    arguments = {"sampling": Sampling.create(6, **settings), "stop_token_ids": stops}
    done = generate(tiny_llama(), PROMPTS, max_new_tokens=LIMITS, **arguments)
    assert {request.finish_reason for request in done} == {"stop", "length"}
    assert texts(server.generate(PROMPTS, LIMITS, **arguments).requests) == texts(done)


@pytest.mark.parametrize("width", [5, 300])
def test_windows_and_rows_longer_than_attention_reads_at_once(width):
    """A row of 300 tokens ends in the middle of the second read, which the end of the cache cuts short."""
    model, prompts = tiny_llama(seed=1, sliding_window=width, tie_embeddings=True), random_prompts(290, 3)
    done = contiguous.ContiguousServer(model, ROWS, 300, chunk_sizes=(128,)).generate(prompts, [10, 10])
    assert texts(done.requests) == [greedy(model, prompt, 10) for prompt in prompts]


def test_every_request_reserves_the_maximum(server):
    serving = server.generate(PROMPTS, LIMITS)
    stored = [len(prompt) + limit - 1 for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert [request.wasted_slots for request in serving.requests] == [LENGTH - n for n in stored]
    assert serving.wasted_slots == 6 * LENGTH - sum(stored)
    assert serving.peak_concurrent == ROWS
    config = tiny_llama().config
    slot_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert server.cache_bytes == ROWS * LENGTH * slot_bytes


def test_times_are_in_order(server):
    """In a static batch nobody starts before all of the batch have ended."""
    for continuous in (True, False):
        serving = server.generate(PROMPTS, LIMITS, continuous=continuous)
        first, last = np.array([(r.first_token_seconds, r.seconds) for r in serving.requests]).T
        assert np.all((first > 0) & (first <= last))
        assert max(last) <= serving.seconds
        assert serving.tokens_per_second == pytest.approx(sum(LIMITS) / serving.seconds)
        waits = [np.all(first[n : n + ROWS] > max(last[:n])) for n in range(ROWS, len(PROMPTS), ROWS)]
        assert all(waits) != continuous


def test_caches_are_updated_in_place(server):
    old = jax.tree.leaves(server._cache)
    server.generate(PROMPTS[:1], [2])
    assert all(array.is_deleted() for array in old)


@pytest.mark.parametrize(
    ("prompt", "limit"), [([], 1), ([1], 0), ([1] * (LENGTH + 1), 1), ([1] * 10, LENGTH - 8)]
)
def test_a_request_that_does_not_fit(server, prompt, limit):
    with pytest.raises(ValueError, match=rf"max_length={LENGTH}, got {len(prompt)} [+] {limit}"):
        server.generate([prompt], [limit])
    server.generate([[1] * 10], [LENGTH - 9])


@pytest.mark.parametrize(
    "wrong", [{"max_rows": 0}, {"max_length": 0}, {"chunk_sizes": (16, 8)}, {"chunk_sizes": (2,)}]
)
def test_wrong_sizes(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        contiguous.ContiguousServer(
            tiny_llama(), **{"max_rows": 2, "max_length": 8, "dtype": jnp.float32, **wrong}
        )
