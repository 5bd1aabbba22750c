"""A model with its weights and tokenizer, from files."""

import math
import os
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from paged_jax.kv_pages import default_dtype
from paged_jax.models.checkpoint import Checkpoint, TensorSource, open_checkpoint
from paged_jax.models.llama import Llama, LlamaConfig
from paged_jax.models.tokenizer import Tokenizer

_TOP_LEVEL = {
    "embed.embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


class Loaded(NamedTuple):
    """What `load` found; `tokenizer` is None where the files hold none."""

    model: Llama
    tokenizer: Tokenizer | None
    name: str


def load(
    name_or_path: str | os.PathLike[str], *, dtype: DTypeLike | None = None, progress: bool = False
) -> Loaded:
    """Loads a Llama-architecture model.

    Args:
        name_or_path: a Hugging Face folder (config.json, safetensors, tokenizer.json), a .gguf file, or
            the name of a model that an installed weights package brings, such as "smollm2-135m".
        dtype: of parameters and computation; float32 on CPU and bfloat16 elsewhere by default.
        progress: show a progress bar on stderr.

    Raises:
        ValueError: if there is no such model, or its files are damaged or hold something else; the
            message names the file.
    """
    dtype = default_dtype() if dtype is None else dtype
    checkpoint = open_checkpoint(name_or_path)
    try:
        config = LlamaConfig.from_hugging_face(checkpoint.config)
    except ValueError as error:
        raise ValueError(f"{checkpoint.name}: {error}") from error
    model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, abstract = nnx.split(model)
    flat = dict(nnx.to_flat_state(abstract))
    columns = (TextColumn("loading {task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        for path in bar.track(list(flat), description=checkpoint.name):
            parameter = flat[path]
            value = _read(checkpoint, ".".join(map(str, path)), parameter.shape)
            flat[path] = parameter.replace(jnp.asarray(value, dtype))
    return Loaded(nnx.merge(graph, nnx.from_flat_state(flat)), checkpoint.tokenizer, checkpoint.name)


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    source = checkpoint_name(name)
    tensor: TensorSource | None = checkpoint.tensors.get(source)
    if tensor is None:
        raise ValueError(f"{checkpoint.name}: the tensor {source} is missing")
    expected = shape
    if name.endswith("kernel"):
        # [out, in] in the file, [in, out] in Flax, where either may be split into [heads, head_dim].
        in_axes = 2 if name.endswith("out.kernel") else 1
        expected = (math.prod(shape[in_axes:]), math.prod(shape[:in_axes]))
    elif name.endswith("bias"):
        expected = (math.prod(shape),)
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"{checkpoint.name}: {source} must have shape {list(expected)}, got {list(tensor.shape)}"
        )
    values = tensor.read()
    return (values.T if name.endswith("kernel") else values).reshape(shape)


def checkpoint_name(parameter: str) -> str:
    """The name in Hugging Face checkpoints of a parameter of `Llama`."""
    if parameter in _TOP_LEVEL:
        return _TOP_LEVEL[parameter]
    _, layer, name = parameter.split(".", 2)
    module, _, kind = name.rpartition(".")
    weight = _IN_BLOCK.get(name) or f"{_IN_BLOCK[module]}.{'weight' if kind == 'kernel' else kind}"
    return f"model.layers.{layer}.{weight}"
