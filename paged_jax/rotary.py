"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Llama."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches slow rotations to a longer context and leaves fast ones alone (Llama 3.1).

    Wavelengths shorter than `original_length / high_freq_factor` positions stay, those longer than
    `original_length / low_freq_factor` grow by `factor`, and those between are blended.

    Raises:
        ValueError: if a number is not positive, or `low_freq_factor` not below `high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self):
        if (
            not 0 < self.low_freq_factor < self.high_freq_factor
            or min(self.factor, self.original_length) <= 0
        ):
            raise ValueError(
                f"Llama3Scaling: needs positive numbers and low_freq_factor < high_freq_factor, got {self}"
            )

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_length * frequencies / (2 * math.pi)  # rotations within the original context
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(blend, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class RotaryEmbedding:
    """Rotates pairs (i, i + rotary_dim / 2) of each head by position * theta ** (-2 i / rotary_dim).

    Args:
        rotary_dim: how many leading dimensions of a head rotate; the others pass through.
        scaling: changes the frequencies.
        divisors: of each frequency, where a checkpoint stores its scaling like that.

    Raises:
        ValueError: if `rotary_dim` is odd or not positive.
    """

    rotary_dim: int
    theta: float = 10_000.0
    scaling: Llama3Scaling | None = None
    divisors: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"RotaryEmbedding: rotary_dim must be even and positive, got {self.rotary_dim=}")
        if self.divisors is not None and len(self.divisors) != self.rotary_dim // 2:
            raise ValueError(
                f"RotaryEmbedding: needs one divisor per pair, {self.rotary_dim // 2} in all, "
                f"got {len(self.divisors)}"
            )

    def frequencies(self) -> np.ndarray:
        """Radians per position of each pair, float64 [rotary_dim / 2]."""
        frequencies = self.theta ** (-np.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        if self.scaling is not None:
            frequencies = self.scaling(frequencies)
        return frequencies if self.divisors is None else frequencies / np.asarray(self.divisors)

    def __call__(
        self, x: Float[Array, "tokens heads head_dim"], positions: Int32[Array, " tokens"]
    ) -> Float[Array, "tokens heads head_dim"]:
        """Rotates queries or keys; computed in float32 or wider, returned in the dtype of `x`.

        Raises:
            ValueError: if the heads of `x` have fewer than `rotary_dim` dimensions.
        """
        if x.shape[-1] < self.rotary_dim:
            raise ValueError(
                f"RotaryEmbedding: {self.rotary_dim=} dimensions cannot rotate in heads of {x.shape[-1]}"
            )
        dtype = np.promote_types(x.dtype, np.float32)
        frequencies = jnp.asarray(self.frequencies(), dtype)
        angles = positions.astype(dtype)[:, None, None] * frequencies[None, None, :]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        half = self.rotary_dim // 2
        first, second = x[..., :half].astype(dtype), x[..., half : self.rotary_dim].astype(dtype)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([rotated.astype(x.dtype), x[..., self.rotary_dim :]], axis=-1)
