"""What every benchmark here shares: where it ran, timing in turns, and the result as a table or as JSON."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--rounds", type=int, default=9, help="how often everything is timed, in turns")
    return parser


def time_in_turns(runs: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Median seconds of each run. Taking turns lets a noisy machine slow all of them alike.

    Every run is called once before, to compile it.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("timing", total=len(runs) * (rounds + 1))
        for round_ in range(rounds + 1):
            for name, run in runs.items():
                began = time.perf_counter()
                jax.block_until_ready(run())
                if round_ > 0:
                    seconds[name].append(time.perf_counter() - began)
                progress.advance(task)
    return {name: statistics.median(times) for name, times in seconds.items()}


class ReadBandwidth:
    """A run that reads 256 MiB once, to be timed in turns with the others."""

    def __init__(self) -> None:
        self.source = jnp.ones((8192, 8192), jnp.float32)
        self.reduce = jax.jit(lambda x: jnp.max(x, axis=1))

    def __call__(self) -> jax.Array:
        return self.reduce(self.source)

    def bytes_per_second(self, seconds: float) -> float:
        return self.source.nbytes / seconds


def environment() -> dict[str, Any]:
    """The hardware, the versions and the commit that a number belongs to."""
    # What was measured before, and what is drawn of it, is not what is measured.
    code = (":/", ":!/benchmarks/results", ":!/docs", ":!/README.md")
    try:
        commit = _git("rev-parse", "--short", "HEAD").strip()
        if _git("status", "--porcelain", "--untracked-files=no", "--", *code):
            commit += "-dirty"
    except (OSError, subprocess.CalledProcessError):  # no git here, or no repository
        commit = "unknown"
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": commit,
    }


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True)


def report(
    options: argparse.Namespace, result: dict[str, Any], rows: list[dict[str, Any]], notes: list[str]
) -> None:
    """Prints `rows` as a table with the notes under it, or `result` as JSON."""
    result = {"environment": environment(), **result}
    text = json.dumps(result, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    if options.json:
        print(text)
        return
    console = Console(highlight=False)
    table = Table(*rows[0], box=None, pad_edge=False, padding=(0, 1))
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    console.print(table)
    for note in notes:
        console.print(note)
    console.print(", ".join(f"{name} {value}" for name, value in result["environment"].items()), style="dim")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor()
    )
