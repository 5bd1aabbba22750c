"""Arguments, indices and control flow that stay right under jit; used by every file of the core."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Int32

State = TypeVar("State")


def as_int32(
    function: str, name: str, value: ArrayLike, shape: tuple[int | None, ...]
) -> Int32[Array, "..."]:
    """Checks an integer argument; None in `shape` takes any size. Wider types saturate, so nothing wraps."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    fits = len(array.shape) == len(shape) and all(
        s in (None, a) for a, s in zip(array.shape, shape, strict=True)
    )
    if not jnp.issubdtype(array.dtype, jnp.integer) or not fits:
        expected = "[" + ", ".join("any" if s is None else str(s) for s in shape) + "]"
        raise ValueError(
            f"{function}: {name} must be an integer array of shape {expected}, "
            f"got {array.dtype} {list(array.shape)}"
        )
    limits, own = jnp.iinfo(jnp.int32), jnp.iinfo(array.dtype)
    if own.max > limits.max:
        array = array.clip(max(limits.min, own.min), limits.max)
    return jnp.asarray(array, jnp.int32)


def check_sizes(function: str, **sizes: int) -> None:
    """Refuses whatever is not a positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{function}: {name} must be a positive integer, got {name}={size!r}")


def power_of_two(n: int) -> int:
    """The smallest of at least n: sizes that are rounded up share their compiled programs."""
    return 1 << max(0, n - 1).bit_length()


def require_now(valid: Bool[Array, ""], message: Callable[[], str]) -> None:
    """Raises where the values are known; a traced call cannot, and is made to change nothing instead."""
    if not isinstance(valid, jax.core.Tracer) and not valid:
        raise ValueError(message())


def or_nowhere(indices: Int32[Array, "..."], size: int) -> Int32[Array, "..."]:
    """Sends negative indices past the high end, where a scatter drops them; else they would wrap around."""
    return jnp.where(indices < 0, size, indices)


def once_if(condition: Bool[Array, ""], transition: Callable[[State], State], state: State) -> State:
    """`transition(state)` where the condition holds, in place.

    As a loop that runs at most once, because `lax.cond` copies the pool-sized arrays it passes through.
    """
    return lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros_like(carry[0]), transition(carry[1])),
        (condition, state),
    )[1]
