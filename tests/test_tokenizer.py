"""Tokenizers from GGUF metadata and tokenizer.json, streaming, and chat templates."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from paged_jax.models.checkpoint import open_checkpoint
from paged_jax.models.tokenizer import Tokenizer, TokenStream, tokenizer_from_gguf

GOLDEN = Path(__file__).parent / "golden"
SMOLLM2 = json.loads((GOLDEN / "smollm2.json").read_text())
TINY_LLAMA3 = json.loads((GOLDEN / "tiny_llama3" / "golden.json").read_text())
REPLACEMENT = "\ufffd"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return open_checkpoint("smollm2-135m").tokenizer


@pytest.fixture(scope="module")
def tiny_llama3() -> Tokenizer:
    return open_checkpoint(GOLDEN / "tiny_llama3").tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("case", SMOLLM2["tokenizer"], ids=lambda case: repr(case["text"])[:30])
def test_smollm2_ids_and_text(smollm2, case):
    assert smollm2.encode(case["text"]) == case["ids_split_digits"]
    assert smollm2.decode(case["ids"]) == case["decoded"]


def test_smollm2_special_tokens(smollm2):
    special = SMOLLM2["special_tokens"]
    assert smollm2.bos_token_id == special["bos_token_id"]
    assert smollm2.eos_token_ids == (special["eos_token_id"],)
    for token, token_id in special["added_tokens"].items():
        assert smollm2.encode(token) == [token_id]
        assert smollm2.decode([token_id]) == ""
        assert smollm2.decode([token_id], skip_special_tokens=False) == token


@pytest.mark.parametrize("case", SMOLLM2["chat"], ids=lambda case: f"{len(case['messages'])}-messages")
def test_smollm2_chat(smollm2, case):
    text = smollm2.apply_chat_template(case["messages"])
    assert text == case["text"]
    assert smollm2.encode(text, add_special_tokens=False) == case["ids"]
    assert text.removeprefix(smollm2.apply_chat_template(case["messages"], add_generation_prompt=False)) == (
        "<|im_start|>assistant\n"
    )


def test_tokenizer_json_adds_its_beginning_token(tiny_llama3):
    assert tiny_llama3.encode(TINY_LLAMA3["text"]) == TINY_LLAMA3["ids"]
    assert tiny_llama3.encode(TINY_LLAMA3["text"], add_special_tokens=False) == TINY_LLAMA3["ids"][1:]
    assert tiny_llama3.bos_token_id == TINY_LLAMA3["ids"][0]
    text = tiny_llama3.apply_chat_template(TINY_LLAMA3["messages"])
    assert text == TINY_LLAMA3["chat_text"]
    assert tiny_llama3.encode(text, add_special_tokens=False) == TINY_LLAMA3["chat_ids"]


@pytest.mark.parametrize("case", SMOLLM2["tokenizer"], ids=lambda case: repr(case["text"])[:30])
def test_streamed_text_is_whole_text(smollm2, case):
    pieces = streamed(smollm2, case["ids"])
    assert "".join(pieces) == case["decoded"]
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=20))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_streamed_text_is_whole_text_for_any_ids(smollm2, ids):
    assert "".join(streamed(smollm2, ids)) == smollm2.decode(ids)


def test_stream_waits_for_whole_characters(smollm2):
    ids = smollm2.encode("🦩")
    assert len(ids) > 1
    assert streamed(smollm2, ids) == [""] * (len(ids) - 1) + ["🦩", ""]
    assert streamed(smollm2, ids[:-1])[-1] == REPLACEMENT, "what never became a character is not lost"


def test_stream_decodes_only_the_latest_ids():
    lengths = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return "a" * len(ids)

    stream = TokenStream(decode)
    assert [stream.push(i) for i in range(50)] == ["a"] * 50
    assert max(lengths) == 2


def test_text_that_is_no_unicode_is_refused(smollm2):
    with pytest.raises(ValueError, match="valid Unicode"):
        smollm2.encode("broken \udcff argument")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{% for %}", "chat template failed"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "chat template failed"),
    ],
)
def test_chat_template_failures_are_value_errors(smollm2, template, message):
    tokenizer = Tokenizer(smollm2.backend, {}, [], template)
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_chat_template_environment(smollm2):
    template = """{% for message in messages %}
    {% if loop.index > 1 %}{% break %}{% endif %}
{{ bos_token }}{{ message | tojson }}
{% endfor %}{{ strftime_now('%%') }}"""
    tokenizer = Tokenizer(smollm2.backend, {"bos_token": "<s>"}, [], template)
    text = tokenizer.apply_chat_template([{"content": "<é>"}, {"content": "never"}])
    assert text == '<s>{"content": "<é>"}\n%'


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_metadata(**ggml) -> dict:
    tokens = [*BYTES, "ab", "abc", "<|begin|>", "<|end|>", "<tool>"]
    types = [NORMAL] * (len(BYTES) + 2) + [CONTROL, CONTROL, USER_DEFINED]
    begin = tokens.index("<|begin|>")
    ggml = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["a b"],
        "bos_token_id": begin,
        "eos_token_id": begin + 1,
        **ggml,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}


# The same text cut in the four ways. "Ġ" is a blank and "Ċ" a line end in byte-level BPE.
CUT_TEXT = "I'LL say  12345!\n\n x"
CUTS = {
    "gpt-2": ["I", "'", "LL", "Ġsay", "Ġ", "Ġ12345", "!", "ĊĊ", "Ġx"],
    "smollm": ["I", "'", "LL", "Ġsay", "ĠĠ", "1", "2", "3", "4", "5", "!", "ĊĊ", "Ġx"],
    "llama-bpe": ["I", "'LL", "Ġsay", "Ġ", "Ġ", "123", "45", "!ĊĊ", "Ġx"],
    "default": ["I", "'", "LL", "Ġsay", "Ġ", "Ġ", "123", "45", "!", "ĊĊ", "Ġx"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_pre_tokenizer_cuts(pre):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre=pre))
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str(CUT_TEXT)
    assert [piece for piece, _ in pieces] == CUTS[pre]
    assert tokenizer.decode(tokenizer.encode(CUT_TEXT)) == CUT_TEXT


def test_llama3_takes_whole_words_and_begins_texts():
    names = byte_level_metadata()["tokenizer.ggml.tokens"]

    def encode(**ggml) -> list[str]:
        return [names[i] for i in tokenizer_from_gguf(byte_level_metadata(**ggml)).encode("abc")]

    assert encode(pre="gpt-2") == ["ab", "c"]
    assert encode(pre="llama-bpe") == ["<|begin|>", "abc"]
    assert encode(pre="llama-bpe", add_bos_token=False) == ["abc"]
    assert encode(pre="gpt-2", add_bos_token=True, add_eos_token=True) == ["<|begin|>", "ab", "c", "<|end|>"]


def test_gguf_added_tokens_and_ends():
    metadata = byte_level_metadata(pre="gpt-2", eot_token_id=3, eom_token_id=3)
    tokenizer = tokenizer_from_gguf(metadata)
    end = metadata["tokenizer.ggml.eos_token_id"]
    assert tokenizer.eos_token_ids == (end, 3)
    assert tokenizer.decode(tokenizer.encode("<tool>a<|end|>")) == "<tool>a"
    assert len(tokenizer.encode("<tool>a<|end|>")) == 3


def sentencepiece_metadata(**ggml) -> dict:
    pieces = {"▁": -9, "a": -8, "b": -7, "c": -6, "▁a": -5, "ab": -4, "bc": -3, "▁abc": -1}
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    ggml = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *bytes_, *pieces],
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "scores": [0.0] * 259 + [float(score) for score in pieces.values()],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **ggml,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["▁abc"]),
        ("aabc", ["▁a", "a", "bc"]),  # of the pairs at hand "bc" scores best, not "ab"
        ("ab c", ["▁", "ab", "▁", "c"]),
        (" a", ["▁", "▁a"]),
        ("aé", ["▁a", "<0xC3>", "<0xA9>"]),
        ("a</s>", ["▁a", "</s>"]),
        ("", []),
    ],
)
def test_sentencepiece_from_gguf(text, pieces):
    metadata = sentencepiece_metadata()
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode(text)
    assert [metadata["tokenizer.ggml.tokens"][i] for i in ids] == ["<s>", *pieces]
    assert tokenizer.decode(ids) == text.removesuffix("</s>")
    assert "".join(streamed(tokenizer, ids)) == text.removesuffix("</s>")


def test_sentencepiece_without_space_prefix():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"
    assert len(tokenizer.encode("ab")) == 1


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level_metadata(model="bert"), "tokenizer.ggml.model"),
        (byte_level_metadata(pre="unheard-of"), "tokenizer.ggml.pre"),
        (byte_level_metadata(model="llama"), "tokenizer.ggml.scores is missing"),
        (byte_level_metadata(token_type=[NORMAL]), "shorter"),
    ],
)
def test_unsupported_gguf_tokenizers_are_refused(metadata, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(metadata)
