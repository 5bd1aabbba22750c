"""`paged-jax bench`: what it measures, what it prints, and what it says to bad input; and `--tune`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from paged_jax.attention import KernelConfig, Tiling, mosaic_compat
from paged_jax.attention.kernel_config import Problem, choose_config
from paged_jax.cli import tune
from paged_jax.cli.app import app

TINY = Path(__file__).parent / "golden" / "tiny_llama3"
WORKLOAD = ("--requests", 3, "--prompt-tokens", "2,9", "--new-tokens", "3,6", "--rows", 2, "--page-size", 4)


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    """At these sizes compiling is all the time there is."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def _no_compilation_cache(monkeypatch):
    monkeypatch.setattr("paged_jax.cli.app._cache_compilations", lambda: None)


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "--model", *map(str, (TINY, *arguments))])


def run_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def expect_error(result, message):
    assert result.exit_code not in (0, None)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_json():
    found = run_json(*WORKLOAD)
    assert found["requests"] == 3
    assert 9 <= found["new_tokens"] <= 18
    assert found["tokens_per_second"] == pytest.approx(found["new_tokens"] / found["seconds"])
    assert found["peak_concurrent"] == 2
    assert 1 <= found["peak_pages"] <= 2 * 4  # 15 tokens in pages of 4
    assert found["compiles_after_warmup"] == 0
    assert (
        0 < found["time_to_first_token"]["median"] <= found["time_to_first_token"]["p90"] < found["seconds"]
    )
    assert found["inter_token_time"]["median"] > 0


def test_text():
    result = run(*WORKLOAD)
    assert result.exit_code == 0, result.output
    lines = dict(line.strip().split(maxsplit=1) for line in result.stdout.splitlines() if line.strip())
    assert set(lines) == {"tokens", "time", "first", "between", "rows", "pages", "wasted", "host"}
    assert lines["rows"] == "2 at once, 0 preempted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-tokens", "9,2"), "--prompt-tokens: expected the least and the most"),
        (("--new-tokens", "0,4"), "--new-tokens: expected the least and the most"),
        (("--new-tokens", "4"), "--new-tokens: expected the least and the most"),
        (("--prompt-tokens", "few"), "expected whole numbers"),
        (("--requests", 0), "--requests"),
        (("--heads", "4,2,16"), "--heads goes with --tune"),
        (("--tune", "--heads", "4,3,16"), "expected query heads, a divisor of them as kv heads"),
        (("--tune",), "--tune times the GPU kernel, which cannot run here: it needs a GPU"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    expect_error(run(*arguments), message)


@pytest.fixture
def tilings_for_cpu(monkeypatch):
    """Everything but the kernel, in its place the portable implementation; the last config cannot run."""
    monkeypatch.setattr(mosaic_compat, "kernel_unavailable", lambda: None)
    monkeypatch.setattr(tune, "COLD_BYTES", 0)
    monkeypatch.setattr(
        tune, "candidates", lambda problem: [Tiling(1, 4), Tiling(1, 1), KernelConfig(1, 16, 2)]
    )


def test_tune_times_each_config_for_both_kinds_of_step(tilings_for_cpu):
    found = run_json(*WORKLOAD, "--tune")
    assert list(found) == ["decode", "15 tokens of one prompt, the others decode"]
    for kind in found.values():
        assert kind["bytes"] == 2 * 15 * 2 * 2 * 2 * 16  # rows, tokens, keys and values, bytes, heads of 16
        *ran, failed = kind["trials"]
        assert [trial["config"]["pages_per_step"] for trial in ran] == [4, 1]
        assert kind["fastest"] == min(ran, key=lambda trial: trial["seconds"]["median"])["config"]
        assert "mosaic_hopper cannot run this" in failed["failure"]


def test_tune_prints_the_config_to_pass(tilings_for_cpu):
    result = run(*WORKLOAD, "--tune", "--heads", "2,1,8")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("paged_attention(..., tiling=Tiling(tile_tokens=1, pages_per_step=") == 2
    assert result.stdout.count("chosen") == 2


def test_a_program_calls_attention_so_often():
    """Every call on the result before; the pages after the first call are others."""
    inputs = tune.random_inputs(
        [9, 16], None, q_heads=2, kv_heads=1, head_dim=8, page_size=4, dtype="float32", pool_bytes=1 << 14
    )
    first, last = jax.jit(tune.attend_repeatedly, static_argnames="iterations")(inputs, iterations=3)
    q, shift = inputs.q, 7919 % inputs.k_pages.shape[0]
    for call in range(3):
        tables = (inputs.block_tables + call * shift) % inputs.k_pages.shape[0]
        q = tune.paged_attention(*inputs._replace(q=q, block_tables=tables))
        if call == 0:
            np.testing.assert_allclose(first, q, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, q, rtol=1e-5, atol=1e-6)


def test_random_inputs_hold_every_page_once_at_most():
    sizes = {"q_heads": 2, "kv_heads": 1, "head_dim": 8, "page_size": 4, "pool_bytes": 1 << 14}
    inputs = tune.random_inputs([9, 16], [3, 1], **sizes)
    assert (inputs.q.shape, inputs.q.dtype) == ((4, 2, 8), jnp.bfloat16)
    assert inputs.k_pages.shape == ((1 << 14) // (2 * 4 * 8 * 2), 1, 4, 8)
    assert np.unique(inputs.block_tables).size == inputs.block_tables.size
    assert inputs.query_starts.tolist() == [0, 3, 4]


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("page_size", [16, 48, 256])
def test_candidates_fit_and_begin_with_the_chosen_one(decode: bool, page_size: int):
    problem = Problem(
        num_tokens=32 if decode else 4096,
        num_rows=32 if decode else 2,
        kv_heads=8,
        group=4,
        head_dim=128,
        page_size=page_size,
        max_pages_per_row=64,
        q_dtype="bfloat16",
        page_dtype="bfloat16",
        quantised=False,
        decode=decode,
    )
    found = tune.candidates(problem)
    assert found[0] == choose_config(problem)
    assert len(set(found)) == len(found) > 5
    for config in found:
        config.check(problem)
    assert {config.compute_warpgroups for config in found} == ({1} if decode else {1, 2})
    assert len({config.kv_step for config in found}) > 1


def test_iterations_fill_the_time_and_are_bounded():
    assert tune.iterations_for(4e9) == 30  # of a millisecond each
    assert tune.iterations_for(0, 7e12, seconds=0.1) == 10
    assert tune.iterations_for(1e12) == 2
    assert tune.iterations_for(1) == 500
