"""Models to run on pages: a Llama-architecture decoder, its files and its tokenizer."""

from paged_jax.models.llama import Llama, LlamaConfig
from paged_jax.models.loading import Loaded, load
from paged_jax.models.tokenizer import Tokenizer

__all__ = ["Llama", "LlamaConfig", "Loaded", "Tokenizer", "load"]
