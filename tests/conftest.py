"""JAX as strict as it gets, and the same hypothesis examples on every run."""

import os

# Each warpgroup of an interpreted GPU kernel waits in a thread of XLA's: with two, three would wait for ever.
os.environ.setdefault("NPROC", "8")

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")
