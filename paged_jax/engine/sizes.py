"""How large an engine is: its arguments checked, and the pool measured against the memory there is."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.capacity import (
    check_memory,
    memory_budget,
    pages_for,
    pages_in_budget,
    parse_size,
    physical_memory,
    reported_free_memory,
)
from paged_jax.engine.scheduler import Limits
from paged_jax.engine.steps import EngineModel
from paged_jax.under_jit import check_sizes, power_of_two


def limits_of(
    model: EngineModel,
    *,
    max_rows: int,
    max_length: int | None,
    page_size: int,
    num_pages: int | None,
    memory: str | int | float | None,
    dtype: DTypeLike | None,
    step_tokens: int | Sequence[int],
    steps_per_visit: int,
    draft_tokens: int,
) -> Limits:
    """The limits that the arguments of `Engine` stand for.

    Raises:
        ValueError: for sizes that do not fit together, and for more memory than there is.
    """
    max_length = model.max_length if max_length is None else max_length
    check_sizes(
        "Engine",
        max_rows=max_rows,
        max_length=max_length,
        page_size=page_size,
        steps_per_visit=steps_per_visit,
    )
    sizes = _step_sizes(step_tokens, max_rows)
    if not isinstance(draft_tokens, int) or isinstance(draft_tokens, bool) or draft_tokens < 0:
        raise ValueError(f"Engine: draft_tokens must be a whole number of at least 0, got {draft_tokens!r}")
    if max_length > model.max_length:
        raise ValueError(
            f"Engine: the model was made for rows of {model.max_length} tokens, got {max_length=}"
        )
    if sizes[-1] <= max_rows:
        raise ValueError(
            "Engine: a step must have room for one token of every row and some of a prompt, got "
            f"{step_tokens=} for {max_rows=}"
        )
    if num_pages is not None and memory is not None:
        raise ValueError(f"Engine: give num_pages or memory, not both; got {num_pages=}, {memory=}")
    page_bytes = _bytes_per_page(model, page_size, dtype)
    if num_pages is None:
        num_pages = _pages_in(memory, page_bytes, page_size, max_rows, pages_for(max_length, page_size))
    check_sizes("Engine", num_pages=num_pages)
    check_memory(num_pages * page_bytes, jax.devices()[0])
    return Limits(
        max_rows=max_rows,
        num_pages=num_pages,
        page_size=page_size,
        max_length=max_length,
        # Larger ones would never be filled, and they are sizes of arrays.
        sizes=tuple(sorted({min(size, max_rows * max_length) for size in sizes})),
        steps_per_visit=min(steps_per_visit, max_length),
        draft_tokens=draft_tokens,
        window=model.sliding_window,
    )


def _step_sizes(step_tokens: int | Sequence[int], max_rows: int) -> tuple[int, ...]:
    """In ascending order; one number gets a small one beside it where it is much larger than the rows."""
    if isinstance(step_tokens, Sequence):
        sizes = tuple(step_tokens)
    else:
        check_sizes("Engine", step_tokens=step_tokens)
        small = power_of_two(2 * max_rows)
        sizes = (small, step_tokens) if 4 * small <= step_tokens else (step_tokens,)
    for size in sizes or (0,):
        check_sizes("Engine", step_tokens=size)
    return tuple(sorted(sizes))


def _bytes_per_page(model: EngineModel, page_size: int, dtype: DTypeLike | None) -> int:
    """Of all layers together, scales included."""
    pages = jax.eval_shape(lambda: model.create_pages(1, page_size, dtype))
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(pages))


def _pages_in(
    memory: str | int | float | None, page_bytes: int, page_size: int, max_rows: int, max_pages_per_row: int
) -> int:
    """How many pages `Engine` makes of its argument `memory`.

    Raises:
        ValueError: if it is no size, or does not hold one row.
    """
    device = jax.devices()[0]
    if memory is None and reported_free_memory(device) is None:
        enough = max_rows * max_pages_per_row
        machine = physical_memory()
        return enough if machine is None else min(enough, max(max_pages_per_row, machine // 4 // page_bytes))
    if isinstance(memory, str):
        budget = parse_size(memory)
    elif isinstance(memory, float) or memory is None:
        budget = memory_budget(0.9 if memory is None else memory, device)
    else:
        budget = memory
    return pages_in_budget(budget, page_bytes // page_size, page_size, max_rows, max_pages_per_row)
