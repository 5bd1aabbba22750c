"""What an engine and its settings take, and what they refuse and say about it."""

import dataclasses

import numpy as np
import pytest
from engines import make_engine
from engines import quick_compilation as quick_compilation
from flax import nnx
from tiny import greedy, random_prompts, tiny_llama

from paged_jax.engine import Engine, Metrics, SamplingParams

NEW = 20
PROMPTS = random_prompts(9, 6, 20, seed=5)


def params(max_tokens: int = NEW, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings)


def continued(prompt) -> tuple[int, ...]:
    return greedy(tiny_llama(), prompt, NEW)


class TestPlainValues:
    """What is given as an iterator or in numpy's types is kept in Python's own."""

    def test_settings(self):
        settings = SamplingParams(
            max_tokens=np.int64(5),
            temperature=np.float32(0.5),
            top_k=np.int8(3),
            stop=iter(["a", iter([1, 2]), np.array([3, 4])]),
            stop_token_ids=map(int, "56"),
        )
        plain = SamplingParams(5, 0.5, 3, stop=("a", (1, 2), (3, 4)), stop_token_ids=(5, 6))
        assert settings == plain
        assert repr(settings) == repr(plain)

    def test_prompts(self):
        outputs = make_engine().generate((np.array(prompt) for prompt in PROMPTS), iter([params()] * 3))
        assert [output.prompt_ids for output in outputs] == [tuple(prompt) for prompt in PROMPTS]
        assert [output.token_ids for output in outputs] == [continued(prompt) for prompt in PROMPTS]


class TestRefusals:
    def test_a_bad_prompt_among_good_ones_starts_nothing(self):
        engine = make_engine()
        for bad in ([], [64], [-1], [1.5], "text", [[1, 2]]):
            with pytest.raises(ValueError, match="Engine: "):
                engine.generate([PROMPTS[0], bad, PROMPTS[1]], params())
        with pytest.raises(ValueError, match="got 2 prompts and 3 SamplingParams"):
            engine.generate(PROMPTS[:2], [params()] * 3)
        assert engine.metrics == dataclasses.replace(Metrics(pages=24, pages_free=24))
        assert not engine.has_work

    @pytest.mark.parametrize(
        ("prompt", "wrong", "message"),
        [
            ([], {}, r"a prompt must be one or more token ids in \[0, 64\), got \[\]"),
            ([1, 64], {}, r"in \[0, 64\), got \[1, 64\]"),
            ([1, -1], {}, r"in \[0, 64\), got \[1, -1\]"),
            ([1.0], {}, r"a prompt must be one or more token ids in \[0, 64\), got \[1.0\]"),
            ([[1]], {}, r"a prompt must be one or more token ids in \[0, 64\), got \[\[1\]\]"),
            ("text", {}, "without a tokenizer a prompt must be token ids, got a text"),
            ([1], {"stop": "text"}, "stop texts need a tokenizer, got .*'text'"),
            ([1], {"stop_token_ids": range(17)}, "17 stop tokens.* are more than 16; raise max_stop_tokens"),
            ([1] * 50, {}, "50 prompt and 20 new tokens is longer than a row of 64; ask for fewer"),
        ],
        ids=str,
    )
    def test_of_requests(self, prompt, wrong, message):
        engine = make_engine()
        for ask in (engine.submit, engine.stream):
            with pytest.raises(ValueError, match=message):
                ask(prompt, params(**wrong))
        assert not engine.has_work

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"max_tokens": 0}, r"max_tokens must be a whole number in \[1, 2147483648\), got 0"),
            ({"max_tokens": 1.5}, "max_tokens must be .* got 1.5"),
            ({"max_tokens": True}, "max_tokens must be .* got True"),
            ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
            ({"temperature": float("nan")}, "temperature must be at least 0, got nan"),
            ({"temperature": 1e300}, r"temperature must fit a float32, got 1e\+300"),
            ({"top_k": -1}, r"top_k must be a whole number in \[0, .* got -1"),
            ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
            ({"min_p": 1.1}, r"min_p must be in \[0, 1\], got 1.1"),
            ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than 0, got 0.0"),
            ({"presence_penalty": float("inf")}, "presence_penalty must be finite, got inf"),
            ({"frequency_penalty": float("nan")}, "frequency_penalty must be finite, got nan"),
            ({"seed": -1}, r"seed must be a whole number in \[0, 4294967296\), got -1"),
            ({"seed": 2**32}, "seed must be .* got 4294967296"),
            ({"n": 0}, r"n must be a whole number in \[1, .* got 0"),
            ({"stop": ("",)}, "none of them empty, got "),
            ({"stop": ((),)}, "none of them empty, got "),
            ({"stop": (7, 8)}, r"texts or sequences of token ids, none of them empty, got \(7, 8\)"),
            ({"stop": ((7, "8"),)}, r"texts or sequences of token ids, .* got \(\(7, '8'\),\)"),
            ({"stop_token_ids": 5}, "stop_token_ids must be a sequence of token ids, got 5"),
            ({"stop_token_ids": (-1,)}, r"must be a sequence of token ids, got \(-1,\)"),
            ({"temperature": "0.5"}, "temperature must be at least 0, got '0.5'"),
            ({"repetition_penalty": 1e-50}, "repetition_penalty must be greater than 0, got 1e-50"),
            ({"stop": None}, "texts or sequences of token ids, .* got None"),
            ({"stop": (b"ab",)}, "texts or sequences of token ids, .* got "),
            ({"stop_token_ids": (2**31,)}, r"must be a sequence of token ids, got \(2147483648,\)"),
        ],
        ids=str,
    )
    def test_of_settings(self, wrong, message):
        with pytest.raises(ValueError, match="SamplingParams: .*" + message):
            SamplingParams(**wrong)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"max_rows": 0}, "max_rows must be a positive integer, got max_rows=0"),
            ({"max_length": 513}, "made for rows of 512 tokens, got max_length=513"),
            ({"page_size": 0}, "page_size must be a positive integer, got page_size=0"),
            ({"num_pages": 0}, "num_pages must be a positive integer, got num_pages=0"),
            ({"num_pages": 8, "memory": "1GiB"}, "give num_pages or memory, not both; got num_pages=8"),
            (
                {"step_tokens": 4},
                "one token of every row and some of a prompt, got step_tokens=4 for max_rows=4",
            ),
            ({"steps_per_visit": 0}, "steps_per_visit must be a positive integer, got steps_per_visit=0"),
            ({"max_stop_tokens": 0}, "max_stop_tokens must be a positive integer, got max_stop_tokens=0"),
            ({"draft_tokens": -1}, "draft_tokens"),
            ({"draft_tokens": True}, "draft_tokens must be a whole number of at least 0, got True"),
            ({"step_tokens": 32.0}, "step_tokens must be a positive integer, got step_tokens=32.0"),
            ({"step_tokens": (8, "x")}, "step_tokens must be a positive integer, got step_tokens='x'"),
        ],
        ids=str,
    )
    def test_of_engines(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            make_engine(**wrong)

    def test_sizes_beyond_all_need_are_cut(self):
        engine = make_engine(steps_per_visit=10**10, step_tokens=10**12)
        assert engine.generate(PROMPTS, params())[1].token_ids == continued(PROMPTS[1])
        assert engine._core.limits.sizes[-1] == 4 * 64
        assert engine._core.limits.steps_per_visit == 64

    def test_of_what_comes_beside_a_prompt(self):
        engine = make_engine()
        for wrong, message in (
            ({"salt": None}, "salt a text, got .* salt=None"),
            (
                {"params": {"max_tokens": 3}},
                "params must be SamplingParams and salt a text, got {'max_tokens",
            ),
            ({"request_id": b"x"}, "request_id must be a text, got b'x'"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit(PROMPTS[0], **{"params": params(), **wrong})
        assert not engine.has_work

    def test_of_one_text_for_many_prompts(self):
        with pytest.raises(ValueError, match=r"prompts must be several, got one text; use \['Hello'\]"):
            make_engine().generate("Hello")

    def test_of_models(self):
        engine, other = make_engine(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        for ask in (Engine, engine.replace_model):
            with pytest.raises(
                TypeError,
                match="Engine: Linear has no create_pages, logits, max_length, sliding_window, vocab_size; "
                r"see paged_jax\.engine\.steps\.EngineModel",
            ):
                ask(other)
