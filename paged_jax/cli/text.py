"""Text from a loaded model: prompts are encoded, rows advance a few tokens a call, text comes out."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.capacity import TokenShape, check_memory, pages_for, pages_in_budget
from paged_jax.generate import Completion, Generation, completions, enough_pages, finished, run, start
from paged_jax.kv_pages import default_dtype
from paged_jax.models import Loaded, Tokenizer
from paged_jax.sampling import Sampling

_STEPS_PER_CALL = 4


@dataclass(frozen=True)
class TextCompletion:
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # None: interrupted


@dataclass(frozen=True)
class Usage:
    """What a run took. Slots are places for one token's keys and values in all layers."""

    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    seconds: float  # without compiling
    page_size: int
    num_pages: int
    peak_pages: int  # in use at once
    used_slots: int
    wasted_slots: int  # in the last pages of the rows, at the end of each
    contiguous_slots: int  # that a cache reserves which gives every row the most that any of them may need
    context_slots: int  # and one that gives every row the model's whole context
    bytes_per_token: int

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes": self.peak_pages * self.page_size * self.bytes_per_token,
            "contiguous_bytes": self.contiguous_slots * self.bytes_per_token,
            "context_bytes": self.context_slots * self.bytes_per_token,
        }


class TextGeneration:
    """One run over several prompts, to be iterated: every item is the new text of each row, in order.

    Stopping early is fine: `completions` and `usage` tell what there is so far.

    Raises:
        ValueError: for a prompt that is empty or does not fit the model's context, a model without a
            tokenizer or chat template, or a pool that cannot hold one of the prompts.
    """

    def __init__(
        self,
        loaded: Loaded,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        chat: bool = False,
        sampling: Sampling,
        page_size: int = 16,
        num_pages: int | None = None,
        pool_bytes: int | None = None,
    ):
        if loaded.tokenizer is None:
            raise ValueError(
                f"{loaded.name} comes without a tokenizer (tokenizer.json), so it cannot take text"
            )
        self.tokenizer = loaded.tokenizer
        self.model = loaded.model
        self.prompts = tuple(prompts)
        config = self.model.config
        if "" in prompts:
            raise ValueError("a prompt is empty: give it at least one character")
        ids = [_encode(self.tokenizer, prompt, chat) for prompt in prompts]
        for prompt, prompt_ids in zip(prompts, ids, strict=True):
            if len(prompt_ids) >= config.max_length:
                raise ValueError(
                    f"a prompt is longer than the model's context: {len(prompt_ids)} tokens leave no room "
                    f"for a new one in {config.max_length}; it begins with {prompt[:40]!r}"
                )
        limits = [min(max_new_tokens, config.max_length - len(prompt_ids)) for prompt_ids in ids]
        max_tokens = [len(prompt_ids) + limit for prompt_ids, limit in zip(ids, limits, strict=True)]
        longest = max(max_tokens)
        dtype = jnp.dtype(default_dtype())
        shape = TokenShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype.itemsize)
        if pool_bytes is not None:
            row_pages = pages_for(longest, page_size)
            num_pages = pages_in_budget(pool_bytes, shape.num_bytes, page_size, len(ids), row_pages)
        elif num_pages is None:
            num_pages = enough_pages(max_tokens, page_size)
        check_memory(num_pages * page_size * shape.num_bytes, jax.devices()[0])
        self._contiguous_slots = len(ids) * longest
        self._bytes_per_token = shape.num_bytes
        self._seconds = self._compile_seconds = 0.0
        self.state: Generation = start(
            self.model,
            ids,
            max_new_tokens=limits,
            stop_token_ids=self.tokenizer.eos_token_ids,
            sampling=sampling,
            page_size=page_size,
            num_pages=num_pages,
            dtype=dtype,
        )

    def compile(self) -> None:
        """Compiles the loop, by running no step of it."""
        began = time.perf_counter()
        self.state = run(self.model, self.state, 0)
        jax.block_until_ready(self.state)
        self._compile_seconds = time.perf_counter() - began

    def __iter__(self) -> Iterator[list[str]]:
        streams = [self.tokenizer.stream() for _ in self.prompts]
        shown = [0] * len(self.prompts)
        while not finished(self.state):
            began = time.perf_counter()
            self.state = run(self.model, self.state, _STEPS_PER_CALL)
            jax.block_until_ready(self.state)
            self._seconds += time.perf_counter() - began
            pieces = []
            for row, completion in enumerate(completions(self.state)):
                new = completion.token_ids[shown[row] :]
                shown[row] += len(new)
                pieces.append("".join(streams[row].push(token) for token in new))
            yield pieces
        yield [stream.flush() for stream in streams]

    def completions(self) -> list[TextCompletion]:
        return [
            TextCompletion(prompt, self.tokenizer.decode(row.token_ids), row.token_ids, row.finish_reason)
            for prompt, row in zip(self.prompts, completions(self.state), strict=True)
        ]

    def usage(self) -> Usage:
        table = self.state.table
        rows = completions(self.state)
        stored = [_stored_tokens(row) for row in rows]
        return Usage(
            prompt_tokens=sum(len(row.prompt_ids) for row in rows),
            new_tokens=sum(len(row.token_ids) for row in rows),
            compile_seconds=self._compile_seconds,
            seconds=self._seconds,
            page_size=table.page_size,
            num_pages=table.num_pages,
            peak_pages=table.num_pages - int(self.state.least_free),
            used_slots=sum(stored),
            wasted_slots=sum(-n % table.page_size for n in stored),
            contiguous_slots=self._contiguous_slots,
            context_slots=len(rows) * self.model.config.max_length,
            bytes_per_token=self._bytes_per_token,
        )


def _encode(tokenizer: Tokenizer, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer.encode(prompt)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(rendered, add_special_tokens=False)


def _stored_tokens(row: Completion) -> int:
    """A row's last token is never fed back, so its keys and values take no slot."""
    return len(row.prompt_ids) + max(0, len(row.token_ids) - 1)
