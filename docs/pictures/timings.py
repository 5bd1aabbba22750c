"""What the benchmarks measured, from their results in benchmarks/results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import style
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HEIGHT = 330.0
Points = Sequence[tuple[float, float]]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def where(found: dict[str, Any]) -> str:
    environment = found["environment"]
    cores = environment["cores"]
    return f"{environment['device']}, {cores} core{'s' if cores > 1 else ''}, jax {environment['jax']}"


def draw_throughput(path: Path, found: dict[str, Any] | None = None) -> None:
    """Tokens a second over requests at once, in the same memory."""
    found = read("concurrency-cpu.json") if found is None else found
    axes = style.chart(HEIGHT, "Tokens a second, by requests at once", where(found))
    engine, contiguous = (rates(found, server) for server in ("engine", "contiguous"))
    last = engine[-1][0]
    _line(axes, engine, style.BLUE)
    _line(axes, contiguous, style.AMBER)
    full, rate = contiguous[-1]
    axes.plot((full, last), (rate, rate), color=style.AMBER, linewidth=1.6, linestyle=(0, (2, 2)))
    axes.axvline(full, color=style.FAINT, linewidth=1.2, zorder=0)
    axes.set(xscale="log", xlim=(0.85 * engine[0][0], 1.18 * last), xlabel="requests at once")
    _label_x(axes, [rows for rows, _ in engine])
    axes.set_ylim(0, 1.15 * max(speed for _, speed in [*engine, *contiguous]))
    slots = f"{found['max_length']} slots reserved each:\nthe memory is full at {full}"
    _note(axes, (full, 0), slots, style.AMBER, (9, 24), va="bottom")
    _note(axes, engine[-1], "pages, same memory", style.BLUE, (0, 9), ha="right", va="bottom")
    style.save(axes.figure, path, "Throughput against concurrency, pages and reserved rows")


def rates(found: dict[str, Any], server: str) -> list[tuple[int, float]]:
    """Rows and tokens a second of one of the servers."""
    return [
        (result["rows"], result["tokens_per_second"])
        for result in found["results"]
        if result["server"] == server
    ]


def draw_attention_time(path: Path, found: dict[str, Any] | None = None) -> None:
    """Milliseconds of a decode step's attention over the tokens that 16 rows hold."""
    found = read("attention-cpu.json") if found is None else found
    axes = style.chart(HEIGHT, "Attention of one decode step, in ms", f"16 rows; {where(found)}", right=118)
    results = sorted(found["results"], key=lambda result: result["tokens"])
    most = results[-1]["tokens"]
    lines = {
        "contiguous,\ntoken-major": ("token-major", style.AMBER),
        "contiguous,\nhead-major": ("head-major", style.PINK),
        "pages": ("paged", style.BLUE),
    }
    for label, (name, colour) in lines.items():
        points = [(result["tokens"], result["ms"][name]) for result in results]
        _line(axes, points, colour)
        # Apart also where the lines end close to each other.
        _note(axes, points[-1], label, colour, (9, 8 if name == "token-major" else 0), va="center")
    floor = [(result["tokens"], result["floor_ms"]) for result in results]
    axes.plot(*zip(*floor, strict=True), color=style.MUTED, linewidth=1.6, linestyle=(0, (2, 2)))
    _note(axes, floor[-1], "reading the\nbytes once", style.MUTED, (9, 0), va="center")
    axes.set(xlim=(0, most), xlabel="live tokens in all rows")
    axes.set_ylim(bottom=0)
    _label_x(axes, [0, most // 4, most // 2, most])
    style.save(axes.figure, path, "Attention time against tokens, in pages and contiguous")


def draw_allocator_time(path: Path, found: dict[str, Any] | None = None) -> None:
    """Microseconds of a step that gives every row a page and takes it back, over the size of the pool."""
    found = read("page_table-cpu.json") if found is None else found
    axes = style.chart(HEIGHT, "A page for every row and back, in µs", where(found), left=66, right=118)
    for result in found["results"]:
        points = [(int(pages), time) for pages, time in result["microseconds"].items()]
        if result["step"] == "grow and release":
            colour, label = style.BLUE, f"{result['rows']} rows"
        elif result["step"] == "argmin per page":
            colour, label = style.AMBER, f"{result['rows']} rows, an\nargmin a page"
        else:
            continue
        _line(axes, points, colour)
        _note(axes, points[-1], label, colour, (9, 0), va="center")
    axes.set(xscale="log", yscale="log", xlabel="pages in the pool")
    _label_x(axes, [pages for pages, _ in points])
    top = axes.get_ylim()[1]
    ticks = [tick for tick in (10, 100, 1000, 10000) if tick < top]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(top=top)
    axes.yaxis.set_minor_locator(NullLocator())
    style.save(axes.figure, path, "Allocator time against the size of the pool")


def _line(axes: Axes, points: Points, colour: str) -> None:
    axes.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=2.2, markersize=5, clip_on=False)


def _note(
    axes: Axes, at: tuple[float, float], text: str, colour: str, offset: tuple[float, float], **place: str
) -> None:
    """A line's name beside one of its points."""
    dark = style.mix(colour, 0.82, style.INK)  # thin letters need more contrast than lines
    axes.annotate(
        text, at, offset, textcoords="offset points", color=dark, size=style.SMALL, weight="bold", **place
    )


def _label_x(axes: Axes, values: Sequence[int]) -> None:
    axes.set_xticks(values, [str(value) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
