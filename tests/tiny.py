"""A small random Llama, and the same model in numpy float64, which recomputes everything for every token."""

import functools

import numpy as np
from flax import nnx
from rows import full_forward, randomized, weights_of

from paged_jax.models import Llama, LlamaConfig
from paged_jax.rotary import RotaryEmbedding

VOCAB = 64
NO_STOPS = (VOCAB, VOCAB + 1)  # beyond the vocabulary: no row ever writes one


@functools.cache
def tiny_llama(seed: int = 7, **changes) -> Llama:
    """Two layers of width 32 whose parameters are all random, biases and norms included."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rotary": RotaryEmbedding(8, theta=100.0)}
    config = LlamaConfig(**{**sizes, **heads, "max_length": 512, **changes})
    return randomized(lambda: Llama(config, rngs=nnx.Rngs(0)), seed)


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCAB, size=length).tolist() for length in lengths]


def forward(model: Llama, ids: list[int]) -> np.ndarray:
    """Logits after every token, [tokens, vocab]."""
    config, weights = model.config, weights_of(model)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps) * scale

    def linear(x: np.ndarray, parameters: dict) -> np.ndarray:
        return x @ parameters["kernel"] + parameters.get("bias", 0)

    x = weights["embed"]["embedding"][ids]
    for block in weights["blocks"].values():
        attention_input = norm(x, block["attention_norm"]["scale"])
        x = x + full_forward(
            block["attention"], attention_input, theta=config.rotary.theta, window=config.sliding_window
        )
        mlp, mlp_input = block["mlp"], norm(x, block["mlp_norm"]["scale"])
        gate = linear(mlp_input, mlp["gate"])
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(mlp_input, mlp["up"]), mlp["down"])
    x = norm(x, weights["norm"]["scale"])
    return x @ weights["embed"]["embedding"].T if config.tie_embeddings else linear(x, weights["head"])


@functools.cache
def _greedy(model: Llama, prompt: tuple[int, ...], num_new: int) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(num_new):
        logits = forward(model, ids)[-1]
        runner_up, best = np.sort(logits)[-2:]
        assert best - runner_up > 5e-5, "too close for float32: take other prompts"
        ids.append(int(logits.argmax()))
    return tuple(ids[len(prompt) :])


def greedy(model: Llama, prompt: list[int], num_new: int) -> tuple[int, ...]:
    """The most probable continuation."""
    return _greedy(model, tuple(prompt), num_new)
