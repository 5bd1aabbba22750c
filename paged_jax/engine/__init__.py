"""Continuous batching over one pool of pages."""

from paged_jax.engine.engine import Engine
from paged_jax.engine.metrics import Metrics
from paged_jax.engine.recording import Recording, record
from paged_jax.engine.request import Completion, Delta, RequestOutput, SamplingParams

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "Metrics",
    "Recording",
    "RequestOutput",
    "SamplingParams",
    "record",
]
