"""For pages that show figures: `<!-- results rivals-cpu.json -->` becomes a table of this file's figures."""

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MARKER = re.compile(r"<!-- results (\S+\.json) -->")

Result = dict[str, Any]
Rows = list[dict[str, str]]


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    return MARKER.sub(lambda marker: render(marker[1]), markdown)


def render(file: str) -> str:
    """A table and the line that says where its figures come from, in Markdown."""
    result = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows = TABLES[file](result)
    rules = ("---:" if cell[:1].isdigit() else "---" for cell in rows[0].values())
    lines = [" | ".join(rows[0]), " | ".join(rules)]
    lines += [" | ".join(row.values()) for row in rows]
    return "\n".join([*(f"| {line} |" for line in lines), "", f"*{_where(result)}; `{file}`*"])


def _where(result: Result) -> str:
    if "environment" not in result:  # compiled, not run
        return f"jax {result['jax']}, for {result['target']}"
    found = result["environment"]
    cores = f"{found['cores']} core" + "s" * (found["cores"] > 1)
    versions = {name: found[name] for name in ("jax", "jaxlib")} | result.get("versions", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{found['device']}, {cores}, Python {found['python']}, {named}, commit {found['commit']}"


def _number(value: float) -> str:
    """Three digits, and all of them before the point; counts and nothing as they are."""
    if isinstance(value, int) or value == 0:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def rivals(result: Result) -> Rows:
    ours = result["results"][0]["ms"]
    rows = []
    for record in result["results"]:
        row = {
            "decode attention": f"{record['side']} {record.get('version', '')}".strip(),
            "cache": record["cache"],
        }
        for batch, status in record["status"].items():
            time = record["ms"].get(batch)
            row[f"{batch}, ms"] = status if time is None else _number(time)
            row[f"{batch} / ours"] = "" if time is None else f"{time / ours[batch]:.2f}"
        rows.append(row)
    floor = {f"{batch}, ms": _number(time) for batch, time in result["floor_ms"].items()}
    empty = dict.fromkeys(rows[0], "")
    return [*rows, empty | {"decode attention": "reading the live bytes once"} | floor]


def attention(result: Result) -> Rows:
    return [
        {
            "batch": record["batch"],
            "live tokens": str(record["tokens"]),
            "pages, ms": _number(record["ms"]["paged"]),
            "token-major, ms": _number(record["ms"]["token-major"]),
            "head-major, ms": _number(record["ms"]["head-major"]),
            "pages / token-major": f"{record['paged_to_token_major']:.2f}",
            "pages / head-major": f"{record['paged_to_head_major']:.2f}",
            "bytes once, ms": _number(record["floor_ms"]),
        }
        for record in result["results"]
    ]


def serving(result: Result) -> Rows:
    versions = result["transformers"]["versions"]
    titles = {
        "engine": "engine, pages",
        "contiguous": "contiguous server",
        "transformers": f"transformers {versions['transformers']}, torch {versions['torch']}",
    }
    rows = []
    for name, title in titles.items():
        record, rounds = result[name], result["tokens_per_second_of_rounds"][name]
        rows.append(
            {
                "server": title,
                "tokens/s": _number(record["tokens_per_second"]),
                "in the rounds": f"{_number(min(rounds))} to {_number(max(rounds))}",
                "requests at once": str(record["peak_concurrent"]),
                "slots held and unused": str(record.get("wasted_slots", "")),
                "first token, median s": _number(record["time_to_first_token"]["median"]),
                "next token, median ms": _number(record["inter_token_time"]["median"] * 1e3),
            }
        )
    return rows


def concurrency(result: Result) -> Rows:
    rows: dict[int, dict[str, str]] = {}
    for record in result["results"]:
        row = rows.setdefault(record["rows"], {"requests at once": str(record["rows"])})
        low, high = min(record["rounds"]), max(record["rounds"])
        row[record["server"]] = f"{_number(record['tokens_per_second'])} ({_number(low)} to {_number(high)})"
    return [
        {
            "requests at once": row["requests at once"],
            "pages, tokens/s": row["engine"],
            "reserved rows, tokens/s": row.get("contiguous", "no memory"),
        }
        for row in rows.values()
    ]


def over_pool_sizes(result: Result) -> Rows:
    rows = []
    for record in result["results"]:
        if "step" in record:
            row = {"step": f"{record['step']}, {record['rows']} rows"}
        else:
            row = {"step": f"{record['tokens']} tokens"}
        row |= {f"{pages} pages, µs": _number(time) for pages, time in record["microseconds"].items()}
        rows.append(row | {"largest / smallest": f"{record['largest_to_smallest']:.2f}"})
    return rows


def page_dtypes(result: Result) -> Rows:
    return [
        {
            "dtype of the pages": record["dtype"],
            **{f"{pages} pages, ms": _number(time) for pages, time in record["milliseconds"].items()},
            "largest / smallest": f"{record['largest_to_smallest']:.2f}",
        }
        for record in result["results"]
    ]


def generate(result: Result) -> Rows:
    return [
        {
            "rows": str(record["rows"]),
            "tokens/s": _number(record["tokens/s"]),
            "step, ms": _number(record["step, ms"]),
            "reading the weights once, ms": _number(record["floor, ms"]),
            "step with 8 times the pool, ms": _number(record["step with 8x the pool, ms"]),
        }
        for record in result["results"]
    ]


def fragmentation(result: Result) -> Rows:
    policies = {
        "reserve": "contiguous, the largest length reserved",
        "oracle": "contiguous, the final length known before",
        "double": "contiguous, doubled and copied when full",
        "pages": "pages, one left free for each that runs",
        "pages, no margin": "pages, whoever fits joins",
    }
    return [
        {
            "policy": policies[record["policy"]],
            "slots that hold tokens": f"{100 * record['mean']['used']:.1f} %",
            "requests at once": _number(record["mean"]["running"]),
            "requests done": _number(record["mean"]["completed"]),
            "preempted": _number(record["mean"]["preempted"]),
            "tokens copied": _number(record["mean"]["copied"]),
        }
        for record in result["results"]
    ]


def kernel_resources(result: Result) -> Rows:
    kernels = result["kernels"]
    return [
        {
            "kinds of call compiled": str(len(kernels)),
            "with spills": str(sum(kernel["spilled_bytes"] > 0 for kernel in kernels)),
            "most registers a thread": str(max(kernel["registers"] for kernel in kernels)),
            "two blocks a processor": str(sum(kernel["blocks_per_processor"] >= 2 for kernel in kernels)),
        }
    ]


TABLES = {
    "rivals-cpu.json": rivals,
    "attention-cpu.json": attention,
    "page_dtypes-cpu.json": page_dtypes,
    "serving-cpu.json": serving,
    "concurrency-cpu.json": concurrency,
    "page_table-cpu.json": over_pool_sizes,
    "kv_write-cpu.json": over_pool_sizes,
    "generate-cpu.json": generate,
    "fragmentation.json": fragmentation,
    "kernel_resources.json": kernel_resources,
}
