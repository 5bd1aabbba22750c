"""From JAX's paged attention kernel for GPU, deprecated since jax 0.11, to this package."""

from jaxtyping import Array, Shaped


def convert_pages(
    k_pages: Shaped[Array, "kv_heads num_pages page_size *head_dim"],
    v_pages: Shaped[Array, "kv_heads num_pages page_size *head_dim"],
) -> tuple[
    Shaped[Array, "num_pages kv_heads page_size *head_dim"],
    Shaped[Array, "num_pages kv_heads page_size *head_dim"],
]:
    """One layer's pages, or their scales, from the layout of `jax.experimental.pallas.ops.gpu`.

    In its `paged_attention` all pages of a kv head lie together, here all kv heads of a page. Page ids,
    block tables and lengths stay as they are. Makes copies: convert a running cache once, not in every step.

    Raises:
        ValueError: if the two are not arrays of one shape with these axes.
    """
    if k_pages.ndim not in (3, 4) or v_pages.shape != k_pages.shape:
        raise ValueError(
            "convert_pages: k_pages and v_pages must have one shape, "
            "[kv_heads, num_pages, page_size, head_dim] or, as scales, [kv_heads, num_pages, page_size], "
            f"got {k_pages.shape=}, {v_pages.shape=}"
        )
    return k_pages.swapaxes(0, 1), v_pages.swapaxes(0, 1)
