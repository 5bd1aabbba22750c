"""Paged attention as a Flax NNX module."""

from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paged_jax.attention import paged_attention
from paged_jax.attention.api import Implementation
from paged_jax.kv_pages import KVPages
from paged_jax.ragged_batch import RaggedBatch
from paged_jax.rotary import RotaryEmbedding

Self = TypeVar("Self", bound="PagedAttention")

default_kernel_init = nnx.initializers.lecun_normal()


class PagedAttention(nnx.Module):
    """Causal self-attention whose keys and values live in pages.

    The parameters are those of `nnx.MultiHeadAttention`: `query`, `key`, `value`, `out`. The module
    holds no cache: the pages are an argument and a result, so it works the same in plain calls,
    under `jax.jit` on split state, `nnx.jit` and `lax.scan`.

    Example:

        attention = PagedAttention(num_heads=8, in_features=64, num_kv_heads=2, rngs=nnx.Rngs(0))
        pages = KVPages.create(num_layers=1, num_pages=32, num_kv_heads=2, page_size=16, head_dim=8)
        table = PageTable.create(num_pages=32, page_size=16, max_rows=4, max_pages_per_row=8)

        table, grant = page_table.extend(table, jnp.array([5, 3, 0, 9]))
        new_tokens = jnp.where(grant.granted, jnp.array([5, 3, 0, 9]), 0)
        batch = RaggedBatch.packed(table, new_tokens, size=17)
        y, pages = attention(x, pages, batch)  # x, y: [17, 64]
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        *,
        num_kv_heads: int | None = None,
        layer: int = 0,
        rotary: RotaryEmbedding | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        use_bias: bool = False,
        use_out_bias: bool | None = None,
        use_sinks: bool = False,
        query_norm: nnx.Module | None = None,
        key_norm: nnx.Module | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        """
        Args:
            num_heads: query heads.
            in_features: width of the input.
            qkv_features: num_heads * head_dim; `in_features` by default.
            out_features: width of the output; `in_features` by default.
            num_kv_heads: key and value heads, a divisor of `num_heads`; `num_heads` by default.
            layer: which layer of the `KVPages` is this module's.
            rotary: rotates queries and keys by their positions. None: no position embedding.
            scale: as in `paged_attention`.
            sliding_window: as in `paged_attention`.
            logits_soft_cap: as in `paged_attention`.
            use_bias: biases on query, key and value.
            use_out_bias: bias on the output; as `use_bias` by default.
            use_sinks: a learned sink logit per head.
            query_norm: applied to the heads of queries, over head_dim, before the rotation.
            key_norm: applied to the heads of keys, likewise.
            dtype: of the computation; by default that of input and parameters together.
            param_dtype: of the parameters.
            implementation: of `paged_attention`.

        Raises:
            ValueError: if the heads do not divide the features or each other.
        """
        qkv_features = in_features if qkv_features is None else qkv_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim_of(num_heads, num_kv_heads, qkv_features)
        self.in_features = in_features
        self.layer = layer
        self.rotary = rotary
        self.scale = scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.implementation = implementation

        def project(out_heads: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                in_features,
                (out_heads, self.head_dim),
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                rngs=rngs,
            )

        self.query, self.key, self.value = project(num_heads), project(num_kv_heads), project(num_kv_heads)
        self.out = nnx.LinearGeneral(
            (num_heads, self.head_dim),
            in_features if out_features is None else out_features,
            axis=(-2, -1),
            use_bias=use_bias if use_out_bias is None else use_out_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        self.query_norm = nnx.data(query_norm)
        self.key_norm = nnx.data(key_norm)
        self.sinks = nnx.data(nnx.Param(jnp.zeros(num_heads, param_dtype)) if use_sinks else None)

    @classmethod
    def from_multi_head_attention(
        cls: type[Self],
        attention: nnx.MultiHeadAttention,
        *,
        layer: int = 0,
        rotary: RotaryEmbedding | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        implementation: Implementation | None = None,
    ) -> Self:
        """A paged module on the parameters of a contiguous one, shared and not copied.

        It computes what `attention(x, mask=causal)` computes on the whole of each row, for any
        number of new tokens a call. Dropout is left out: this is for inference.

        Raises:
            ValueError: if the module attends other inputs than its own, or has its own attention function.
        """
        if attention.in_kv_features != attention.in_features:
            raise ValueError(
                "PagedAttention.from_multi_head_attention: needs self-attention, got "
                f"{attention.in_features=}, {attention.in_kv_features=}"
            )
        if attention.attention_fn is not nnx.dot_product_attention:
            raise ValueError(
                "PagedAttention.from_multi_head_attention: needs nnx.dot_product_attention as attention_fn, "
                f"got {attention.attention_fn!r}"
            )
        module = nnx.eval_shape(
            lambda: cls(
                attention.num_heads,
                attention.in_features,
                attention.qkv_features,
                attention.out_features,
                num_kv_heads=attention.key.kernel.shape[-2],
                layer=layer,
                rotary=rotary,
                sliding_window=sliding_window,
                logits_soft_cap=logits_soft_cap,
                implementation=implementation,
                rngs=nnx.Rngs(0),
            )
        )
        module.query, module.key, module.value = attention.query, attention.key, attention.value
        module.out = attention.out
        if attention.normalize_qk:
            module.query_norm, module.key_norm = nnx.data(attention.query_ln), nnx.data(attention.key_ln)
        return module

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
            ValueError: if `x` does not fit the module and the batch, or the pages do not fit the module.
        """
        check_input(x, batch, self.in_features)
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None:
            q = self.query_norm(q)
        if self.key_norm is not None:
            k = self.key_norm(k)
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
            sinks=None if self.sinks is None else self.sinks[...],
            implementation=self.implementation,
        )
        return self.out(out), pages


def head_dim_of(num_heads: int, num_kv_heads: int, qkv_features: int) -> int:
    """Width of a head; refuses numbers that do not divide each other."""
    if num_heads < 1 or qkv_features % num_heads:
        raise ValueError(
            f"PagedAttention: num_heads must divide qkv_features, got {num_heads=}, {qkv_features=}"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"PagedAttention: num_kv_heads must divide num_heads, got {num_heads=}, {num_kv_heads=}"
        )
    return qkv_features // num_heads


def check_input(x: Array, batch: RaggedBatch, in_features: int) -> None:
    """Refuses an input that is not one vector per token of the batch."""
    tokens = batch.rows.shape[0]
    if x.shape != (tokens, in_features):
        raise ValueError(
            f"PagedAttention: x must have shape [{tokens=}, {in_features=}], got {list(x.shape)}"
        )


def write_and_attend(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pages: KVPages,
    batch: RaggedBatch,
    *,
    layer: int,
    rotary: RotaryEmbedding | None,
    scale: float | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    sinks: Float[Array, " q_heads"] | None,
    implementation: Implementation | None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """What every paged attention module does between its projections: rotate, store, attend."""
    if not 0 <= layer < pages.num_layers:
        raise ValueError(f"PagedAttention: {layer=} is not among the {pages.num_layers} layers of the pages")
    pool = pages.k_pages[layer].shape
    if (batch.num_pages, batch.page_size) != (pool[0], pool[2]):
        raise ValueError(
            f"PagedAttention: the page table has {batch.num_pages} pages of {batch.page_size} tokens, "
            f"and the pool {pool[0]} of {pool[2]}; create both with the same sizes"
        )
    if rotary is not None:
        q, k = rotary(q, batch.positions), rotary(k, batch.positions)
    pages = pages.write(layer, k, v, batch.page_ids, batch.slots)
    out: Any = paged_attention(
        q,
        pages.k_pages[layer],
        pages.v_pages[layer],
        batch.block_tables,
        batch.lengths,
        batch.query_starts,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        k_scales=None if pages.k_scales is None else pages.k_scales[layer],
        v_scales=None if pages.v_scales is None else pages.v_scales[layer],
        implementation=implementation,
    )
    return out, pages
