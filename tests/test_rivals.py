"""The comparison with other packages: what agrees is timed, what does not is named; its tables."""

import importlib
import re
import sys
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import paged_attention

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs" / "extensions")]
rivals = importlib.import_module("rivals")
results = importlib.import_module("results")

SMALL = {"rows": 3, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "max_length": 256}
BROUGHT = [name for name, side in rivals.SIDES.items() if not side.requirement]


@pytest.fixture(scope="module")
def drawn():
    return rivals.draw(**SMALL)


def test_the_oracle_is_the_reference(drawn):
    inputs, batches = drawn
    for lengths in batches.values():
        expected = paged_attention(*inputs, jnp.asarray(lengths), implementation="reference")
        chex.assert_trees_all_close(
            rivals.oracle(inputs, lengths).astype(np.float32), expected, rtol=1e-5, atol=1e-5
        )


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # JAX's older kernel is
@pytest.mark.parametrize("name", BROUGHT)
def test_what_comes_with_paged_jax_agrees(drawn, name):
    runs, [record] = rivals.check(*drawn, {name: rivals.SIDES[name]})
    assert record["status"] == {"full": "agrees", "mixed": "agrees"}
    assert list(runs) == [(name, "full"), (name, "mixed")]


def test_what_is_wrong_is_named_and_not_timed(drawn):
    def whole_pages(inputs):  # live or not
        def attend(*arrays):
            *arrays, lengths = arrays
            return paged_attention(*arrays, -(-lengths // 16) * 16)

        return attend, tuple(inputs)

    sides = {"ours": rivals.SIDES[rivals.OURS], "whole pages": rivals.Side(whole_pages, "pages")}
    runs, records = rivals.check(*drawn, sides)
    assert ("whole pages", "full") in runs
    assert ("whole pages", "mixed") not in runs
    assert records[1]["status"]["mixed"].startswith("wrong by 0.")
    with pytest.raises(AssertionError, match="whole pages differs from the oracle"):
        rivals.check(*drawn, {"whole pages": sides["whole pages"]})


def test_what_is_not_installed_is_listed_with_its_command(drawn):
    def absent(inputs):
        return importlib.import_module("no_such_package").attend, ()

    sides = {"ours": rivals.SIDES[rivals.OURS], "absent": rivals.Side(absent, "pages", "absent", "absent==1")}
    runs, records = rivals.check(*drawn, sides)
    assert [name for name, _ in runs] == ["ours", "ours"]
    assert records[1]["install"] == "pip install absent==1"
    assert records[1]["status"] == {"full": "not installed", "mixed": "not installed"}


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_the_older_kernel_of_jax_agrees_in_the_interpreter():
    rivals.check_jax_kernel()


def test_every_result_has_its_table_on_the_page():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert sorted(results.MARKER.findall(page)) == sorted(results.TABLES)
    files = {file.name for file in results.RESULTS.glob("*.json")}
    assert {name for name in files if not name.startswith("gpu")} == set(results.TABLES)
    built = results.on_page_markdown(page)
    assert "<!--" not in built
    tables = re.findall(r"(?:^\|.*\|$\n)+", built, re.MULTILINE)
    assert len(tables) == len(results.TABLES)
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_losses_are_shown_as_plainly_as_wins():
    record = {"cache": "pages", "version": "", "status": {"full": "agrees", "mixed": "wrong by 0.5"}}
    result = {
        "results": [
            {**record, "side": "ours", "status": dict.fromkeys(("full", "mixed"), "agrees")}
            | {"ms": {"full": 20.0, "mixed": 4.0}},
            {**record, "side": "faster", "version": "1.0", "ms": {"full": 10.0}},
        ],
        "floor_ms": {"full": 5.0, "mixed": 1.0},
    }
    ours, faster, floor = (list(row.values()) for row in results.rivals(result))
    assert ours == ["ours", "pages", "20.0", "1.00", "4.00", "1.00"]
    assert faster == ["faster 1.0", "pages", "10.0", "0.50", "wrong by 0.5", ""]
    assert floor == ["reading the live bytes once", "", "5.00", "", "1.00", ""]
