"""What callers ask for and what they get back. No jax: plain Python values."""

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal, NamedTuple

from paged_jax.engine.prefix_index import Chain
from paged_jax.engine.text import TextWriter

_FLOAT32_MAX, _FLOAT32_TINY = 2.0**128 - 2.0**104, 2.0**-126
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How a request is continued, and when it ends.

    Attributes:
        max_tokens: new tokens, at most.
        temperature: 0 takes the likeliest token. See `Sampling.create` for this and the next six.
        seed: of the draws, in [0, 2**32); sample i of a request draws with seed + i. None: the engine
            chooses, another one for every request. A seeded request continues equally in any company.
        stop_token_ids: end the text, beside the tokenizer's own end tokens.
        stop: texts, or sequences of token ids, that end it. The earliest match in what was written ends
            the text just before it; `token_ids` end with the token that completed it. The prompt does not
            count.
        ignore_eos: go on after the tokenizer's end tokens.
        n: samples of the prompt. They share its pages.
        logprobs: return the model's log-probability of every new token, before penalties and temperature.

    Raises:
        ValueError: for a setting outside its range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str | tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: bool = False

    def __post_init__(self) -> None:
        self._keep("stop", self._stops())
        if (stop_token_ids := _token_ids(self.stop_token_ids)) is None:
            raise ValueError(
                f"SamplingParams: stop_token_ids must be a sequence of token ids, got {self.stop_token_ids!r}"
            )
        self._keep("stop_token_ids", stop_token_ids)
        whole = {"max_tokens": (1, 2**31), "top_k": (0, 2**31), "n": (1, 2**16)}
        if self.seed is not None:
            whole["seed"] = (0, 2**32)
        for name, (low, high) in whole.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) < high:
                raise ValueError(
                    f"SamplingParams: {name} must be a whole number in [{low}, {high}), got {value!r}"
                )
            self._keep(name, int(value))
        numbers: dict[str, tuple[Callable[[float], bool], str]] = {
            "temperature": (lambda x: x >= 0, "at least 0"),
            "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
            "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]"),
            "repetition_penalty": (lambda x: x >= _FLOAT32_TINY, "greater than 0"),
            "presence_penalty": (math.isfinite, "finite"),
            "frequency_penalty": (math.isfinite, "finite"),
        }
        for name, (in_range, wanted) in numbers.items():
            value = getattr(self, name)
            number = float(value) if isinstance(value, Real) else math.nan
            if not math.isfinite(number) or not in_range(number):
                raise ValueError(f"SamplingParams: {name} must be {wanted}, got {value!r}")
            if abs(number) > _FLOAT32_MAX:
                raise ValueError(f"SamplingParams: {name} must fit a float32, got {value!r}")
            self._keep(name, number)

    def _keep(self, name: str, value: object) -> None:
        """Plain Python values in place of what was given, such as numpy's numbers or an iterator."""
        object.__setattr__(self, name, value)

    def _stops(self) -> tuple[str | tuple[int, ...], ...]:
        given = (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop)
        stops = [stop if isinstance(stop, str) else _token_ids(stop) for stop in given or ()]
        if given is None or not all(stops):
            raise ValueError(
                "SamplingParams: stop must hold texts or sequences of token ids, none of them empty, "
                f"got {self.stop!r}"
            )
        return tuple(stop for stop in stops if stop)


def _as_tuple(values: object) -> tuple[object, ...] | None:
    """None for what is no collection of values, such as a number or bytes."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None


def _token_ids(values: object) -> tuple[int, ...] | None:
    """None for what is no sequence of token ids."""
    tokens = _as_tuple(values)
    if tokens is None:
        return None
    ids = tuple(int(token) if isinstance(token, Integral) else -1 for token in tokens)
    return ids if all(0 <= token < 2**31 for token in ids) else None


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt.

    `finish_reason` is "stop" after a stop token, text or sequence, "length" at `max_tokens`, "abort" for a
    request that was taken back, and None while it is being written. `text` is None without a tokenizer; a
    stop is not part of it. `token_ids` hold everything up to the token that ended the text.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason | None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What became of a request: `SamplingParams.n` completions of its prompt."""

    request_id: str
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str | None:
        """Of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first completion."""
        return self.completions[0].token_ids

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)


@dataclass(frozen=True)
class Delta:
    """What a visit has added to one completion of a request."""

    request_id: str
    index: int  # which of the request's n completions
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason | None  # set in a completion's last delta, and there only


@dataclass(eq=False)
class Sequence:
    """One completion on its way: the engine's own record, in the queue or in a row."""

    request_id: str
    index: int
    arrival: int  # first come, first served
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    namespace: str
    max_tokens: int  # where it ends at the latest, the prompt included
    stop_token_ids: tuple[int, ...]
    writer: TextWriter
    token_ids: list[int] = field(default_factory=list)  # the new ones
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    row: int | None = None
    length: int = 0  # tokens whose keys and values are in pages
    first_kept: int = 0  # tokens before it have left a sliding window and their pages
    shares_tail: bool = False  # its partly filled last page may have another holder
    chain: Chain | None = None  # the pages of it that the prefix index knows

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def wanted(self) -> int:
        """Known tokens that are not yet in pages: one for a row that decodes."""
        return self.num_tokens - self.length

    def leave_row(self) -> None:
        """What is in pages is given up; what is known stays."""
        self.row = self.chain = None
        self.length = self.first_kept = 0
        self.shares_tail = False

    def completion(self) -> Completion:
        return Completion(
            token_ids=tuple(self.token_ids),
            text=self.writer.text if self.writer.has_text else None,
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs) if self.params.logprobs else None,
        )

    def tokens(self) -> Seq[int]:
        return (*self.prompt_ids, *self.token_ids)


class News(NamedTuple):
    """What a visit has brought for one sequence."""

    job: Sequence
    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: FinishReason | None
