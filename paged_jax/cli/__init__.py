"""The program `paged-jax`."""

from paged_jax.cli.app import main

__all__ = ["main"]
