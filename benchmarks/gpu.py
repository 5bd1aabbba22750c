"""The GPU kernel on a GPU: first whether it is right, then how fast, against the device and everyone else.

    python benchmarks/gpu.py                       # everything, under eight minutes on an H200
    python benchmarks/gpu.py --output-dir DIR      # where gpu.json, gpu.png and gpu.log go
    python benchmarks/gpu.py --small               # tiny shapes and no kernel, on any machine

The work is done in another process, which is started again behind an item that crashes or hangs. Results
are written after every item. Exit status 1 if a number was wrong or is missing, 2 if the kernel cannot run.
"""

import argparse
import contextlib
import importlib.metadata
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gpu_supervisor import Event, send, supervise

METHOD = (
    "A program calls attention n times, each call on the output before as its queries and on other pages; "
    "the time is that of the program over n, the median of up to 5 runs. What depends on lengths alone, the "
    "layout of the work, may be made once for all n calls, as it is for the layers of a model. Bytes are "
    "those of the live keys and values and their scales. Operations are those of both products, for the "
    "keys that each token sees."
)
GOALS = {
    "decode_share_of_copy": ("32 x 4096 from pages of 16, share of the copy bandwidth", 0.90),
    "decode_page_16_to_64": ("the same to pages of 64", 0.97),
    "prefill_share_of_matrix": ("8192 tokens, share of the matrix rate", 0.65),
}
CHECKED = ("correctness", "decode", "quantised", "prefill")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seconds", type=float, default=450, help="when it ends at the latest")
    parser.add_argument("--small", action="store_true", help="tiny shapes, the portable implementation")
    parser.add_argument("--only", nargs="*", metavar="SECTION", help="only these sections")
    parser.add_argument("--skip", type=int, help=argparse.SUPPRESS)  # makes it the process that works
    options = parser.parse_args()
    if options.skip is not None:
        work(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the other process ends too
    results = Results(options.output_dir, options.small)
    command = [sys.executable, __file__, *(["--small"] if options.small else [])]
    if options.only:
        command += ["--only", *options.only]
    deadline = time.monotonic() + options.seconds
    results.ended = supervise(
        command, results.handle, options.output_dir / "gpu.log", deadline=deadline, patience=120
    )
    results.save()
    results.plot()
    sys.exit(results.conclude())


def work(options: argparse.Namespace) -> None:
    from gpu_cases import Correctness
    from gpu_child import run_sections
    from gpu_decode import decode_section, quantised_section
    from gpu_limits import Limits
    from gpu_prefill import Prefill
    from gpu_rivals import Rivals
    from gpu_tuning import Kernels, Tuning

    send(environment=environment())
    sections = {
        "correctness": Correctness,
        "limits": Limits,
        "decode": decode_section,
        "prefill": Prefill,
        "rivals": Rivals,
        "quantised": quantised_section,
        "tuning": Tuning,
        "kernels": Kernels,
    }
    chosen = [make for name, make in sections.items() if not options.only or name in options.only]
    try:
        run_sections(
            [lambda make=make: make(options.small) for make in chosen], options.skip, options.seconds
        )
    except NotImplementedError as error:
        send(refused=str(error))
        send(done=True)


def environment() -> dict[str, Any]:
    import harness
    import jax

    found = harness.environment()
    found["memory_bytes"] = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    for package in ("torch", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


class Results:
    """What there is so far: in memory, on the disk, and a line for each item on the screen."""

    def __init__(self, folder: Path, small: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "gpu.json"
        self._began = time.monotonic()
        self.environment: dict[str, Any] = {}
        self.small = small
        self.refused: str | None = None
        self.ended = "running"
        self._expected: dict[str, int] = {}
        self.sections: dict[str, dict[str, Any]] = {}

    def handle(self, event: Event) -> None:
        self.environment = event.get("environment", self.environment)
        self.refused = event.get("refused", self.refused)
        self._expected |= event.get("items", {})
        if "result" not in event:
            return
        section, item, found = event["section"], event["item"] or "(all)", event["result"]
        self._add_shares(found)
        self.sections.setdefault(section, {})[item] = found
        if section != "correctness" or not found.get("passed"):
            print(
                f"{time.monotonic() - self._began:4.0f} s  {section}: {item}: {describe(found)}", flush=True
            )
        self.save()

    def _add_shares(self, found: dict[str, Any]) -> None:
        limits = self.sections.get("limits", {})
        for rate, limit, share in (
            ("bytes_per_second", "copy", "share_of_copy"),
            ("operations_per_second", "matrix", "share_of_matrix"),
        ):
            best = limits.get(limit, {}).get(rate)
            if best and rate in found:
                found[share] = found[rate] / best

    def save(self) -> None:
        """In one step: whoever kills this finds a whole file."""
        result = {
            "benchmark": "gpu",
            "environment": self.environment,
            "small": self.small,
            "method": METHOD,
            "seconds": time.monotonic() - self._began,
            "ended": self.ended,
            "goals": self.goals(),
            **self.sections,
        }
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
        unfinished.replace(self._path)

    def goals(self) -> dict[str, Any]:
        """What was reached of them, None where it was not measured."""
        decode = [found for found in self.sections.get("decode", {}).values() if "seconds" in found]
        by_page = {
            found["page_size"]: found
            for found in decode
            if (found["rows"], found["kv"], found["lengths"]) == (32, 4096, "uniform")
        }
        both = 16 in by_page and 64 in by_page
        prefill = self.sections.get("prefill", {}).get("8192 tokens", {})
        return {
            "decode_share_of_copy": by_page.get(16, {}).get("share_of_copy"),
            "decode_page_16_to_64": by_page[64]["seconds"] / by_page[16]["seconds"] if both else None,
            "prefill_share_of_matrix": prefill.get("share_of_matrix"),
        }

    def plot(self) -> None:
        try:
            from gpu_plot import plot

            plot(self.sections, self.environment, self._path.with_suffix(".png"))
        except ImportError as error:
            print(f"no picture: {error}")

    def wrong(self) -> list[str]:
        """What keeps the run from being a proof."""
        found = [
            f"{section}: {item}"
            for section in CHECKED
            for item, result in self.sections.get(section, {}).items()
            if not result.get("passed") and "skipped" not in result
        ]
        missing = self._expected.get("correctness", 0) - len(self.sections.get("correctness", {}))
        return [*found, f"{missing} cases did not run"] if missing else found

    def conclude(self) -> int:
        """Prints how it went and returns the exit status."""
        if self.refused is not None:
            print(f"error: {self.refused}", file=sys.stderr)
            return 2
        correctness = self.sections.get("correctness", {}).values()
        seconds = time.monotonic() - self._began
        print(f"\n{self.ended} after {seconds:.0f} s, on {self.environment.get('device')}")
        if correctness:
            worst = max((found.get("roundings") or 0 for found in correctness), default=0)
            compiling = sum(found.get("compile_seconds", 0) for found in correctness)
            passed = sum(bool(found.get("passed")) for found in correctness)
            print(
                f"{passed} of {self._expected['correctness']} cases right; the largest error is {worst:.2f} "
                f"times that of rounding; {compiling:.0f} s of compiling, side by side"
            )
        for name, reached in self.goals().items():
            words, wanted = GOALS[name]
            print(f"{words}: {'not measured' if reached is None else f'{reached:.1%}'} (goal {wanted:.0%})")
        for line in fastest_configs(self.sections.get("tuning", {})):
            print(line)
        wrong = self.wrong()
        for line in wrong[:20]:
            print(f"WRONG  {line}")
        if self.ended.startswith("did not start"):
            return 1
        return 1 if wrong else 0


def fastest_configs(tuning: dict[str, Any]) -> list[str]:
    """Of each task, and what choosing by the shapes costs against it."""
    lines = []
    for task in dict.fromkeys(found["task"] for found in tuning.values() if "task" in found):
        timed = [found for found in tuning.values() if found.get("task") == task and "seconds" in found]
        chosen = next((found for found in timed if found["chosen"]), None)
        best = min(timed, key=lambda found: found["seconds"], default=None)
        if best and chosen:
            lines.append(
                f"{task}: {best['seconds'] * 1e6:.1f} us with {best['config']}, "
                f"the chosen one takes {chosen['seconds'] / best['seconds']:.2f} times as long"
            )
    return lines


def describe(found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"skipped, {found['skipped']}"
    if "failure" in found:
        return f"FAILED {' '.join(found['failure'].split())[:400]}"
    words = ["; ".join(found.get("failures", []))]
    if "seconds" in found:
        words.append(f"{found['seconds'] * 1e6:.1f} us")
    if "bytes_per_second" in found:
        words.append(f"{found['bytes_per_second'] / 1e9:.0f} GB/s")
    if "share_of_copy" in found:
        words.append(f"{found['share_of_copy']:.1%} of copying")
    if "operations_per_second" in found:
        words.append(f"{found['operations_per_second'] / 1e12:.1f} TFLOP/s")
    if "share_of_matrix" in found:
        words.append(f"{found['share_of_matrix']:.1%} of the matrix rate")
    if found.get("roundings") is not None:
        words.append(f"error {found['roundings']:.2f} roundings")
    if found.get("agrees") is False:
        words.append(f"DISAGREES by {found['distance']:.3f}")
    for kernel, microseconds in found.get("microseconds", [])[:12]:
        words.append(f"{kernel[:40]} {microseconds:.1f} us")
    return ", ".join(filter(None, words))


if __name__ == "__main__":
    main()
