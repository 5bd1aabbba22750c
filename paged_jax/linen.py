"""Paged attention as a Flax Linen module."""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paged_jax.attention.api import Implementation
from paged_jax.kv_pages import KVPages
from paged_jax.nnx import check_input, head_dim_of, write_and_attend
from paged_jax.ragged_batch import RaggedBatch
from paged_jax.rotary import RotaryEmbedding


class PagedAttention(nn.Module):
    """Causal self-attention whose keys and values live in pages: `paged_jax.nnx.PagedAttention` for Linen.

    Its parameters are those of `nn.MultiHeadDotProductAttention`, by name and by shape, and so are
    the defaults: applied with the parameters of such a module, as they are, it computes what that
    module computes with a causal mask on the whole of each row, for any number of new tokens a
    call. Give it the same `use_bias` and `normalize_qk`: Linen ignores parameters that nobody asks for.

    Example:

        contiguous = nn.MultiHeadDotProductAttention(num_heads=8)
        variables = contiguous.init(key, x_of_a_row)
        attention = PagedAttention(num_heads=8)
        y, pages = attention.apply(variables, x, pages, batch)  # x, y: [tokens, features]

    Attributes:
        num_heads: query heads.
        qkv_features: num_heads * head_dim; the width of the input by default.
        out_features: width of the output; that of the input by default.
        num_kv_heads: key and value heads, a divisor of `num_heads`; `num_heads` by default.
        layer: which layer of the `KVPages` is this module's.
        rotary: rotates queries and keys by their positions. None: no position embedding.
        scale: as in `paged_attention`.
        sliding_window: as in `paged_attention`.
        logits_soft_cap: as in `paged_attention`.
        use_bias: biases on query, key and value.
        use_out_bias: bias on the output; as `use_bias` by default.
        use_sinks: a learned sink logit per head, the parameter `sinks`.
        normalize_qk: layer norm without bias on queries and keys, before the rotation.
        dtype: of the computation; by default that of input and parameters together.
        param_dtype: of the parameters.
        implementation: of `paged_attention`.
    """

    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    layer: int = 0
    rotary: RotaryEmbedding | None = None
    scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    use_bias: bool = True
    use_out_bias: bool | None = None
    use_sinks: bool = False
    normalize_qk: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    implementation: Implementation | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "tokens in_features"], pages: KVPages, batch: RaggedBatch
    ) -> tuple[Float[Array, "tokens out_features"], KVPages]:
        """Attends from one step's tokens over everything their rows hold.

        Args:
            x: the tokens of `batch`, in its order. What stands in padding tokens does not matter.
            pages: keys and values so far; this step's are written into layer `layer`.

        Returns:
            The output, and the pages with this step's keys and values.

        Raises:
            ValueError: if the heads do not divide the features or each other, `x` does not fit the
                batch, or the pages do not fit the module.
        """
        in_features = x.shape[-1]
        check_input(x, batch, in_features)
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        qkv_features = in_features if self.qkv_features is None else self.qkv_features
        head_dim = head_dim_of(self.num_heads, num_kv_heads, qkv_features)
        norm = partial(nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
        dense = partial(
            nn.DenseGeneral, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=self.kernel_init
        )

        q = dense((self.num_heads, head_dim), use_bias=self.use_bias, name="query")(x)
        k = dense((num_kv_heads, head_dim), use_bias=self.use_bias, name="key")(x)
        v = dense((num_kv_heads, head_dim), use_bias=self.use_bias, name="value")(x)
        if self.normalize_qk:
            q, k = norm(name="query_ln")(q), norm(name="key_ln")(k)
        sinks = None
        if self.use_sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,), self.param_dtype)
        out, pages = write_and_attend(
            q,
            k,
            v,
            pages,
            batch,
            layer=self.layer,
            rotary=self.rotary,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            sinks=sinks,
            implementation=self.implementation,
        )
        out_features = in_features if self.out_features is None else self.out_features
        use_out_bias = self.use_bias if self.use_out_bias is None else self.use_out_bias
        return dense(out_features, axis=(-2, -1), use_bias=use_out_bias, name="out")(out), pages
