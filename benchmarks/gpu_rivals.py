"""What else there is for the same arrays: JAX's older kernel, cuDNN and torch on contiguous caches, XLA."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpu_decode import HEAD_DIM, KV_HEADS, Q_HEADS
from gpu_prefill import Prompts
from jax import Array, lax

from paged_jax.cli.tune import attend_repeatedly, iterations_for, time_calls
from paged_jax.testing import PagedInputs

AGREE = 0.02  # relative distance of two results, in norm: some roundings to bfloat16


class Task(NamedTuple):
    """Lengths and new tokens of all rows; query_lens None: decode."""

    lengths: tuple[int, ...]
    query_lens: tuple[int, ...] | None
    page_size: int = 16

    @property
    def decode(self) -> bool:
        return self.query_lens is None

    @property
    def prompts(self) -> Prompts:
        return Prompts(
            self.query_lens or (1,) * len(self.lengths), self.lengths, self.page_size, pool_bytes=0
        )

    @property
    def calls(self) -> int:
        """As many as take about 30 ms."""
        return iterations_for(self.prompts.bytes, self.prompts.operations)

    def draw(self, pool_bytes: int = 0) -> PagedInputs:
        inputs = self.prompts._replace(pool_bytes=pool_bytes).draw()
        return inputs._replace(query_starts=None) if self.decode else inputs

    def rate(self, seconds: float) -> dict[str, float]:
        """What bounds it: memory where it decodes, arithmetic where it takes up prompts."""
        if self.decode:
            return {"bytes_per_second": self.prompts.bytes / seconds}
        return {"operations_per_second": self.prompts.operations / seconds}


class Arrays(NamedTuple):
    """The same keys and values in pages and in one piece."""

    inputs: PagedInputs
    k: Array  # [rows, kv, kv_heads, head_dim]
    v: Array


def ragged(rows: int, kv: int) -> tuple[int, ...]:
    lengths = np.random.default_rng(rows).integers(1, kv, rows, endpoint=True)
    lengths[-1] = kv
    return tuple(lengths.tolist())


TASKS = {
    "decode 32 x 4096": Task((4096,) * 32, None),
    "decode 32 x 4096, pages of 64": Task((4096,) * 32, None, 64),
    "decode 32 x 4096, ragged": Task(ragged(32, 4096), None),
    "decode 256 x 4096": Task((4096,) * 256, None),
    "decode 1 x 131072": Task((131072,), None),
    "prefill 8192": Task((8192,), (8192,)),
    "prefill 32768": Task((32768,), (32768,)),
    "prefill 2048": Task((2048,), (2048,)),
}
SMALL_TASKS = {"decode 2 x 256": Task((256,) * 2, None), "prefill 24": Task((24,), (24,))}


def draw(task: Task) -> Arrays:
    inputs = task.draw()

    @jax.jit
    def in_one_piece(pool: Array, tables: Array) -> Array:
        pages = pool[tables].swapaxes(2, 3)  # [rows, pages, page_size, kv_heads, head_dim]
        return pages.reshape(tables.shape[0], -1, KV_HEADS, HEAD_DIM)

    k, v = (in_one_piece(pool, inputs.block_tables) for pool in (inputs.k_pages, inputs.v_pages))
    return Arrays(inputs, k, v)


Contender = Callable[[Task, Arrays, int], tuple[Callable[[], Any], Callable[[], Any]]]
"""Gives a run of so many calls, and a run that returns what one call gives, [tokens, q_heads, head_dim]."""


def ours(task: Task, arrays: Arrays, calls: int, *, implementation: str | None) -> Any:
    repeatedly = jax.jit(partial(attend_repeatedly, iterations=calls, implementation=implementation))
    return lambda: repeatedly(arrays.inputs), lambda: repeatedly(arrays.inputs)[0]


def in_a_loop(attend: Callable[..., Array], q: Array, *others: Array, calls: int) -> Any:
    """Each call on the output before as its queries, as `attend_repeatedly` does it."""

    @jax.jit
    def repeatedly(q: Array, *others: Array) -> Array:
        return lax.fori_loop(0, calls, lambda _, q: attend(q, *others), q)

    return lambda: repeatedly(q, *others), lambda: jax.jit(attend)(q, *others)


def jax_paged(task: Task, arrays: Arrays, calls: int) -> Any:
    """jax.experimental.pallas.ops.gpu, as it is called without choosing sizes."""
    if not task.decode:
        raise NotImplementedError("it only decodes")
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def attend(q: Array, k_pages: Array, v_pages: Array, tables: Array, lengths: Array) -> Array:
        # It does not scale the scores.
        scaled = q * jnp.asarray(HEAD_DIM**-0.5, q.dtype)
        return paged_attention(scaled, k_pages, v_pages, tables, lengths).astype(q.dtype)

    q, k_pages, v_pages, tables, lengths, _ = arrays.inputs
    k_pages, v_pages = (jnp.array(pages.swapaxes(0, 1)) for pages in (k_pages, v_pages))
    return in_a_loop(attend, q, k_pages, v_pages, tables, lengths, calls=calls)


def cudnn(task: Task, arrays: Arrays, calls: int) -> Any:
    """Through jax.nn, on contiguous keys and values."""
    rows, kv = arrays.k.shape[:2]
    uniform = all(length == kv for length in task.lengths)

    def attend(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        out = jax.nn.dot_product_attention(
            q.reshape(rows, -1, Q_HEADS, HEAD_DIM),
            k,
            v,
            is_causal=not task.decode,
            key_value_seq_lengths=None if uniform else lengths,
            implementation="cudnn",
        )
        return out.reshape(q.shape)

    return in_a_loop(attend, arrays.inputs.q, arrays.k, arrays.v, arrays.inputs.lengths, calls=calls)


def torch_flash(task: Task, arrays: Arrays, calls: int) -> Any:
    """scaled_dot_product_attention with its flash backend, on contiguous keys and values."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    rows, kv = arrays.k.shape[:2]
    if any(length != kv for length in task.lengths):
        raise NotImplementedError("it takes no lengths")
    q, k, v = (
        torch.from_dlpack(array).transpose(1, 2)
        for array in (arrays.inputs.q.reshape(rows, -1, Q_HEADS, HEAD_DIM), arrays.k, arrays.v)
    )

    def attend() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=not task.decode, enable_gqa=True
        )

    def run() -> None:
        with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for _ in range(calls):
                attend()
        torch.cuda.synchronize()

    def once() -> Any:
        with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend().transpose(1, 2).reshape(-1, Q_HEADS, HEAD_DIM).float().cpu()

    return run, once


class Rivals:
    """Each contender at each task, in one process, ours first."""

    name, seconds, patience = "rivals", 90.0, 75.0

    def __init__(self, small: bool):
        own = "xla" if small else "mosaic_hopper"
        self._tasks = SMALL_TASKS if small else TASKS
        self._contenders: dict[str, Contender] = {
            own: partial(ours, implementation=own),
            "cudnn": cudnn,
            "jax paged_attention": jax_paged,
            "torch flash": torch_flash,
        }
        if not small:
            self._contenders["xla"] = partial(ours, implementation="xla")
        self._drawn: tuple[str, Arrays] | None = None
        self._outputs: dict[str, np.ndarray] = {}  # of the first contender at each task

    @property
    def names(self) -> list[str]:
        return [f"{task}: {contender}" for task in self._tasks for contender in self._contenders]

    def prepare(self, names: Sequence[str], until: float) -> None:
        """Nothing: arrays are made as their task comes, for there is not memory for all of them."""

    def run(self, name: str) -> dict[str, Any]:
        task_name, contender = name.split(": ")
        task = self._tasks[task_name]
        calls = 2 if contender == "xla" else task.calls
        run, once = self._contenders[contender](task, self._arrays(task_name), calls)
        output = np.asarray(once(), np.float32)
        distance = self._distance(task_name, output)
        timing = time_calls(run, calls)
        return {
            "task": task_name,
            "contender": contender,
            "seconds": timing.median,
            "fastest": timing.fastest,
            "slowest": timing.slowest,
            **task.rate(timing.median),
            "distance": distance,
            "agrees": distance is not None and distance <= AGREE,
            "calls": calls,
        }

    def _arrays(self, task_name: str) -> Arrays:
        if self._drawn is None or self._drawn[0] != task_name:
            self._drawn = None
            self._drawn = task_name, jax.block_until_ready(draw(self._tasks[task_name]))
        return self._drawn[1]

    def _distance(self, task_name: str, output: np.ndarray) -> float | None:
        """From the first result for the task, relative to it."""
        expected = self._outputs.setdefault(task_name, output)
        return float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
