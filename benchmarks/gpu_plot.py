"""A picture of the results: decode bandwidth, prefill rate, and everyone's time for the same tasks."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#2f6db5", "#d97f26", "#3a9b6c", "#a5508a", "#8a6b45")


def plot(sections: dict[str, dict[str, Any]], environment: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(15, 5), layout="constrained")
    decode, prefill, rivals = figure.subplots(1, 3)
    limits = sections.get("limits", {})
    _decode(decode, sections.get("decode", {}), limits.get("copy", {}).get("bytes_per_second"))
    _prefill(prefill, sections.get("prefill", {}), limits.get("matrix", {}).get("operations_per_second"))
    _rivals(rivals, sections.get("rivals", {}))
    figure.suptitle(
        ", ".join(
            f"{name} {environment[name]}" for name in ("device", "jax", "commit") if name in environment
        )
    )
    figure.savefig(path, dpi=120)


def _decode(axes: Axes, found: dict[str, Any], copy: float | None) -> None:
    axes.set(
        title="decode, 32/8 heads of 128, bfloat16", xlabel="tokens of each row", ylabel="GB/s", xscale="log"
    )
    timed = [shape for shape in found.values() if "seconds" in shape and shape["lengths"] == "uniform"]
    for rows, colour in zip(sorted({shape["rows"] for shape in timed}), COLOURS, strict=False):
        for page_size, style in ((16, "o-"), (64, "x--")):
            points = sorted(
                (shape["kv"], shape["bytes_per_second"] / 1e9)
                for shape in timed
                if (shape["rows"], shape["page_size"]) == (rows, page_size)
            )
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    color=colour,
                    label=f"{rows} rows, pages of {page_size}",
                )
    if copy:
        axes.axhline(copy / 1e9, color="black", linewidth=0.8, label="copying")
    if timed:
        axes.legend(fontsize=7)


def _prefill(axes: Axes, found: dict[str, Any], matrix: float | None) -> None:
    axes.set(title="prefill", xlabel="TFLOP/s")
    timed = {
        name: prompts["operations_per_second"] / 1e12
        for name, prompts in found.items()
        if "seconds" in prompts
    }
    axes.barh([name.replace(", ", ",\n") for name in timed], list(timed.values()), color=COLOURS[0])
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    if matrix:
        axes.axvline(matrix / 1e12, color="black", linewidth=0.8)


def _rivals(axes: Axes, found: dict[str, Any]) -> None:
    axes.set(title="the same arrays", xlabel="us a call", xscale="log")
    timed = [result for result in found.values() if "seconds" in result]
    contenders = list(dict.fromkeys(result["contender"] for result in timed))
    tasks = list(dict.fromkeys(result["task"] for result in timed))
    height = 0.8 / max(1, len(contenders))
    for place, contender in enumerate(contenders):
        own = [result for result in timed if result["contender"] == contender]
        axes.barh(
            [tasks.index(result["task"]) + place * height for result in own],
            [result["seconds"] * 1e6 for result in own],
            height,
            color=COLOURS[place % len(COLOURS)],
            label=contender,
        )
    axes.set_yticks(range(len(tasks)), tasks, fontsize=7)
    axes.invert_yaxis()
    if timed:
        axes.legend(fontsize=7)
