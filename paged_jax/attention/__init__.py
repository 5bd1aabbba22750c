"""Attention over pages, through block tables."""

from paged_jax.attention.api import Choice, paged_attention, paged_attention_implementation
from paged_jax.attention.kernel_config import KernelConfig
from paged_jax.attention.merge import merge_attention
from paged_jax.attention.schedule import Tiling

__all__ = [
    "Choice",
    "KernelConfig",
    "Tiling",
    "merge_attention",
    "paged_attention",
    "paged_attention_implementation",
]
