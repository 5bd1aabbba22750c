"""The Llama family of decoders (Touvron et al. 2023, arXiv:2302.13971) on paged attention."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from paged_jax.kv_pages import KVPages
from paged_jax.nnx import PagedAttention
from paged_jax.ragged_batch import RaggedBatch
from paged_jax.rotary import Llama3Scaling, RotaryEmbedding


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a decoder. `max_length` is the longest row the model was made for, in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    rms_norm_eps: float = 1e-5
    rotary: RotaryEmbedding | None = None
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False

    @classmethod
    def from_hugging_face(cls, config: dict[str, Any]) -> "LlamaConfig":
        """From the contents of a config.json.

        Raises:
            ValueError: if a size is missing, or the model is of another architecture or uses a rotary
                scaling that is not supported.
        """
        model_type = config.get("model_type", "llama")
        if model_type not in ("llama", "mistral"):
            raise ValueError(f"only Llama-architecture models can be run (llama, mistral), got {model_type=}")
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {activation!r}")
        num_heads = _positive(config, "num_attention_heads", int)
        hidden_size = _positive(config, "hidden_size", int)
        head_dim = _positive(config, "head_dim", int, default=hidden_size // num_heads)
        window = config.get("sliding_window")
        return cls(
            vocab_size=_positive(config, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size", int),
            num_layers=_positive(config, "num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=_positive(config, "num_key_value_heads", int, default=num_heads),
            head_dim=head_dim,
            max_length=_positive(config, "max_position_embeddings", int),
            rms_norm_eps=_positive(config, "rms_norm_eps"),
            rotary=_rotary(config, head_dim),
            sliding_window=None if window is None else _positive(config, "sliding_window", int),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            tie_embeddings=config.get("tie_word_embeddings", False),
        )


def _rotary(config: dict[str, Any], head_dim: int) -> RotaryEmbedding:
    # Two forms are in use: rope_theta beside rope_scaling, and both within rope_parameters.
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise ValueError(f"the configuration's rotary settings must be an object, got {settings!r}")
    theta = _positive({"rope_theta": 10_000.0, **config, **settings}, "rope_theta")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return RotaryEmbedding(head_dim, theta)
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=_positive(settings, "factor"),
            low_freq_factor=_positive(settings, "low_freq_factor"),
            high_freq_factor=_positive(settings, "high_freq_factor"),
            original_length=_positive(settings, "original_max_position_embeddings", int),
        )
        return RotaryEmbedding(head_dim, theta, scaling)
    if kind == "linear":
        return RotaryEmbedding(head_dim, theta, divisors=(_positive(settings, "factor"),) * (head_dim // 2))
    if kind == "factors":
        return RotaryEmbedding(head_dim, theta, divisors=tuple(settings.get("factors", ())))
    raise ValueError(f"rotary scaling of the kinds default, linear and llama3 is supported, got {kind!r}")


def _positive(
    config: dict[str, Any], key: str, kind: type[int] | type[float] = float, default: int | None = None
) -> Any:
    """The number under `key`; a configuration comes from a file, and may hold anything."""
    value: Any = default if config.get(key) is None else config[key]
    kinds = (int,) if kind is int else (int, float)
    if type(value) not in kinds or not value > 0:
        wanted = "whole number" if kind is int else "number"
        raise ValueError(f"the model's configuration needs a positive {wanted} as {key}, got {value!r}")
    return value


class Llama(nnx.Module):
    """A decoder whose layers share one `KVPages`: layer i of the model is layer i of the pages."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        """
        Args:
            dtype: of parameters and computation.
        """
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.blocks = nnx.List(
            [Block(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_layers)]
        )
        self.norm = _norm(config, dtype, rngs)
        self.head = nnx.data(
            None
            if config.tie_embeddings
            else nnx.Linear(
                config.hidden_size,
                config.vocab_size,
                use_bias=False,
                dtype=dtype,
                param_dtype=dtype,
                rngs=rngs,
            )
        )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        return self.config.max_length

    @property
    def sliding_window(self) -> int | None:
        return self.config.sliding_window

    def __call__(
        self, tokens: Int32[Array, " tokens"], pages: KVPages, batch: RaggedBatch
    ) -> tuple[Float[Array, "tokens hidden_size"], KVPages]:
        """The last hidden states of one step's tokens, and the pages with their keys and values.

        Takes the tokens of `batch` in its order; `logits` turns the states that are wanted into logits.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x, pages = block(x, pages, batch)
        return self.norm(x), pages

    def logits(self, hidden: Float[Array, "tokens hidden_size"]) -> Float[Array, "tokens vocab"]:
        return self.embed.attend(hidden) if self.head is None else self.head(hidden)

    def create_pages(self, num_pages: int, page_size: int, dtype: DTypeLike | None = None) -> KVPages:
        """Pages for this model's layers; see `KVPages.create`."""
        config = self.config
        return KVPages.create(
            config.num_layers, num_pages, config.num_kv_heads, page_size, config.head_dim, dtype=dtype
        )


class Block(nnx.Module):
    """Attention and a gated MLP, each normalised before and added to its input."""

    def __init__(self, config: LlamaConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, dtype, rngs)
        self.attention = PagedAttention(
            config.num_heads,
            config.hidden_size,
            config.num_heads * config.head_dim,
            num_kv_heads=config.num_kv_heads,
            layer=layer,
            rotary=config.rotary,
            sliding_window=config.sliding_window,
            use_bias=config.attention_bias,
            dtype=dtype,
            param_dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = _norm(config, dtype, rngs)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden_size"], pages: KVPages, batch: RaggedBatch
    ) -> tuple[Float[Array, "tokens hidden_size"], KVPages]:
        attended, pages = self.attention(self.attention_norm(x), pages, batch)
        x += attended
        return x + self.mlp(self.mlp_norm(x)), pages


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(in_features: int, out_features: int) -> nnx.Linear:
            return nnx.Linear(
                in_features, out_features, use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs
            )

        self.gate = linear(config.hidden_size, config.intermediate_size)
        self.up = linear(config.hidden_size, config.intermediate_size)
        self.down = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Float[Array, "tokens hidden_size"]) -> Float[Array, "tokens hidden_size"]:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def _norm(config: LlamaConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=dtype, rngs=rngs
    )
