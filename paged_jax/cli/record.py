"""A short run of an engine in which everything happens that pages are for, recorded."""

import os
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from paged_jax.cli.replay import as_html, check_pages, replacing
from paged_jax.engine import Engine, Recording, SamplingParams, record
from paged_jax.engine.recording import Copied, Joined
from paged_jax.engine.steps import EngineModel
from paged_jax.models import Llama, LlamaConfig, load
from paged_jax.rotary import RotaryEmbedding

LONGEST = 19
"""Pages of the longest request, prompt and new tokens."""


def record_to_page(
    path: str | os.PathLike[str],
    name_or_path: str | None = None,
    *,
    requests: int,
    rows: int,
    page_size: int,
    num_pages: int | None = None,
) -> str:
    """Records a run and writes the page that replays it. Returns what the page shows, for people.

    Args:
        name_or_path: of the model, as `load` takes it. None: `tiny_model`.

    Raises:
        ValueError: if there is no such model, or the pool is too small or too large for it.
        OSError: if the file cannot be written; before anything runs.
    """
    num_pages = max(LONGEST, 8 * rows) if num_pages is None else num_pages
    check_pages(num_pages)
    if num_pages < LONGEST:
        raise ValueError(f"replay: a request of this run takes up to {LONGEST} pages, got {num_pages=}")
    with replacing(path) as file:
        if name_or_path is None:
            # At these sizes compiling is all the time there is.
            jax.config.update("jax_disable_most_optimizations", True)
            model, name = tiny_model(), "a tiny random model"
        else:
            model, _, name = load(name_or_path)
        recording = record_run(model, requests=requests, rows=rows, page_size=page_size, num_pages=num_pages)
        file.write(as_html(recording, f"A recorded run of {name}"))
    visits, metrics = recording.visits, recording.visits[-1].metrics
    events = [event for visit in visits for event in visit.events]
    hits = sum(isinstance(event, Joined) and event.num_held > 0 and event.sibling is None for event in events)
    copies = sum(isinstance(event, Copied) for event in events)
    return (
        f"{requests} requests in {rows} rows, {num_pages} pages of {page_size} tokens: "
        f"{'the first ' if recording.full else ''}{len(visits)} visits, {hits} prefix hits, "
        f"{copies} pages copied on write, {metrics.preemptions} preemptions\n"
        f"The page that replays it: {path}"
    )


def tiny_model() -> Llama:
    """Two layers with random weights: nothing to download, and what it writes means nothing."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_length=2**20,
        rotary=RotaryEmbedding(8),
        tie_embeddings=True,
    )
    return Llama(config, rngs=nnx.Rngs(0))


def record_run(model: EngineModel, *, requests: int, rows: int, page_size: int, num_pages: int) -> Recording:
    """Serves random requests, some of which begin with the same tokens or want several samples.

    They come one after the other while others run. Lengths are multiples of the page size, so that a
    run looks the same with any.

    Returns:
        The recording of the whole run, or of as many visits as `record` keeps.

    Raises:
        ValueError: if the pool does not hold one request.
    """
    engine = Engine(
        model,
        max_rows=rows,
        max_length=LONGEST * page_size,
        page_size=page_size,
        num_pages=num_pages,
        step_tokens=max(4 * page_size, 2 * rows),
        steps_per_visit=2,
    )
    waiting = _requests(requests, model.vocab_size, page_size)
    with record(engine) as recording:
        while (waiting or engine.has_work) and not recording.full:
            if waiting and engine.metrics.waiting < 3:
                engine.submit(*waiting.pop(0))
            engine.step()
    return recording


def _requests(count: int, vocab_size: int, page_size: int) -> list[tuple[Sequence[int], SamplingParams]]:
    rng = np.random.default_rng(0)

    def tokens(least: int, most: int) -> list[int]:
        """From `least` to `most` pages full."""
        return rng.integers(vocab_size, size=rng.integers(least * page_size, most * page_size)).tolist()

    instructions = [tokens(3, 4), tokens(2, 3)]
    return [
        (
            # Two in three begin with one of two texts, such as a system prompt.
            (instructions[number % 3] if number % 3 < 2 else []) + tokens(1, 3),
            SamplingParams(
                max_tokens=int(rng.integers(5 * page_size, 12 * page_size)),
                temperature=1.0,
                n=3 if number % 5 == 1 else 1,
            ),
        )
        for number in range(count)
    ]
