"""Drawn tokens against the probabilities that numpy gives, and each row for itself."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling import Sampling, _keep_top, penalize, sample

LOGITS = np.array([2.0, -1.0, 1.5, 0.0, 1.0, 1.0, -3.0, 0.5], np.float32)
VOCAB, DRAWS = len(LOGITS), 4096

draw = jax.jit(sample)


def tokens_of(logits, positions, **settings) -> list[int]:
    logits = jnp.asarray(logits)
    sampling = Sampling.create(len(logits), **settings)
    return draw(logits, sampling, jnp.asarray(positions, jnp.int32)).tolist()


def probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """What the settings make of one row's logits, float64."""
    logits = np.asarray(logits, np.float64) / temperature

    def softmax(kept: np.ndarray) -> np.ndarray:
        exps = np.where(kept, np.exp(logits - logits.max()), 0)
        return exps / exps.sum()

    kept = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        kept &= logits >= sorted(logits)[-top_k]
    mass, nucleus = 0.0, np.zeros_like(kept)
    for token in np.argsort(-softmax(kept), kind="stable"):
        nucleus[token] = mass < top_p
        mass += softmax(kept)[token]
    kept &= nucleus
    kept &= softmax(kept) >= min_p * softmax(kept).max()
    return softmax(kept)


def surprise(tokens, expected: np.ndarray) -> float:
    """Chi-square of the counts in standard deviations from its mean; infinite for an impossible token."""
    counts, expected = np.bincount(tokens, minlength=len(expected)), expected * len(tokens)
    if counts[expected == 0].any():
        return np.inf
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = max(1, len(expected) - 1)
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("over", ["seeds", "positions"])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 4},  # the fourth and the fifth are equal
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 2.0, "min_p": 0.3},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.68},  # of the mass that top_k leaves
    ],
    ids=str,
)
def test_draws_follow_the_settings(settings, over):
    every = np.arange(DRAWS)
    seed, positions = (every, np.full(DRAWS, 17)) if over == "seeds" else (3, every)
    tokens = tokens_of(np.tile(LOGITS, (DRAWS, 1)), positions, seed=seed, **settings)
    assert surprise(tokens, probabilities(LOGITS, **settings)) < 4
    filters = set(settings) - {"temperature"}
    for name in filters or {name for name, value in settings.items() if value != 1}:
        others = {key: value for key, value in settings.items() if key != name}
        assert surprise(tokens, probabilities(LOGITS, **others)) > 20, f"{name} makes no difference"


def test_a_row_draws_anew_at_every_position():
    """Tokens of two positions, and of two seeds, are independent: pairs are as frequent as by chance."""
    flat = np.zeros((2 * DRAWS, 4), np.float32)
    neighbours = np.repeat(np.arange(DRAWS), 2)
    step = np.tile([0, 1], DRAWS)
    for seed, positions in ((neighbours, step), (step, neighbours)):
        first, second = np.array(tokens_of(flat, positions, temperature=1.0, seed=seed)).reshape(-1, 2).T
        assert surprise(4 * first + second, np.full(16, 1 / 16)) < 4


class TestGreedy:
    def test_the_largest_and_of_equal_ones_the_first(self):
        logits = np.array([[1, 3, 3, 2], [-5, -4, -4, -9], [0, 0, 0, 0]], np.float32)
        assert tokens_of(logits, [0, 1, 2]) == [1, 1, 0]

    def test_top_k_of_one(self):
        logits = np.random.default_rng(0).normal(size=(64, 40)).astype(np.float32)
        tokens = tokens_of(logits, np.arange(64), temperature=1.5, top_k=1, seed=np.arange(64))
        assert tokens == logits.argmax(axis=1).tolist()
        assert tokens != tokens_of(logits, np.arange(64), temperature=1.5, seed=np.arange(64))

    @pytest.mark.parametrize(
        "settings",
        [
            {"temperature": 1e-37},
            {"temperature": 1e-3},
            {"temperature": 1.0, "top_p": 1e-50},
            {"temperature": 1.0, "min_p": 1},
        ],
        ids=str,
    )
    def test_extreme_settings_reach_it(self, settings):
        """Also where 40 / temperature is beyond float32, and top_p below it."""
        logits = np.tile(np.array([20, 39, 40, 38], np.float32), (64, 1))
        assert tokens_of(logits, np.arange(64), seed=np.arange(64), **settings) == [2] * 64


class TestKeepsEverything:
    @pytest.mark.parametrize(
        "neutral", [{"top_k": 0}, {"top_k": 10**6}, {"top_k": VOCAB}, {"top_p": 1}, {"min_p": 0}], ids=str
    )
    def test_neutral_settings(self, neutral):
        logits, every = np.tile(LOGITS, (DRAWS, 1)), np.arange(DRAWS)
        plain = tokens_of(logits, every, temperature=1.3)
        assert tokens_of(logits, every, temperature=1.3, **neutral) == plain
        # A neighbour that filters makes all rows go through the filters.
        keeping = {"top_k": 0, "top_p": 1, "min_p": 0, **neutral}
        filtering = {"top_k": 2, "top_p": 0.5, "min_p": 0.9}
        mixed = {name: np.r_[np.full(DRAWS - 1, keeping[name]), filtering[name]] for name in filtering}
        assert tokens_of(logits, every, temperature=1.3, **mixed)[:-1] == plain[:-1]

    def test_mass_that_rounds_to_one_before_the_end(self):
        """In float32 the first token alone has all the mass: the others must stay all the same."""
        logits = -20 * jnp.arange(6, dtype=jnp.float32)[None, :]
        assert jax.nn.softmax(logits)[0, 0] == 1
        chex.assert_trees_all_equal(_keep_top(logits, jnp.array([0]), jnp.array([1.0])), logits)

    def test_a_banned_token_stays_banned(self):
        logits = np.tile(np.where(np.arange(VOCAB) < 3, 0, -np.inf).astype(np.float32), (256, 1))
        for settings in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.1}):
            tokens = tokens_of(logits, np.arange(256), temperature=1.0, **settings)
            assert set(tokens) == {0, 1, 2}


class TestRowsAreIndependent:
    def test_b66_alone_beside_others_and_in_another_slot(self):
        settings = {
            "temperature": [0, 0.7, 1.5, 1.5, 1.0, 0.7, 1.5, 0],
            "top_k": [0, 0, 0, 3, 0, 5, 0, 1],
            "top_p": [1, 1, 1, 1, 0.8, 0.9, 1, 1],
            "min_p": [0, 0, 0, 0, 0, 0.1, 0.2, 0],
            "seed": [5, 6, 7, 7, 8, 9, 2**32 - 1, 0],
        }

        all_logits = np.random.default_rng(1).normal(0, 2, (24, 8, 32)).astype(np.float32)

        def of(rows):
            own = {name: np.take(values, rows) for name, values in settings.items()}
            return np.array([tokens_of(a[rows], s + np.array(rows), **own) for s, a in enumerate(all_logits)])

        together, order = of(range(8)), np.roll(np.arange(8), 3)
        chex.assert_trees_all_equal(together[:, order], of(order))
        chex.assert_trees_all_equal(together, np.concatenate([of([row]) for row in range(8)], axis=1))
        chex.assert_trees_all_equal(together[:, [0, 7]], all_logits[:, [0, 7]].argmax(axis=2))

    @pytest.mark.parametrize("default", ["rbg", "unsafe_rbg"])
    def test_b66_whatever_generator_jax_has_by_default(self, default):
        """These draw for a whole batch at once, from the first row's seed."""
        logits = np.tile(LOGITS, (4, 1))
        expected = tokens_of(logits, np.arange(4), temperature=1.0, seed=[1, 2, 3, 4])
        with jax.default_prng_impl(default):
            for seed in ([1, 2, 3, 4], [9, 2, 9, 4]):
                tokens = tokens_of(logits, np.arange(4), temperature=1.0, seed=seed)
                assert tokens[1::2] == expected[1::2]

    def test_equal_rows_draw_equal_tokens(self):
        logits = np.tile(LOGITS, (DRAWS, 1))
        assert len(set(tokens_of(logits, np.full(DRAWS, 5), temperature=1.0, seed=1))) == 1
        assert len(set(tokens_of(logits, np.full(DRAWS, 5), temperature=1.0, seed=np.arange(DRAWS)))) == VOCAB


def test_every_seed_is_another():
    """Neighbours, and seeds that agree in their low or high bits: as uint32, int64 and Python numbers."""
    seeds = [0, 1, 2**16, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1]
    logits, positions = np.zeros((len(seeds) * 32, 64), np.float32), np.tile(np.arange(32), len(seeds))
    repeated = np.repeat(np.array(seeds), 32)
    tokens = tokens_of(logits, positions, temperature=1.0, seed=repeated)
    assert len({tuple(row) for row in np.reshape(tokens, (len(seeds), 32))}) == len(seeds)
    assert tokens_of(logits, positions, temperature=1.0, seed=jnp.asarray(repeated, jnp.uint32)) == tokens
    assert tokens_of(logits[:32], positions[:32], temperature=1.0, seed=2**32 - 1) == tokens[-32:]


class TestPenalties:
    ROWS = np.array([[2.0, -2.0, 0.0, 4.0, -4.0]] * 3, np.float32)
    TOKENS = np.array([[0, 1, 1, 4], [2, 3, 0, 0], [3, 3, 99, -1]], np.int32)
    NUM_TOKENS = np.array([3, 2, 2], np.int32)

    def penalized(self, prompt_lens=(0, 0, 0), **settings):
        sampling = Sampling.create(3, **settings)
        counts = (np.array(prompt_lens, np.int32), self.NUM_TOKENS)
        return np.asarray(jax.jit(penalize)(self.ROWS, sampling, self.TOKENS, *counts))

    def test_repetition_divides_positive_and_multiplies_negative_logits_once(self):
        expected = self.ROWS.copy()
        expected[0, [0, 1]] = [1.0, -4.0]
        expected[1, 3] = 1.0
        expected[2, 3] = 8.0  # a penalty below 1 is a reward
        chex.assert_trees_all_equal(self.penalized(repetition_penalty=[2, 4, 0.5]), expected)

    def test_presence_counts_once_and_frequency_every_time_and_neither_the_prompt(self):
        settings = {"presence_penalty": [0.5, 0, 0.25], "frequency_penalty": [0.125, 1, -1]}
        expected = self.ROWS.copy()
        expected[0, [0, 1]] -= [0.625, 0.75]
        expected[1, 3] -= 1
        expected[2, 3] += 2 - 0.25
        chex.assert_trees_all_equal(self.penalized((0, 1, 0), **settings), expected)
        expected[0] = self.ROWS[0]
        expected[0, 1] -= 0.625
        chex.assert_trees_all_equal(self.penalized((2, 1, 0), **settings), expected)

    def test_none(self):
        chex.assert_trees_all_equal(self.penalized(), self.ROWS)
        mixed = self.penalized(repetition_penalty=[1, 4, 1], frequency_penalty=[0, 1, 0])
        chex.assert_trees_all_equal(mixed[[0, 2]], self.ROWS[[0, 2]])
        assert not np.array_equal(mixed[1], self.ROWS[1])


def test_b56_x64_draws_the_same():
    logits, every = np.tile(LOGITS, (DRAWS, 1)), np.arange(DRAWS)
    settings = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.01, "seed": every}
    expected = tokens_of(logits, every, **settings)
    with jax.enable_x64(True):
        assert tokens_of(logits, every, **settings) == expected
        tokens = draw(jnp.asarray(logits), Sampling.create(DRAWS), jnp.asarray(every, jnp.int32))
        chex.assert_type(tokens, jnp.int32)


def test_logits_of_fewer_bits():
    few, every = jnp.tile(jnp.asarray(LOGITS, jnp.bfloat16), (256, 1)), np.arange(256)
    same = few.astype(jnp.float32)
    assert tokens_of(few, every, temperature=1.0) == tokens_of(same, every, temperature=1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": np.nan},
        {"temperature": np.inf},
        {"temperature": "0.7"},
        {"temperature": None},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": 2**31},
        {"top_p": 0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"repetition_penalty": 1e-50},  # 0 in float32
        {"presence_penalty": np.nan},
        {"frequency_penalty": np.inf},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": 2**70},
        {"seed": 1.5},
        {"temperature": [1.0, 0.5]},  # for three rows
        {"top_k": [[1], [2], [3]]},
        {"top_p": [0.5, 0.5, 1.5]},
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=rf"Sampling: {name} must be .* each of 3 rows, got "):
        Sampling.create(3, **{name: value})
