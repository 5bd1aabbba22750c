"""Which dtype a computation on several dtypes runs in."""

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike


def wider(first: DTypeLike, second: DTypeLike) -> DTypeLike:
    """The dtype that holds both, also where the user has made implicit promotion an error."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(first, second)
