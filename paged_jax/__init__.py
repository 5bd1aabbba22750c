"""Paged attention for JAX and Flax."""

from paged_jax import page_table
from paged_jax.attention import Tiling, merge_attention, paged_attention, paged_attention_implementation
from paged_jax.engine import Engine, SamplingParams
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import NO_PAGE, Grant, PageTable
from paged_jax.ragged_batch import RaggedBatch
from paged_jax.rotary import Llama3Scaling, RotaryEmbedding

__all__ = [
    "NO_PAGE",
    "Engine",
    "Grant",
    "KVPages",
    "Llama3Scaling",
    "PageTable",
    "RaggedBatch",
    "RotaryEmbedding",
    "SamplingParams",
    "Tiling",
    "merge_attention",
    "page_table",
    "paged_attention",
    "paged_attention_implementation",
]
