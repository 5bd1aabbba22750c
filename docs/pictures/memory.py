"""Contiguous regions against pages on the same requests: slots over time, and a map of one moment.

What is drawn comes from `benchmarks/fragmentation.py`.
"""

from pathlib import Path
from typing import NamedTuple

import fragmentation
import numpy as np
import style
from fragmentation import PAGE_SIZE, WARMUP, Request, Series, random_trace, simulate
from matplotlib.axes import Axes

STEPS = 1200
MAP_CAPACITY, MAP_STEPS, MAP_RATE = 8192, 600, 0.2
MAP_COLUMNS, MAP_ROW = 64, 12.0


class Moment(NamedTuple):
    """A step in which first fit makes the next request wait although enough slots are free."""

    step: int
    wanted: int  # slots of that request
    first_fit: Series
    pages: Series


def draw_waste(path: Path, steps: int = STEPS) -> None:
    trace = random_trace()
    height = 300.0
    figure, page = style.panel(height)
    page.text(24, 34, "How much of the memory holds tokens", size=style.TITLE, weight="bold")
    page.text(24, 54, "the same requests, first come, first served", size=style.SMALL, color=style.MUTED)
    for place, (policy, title) in enumerate(
        (("reserve", f"{fragmentation.MAX_LENGTH} slots reserved each"), ("pages", f"pages of {PAGE_SIZE}"))
    ):
        left, width = 24 + 222 * place, 210
        page.text(left, 84, title, size=style.NORMAL, weight="bold")
        axes = figure.add_axes(
            (left / style.WIDTH, 46 / height, width / style.WIDTH, (height - 46 - 112) / height)
        )
        _draw_shares(axes, simulate(trace, policy, steps=steps), min(WARMUP, steps // 2))
    style.save(figure, path, "Slots that hold a token, reserved against in pages, over time")


def shares(series: Series, since: int = 0) -> dict[str, np.ndarray]:
    """Of the capacity, after each step: slots with a token, slots held without one, and free slots."""
    empty = series.reserved + series.internal
    return {
        name: slots[since:] / series.capacity
        for name, slots in (("tokens", series.used), ("held, empty", empty), ("free", series.free))
    }


def _draw_shares(axes: Axes, series: Series, since: int) -> None:
    found = shares(series)
    steps = np.arange(series.used.size)
    drawn = slice(None, None, max(1, steps.size // 250))  # a phone has no more columns
    layers = [of_steps[drawn] for of_steps in found.values()]
    axes.stackplot(steps[drawn], *layers, colors=(style.BLUE, style.AMBER, style.EMPTY), linewidth=0)
    axes.set(xlim=(0, steps[drawn][-1]), ylim=(0, 1), yticks=[], xlabel="steps")
    axes.tick_params(labelsize=style.SMALL, labelcolor=style.MUTED, length=0, pad=5)
    axes.set_xticks([0, steps[-1] + 1], ["0", str(steps[-1] + 1)])
    for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
        label.set_horizontalalignment(side)
    axes.xaxis.label.set(size=style.SMALL, color=style.MUTED)
    axes.xaxis.labelpad = -12
    for spine in axes.spines.values():
        spine.set_visible(False)
    means = {name: float(np.mean(of_steps[since:])) for name, of_steps in found.items()}
    base, thin = 0.0, []
    for (name, share), colour in zip(means.items(), ("white", style.INK, style.MUTED), strict=True):
        if share > 0.08:
            at = (0.62 * steps[-1], base + share / 2)
            axes.text(*at, f"{name} {share:.0%}", size=style.NORMAL, color=colour, ha="center", va="center")
        elif share > 0.005:
            thin.append(f"{name} {share:.0%}")
        base += share
    axes.set_title("  ".join(thin), loc="right", size=style.SMALL, color=style.MUTED, pad=5)


def find_moment(
    trace: tuple[Request, ...] | None = None, capacity: int = MAP_CAPACITY, steps: int = MAP_STEPS
) -> Moment:
    """The step in which the largest hole is the smallest share of what is free."""
    trace = random_trace(0, steps, MAP_RATE) if trace is None else trace
    # First fit with every final length known beforehand: no slot is reserved that will not be written.
    first_fit, pages = (
        simulate(trace, policy, capacity=capacity, steps=steps) for policy in ("oracle", "pages")
    )
    share = np.where(first_fit.fragmented, first_fit.largest_hole / np.maximum(first_fit.free, 1), np.inf)
    step = int(np.argmin(share))
    next_request = int(first_fit.completed[step] + first_fit.running[step])
    return Moment(step, trace[next_request].length, first_fit, pages)


def draw_fragmentation(path: Path, moment: Moment | None = None) -> None:
    moment = find_moment() if moment is None else moment
    step, first_fit, pages = moment.step, moment.first_fit, moment.pages
    rows = first_fit.owners.shape[1] // MAP_COLUMNS
    band = rows * MAP_ROW + 74
    height = 2 * band + 30
    figure, axes = style.panel(height)
    for place, (series, title, text) in enumerate(
        (
            (
                first_fit,
                f"First fit, lengths known beforehand: {first_fit.running[step]} requests",
                f"{first_fit.free[step]} slots free, at most {first_fit.largest_hole[step]} in one piece: "
                f"a request of {moment.wanted} waits",
            ),
            (
                pages,
                f"Pages: {pages.running[step]} requests",
                f"{pages.free[step]} slots free, in any page",
            ),
        )
    ):
        top = 20 + band * place
        axes.text(24, top + 14, title, size=style.NORMAL, weight="bold")
        axes.text(24, top + 33, text, size=style.SMALL, color=style.MUTED)
        _draw_map(axes, top + 44, series.owners[step])
    note = f"A cell is {PAGE_SIZE} slots in its request's colour; colours repeat, and grey is free."
    axes.text(24, height - 22, note, size=style.SMALL, color=style.MUTED)
    style.save(figure, path, "A memory map under first fit, with holes, and in pages")


def _draw_map(axes: Axes, top: float, owners: np.ndarray) -> None:
    """Sixteen slots a cell, line by line."""
    pitch = (style.WIDTH - 48) / MAP_COLUMNS
    for cell, colour in enumerate(map_colours(owners)):
        x, y = 24 + pitch * (cell % MAP_COLUMNS), top + MAP_ROW * (cell // MAP_COLUMNS)
        style.box(axes, x, y, pitch - 0.6, MAP_ROW - 2, colour)


def map_colours(owners: np.ndarray) -> list[str]:
    """Of each cell. Requests take colours in the order of their first cells, so that neighbours differ."""
    order = list(dict.fromkeys(owner for owner in owners.tolist() if owner >= 0))
    colours = {owner: style.COLOURS[n % len(style.COLOURS)] for n, owner in enumerate(order)}
    return [colours.get(owner, style.EMPTY) for owner in owners.tolist()]
