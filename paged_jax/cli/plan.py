"""The memory of a set of requests, as text and as data: reserved at full length against pages."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paged_jax.capacity import Plan, TokenShape, format_size


def as_dict(plan: Plan, pool: int | None = None) -> dict[str, Any]:
    """For JSON; what concerns the pool, in bytes, only where there is one."""
    numbers = {
        "bytes_per_token": plan.bytes_per_token,
        "page_size": plan.page_size,
        "page_bytes": plan.page_size * plan.bytes_per_token,
        "max_length": plan.max_length,
        "lengths": plan.lengths,
        "used_slots": plan.used_slots,
        "contiguous_slots": plan.contiguous_slots,
        "paged_slots": plan.paged_slots,
        "contiguous_bytes": plan.contiguous_slots * plan.bytes_per_token,
        "paged_bytes": plan.paged_slots * plan.bytes_per_token,
        "contiguous_waste": round(plan.contiguous_waste, 3),
        "paged_waste": round(plan.paged_waste, 3),
    }
    if pool is None:
        return numbers
    held = plan.concurrency(pool)
    return numbers | {
        "pool_bytes": pool,
        "pool_pages": held.num_pages,
        "table_bytes": held.table_bytes,
        "contiguous_requests": held.contiguous,
        "paged_requests": held.paged,
        "ratio": round(held.ratio, 3),
    }


def as_text(plan: Plan, pool: int | None = None, shape: TokenShape | None = None) -> Group:
    """What `rich.print` shows, within 80 columns; with `shape` also where the bytes of a token come from."""
    token, page = format_size(plan.bytes_per_token), format_size(plan.page_size * plan.bytes_per_token)
    head = f"{plan.page_size} tokens x {token} = {page} per page\n"
    if shape:
        heads = f"{shape.num_layers} layers x {shape.num_kv_heads} kv heads"
        size = f"{shape.head_dim} x {shape.itemsize}"
        size = f"({size} + {shape.scale_itemsize})" if shape.scale_itemsize else size
        head = f"2 x {heads} x {size} bytes = {token} per token\n{head}"

    table = Table("", "reserved in full", "in pages", box=None, padding=(0, 3, 0, 0), header_style="dim")
    count = len(plan.lengths)
    reserved = (
        f"{plan.max_length:,}" if count == 1 else f"{count} x {plan.max_length:,} = {plan.contiguous_slots:,}"
    )
    pages = plan.paged_slots // plan.page_size
    plural = "s" if pages > 1 else ""
    table.add_row(
        "token slots", reserved, f"{pages:,} page{plural} x {plan.page_size} = {plan.paged_slots:,}"
    )
    slots = (plan.contiguous_slots, plan.paged_slots)
    table.add_row("memory", *(format_size(n * plan.bytes_per_token) for n in slots))
    table.add_row("in use", *(f"{plan.used_slots:,}" for _ in slots))
    shares = (plan.contiguous_waste, plan.paged_waste)
    table.add_row(
        "wasted",
        *(f"{n - plan.used_slots:,} = {100 * share:.1f} %" for n, share in zip(slots, shares, strict=True)),
        style="bold",
    )
    if pool is None:
        return Group(Text(head), table)
    held = plan.concurrency(pool)
    table.add_row(f"requests in {format_size(pool)}", f"{held.contiguous:,}", f"{held.paged:,}", style="bold")
    tables = format_size(held.table_bytes)
    foot = f"\nPages hold {held.ratio:.3g} times as many requests; their tables take {tables} besides."
    return Group(Text(head), table, Text(foot))
