"""The text of one completion while it is written, and where a stop ends it."""

import copy
from collections.abc import Sequence
from typing import Protocol


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class TextWriter:
    """Takes new tokens, gives out text, and keeps back what may turn out to belong to a stop.

    Args:
        stream: turns token ids into text (`Tokenizer.stream()`); None where there is no tokenizer.
        stops: texts and sequences of token ids. The first to be completed counts, and of several that one
            token completes the one that begins first.
    """

    def __init__(self, stream: _Stream | None, stops: Sequence[str | tuple[int, ...]]):
        self._stream = stream
        self._texts = tuple(stop for stop in stops if isinstance(stop, str))
        self._sequences = tuple(stop for stop in stops if not isinstance(stop, str))
        self._tokens: list[int] = []  # the latest ones, as many as the longest sequence has
        self._starts: list[int] = []  # and where the text of each begins
        self._text = ""
        self._given = 0

    def copy(self) -> "TextWriter":
        """One that goes on from here and leaves this one as it is."""
        writer = copy.copy(self)
        writer._stream = copy.copy(self._stream)
        return writer

    @property
    def has_text(self) -> bool:
        return self._stream is not None

    @property
    def text(self) -> str:
        """What `push` and `finish` have given out so far."""
        return self._text[: self._given]

    def push(self, token_ids: Sequence[int]) -> tuple[int, str, bool]:
        """Reads tokens up to the one that completes a stop.

        Returns:
            How many were read, the text that is certain by now, and whether a stop was completed.
        """
        longest = max(map(len, self._sequences), default=0)
        for index, token in enumerate(token_ids):
            self._starts = [*self._starts, len(self._text)][-longest:] if longest else []
            self._tokens = [*self._tokens, token][-longest:] if longest else []
            searched = len(self._text)
            if self._stream is not None:
                self._text += self._stream.push(token)
            ends = [
                self._starts[-len(stop)]
                for stop in self._sequences
                if tuple(self._tokens[-len(stop) :]) == stop
            ]
            if ends := ends + self._find_texts(searched):
                self._text = self._text[: min(ends)]
                return index + 1, self._give(len(self._text)), True
        return len(token_ids), self._give(self._certain()), False

    def finish(self, end_token: int | None = None) -> tuple[str, bool]:
        """The rest of the text, when no stop has ended it, and whether one has come with it.

        Args:
            end_token: has just ended it by itself. It is no part of the text, but may complete a sequence.
        """
        searched = len(self._text)
        if self._stream is not None:
            self._text += self._stream.flush()
        tokens = (*self._tokens, end_token)
        starts = (*self._starts, len(self._text))
        ends = [starts[-len(stop)] for stop in self._sequences if tokens[-len(stop) :] == stop]
        ends += self._find_texts(searched)
        return self._give(min(ends, default=len(self._text))), bool(ends)

    def _find_texts(self, searched: int) -> list[int]:
        """Where stops begin that end behind the first `searched` characters."""
        found = [self._text.find(stop, max(0, searched - len(stop) + 1)) for stop in self._texts]
        return [begin for begin in found if begin >= 0]

    def _certain(self) -> int:
        end = len(self._text)
        for stop in self._texts:
            for length in range(min(len(stop) - 1, len(self._text)), 0, -1):
                if self._text.endswith(stop[:length]):
                    end = min(end, len(self._text) - length)
                    break
        for sequence in self._sequences:
            for length in range(min(len(sequence) - 1, len(self._tokens)), 0, -1):
                if tuple(self._tokens[-length:]) == sequence[:length]:
                    end = min(end, self._starts[-length])
                    break
        return max(end, self._given)

    def _give(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece
