"""The host's records as bytes and back, so that they can lie beside the device state in a checkpoint."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from paged_jax.engine.request import Delta, SamplingParams, Sequence
from paged_jax.engine.text import TextWriter

_FORMAT = 2


def to_bytes(sequences: Iterable[Sequence], unread: Iterable[Delta], **facts: Any) -> np.ndarray:
    """uint8 [n], JSON inside.

    Args:
        unread: deltas that nobody has read.
        facts: whatever else JSON can hold.
    """
    records = [
        {
            field.name: dataclasses.asdict(sequence.params)
            if field.name == "params"
            else getattr(sequence, field.name)
            for field in dataclasses.fields(Sequence)
            if field.name not in ("chain", "writer")
        }
        for sequence in sequences
    ]
    deltas = [dataclasses.asdict(delta) for delta in unread]
    host = {"format": _FORMAT, "sequences": records, "unread": deltas, **facts}
    return np.frombuffer(json.dumps(host).encode(), np.uint8)


def from_bytes(
    data: np.ndarray, writer: Callable[[SamplingParams], TextWriter]
) -> tuple[list[Sequence], list[Delta], dict[str, Any]]:
    """The sequences, without the pages that a prefix index knew, the deltas, and the other facts.

    Args:
        writer: makes the writer of a sequence; it is told what has been written.

    Raises:
        ValueError: if these are not the bytes of `to_bytes`.
    """
    try:
        host = json.loads(np.asarray(data, np.uint8).tobytes())
        if host["format"] != _FORMAT:
            raise ValueError(f"format {host['format']}")
        sequences = []
        for record in host.pop("sequences"):
            tuples = {name: tuple(record[name]) for name in ("prompt_ids", "stop_token_ids")}
            params = SamplingParams(**record["params"])
            sequence = Sequence(**{**record, **tuples, "params": params, "writer": writer(params)})
            sequence.writer.push(sequence.token_ids)
            sequences.append(sequence)
        unread = [_delta(**record) for record in host.pop("unread")]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not the host's part of an engine's snapshot: {error}") from error
    return sequences, unread, host


def _delta(token_ids: list[int], logprobs: list[float] | None, **others: Any) -> Delta:
    return Delta(token_ids=tuple(token_ids), logprobs=None if logprobs is None else tuple(logprobs), **others)
