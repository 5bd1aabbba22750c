"""README and docs: their Python runs, they say what it needs, and their figures are those of the results."""

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from engines import quick_compilation as quick_compilation

import paged_jax.models

ROOT = Path(__file__).parent.parent
TINY = Path(__file__).parent / "golden" / "tiny_llama3"
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    return ["\n" * text[: match.start(1)].count("\n") + match[1] for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("file", [f for f in FILES if blocks(f)], ids=lambda f: str(f.relative_to(ROOT)))
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_the_blocks_run(file, monkeypatch):
    """Top to bottom, as users run them, but with a small model in place of the real one."""
    load = paged_jax.models.load
    monkeypatch.setattr(paged_jax.models, "load", lambda name, **options: load(TINY, **options))
    namespace: dict = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks(file):
            exec(compile(block, str(file), "exec"), namespace)


@pytest.mark.parametrize("file", [f for f in FILES if blocks(f)], ids=lambda f: str(f.relative_to(ROOT)))
def test_a_page_says_what_to_install_for_it(file):
    """Beyond what comes with the package: the environment of these tests has more than that."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = {re.match("[a-z0-9-]+", wanted)[0].replace("-", "_") for wanted in project["dependencies"]}
    installed |= {"paged_jax", "orbax"} | sys.stdlib_module_names  # flax requires orbax
    for command in re.findall("pip install ([^`\\n]*)", file.read_text(encoding="utf-8")):
        installed |= set(command.replace("-", "_").split())
    nodes = [node for block in blocks(file) for node in ast.walk(ast.parse(block))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= installed


def test_there_is_something_to_run():
    assert sum(len(blocks(file)) for file in FILES) > 10


def figures(page: str, row: str) -> list[float]:
    """The numbers of a table's row, by its first cell."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| {row} \|(.*)\|$", text, re.MULTILINE)
    return [float(cell.strip(" %").replace(",", "")) for cell in line.split("|") if cell.strip()]


def test_figures_of_the_text_are_those_of_the_results():
    def results(name: str) -> dict:
        return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))

    means = {record["policy"]: record["mean"] for record in results("fragmentation.json")["results"]}
    shares = {
        "slots that hold a token": "used",
        "held for tokens still to come": "reserved",
        "held and never used": "internal",
        "free": "free",
        "steps in which enough is free and the next request waits": "fragmented",
    }
    for row, name in shares.items():
        expected = [100 * means[policy][name] for policy in ("reserve", "oracle", "double", "pages")]
        assert figures("concepts/why_paging.md", row) == pytest.approx(expected, abs=0.051)
    for row, name in {
        "requests at the same time": "running",
        "requests finished in 2,000 steps": "completed",
        "requests that had to give back their memory": "preempted",
    }.items():
        expected = [means[policy][name] for policy in ("reserve", "oracle", "double", "pages")]
        assert figures("concepts/why_paging.md", row) == pytest.approx(expected, abs=0.51, rel=1e-3)
    pages = [means[policy] for policy in ("pages", "pages, no margin")]
    for row, values in {
        "slots that hold a token": [100 * mean["used"] for mean in pages],
        "requests at the same time": [mean["running"] for mean in pages],
        "requests sent back": [mean["preempted"] for mean in pages],
        "tokens stored again": [mean["recomputed"] for mean in pages],
    }.items():
        assert figures("concepts/scheduling.md", row) == pytest.approx(values, abs=0.51, rel=0.03)
    serving = results("serving-cpu.json")
    speeds = [f"{serving[name]['tokens_per_second']:.0f}" for name in ("engine", "contiguous")]
    text = (ROOT / "docs/concepts/why_paging.md").read_text(encoding="utf-8")
    assert re.search(
        r"writes (\d+) tokens/s, with 8 at once in reserved\nrows of the same bytes (\d+)", text
    ).groups() == tuple(speeds)
    text = (ROOT / "docs/concepts/scheduling.md").read_text(encoding="utf-8")
    (share,) = re.findall(r"the host takes ([\d.]+) % of the time", text)
    assert float(share) == pytest.approx(100 * serving["host_share"], abs=0.006)
