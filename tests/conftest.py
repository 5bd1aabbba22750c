"""JAX as strict as it gets, and the same hypothesis examples on every run."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

# Each warpgroup of an interpreted GPU kernel waits in a thread of XLA's: with two, three would wait for ever.
# Older versions of jax have no interpreter, and are faster with as many threads as there are cores.
if tuple(map(int, version("jax").split(".")[:2])) >= (0, 11):
    os.environ.setdefault("NPROC", "8")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

# Linux gives a process 65530 memory maps (vm.max_map_count). Compiled programs take a handful each and keep
# them as long as they are cached; when there are no more, XLA crashes.
_MOST_MAPS = 25_000


@pytest.fixture(autouse=True, scope="module")
def _few_memory_maps():
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > _MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def quick_collection():
    """`gc.collect` looks at what the tests of the module have made, not at all that was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
