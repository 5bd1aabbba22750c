"""Showing text on the terminal while it is being written, and what it took."""

from contextlib import nullcontext

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paged_jax.capacity import format_size
from paged_jax.cli.text import TextGeneration, Usage

_ENDINGS: dict[str | None, str] = {None: "[interrupted]"}


def stream_text(generation: TextGeneration, console: Console) -> None:
    """Runs a generation to its end: one prompt's text flows, several grow one under the other.

    Where the console is no terminal, all completions are printed at the end, in order. Interrupted, it
    leaves what has been written on the screen.
    """
    live = console.is_terminal
    with console.status("compiling the loop, once for each size of batch") if live else nullcontext():
        generation.compile()
    texts = [""] * len(generation.prompts)
    if live and len(texts) == 1:
        _flow(generation, console)
        return
    try:
        # Without a terminal this shows nothing.
        with Live(console=console, transient=True, vertical_overflow="ellipsis", auto_refresh=live) as view:
            for pieces in generation:
                texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
                view.update(_texts(generation.prompts, texts) if live else "")
    finally:
        reasons = [completion.finish_reason for completion in generation.completions()]
        endings = [_ENDINGS.get(reason, "") for reason in reasons]
        console.print(_texts(generation.prompts, texts, endings))


def usage_text(usage: Usage) -> Table:
    """The summary under the text, a fact a line."""

    def slots(count: int) -> str:
        return f"{count} slots, {format_size(count * usage.bytes_per_token)}"

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    compiling = f", after {usage.compile_seconds:.1f} s of compiling" if usage.compile_seconds else ""
    table.add_row("tokens", f"{usage.prompt_tokens} read, {usage.new_tokens} written")
    table.add_row("time", f"{usage.seconds:.1f} s, {usage.tokens_per_second:.1f} tokens/s{compiling}")
    table.add_row(
        "pages",
        f"{usage.peak_pages} of {usage.num_pages} used at once, {usage.page_size} tokens each: "
        f"{slots(usage.peak_pages * usage.page_size)}",
    )
    held = usage.used_slots + usage.wasted_slots
    table.add_row("wasted", f"{usage.wasted_slots} of the {held} slots that the rows held as they ended")
    table.add_row("contiguous", f"would have reserved {slots(usage.contiguous_slots)} for these limits,")
    table.add_row("", f"{slots(usage.context_slots)} for the model's whole context")
    return table


def _flow(generation: TextGeneration, console: Console) -> None:
    console.print(Text(generation.prompts[0], style="dim"), end="", soft_wrap=True)
    try:
        for (piece,) in generation:
            console.print(Text(piece), end="", soft_wrap=True)
    finally:
        (completion,) = generation.completions()
        console.print(Text(_ENDINGS.get(completion.finish_reason, ""), style="yellow"))


def _texts(prompts: tuple[str, ...], texts: list[str], endings: list[str] | None = None) -> Group:
    endings = endings or [""] * len(texts)
    parts = [
        Text.assemble((prompt, "dim"), text, (f" {ending}" if ending else "", "yellow"), "\n")
        for prompt, text, ending in zip(prompts, texts, endings, strict=True)
    ]
    return Group(*parts)
