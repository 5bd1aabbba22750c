"""The benchmark of the GPU kernel where there is no GPU: it survives what it runs, and its programs lower."""

import importlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
gpu = importlib.import_module("gpu")
supervisor = importlib.import_module("gpu_supervisor")

CHILD = f"""
import sys, time, os
sys.path.append({str(BENCHMARKS)!r})
from gpu_supervisor import send
skip = int(sys.argv[sys.argv.index("--skip") + 1])
for place, item in enumerate(sys.argv[1].split(",")):
    if place < skip:
        continue
    send(doing="running", section="s", item=str(place), resume=place + 1, patience=float(sys.argv[2]))
    print("a library says", item)
    if item == "crash":
        os._exit(7)
    if item == "hang":
        time.sleep(60)
    if item == "broken":
        send(section="s", item=str(place), result={{"failure": "the GPU is gone"}})
        os._exit(3)
    sys.stdout.write("unfinished")
    send(section="s", item=str(place), result={{"passed": True}})
send(done=True)
"""


def watch(tmp_path: Path, items: str, *, patience: float = 20, seconds: float = 60, **options):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    results = gpu.Results(tmp_path, small=True)
    ended = supervisor.supervise(
        [sys.executable, str(child), items, str(patience)],
        results.handle,
        tmp_path / "log",
        deadline=time.monotonic() + seconds,
        **options,
    )
    return ended, results.sections.get("s", {})


def test_the_rest_runs_after_a_crash_and_a_hang(tmp_path):
    ended, found = watch(tmp_path, "fine,crash,fine,hang,fine", patience=0.5)
    assert ended == "done"
    assert [found[place].get("passed", False) for place in "01234"] == [True, False, True, False, True]
    assert found["1"]["failure"] == "exit status 7 while running: a library says crash"
    assert found["3"]["failure"] == "nothing for 0 s while running: a library says hang"
    assert json.loads((tmp_path / "gpu.json").read_text())["s"] == found
    assert "a library says fine" in (tmp_path / "log").read_text()


def test_a_failure_that_was_reported_stays(tmp_path):
    ended, found = watch(tmp_path, "broken,fine")
    assert ended == "done"
    assert found == {"0": {"failure": "the GPU is gone"}, "1": {"passed": True}}


def test_too_many_crashes_are_given_up(tmp_path):
    ended, found = watch(tmp_path, "crash,crash,crash", restarts=1)
    assert ended == "given up after 1 restarts at s, 1"
    assert list(found) == ["0", "1"]


def test_it_ends_in_time(tmp_path):
    began = time.monotonic()
    ended, found = watch(tmp_path, "fine,hang", seconds=1)
    assert time.monotonic() - began < 10
    assert (ended, list(found)) == ("out of time at s, 1", ["0"])


def test_goals_and_exit_status(tmp_path, capsys):
    results = gpu.Results(tmp_path, small=False)
    results.ended = "done"
    results.handle({"items": {"correctness": 2}, "environment": {"device": "some GPU"}})

    def result(section: str, item: str, **found):
        results.handle({"section": section, "item": item, "result": found})

    result("correctness", "a", passed=True, roundings=1.2, compile_seconds=1.0)
    result("correctness", "b", passed=True, roundings=1.1, compile_seconds=1.0)
    result("limits", "copy", bytes_per_second=4e12)
    result("limits", "matrix", operations_per_second=8e14)
    shape = {"rows": 32, "kv": 4096, "lengths": "uniform", "passed": True}
    result("decode", "16", **shape, page_size=16, seconds=2.0, bytes_per_second=3.6e12)
    result("decode", "64", **shape, page_size=64, seconds=1.9, bytes_per_second=3.8e12)
    result("prefill", "8192 tokens", seconds=1.0, operations_per_second=4e14, passed=True)
    assert results.goals() == {
        "decode_share_of_copy": pytest.approx(0.9),
        "decode_page_16_to_64": pytest.approx(0.95),
        "prefill_share_of_matrix": pytest.approx(0.5),
    }
    assert results.conclude() == 0
    assert "2 of 2 cases right; the largest error is 1.20 times" in capsys.readouterr().out
    result("rivals", "x", failure="not here")  # nobody else's failure makes the kernel wrong
    assert results.conclude() == 0
    result("decode", "16", **shape | {"passed": False}, page_size=16, seconds=2.0)
    assert results.wrong() == ["decode: 16"]
    result("decode", "16", **shape, page_size=16, seconds=2.0)
    results.handle({"items": {"correctness": 3}})
    assert results.wrong() == ["1 cases did not run"]
    assert results.conclude() == 1


def test_a_machine_without_the_gpu_is_refused(tmp_path):
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", "--output-dir", tmp_path, "--only", "correctness"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2, run.stdout + run.stderr
    assert "error: paged_attention: the kernel mosaic_hopper cannot run this: it needs a GPU" in run.stderr


@pytest.fixture
def as_if_on_hopper(monkeypatch):
    """Tracing takes the kernel; only running it would need the GPU."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("the kernel needs jax >= 0.11")
    monkeypatch.setattr("paged_jax.attention.api.kernel_unavailable", lambda: None)


def lowers_for_cuda(traced) -> bool:
    return "paged_attention" in traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)


def test_decode_programs_lower(as_if_on_hopper, monkeypatch):
    decode = importlib.import_module("gpu_decode")
    monkeypatch.setattr(decode, "pool_tokens", lambda: 2**24)
    assert len(decode.decode_section(False).names) == 76
    section = decode.quantised_section(False)
    pages = jax.ShapeDtypeStruct((2**16, 8, 64, 128), "int8")
    scales = jax.ShapeDtypeStruct(pages.shape[:3], "float32")
    section._pools = {"int8": (pages, pages, scales, scales)}
    assert lowers_for_cuda(section._trace(decode.Shape(8, 4096, 16, "int8", "ragged")))


def test_prefill_programs_lower(as_if_on_hopper):
    prefill = importlib.import_module("gpu_prefill").Prefill(False)
    assert lowers_for_cuda(prefill._trace("a chunk of 256 up to 4096, 31 rows decode at 4096"))


def test_larger_cases_reach_what_the_table_does_not(as_if_on_hopper):
    """Two computing warpgroups, and several splits."""
    cases = importlib.import_module("gpu_cases")
    config = importlib.import_module("paged_jax.attention.kernel_config")
    chosen = []
    for case in cases.LARGE_CASES:
        inputs, _ = cases.call_of(case, "bfloat16", np.nan)
        problem = config.problem_of(*inputs[:2], inputs.block_tables, inputs.query_starts, None)
        assert config.unsupported(problem) is None
        chosen.append(config.choose_config(problem))
    assert {config.compute_warpgroups for config in chosen} == {1, 2}
    assert {config.num_splits > 1 for config in chosen} == {True, False}


def test_operations_count_the_pairs_that_are_seen():
    prefill = importlib.import_module("gpu_prefill")
    prompts = prefill.Prompts((3, 1), (5, 7))
    pairs = (3 + 4 + 5) + 7
    assert prompts.operations == 4 * 32 * 128 * pairs
    assert prompts.bytes == (5 + 7) * 2 * 2 * 8 * 128


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_case_that_goes_wrong_is_seen(kind, monkeypatch):
    """Other numbers, numbers that change with dead slots, and numbers that change from call to call."""
    cases = importlib.import_module("gpu_cases")
    section = cases.Correctness(True)
    name = f"{kind}: decode around page edges"
    section.prepare([name], math.inf)
    assert section.run(name)["failures"] == []
    call, calls = section._programs[name].call, []

    def spoiled(*inputs, **options):
        calls.append(inputs)
        output, lse = call(*inputs, **options)
        return output.at[3].multiply(2 if len(calls) < 5 else 1), lse

    program = section._programs[name]._replace(call=spoiled)
    monkeypatch.setattr(section, "_programs", {name: program})
    found = section.run(name)
    assert not found["passed"]
    assert len(found["failures"]) == 2
    assert found["failures"][1] == "not the same bits every time"
    assert found["roundings"] > 1.5


@pytest.mark.slow
def test_everything_small(tmp_path):
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", "--small", "--output-dir", tmp_path],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["ended"], found["small"]) == ("done", True)
    assert {"device", "jax", "commit"} <= set(found["environment"])
    assert all(case["passed"] for case in found["correctness"].values())
    assert found["limits"].keys() == {"copy", "read", "matrix"}
    for section in ("decode", "prefill", "quantised"):
        assert found[section], section
        assert all(item["passed"] and item["seconds"] > 0 for item in found[section].values()), section
    assert {item["lengths"] for item in found["decode"].values()} == {"uniform", "ragged"}
    assert all("seconds" in item or item["failure"] for item in found["rivals"].values())
    assert all(item["seconds"] > 0 for item in found["tuning"].values())
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
