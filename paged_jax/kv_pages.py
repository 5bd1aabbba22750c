"""What the pages hold: the keys and values of every layer, in a pool that is updated in place."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Float32, Int, Int32, Shaped

from paged_jax.page_table import NO_PAGE
from paged_jax.under_jit import as_int32, check_sizes, once_if, or_nowhere

_QUANTISED = ("int8", "float8_e4m3fn")
_DTYPES = ("float64", "float32", "bfloat16", "float16", *_QUANTISED)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """One pool of keys and one of values per layer; a page id means the same page in every layer.

    A (page, kv head) tile is contiguous. A slot that holds no live token may contain anything.
    Donate the whole of it to a jitted step (`donate_argnums`) and its updates happen in place.

    Pages of int8 and float8_e4m3fn are quantised: each token has a float32 scale per kv head, for its
    keys and for its values, and what a page means is its numbers times their scales. `write` makes
    both; whatever reads the pages takes the scales beside them.
    """

    k_pages: tuple[Shaped[Array, "num_pages kv_heads page_size head_dim"], ...]  # one per layer
    v_pages: tuple[Shaped[Array, "num_pages kv_heads page_size head_dim"], ...]
    k_scales: tuple[Float32[Array, "num_pages kv_heads page_size"], ...] | None = None  # of quantised pages
    v_scales: tuple[Float32[Array, "num_pages kv_heads page_size"], ...] | None = None

    @classmethod
    def create(
        cls,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: DTypeLike | None = None,
    ) -> "KVPages":
        """Pools of zeros.

        Args:
            dtype: of the stored keys and values. By default float32 on CPU, where bfloat16 is slow,
                and bfloat16 elsewhere. int8 and float8_e4m3fn come with scales: a token then takes
                head_dim + 4 bytes per kv head, twice. On CPU take int8: XLA converts the whole pool
                for every step that touches float8.

        Raises:
            ValueError: if a size is not a positive integer, or pages cannot have the dtype.
        """
        check_sizes(
            "KVPages.create",
            num_layers=num_layers,
            num_pages=num_pages,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            head_dim=head_dim,
        )
        if dtype is None:
            dtype = default_dtype()
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
        if name not in _DTYPES:
            raise ValueError(f"KVPages.create: dtype must be one of {', '.join(_DTYPES)}, got {name}")

        # Every layer gets its own buffer: one array used twice could not be donated.
        def pools(*shape: int, dtype: DTypeLike) -> tuple[Array, ...]:
            return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

        shape = (num_pages, num_kv_heads, page_size)
        pages = partial(pools, *shape, head_dim, dtype=dtype)
        if name not in _QUANTISED:
            return cls(pages(), pages())
        scales = partial(pools, *shape, dtype=jnp.float32)
        return cls(pages(), pages(), scales(), scales())

    @property
    def num_layers(self) -> int:
        return len(self.k_pages)

    @property
    def page_size(self) -> int:
        return self.k_pages[0].shape[2]

    def write(
        self,
        layer: int,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        page_ids: Int32[Array, " tokens"],
        slots: Int32[Array, " tokens"],
    ) -> "KVPages":
        """Stores one step's keys and values of a layer, cast to the dtype of the pages.

        Quantised, the largest number of a token's head becomes the largest that the dtype has (127 in
        int8, 448 in float8), and the others are rounded to nearest even. A head of zeros stays zero, and
        one that holds NaN or infinity is read back as NaN.

        A token whose page id is NO_PAGE is padding and is not stored, nor is any whose page id or slot
        lies outside the pool.

        Raises:
            ValueError: if there is no such layer, or a shape does not fit the pages.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"KVPages.write: layer must be in [0, {self.num_layers}), got {layer=}")
        _, kv_heads, _, head_dim = self.k_pages[layer].shape
        tokens = page_ids.size
        for name, array, shape in (
            ("page_ids", page_ids, (tokens,)),
            ("k", k, (tokens, kv_heads, head_dim)),
            ("v", v, (tokens, kv_heads, head_dim)),
            ("slots", slots, (tokens,)),
        ):
            if array.shape != shape:
                raise ValueError(
                    f"KVPages.write: {name} must have shape {list(shape)} for {tokens} page ids and pages of "
                    f"shape {list(self.k_pages[layer].shape)}, got {list(array.shape)}"
                )
        page_ids = as_int32("KVPages.write", "page_ids", page_ids, (tokens,))
        slots = as_int32("KVPages.write", "slots", slots, (tokens,))
        new = {"k_pages": k, "v_pages": v}
        if self.k_scales is not None:
            new["k_pages"], new["k_scales"] = quantise(k, self.k_pages[layer].dtype)
            new["v_pages"], new["v_scales"] = quantise(v, self.v_pages[layer].dtype)
        written = {}
        for name, array in new.items():
            pools = getattr(self, name)
            pool = _write(pools[layer], array, page_ids, slots)
            written[name] = (*pools[:layer], pool, *pools[layer + 1 :])
        return dataclasses.replace(self, **written)

    def copy(self, copies: Int[ArrayLike, "copies 2"]) -> "KVPages":
        """Copies whole pages of every layer: (source, destination) pairs of page ids, NO_PAGE for none.

        Carries out the copy on write that `page_table.extend` asks for, scales included.

        Raises:
            ValueError: if `copies` is not an integer array of shape [any, 2].
        """
        return _copy(self, as_int32("KVPages.copy", "copies", copies, (None, 2)))

    def gather(
        self, layer: int, block_table: Int32[Array, " max_pages_per_row"], length: Int[ArrayLike, ""]
    ) -> tuple[
        Float[Array, "max_tokens_per_row kv_heads head_dim"],
        Float[Array, "max_tokens_per_row kv_heads head_dim"],
    ]:
        """A row's keys and values in the order of its tokens; zero from `length` on and in dropped pages.

        In the dtype of the pages; of quantised pages what they mean, float32.
        """
        length = as_int32("KVPages.gather", "length", length, ())
        slots = jnp.arange(self.page_size, dtype=jnp.int32)[None, :]
        first = jnp.arange(block_table.shape[0], dtype=jnp.int32)[:, None] * self.page_size
        live = (first + slots < length) & (block_table[:, None] != NO_PAGE)

        def read(pools: tuple[Array, ...], scales: tuple[Array, ...] | None) -> Array:
            page_ids = jnp.maximum(block_table, 0)
            page = pools[layer][page_ids]  # [max_pages, kv_heads, page_size, head_dim]
            if scales is not None:
                page = page.astype(jnp.float32) * scales[layer][page_ids][..., None]
            page = jnp.where(live[:, None, :, None], page, jnp.zeros_like(page)).swapaxes(1, 2)
            return page.reshape(-1, *page.shape[2:])

        return read(self.k_pages, self.k_scales), read(self.v_pages, self.v_scales)


def default_dtype() -> DTypeLike:
    """float32 on CPU, bfloat16 on anything else."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


@jax.jit
def _copy(pages: KVPages, copies: Int32[Array, "copies 2"]) -> KVPages:
    wanted = copies[:, 1] != NO_PAGE

    def copy_pool(pool: Array) -> Array:
        source = pool[jnp.where(wanted, copies[:, 0], 0)]
        return pool.at[or_nowhere(copies[:, 1], pool.shape[0])].set(source, mode="drop")

    return once_if(jnp.any(wanted), lambda pages: jax.tree.map(copy_pool, pages), pages)


def quantise(
    x: Float[Array, "tokens kv_heads head_dim"], dtype: DTypeLike
) -> tuple[Shaped[Array, "tokens kv_heads head_dim"], Float32[Array, "tokens kv_heads"]]:
    """Numbers of int8 or float8_e4m3fn, and their scale for each token and head: symmetric, no zero point."""
    limit = float(jnp.finfo(dtype).max if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max)
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    # Never 0; and so large that no step, of 2**-9 scales in float8, is lost where subnormals are taken for 0.
    scales = jnp.maximum(largest / limit, 2**10 * jnp.finfo(jnp.float32).tiny)
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.nan)
    # What the division leaves just above the limit is rounded to it, in float8 too.
    values = x / scales[..., None]
    return (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype), scales


def _write(pool: Array, new: Array, page_ids: Array, slots: Array) -> Array:
    num_pages, kv_heads, page_size = pool.shape[:3]
    page_ids, slots = or_nowhere(page_ids, num_pages)[:, None], or_nowhere(slots, page_size)[:, None]
    heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, :]
    return pool.at[page_ids, heads, slots].set(new.astype(pool.dtype), mode="drop")
