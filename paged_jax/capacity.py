"""The memory arithmetic of a KV cache: bytes per token, the pool's size, and what paging saves.

Plain integers, computed before anything is allocated. The one formula:

    bytes per token = 2 (keys and values) * layers * kv heads * (head_dim * itemsize + scale_itemsize)
    bytes per page  = page_size * bytes per token
    pool            = num_pages * bytes per page + tables
    tables          = 4 * (rows * max_pages_per_row + rows + 2 * num_pages + 1)

`scale_itemsize` is what quantised pages (int8, float8_e4m3fn) keep per (token, kv head): 4, a float32; the
tables are the block tables, lengths, reference counts and free stack of `PageTable`, int32 all of them.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

HEADROOM = 0.05
"""Share of a memory budget that is left to a step's temporaries, which stay below 5 % of the pool."""

_INT32 = 4
_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_UNITS: dict[str, int] = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


@dataclass(frozen=True)
class TokenShape:
    """What one token keeps in the cache: keys and values of every layer and kv head.

    Attributes:
        dtype: of the pages, by name.

    Raises:
        ValueError: if a size is not a positive integer, or the pages cannot have that dtype.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        names = ("num_layers", "num_kv_heads", "head_dim")
        _check_positive(**{name: getattr(self, name) for name in names})
        if self.dtype not in list(_ITEMSIZES):
            raise ValueError(f"dtype must be one of {', '.join(_ITEMSIZES)}, got {self.dtype!r}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str | None = None) -> "TokenShape":
        """Of a model, from its Hugging Face config.json.

        Args:
            dtype: of the pages; by default the dtype that the config names, and bfloat16 where it names none.

        Raises:
            ValueError: if a number is missing or not a positive integer, or the dtype is not known.
            NotImplementedError: for multi-head latent attention, which keeps no keys and values per head.
        """
        config = decoder_config(config)
        if config.get("kv_lora_rank"):
            raise NotImplementedError("multi-head latent attention keeps no keys and values per head")
        width = "head_dim" if config.get("head_dim") else "hidden_size"
        _check_positive(
            **{key: config.get(key) for key in ("num_hidden_layers", "num_attention_heads", width)}
        )
        dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        return cls(
            config["num_hidden_layers"],
            config.get("num_key_value_heads") or config["num_attention_heads"],
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            str(dtype).removeprefix("torch."),
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one stored number."""
        return _ITEMSIZES[self.dtype]

    @property
    def scale_itemsize(self) -> int:
        """Bytes of a quantised page's scale per (token, kv head), in keys and values alike; else 0."""
        return 4 if self.itemsize == 1 else 0

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.itemsize + self.scale_itemsize)


def decoder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the decoder alone, from a config.json that may describe other parts beside it.

    Raises:
        ValueError: if its `text_config` is no object.
    """
    text_config = config.get("text_config") or {}
    if not isinstance(text_config, Mapping):
        raise ValueError(f"text_config must be an object, got {text_config!r}")
    return {**config, **text_config}


def table_bytes(num_pages: int, max_rows: int, max_pages_per_row: int) -> int:
    """Bytes of a `PageTable`."""
    return _INT32 * (max_rows * max_pages_per_row + max_rows + 2 * num_pages + 1)


def pool_bytes(
    token_bytes: int, num_pages: int, page_size: int, max_rows: int, max_pages_per_row: int
) -> int:
    """Bytes of `KVPages` (keys, values and scales of all layers) and its `PageTable` together."""
    return num_pages * page_size * token_bytes + table_bytes(num_pages, max_rows, max_pages_per_row)


def pages_in_budget(
    budget: int,
    token_bytes: int,
    page_size: int,
    max_rows: int,
    max_pages_per_row: int,
    *,
    headroom: float = HEADROOM,
) -> int:
    """The most pages whose `pool_bytes` stay within a budget.

    Args:
        budget: bytes, for instance from `memory_budget`.
        token_bytes: bytes per token, `TokenShape.num_bytes`.
        headroom: share of the budget, in [0, 1), that the pool leaves to a step's temporaries.

    Raises:
        ValueError: if the pages do not hold even one row of `max_pages_per_row` pages.
    """
    _check_positive(
        token_bytes=token_bytes, page_size=page_size, max_rows=max_rows, max_pages_per_row=max_pages_per_row
    )
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom must be a share of the budget, in [0, 1), got {headroom=}")
    usable = int(budget * (1 - Fraction(headroom)))
    per_page = pool_bytes(token_bytes, 1, page_size, 0, 0) - table_bytes(0, 0, 0)
    num_pages = (usable - table_bytes(0, max_rows, max_pages_per_row)) // per_page
    if num_pages < max_pages_per_row:
        needed = pool_bytes(token_bytes, max_pages_per_row, page_size, max_rows, max_pages_per_row)
        raise ValueError(
            f"a budget of {format_size(budget)} leaves {format_size(usable)} for the pool, but one row "
            f"of {max_pages_per_row} pages takes {format_size(needed)}: give more memory or shorten the rows"
        )
    return num_pages


def memory_budget(fraction: float, device: "jax.Device") -> int:
    """A fraction of the device memory that nobody uses yet, in bytes. Load the weights first.

    Raises:
        ValueError: if the fraction is not in (0, 1], or the device does not report its memory, as the CPU.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"the fraction of the device memory must be in (0, 1], got {fraction}")
    free = reported_free_memory(device)
    if free is None:
        raise ValueError(f"the device {device} does not report its memory: give the budget in bytes")
    return int(free * Fraction(fraction))


def check_memory(num_bytes: int, device: "jax.Device") -> None:
    """Refuses what cannot be allocated, before it is tried.

    Measured against the free memory that the device reports, on CPU against the machine's physical
    memory; where neither is known everything passes.

    Raises:
        ValueError: if `num_bytes` is more than that.
    """
    available = reported_free_memory(device)
    if available is None and device.platform == "cpu":
        available = physical_memory()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{format_size(num_bytes)} are wanted and the device {device} has {format_size(available)}: "
            "take fewer pages or a smaller model"
        )


class Concurrency(NamedTuple):
    """How many requests a pool holds at once, reserved at full length and in pages."""

    contiguous: int
    paged: int
    num_pages: int  # that the pool is cut into
    table_bytes: int  # of the page table for the paged requests, beside the pool

    @property
    def ratio(self) -> float:
        return self.paged / self.contiguous


@dataclass(frozen=True)
class Plan:
    """What requests cost when each is reserved at full length, and what in pages.

    The requests are described by their lengths in tokens; one length may stand for the mean of many.

    Raises:
        ValueError: if a number is not a positive integer, or a request is longer than `max_length`.
    """

    bytes_per_token: int
    page_size: int
    max_length: int
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("bytes_per_token", "page_size", "max_length")}
        _check_positive(**sizes, **{f"lengths[{i}]": length for i, length in enumerate(self.lengths)})
        if not self.lengths:
            raise ValueError("at least one length of a request is needed, got none")
        if max(self.lengths) > self.max_length:
            raise ValueError(
                f"a request of {max(self.lengths)} tokens is longer than the maximum of {self.max_length}"
            )

    @property
    def used_slots(self) -> int:
        return sum(self.lengths)

    @property
    def contiguous_slots(self) -> int:
        return len(self.lengths) * self.max_length

    @property
    def paged_slots(self) -> int:
        return self.page_size * sum(pages_for(length, self.page_size) for length in self.lengths)

    @property
    def contiguous_waste(self) -> float:
        """Share of the reserved slots that no token uses."""
        return 1 - self.used_slots / self.contiguous_slots

    @property
    def paged_waste(self) -> float:
        return 1 - self.used_slots / self.paged_slots

    def concurrency(self, pool: int) -> Concurrency:
        """Requests such as these in `pool` bytes of keys and values; their tables come on top.

        Raises:
            ValueError: if the pool does not hold one request of `max_length`, in one piece or in pages.
        """
        width = pages_for(self.max_length, self.page_size)
        row = max(self.max_length, width * self.page_size) * self.bytes_per_token
        if pool < row:
            raise ValueError(
                f"a pool of {format_size(pool)} does not hold one request of {self.max_length} tokens, "
                f"which takes {format_size(row)}: give a larger pool or a shorter maximum"
            )
        num_pages = pool // (self.page_size * self.bytes_per_token)
        paged = num_pages * self.page_size * len(self.lengths) // self.paged_slots
        return Concurrency(
            contiguous=pool // (self.max_length * self.bytes_per_token),
            paged=paged,
            num_pages=num_pages,
            table_bytes=table_bytes(num_pages, paged, width),
        )


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def parse_size(text: str) -> int:
    """Bytes of "4096", "128KiB", "1.5 GB", ...: KB to TB are powers of 1000, KiB to TiB powers of 1024.

    Raises:
        ValueError: if the text is no such size, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower() or "b") if match else None
    if match is None or factor is None or Fraction(match[1]) * factor < 1:
        raise ValueError(
            f"expected a size such as 4096, 128KiB or 1.5GB (units {', '.join(_UNITS)}), got {text!r}"
        )
    return math.floor(Fraction(match[1]) * factor)


def format_size(num_bytes: int) -> str:
    """For people: 131072 is "128 KiB"."""
    unit = [unit for unit in ("B", "KiB", "MiB", "GiB", "TiB") if _UNITS[unit] <= max(num_bytes, 1)][-1]
    return f"{num_bytes / _UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {unit}"


def _check_positive(**sizes: object) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")


def reported_free_memory(device: "jax.Device") -> int | None:
    """Bytes that nobody uses yet; None where the device does not report them, as the CPU."""
    stats: Mapping[str, int] = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def physical_memory() -> int | None:
    """Bytes of the machine's own memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not a POSIX system, or one that does not tell
        return None
