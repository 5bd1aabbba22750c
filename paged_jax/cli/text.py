"""Text from a loaded model: prompts are encoded, the engine writes a few tokens a visit, text comes out."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.capacity import TokenShape, check_memory, pages_for, pages_in_budget
from paged_jax.engine import Engine, SamplingParams
from paged_jax.kv_pages import default_dtype
from paged_jax.models import Loaded, Tokenizer
from paged_jax.under_jit import power_of_two

_ROWS = (1, 4, 16)
_STEP_TOKENS = (32, 256)
_MIN_PAGES = 64


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
    """One run over several prompts, to be iterated: every item is the new text of each prompt, in order.

    Stopping early is fine: `completions` and `usage` tell what there is so far.

    Raises:
        ValueError: for a prompt that is empty or does not fit the model's context, a model without a
            tokenizer or chat template, or a pool that cannot hold one of the prompts.
    """

    def __init__(
        self,
        loaded: Loaded,
        prompts: Sequence[str],
        params: SamplingParams,
        *,
        chat: bool = False,
        page_size: int = 16,
        num_pages: int | None = None,
        pool_bytes: int | None = None,
    ):
        if loaded.tokenizer is None:
            raise ValueError(
                f"{loaded.name} comes without a tokenizer (tokenizer.json), so it cannot take text"
            )
        self.tokenizer = loaded.tokenizer
        self.prompts = tuple(prompts)
        config = loaded.model.config
        if "" in prompts:
            raise ValueError("a prompt is empty: give it at least one character")
        self._ids = [_encode(self.tokenizer, prompt, chat) for prompt in prompts]
        for prompt, prompt_ids in zip(prompts, self._ids, strict=True):
            if len(prompt_ids) >= config.max_length:
                raise ValueError(
                    f"a prompt is longer than the model's context: {len(prompt_ids)} tokens leave no room "
                    f"for a new one in {config.max_length}; it begins with {prompt[:40]!r}"
                )
        limits = [min(params.max_tokens, config.max_length - len(prompt_ids)) for prompt_ids in self._ids]
        max_tokens = [len(prompt_ids) + limit for prompt_ids, limit in zip(self._ids, limits, strict=True)]
        longest = max(max_tokens)
        width = max(_MIN_PAGES, power_of_two(pages_for(longest, page_size)))
        dtype = jnp.dtype(default_dtype())
        shape = TokenShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype.name)
        # Few sizes, so that most prompts find their programs compiled.
        max_rows = next(rows for rows in _ROWS if rows >= min(len(prompts), _ROWS[-1]))
        step_tokens = next(
            size for size in _STEP_TOKENS if size >= min(sum(map(len, self._ids)), _STEP_TOKENS[-1])
        )
        if pool_bytes is not None:
            row_pages = pages_for(longest, page_size)
            num_pages = pages_in_budget(pool_bytes, shape.num_bytes, page_size, max_rows, row_pages)
        elif num_pages is None:
            num_pages = max(_MIN_PAGES, power_of_two(sum(pages_for(n, page_size) for n in max_tokens)))
        check_memory(num_pages * page_size * shape.num_bytes, jax.devices()[0])
        self.engine = Engine(
            loaded.model,
            self.tokenizer,
            max_rows=max_rows,
            max_length=min(config.max_length, page_size * width),
            page_size=page_size,
            num_pages=num_pages,
            dtype=dtype,
            step_tokens=(step_tokens,),
            steps_per_visit=4,
        )
        self._contiguous_slots = len(prompts) * longest
        self._context_slots = len(prompts) * config.max_length
        self._bytes_per_token = shape.num_bytes
        self._compile_seconds = 0.0
        self._texts = ["" for _ in prompts]
        self._tokens: list[tuple[int, ...]] = [() for _ in prompts]
        self._reasons: list[str | None] = [None for _ in prompts]
        self._rows = {
            self.engine.submit(prompt_ids, dataclasses.replace(params, max_tokens=limit)): row
            for row, (prompt_ids, limit) in enumerate(zip(self._ids, limits, strict=True))
        }

    def compile(self) -> None:
        """Compiles what is going to run."""
        began = time.perf_counter()
        self.engine.warmup(progress=False)
        self._compile_seconds = time.perf_counter() - began

    def __iter__(self) -> Iterator[list[str]]:
        while self.engine.has_work:
            pieces = ["" for _ in self.prompts]
            for delta in self.engine.step():
                row = self._rows[delta.request_id]
                pieces[row] += delta.text or ""
                self._tokens[row] += delta.token_ids
                self._reasons[row] = delta.finish_reason
            self._texts = [text + piece for text, piece in zip(self._texts, pieces, strict=True)]
            yield pieces

    def completions(self) -> list[TextCompletion]:
        return [
            TextCompletion(*row)
            for row in zip(self.prompts, self._texts, self._tokens, self._reasons, strict=True)
        ]

    def usage(self) -> Usage:
        metrics = self.engine.metrics
        page_size = self.engine.page_size
        # A row's last token is never fed back, so its keys and values take no slot.
        stored = [
            len(prompt_ids) + max(0, len(tokens) - 1)
            for prompt_ids, tokens in zip(self._ids, self._tokens, strict=True)
        ]
        return Usage(
            prompt_tokens=sum(map(len, self._ids)),
            new_tokens=metrics.new_tokens,
            compile_seconds=self._compile_seconds,
            seconds=metrics.seconds,
            page_size=page_size,
            num_pages=metrics.pages,
            peak_pages=metrics.peak_pages,
            used_slots=sum(stored),
            wasted_slots=sum(-n % page_size for n in stored),
            contiguous_slots=self._contiguous_slots,
            context_slots=self._context_slots,
            bytes_per_token=self._bytes_per_token,
        )


def _encode(tokenizer: Tokenizer, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer.encode(prompt)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(rendered, add_special_tokens=False)
