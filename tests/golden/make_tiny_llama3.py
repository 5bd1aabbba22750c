"""Make tiny_llama3/: a random Llama 3 as a Hugging Face folder, and what transformers computes with it.

Every size that a loader could confuse with another one differs: heads * head_dim is not the hidden size, the
output embedding is not the input one, all attention projections have biases, no norm weight is 1. The
frequencies of the rotary embedding fall in all three ranges of Llama 3's rescaling (kept, blended, divided).

Needs torch (CPU build), transformers, numpy:

    python tests/golden/make_tiny_llama3.py

tiny_llama3/golden.npz:
    input_ids   int32[100]
    logits      float32[100, 300]    row i follows token i
tiny_llama3/golden.json: versions, and one text and one chat with their ids. The tokenizer adds <|begin|> by
itself, as Llama 3's does, and so does the chat template: a rendered chat has to be encoded without it.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = Path(__file__).parent / "tiny_llama3"
VOCAB_SIZE = 300
NUM_TOKENS = 100
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
SENTENCES = [
    "The miller counted the sacks, and the sacks were one fewer than the night before.",
    "When the river rose, the children carried the chickens to the upper floor.",
    "There is another letter in the other drawer, under the winter gloves.",
    "Is the ladder still there? The rain is in the attic again.",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = make_model(), make_tokenizer()
    model.save_pretrained(OUT, max_shard_size="220KB")
    tokenizer.save_pretrained(OUT, save_jinja_files=False)

    input_ids = np.random.default_rng(0).integers(VOCAB_SIZE, size=NUM_TOKENS)
    logits = model(torch.tensor(input_ids)[None]).logits[0].numpy()
    np.savez_compressed(OUT / "golden.npz", input_ids=input_ids.astype(np.int32), logits=logits)

    text = "The other miller is in the attic: naïve 🙂"
    messages = [{"role": "user", "content": "Is it there?"}]
    golden = {
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")
        },
        "text": text,
        "ids": tokenizer(text).input_ids,
        "messages": messages,
        "chat_text": tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False),
        "chat_ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    (OUT / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        bos_token_id=SPECIAL_TOKENS.index("<|begin|>"),
        eos_token_id=SPECIAL_TOKENS.index("<|end|>"),
        attn_implementation="eager",
        dtype="float32",
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if (
            parameter.ndim == 1
        ):  # biases start as 0 and norm weights as 1, where a loader that drops them passes
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    begin = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
