import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.rotary import Llama3Scaling, RotaryEmbedding

# Angles of up to about 100 radians, rounded to float32 before their sine is taken.
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def turned(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Each pair (i, i + half) as a complex number, times exp(i * angle), in float64."""
    half = len(frequencies)
    x = np.asarray(x, np.float64)
    turns = np.exp(1j * np.outer(positions, frequencies))[:, None, :]
    numbers = (x[..., :half] + 1j * x[..., half : 2 * half]) * turns
    return np.concatenate([numbers.real, numbers.imag, x[..., 2 * half :]], axis=-1)


def heads(head_dim: int, tokens: int = 7) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(0).normal(size=(tokens, 3, head_dim)), jnp.float32)


POSITIONS = np.array([0, 1, 2, 17, 5, 5, 100], np.int32)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (8, 4), (10, 2), (64, 64), (7, 6)])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 50.0])
def test_turns_pairs_as_complex_numbers(head_dim, rotary_dim, theta):
    x = heads(head_dim)
    frequencies = np.array([theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)])
    got = jax.jit(RotaryEmbedding(rotary_dim, theta))(x, jnp.asarray(POSITIONS))
    assert got.dtype == x.dtype
    chex.assert_trees_all_close(np.asarray(got, np.float64), turned(x, POSITIONS, frequencies), **TOLERANCE)
    chex.assert_trees_all_equal(got[..., rotary_dim:], x[..., rotary_dim:])
    chex.assert_trees_all_equal(got[0], x[0])


def test_scores_follow_the_distance_of_positions():
    rotary = RotaryEmbedding(8)
    q, k = heads(8, tokens=1), heads(8, tokens=2)[1:]

    def score(at_q: int, at_k: int) -> np.ndarray:
        turned_q, turned_k = rotary(q, jnp.array([at_q], jnp.int32)), rotary(k, jnp.array([at_k], jnp.int32))
        return np.asarray(jnp.sum(turned_q * turned_k, axis=-1))

    chex.assert_trees_all_close(score(9, 4), score(105, 100), **TOLERANCE)
    assert np.abs(score(9, 4) - score(9, 5)).max() > 0.1


def test_llama_3_scaling_by_hand():
    # Context 8192: wavelengths under 2048 stay, over 8192 grow 8 times. One of 4096 turns twice in it, a
    # third of the way from 1 turn to 4: a third of it stays, two thirds are divided, 1/3 + 2/3 / 8 = 5/12.
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
    wavelengths = np.array([6.0, 2048.0, 4096.0, 8192.0, 20_000.0])
    kept = 2 * math.pi / wavelengths / scaling(2 * math.pi / wavelengths)
    chex.assert_trees_all_close(kept, np.array([1, 1, 12 / 5, 8, 8]), rtol=1e-12)


def test_llama_3_scaling_case_by_case():
    """The published rule, one frequency at a time, with the constants of Llama 3.2."""
    theta, factor, low, high, length, head_dim = 500_000.0, 32.0, 1.0, 4.0, 8192, 64
    expected = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            expected.append(frequency)
        elif wavelength > length / low:
            expected.append(frequency / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    rotary = RotaryEmbedding(head_dim, theta, Llama3Scaling(factor, low, high, length))
    chex.assert_trees_all_close(rotary.frequencies(), np.array(expected), rtol=1e-12)
    x = heads(head_dim)
    got = np.asarray(rotary(x, jnp.asarray(POSITIONS)), np.float64)
    chex.assert_trees_all_close(got, turned(x, POSITIONS, np.array(expected)), **TOLERANCE)


def test_divisors_divide_frequencies():
    divisors = (1.0, 2.0, 32.0)
    x = heads(8)
    frequencies = np.array([10_000.0 ** (-i / 3) / divisors[i] for i in range(3)])
    got = np.asarray(RotaryEmbedding(6, divisors=divisors)(x, jnp.asarray(POSITIONS)), np.float64)
    chex.assert_trees_all_close(got, turned(x, POSITIONS, frequencies), **TOLERANCE)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_input_is_rounded_once(dtype):
    x = heads(8).astype(dtype)
    rotary, positions = RotaryEmbedding(8), jnp.asarray(POSITIONS)
    got = rotary(x, positions)
    assert got.dtype == dtype
    chex.assert_trees_all_equal(got, rotary(x.astype(jnp.float32), positions).astype(dtype))


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 3, 8)))
        got = RotaryEmbedding(8)(x, jnp.asarray(POSITIONS))
        assert got.dtype == jnp.float64
        frequencies = np.array([10_000.0 ** (-i / 4) for i in range(4)])
        chex.assert_trees_all_close(np.asarray(got), turned(x, POSITIONS, frequencies), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RotaryEmbedding(0), r"rotary_dim must be even and positive.*rotary_dim=0"),
        (lambda: RotaryEmbedding(-2), "rotary_dim must be even and positive"),
        (lambda: RotaryEmbedding(7), "rotary_dim must be even and positive"),
        (lambda: RotaryEmbedding(8, divisors=(1.0, 2.0)), "one divisor per pair, 4 in all, got 2"),
        (lambda: RotaryEmbedding(16)(heads(8), jnp.asarray(POSITIONS)), "rotary_dim=16.*heads of 8"),
        (lambda: Llama3Scaling(8.0, 4.0, 1.0, 8192), "low_freq_factor < high_freq_factor, got"),
        (lambda: Llama3Scaling(8.0, 1.0, 1.0, 8192), "low_freq_factor < high_freq_factor"),
        (lambda: Llama3Scaling(0.0, 1.0, 4.0, 8192), "positive.*factor=0.0"),
        (lambda: Llama3Scaling(8.0, 1.0, 4.0, 0), "positive.*original_length=0"),
        # One dimension less than half would broadcast against every pair.
        (lambda: RotaryEmbedding(12)(heads(7), jnp.asarray(POSITIONS)), "rotary_dim=12.*heads of 7"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
