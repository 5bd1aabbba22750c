"""Llama-architecture models in GGUF files, given in the names and the layout of Hugging Face.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paged_jax.models.tokenizer import Tokenizer, tokenizer_from_gguf

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF file, still in the file.

    Attributes:
        shape: as Hugging Face has it, slowest axis first: `(out_features, in_features)` for a matrix.
        interleaved_heads: number of heads whose rows the file stores in the order of interleaved rotary
            embedding, which `read` puts back in the order of Hugging Face; 0 where they are in order.
    """

    data: np.ndarray  # a view of the mapped file
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    interleaved_heads: int = 0

    def read(self) -> np.ndarray:
        """The values, float32, dequantised where the file has them quantised."""
        values = gguf.dequantize(self.data, self.type).astype(np.float32, copy=False).reshape(self.shape)
        if not self.interleaved_heads:
            return values
        # The file has rows (0, half), (1, half + 1), ... of each head next to each other.
        pairs = values.reshape(self.interleaved_heads, -1, 2, *self.shape[1:])
        return pairs.swapaxes(1, 2).reshape(self.shape)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor], Tokenizer | None]:
    """Config in the vocabulary of Hugging Face's config.json, tensors by its names, and the tokenizer.

    A rotary scaling that the file gives as one factor per frequency (Llama 3) comes out as
    `config["rope_scaling"] = {"rope_type": "factors", "factors": [head_dim / 2 floats]}`: divide the
    frequencies by them.

    Raises:
        ValueError: the file is no GGUF file, is cut off or damaged, or holds no Llama-architecture model.
    """
    metadata, tensors = _read(path)
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise ValueError(f"expected a model of the llama architecture, got {architecture!r}")
    config = _config(metadata, tensors)
    if _ROPE_FACTORS in tensors:
        factors = tensors.pop(_ROPE_FACTORS).read()
        config["rope_scaling"] = {"rope_type": "factors", "factors": factors.tolist()}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    renamed = {}
    for name, tensor in tensors.items():
        new_name = _huggingface_name(name)
        interleaved_heads = heads.get(new_name.split(".")[-2], 0)
        if interleaved_heads and tensor.shape[0] != interleaved_heads * config["head_dim"]:
            raise ValueError(f"expected {interleaved_heads} heads in {name}, got shape {tensor.shape}")
        renamed[new_name] = replace(tensor, interleaved_heads=interleaved_heads)
    tokenizer = tokenizer_from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None
    config["eos_token_id"] = list(tokenizer.eos_token_ids) if tokenizer else []
    return config, renamed, tokenizer


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    def number(key: str, default: float | None = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"expected llama.{key} in the metadata to be one positive number, got {value!r}")
        return value

    if "token_embd.weight" not in tensors:
        raise ValueError("tensor token_embd.weight is missing")
    heads = number("attention.head_count")
    head_dim = number("attention.key_length", number("embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ValueError(f"expected llama.{key} to be the head dimension {head_dim}, got {number(key)}")
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _rope_scaling(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    prefix = "llama.rope.scaling."
    rope_type = metadata.get(prefix + "type", "linear")
    # The second is the name in files of 2023.
    factor = metadata.get(prefix + "factor", metadata.get("llama.rope.scale_linear"))
    if rope_type == "none" or not factor:
        return None
    scaling = {"rope_type": rope_type, "factor": factor}
    if (length := metadata.get(prefix + "original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = length
    return scaling


def _huggingface_name(name: str) -> str:
    if match := re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        if layer is None and part in _NAMES:
            return f"{_NAMES[part]}.{kind}"
        if layer is not None and part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise ValueError(f"tensor {name} belongs to no dense Llama decoder, the only kind supported")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata, and tensors by the file's own names."""
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # whatever numpy says of a file that ends too early
        raise ValueError(f"it is no GGUF file, or cut off or damaged ({error})") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        tensor.name: GGUFTensor(
            tensor.data, tensor.tensor_type, tuple(int(n) for n in reversed(tensor.shape))
        )
        for tensor in reader.tensors
    }
    return metadata, tensors
