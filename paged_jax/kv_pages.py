"""What the pages hold: the keys and values of every layer, in a pool that is updated in place."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Int, Int32

from paged_jax.page_table import NO_PAGE
from paged_jax.under_jit import as_int32, check_sizes, once_if, or_nowhere


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """One pool of keys and one of values per layer; a page id means the same page in every layer.

    A (page, kv head) tile is contiguous. A slot that holds no live token may contain anything.
    Donate the whole of it to a jitted step (`donate_argnums`) and its updates happen in place.
    """

    k_pages: tuple[Float[Array, "num_pages kv_heads page_size head_dim"], ...]  # one per layer
    v_pages: tuple[Float[Array, "num_pages kv_heads page_size head_dim"], ...]
    k_scales: tuple[Float[Array, "num_pages kv_heads page_size"], ...] | None = None  # of quantised pages
    v_scales: tuple[Float[Array, "num_pages kv_heads page_size"], ...] | None = None

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
                and bfloat16 elsewhere.

        Raises:
            ValueError: if a size is not a positive integer, or the dtype is not a floating one.
        """
        shape = (num_pages, num_kv_heads, page_size, head_dim)
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
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"KVPages.create: dtype must be a floating type, got {dtype=}")

        # Every layer gets its own buffer: one array used twice could not be donated.
        def pools() -> tuple[Array, ...]:
            return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

        return cls(pools(), pools())

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
        return dataclasses.replace(
            self,
            k_pages=_replace(self.k_pages, layer, _write(self.k_pages[layer], k, page_ids, slots)),
            v_pages=_replace(self.v_pages, layer, _write(self.v_pages[layer], v, page_ids, slots)),
        )

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
        """A row's keys and values in the order of its tokens; zero from `length` on and in dropped pages."""
        length = as_int32("KVPages.gather", "length", length, ())
        slots = jnp.arange(self.page_size, dtype=jnp.int32)[None, :]
        first = jnp.arange(block_table.shape[0], dtype=jnp.int32)[:, None] * self.page_size
        live = (first + slots < length) & (block_table[:, None] != NO_PAGE)

        def read(pool: Array) -> Array:
            # [max_pages, page_size, kv_heads, head_dim]
            page = pool[jnp.maximum(block_table, 0)].swapaxes(1, 2)
            page = jnp.where(live[:, :, None, None], page, jnp.zeros_like(page))
            return page.reshape(-1, *page.shape[2:])

        return read(self.k_pages[layer]), read(self.v_pages[layer])


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


def _write(pool: Array, new: Array, page_ids: Array, slots: Array) -> Array:
    num_pages, kv_heads, page_size, _ = pool.shape
    page_ids, slots = or_nowhere(page_ids, num_pages)[:, None], or_nowhere(slots, page_size)[:, None]
    heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, :]
    return pool.at[page_ids, heads, slots].set(new.astype(pool.dtype), mode="drop")


def _replace(pools: tuple[Array, ...], layer: int, pool: Array) -> tuple[Array, ...]:
    return (*pools[:layer], pool, *pools[layer + 1 :])
