"""A toy language model on the module, run in every way that a decode loop is written."""

from contextlib import nullcontext
from functools import partial
from itertools import combinations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from rows import (
    assert_close,
    decode,
    extend,
    far,
    full_forward,
    nnx_call,
    quick_jit,
    randomized,
    run_rows,
    weights_of,
)

from paged_jax.kv_pages import KVPages
from paged_jax.nnx import PagedAttention
from paged_jax.page_table import PageTable
from paged_jax.rotary import RotaryEmbedding

VOCAB, FEATURES, HEADS, HEAD_DIM, PAGE_SIZE, STEPS = 17, 8, 2, 4, 4, 12
WINDOWS = (4, None, 4)
PROMPTS = [np.array([3, 14, 1], np.int32), np.array([5, 9, 2, 6, 5], np.int32)]


class ToyLM(nnx.Module):
    def __init__(self, implementation: str | None, rngs: nnx.Rngs):
        def layer(number: int, window: int | None) -> PagedAttention:
            return PagedAttention(
                HEADS,
                FEATURES,
                num_kv_heads=1,
                layer=number,
                sliding_window=window,
                rotary=RotaryEmbedding(HEAD_DIM),
                use_bias=True,
                implementation=implementation,
                rngs=rngs,
            )

        self.embed = nnx.Embed(VOCAB, FEATURES, rngs=rngs)
        self.layers = nnx.List([layer(number, window) for number, window in enumerate(WINDOWS)])
        self.head = nnx.Linear(FEATURES, VOCAB, rngs=rngs)

    def __call__(self, tokens, pages, batch):
        x = self.embed(tokens)
        for layer in self.layers:
            y, pages = layer(x, pages, batch)
            x = x + y
        return self.head(x), pages


def make(implementation: str | None = None) -> ToyLM:
    return randomized(lambda: ToyLM(implementation, nnx.Rngs(0)), seed=4)


def recompute(tokens: np.ndarray, windows: tuple[int | None, ...] = WINDOWS) -> np.ndarray:
    """The logits of one row from nothing but its tokens."""
    weights = weights_of(make())
    x = weights["embed"]["embedding"][tokens]
    for layer, window in enumerate(windows):
        x = x + full_forward(weights["layers"][layer], x, theta=10_000.0, window=window)
    return x @ weights["head"]["kernel"] + weights["head"]["bias"]


@pytest.fixture(scope="module")
def prefilled():
    """The state after the prompts: each row's next token, page table, pages."""
    state = PageTable.create(16, PAGE_SIZE, 2, 5), KVPages.create(3, 16, 1, PAGE_SIZE, HEAD_DIM, jnp.float32)
    logits, table, pages = run_rows(nnx_call(make()), PROMPTS, [[3, 5]], *state, size=8)
    assert_close(logits, [recompute(prompt) for prompt in PROMPTS])
    return jnp.array([y[-1].argmax() for y in logits], jnp.int32), table, pages


def step(model: ToyLM, state):
    tokens, table, pages = state
    table, grant = extend(table, jnp.ones_like(tokens))
    logits, pages = model(tokens, pages, decode(table, grant.granted))
    return (jnp.argmax(logits, axis=-1).astype(jnp.int32), table, pages), (tokens, logits)


def loop(one_step, state):
    outputs = []
    for _ in range(STEPS):
        state, output = one_step(state)
        outputs.append(output)
    return state, jax.tree.map(lambda *steps: jnp.stack(steps), *outputs)


def plain(state):
    # Outside jit every call compiles its loops; those of this implementation are small.
    return loop(partial(step, make("reference")), state)


def jit_on_split_state(state):
    graphdef, params = nnx.split(make())

    @partial(quick_jit, donate_argnums=1)
    @chex.assert_max_traces(n=1)
    def run(params, state):
        return step(nnx.merge(graphdef, params), state)

    return loop(partial(run, params), jax.tree.map(jnp.copy, state))


def nnx_jit(state):
    return loop(partial(nnx.jit(step), make()), state)


def scan_over_steps(state):
    graphdef, params = nnx.split(make())

    @quick_jit
    def run(params, state):
        model = nnx.merge(graphdef, params)
        return lax.scan(lambda state, _: step(model, state), state, length=STEPS)

    return run(params, state)


@pytest.mark.parametrize("run", [plain, jit_on_split_state, nnx_jit, scan_over_steps])
def test_b57_b59_greedy_steps_equal_the_full_recompute(prefilled, run):
    # A plain call transforms nothing of ours, and the check would have it compile every step anew.
    with nullcontext() if run is plain else jax.checking_leaks():
        (_, table, pages), (tokens, logits) = run(prefilled)
    tokens, logits = np.asarray(tokens), np.asarray(logits)
    for row, prompt in enumerate(PROMPTS):
        text = np.concatenate([prompt, tokens[:, row]])
        right = recompute(text)
        chex.assert_trees_all_equal(text[len(prompt) :], right[len(prompt) - 1 : -1].argmax(axis=-1))
        assert_close([logits[:, row]], [right[len(prompt) :]])
        for windows in ((None, None, None), (4, 4, 4), (None, 4, None), (5, None, 4), (4, None, 5)):
            assert far([logits[:, row]], [recompute(text, windows)[len(prompt) :]]), windows

    _, table_before, pages_before = prefilled
    for row in range(2):
        before, after = int(table_before.lengths[row]), int(table.lengths[row])
        assert after == before + STEPS
        keys = [np.asarray(pages.gather(layer, table.block_tables[row], after)[0]) for layer in range(3)]
        assert all((layer[:after] != 0).all() for layer in keys)
        assert all(np.abs(a[:after] - b[:after]).max() > 0.05 for a, b in combinations(keys, 2))
        for layer in range(3):
            kept = pages_before.gather(layer, table_before.block_tables[row], before)[0][:before]
            chex.assert_trees_all_equal(kept, keys[layer][:before])
