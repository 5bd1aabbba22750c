"""The program `paged-jax`. What a command needs is imported when it runs, so that help is there at once."""

import json
import os
import platform
import sys
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from paged_jax.capacity import Plan, TokenShape, format_size, parse_size
from paged_jax.cli.errors import OneLineErrors, UsageError
from paged_jax.cli.options import (
    Json,
    PageSize,
    bounds,
    given,
    head_shape,
    numbers,
    parse,
    read_config,
)

app = typer.Typer(name="paged-jax", cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """The entry point of `paged-jax` and `python -m paged_jax`."""
    app(prog_name="paged-jax")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Paged attention for JAX: keys and values in pages that rows take as they grow."""
    if version:
        print(_version("paged_jax") or "not installed")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Option(metavar="TEXT", help="Once for each text to continue.")],
    model: Annotated[
        str, typer.Option(metavar="NAME|PATH", help="smollm2-135m, a Hugging Face folder, or a .gguf file.")
    ] = "smollm2-135m",
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt to the model as a question.")] = False,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="New tokens for each, at most.")] = 64,
    temperature: Annotated[float, typer.Option(metavar="X", min=0, help="0: always the likeliest.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="N", min=0, help="Draw from the N likeliest. 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="X", help="Or from this share of probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(metavar="X", help="Or from this fraction of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(metavar="X", help="Above 1: repeats less.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the draws.")] = 0,
    page_size: PageSize = 16,
    pages: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="In the pool. Default: enough.")
    ] = None,
    pool: Annotated[str | None, typer.Option(metavar="SIZE", help="Or the memory for it, as 64MiB.")] = None,
    as_json: Json = False,
) -> None:
    """Continue texts with a model, all at once, from a paged cache."""
    if pages is not None and pool is not None:
        raise UsageError("give --pages or --pool, not both")
    pool_size = None if pool is None else parse("--pool", parse_size, pool)
    _devices()
    _cache_compilations()

    from paged_jax.cli.stream import stream_text, usage_text
    from paged_jax.cli.text import TextGeneration
    from paged_jax.engine import SamplingParams
    from paged_jax.models import load

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    generation = TextGeneration(
        load(model, progress=sys.stderr.isatty() and not as_json),
        prompt,
        params,
        chat=chat,
        page_size=page_size,
        num_pages=pages,
        pool_bytes=pool_size,
    )
    if as_json:
        generation.compile()
        for _ in generation:
            pass
        completions = [vars(completion) for completion in generation.completions()]
        _print_json({"completions": completions, "summary": generation.usage().as_dict()})
        return
    stream_text(generation, _console())
    _print_rich(usage_text(generation.usage()))


@app.command()
def bench(
    model: Annotated[
        str, typer.Option(metavar="NAME|PATH", help="smollm2-135m, a Hugging Face folder, or a .gguf file.")
    ] = "smollm2-135m",
    requests: Annotated[int, typer.Option(metavar="N", min=1, help="All there at the start.")] = 16,
    prompt_tokens: Annotated[str, typer.Option(metavar="N,N", help="Tokens of a prompt, from to.")] = "8,256",
    new_tokens: Annotated[str, typer.Option(metavar="N,N", help="New tokens, from to.")] = "16,128",
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that run at once.")] = 16,
    page_size: PageSize = 16,
    pages: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="In the pool. Default: enough.")
    ] = None,
    draft_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Guessed and verified in each step.")
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of lengths and prompts.")] = 0,
    tune: Annotated[
        bool, typer.Option("--tune", help="Instead, time the GPU kernel's configs on such steps.")
    ] = False,
    heads: Annotated[
        str | None, typer.Option(metavar="N,N,N", help="Tune for query heads, kv heads, head_dim: 32,8,128.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve random requests from one pool of pages, and measure it."""
    lengths = [
        parse(name, bounds, text)
        for name, text in (("--prompt-tokens", prompt_tokens), ("--new-tokens", new_tokens))
    ]
    shape = None if heads is None else parse("--heads", head_shape, heads)
    if heads is not None and not tune:
        raise UsageError("--heads goes with --tune")
    _devices()
    _cache_compilations()
    if tune:
        length = sum(most for _, most in lengths)
        _tune(model, shape, rows, length, page_size, as_json)
        return

    from paged_jax.cli.bench import Workload, as_text, serve
    from paged_jax.engine import Engine
    from paged_jax.models import load

    live = sys.stderr.isatty() and not as_json
    loaded = load(model, progress=live)
    prompts, new = lengths
    workload = Workload.random(requests, loaded.model.vocab_size, prompts, new, seed)
    engine = Engine(
        loaded.model,
        max_rows=rows,
        max_length=min(loaded.model.max_length, workload.longest),
        page_size=page_size,
        num_pages=pages,
        step_tokens=max(256, 4 * rows),
        draft_tokens=draft_tokens,
    )
    engine.warmup(progress=live)
    with Console(stderr=True).status("") if live else nullcontext() as status:
        served = serve(engine, workload, lambda metrics: status.update(metrics.line()) if status else None)
    if as_json:
        _print_json(served.as_dict())
    else:
        _print_rich(as_text(served))


def _tune(
    model: str, heads: tuple[int, ...] | None, rows: int, length: int, page_size: int, as_json: bool
) -> None:
    from paged_jax.attention.mosaic_compat import kernel_unavailable

    if (obstacle := kernel_unavailable()) is not None:
        raise RuntimeError(f"--tune times the GPU kernel, which cannot run here: {obstacle}")

    from paged_jax.cli import tune

    heads = _model_heads(model) if heads is None else heads
    found = tune.tune(tune.HeadShape(*heads), rows, length, max(256, 4 * rows), page_size)
    if as_json:
        _print_json({name: tune.as_dict(trials, num_bytes) for name, (num_bytes, trials) in found.items()})
        return
    for name, (num_bytes, trials) in found.items():
        _print_rich(tune.as_text(f"{name}: {rows} rows of {length} tokens", trials, num_bytes))
        print(f"paged_attention(..., tiling={tune.fastest(trials).tiling})\n")


def _model_heads(name_or_path: str) -> tuple[int, ...]:
    from paged_jax.models.checkpoint import open_checkpoint
    from paged_jax.models.llama import LlamaConfig

    config = LlamaConfig.from_hugging_face(open_checkpoint(name_or_path).config)
    return config.num_heads, config.num_kv_heads, config.head_dim


@app.command()
def plan(
    bytes_per_token: Annotated[str | None, typer.Option(metavar="SIZE", help="Such as 128KiB.")] = None,
    config: Annotated[Path | None, typer.Option(help="Or a model's config.json (Hugging Face).")] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Or the model's layers,")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="key/value heads")] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", min=1, help="and size of a head.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the pages. Default: the config's, else bfloat16.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The most tokens of a request.")
    ] = None,
    mean_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of a request on average.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(metavar="N,N,...", help="Or the tokens of each.")] = None,
    pool: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for keys and values, as 32GiB.")
    ] = None,
    page_size: PageSize = 16,
    as_json: Json = False,
) -> None:
    """Memory of requests in pages, against a cache reserved at full length."""
    from paged_jax.cli.plan import as_dict, as_text

    model = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    given = [name for name, number in model.items() if number is not None]
    if (bytes_per_token is not None) + (config is not None) + bool(given) != 1 or len(given) in (1, 2):
        raise UsageError("give --bytes-per-token, or --config, or all of --layers, --kv-heads and --head-dim")
    if (mean_length is None) == (lengths is None):
        raise UsageError("give either --mean-length or --lengths")
    if dtype is not None and bytes_per_token is not None:
        raise UsageError("--dtype has no meaning beside --bytes-per-token")

    shape = None
    if config is not None:
        shape, longest = read_config(config, dtype)
        max_length = max_length or longest
    elif layers and kv_heads and head_dim:
        shape = parse("--dtype", partial(TokenShape, layers, kv_heads, head_dim), dtype or "bfloat16")
    token_bytes = shape.num_bytes if shape else parse("--bytes-per-token", parse_size, bytes_per_token or "")
    if max_length is None:
        raise UsageError("give --max-length")
    all_lengths = (mean_length,) if mean_length else parse("--lengths", numbers, lengths or "")
    pool_bytes = None if pool is None else parse("--pool", parse_size, pool)
    planned = Plan(token_bytes, page_size, max_length, all_lengths)
    if as_json:
        _print_json(as_dict(planned, pool_bytes))
    else:
        _print_rich(as_text(planned, pool_bytes, shape))


@app.command()
def trace(
    context: typer.Context,
    page_size: PageSize = 4,
    tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens that the row starts with.")] = 9,
    steps: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens that follow, one by one.")] = 4,
    free_pages: Annotated[
        str, typer.Option(metavar="N,N,...", help="Pages that the pool hands out first.")
    ] = "7,2,14,9",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the pool: png, pdf, svg.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write (or replace) a page that replays a run of")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="this model (default: a tiny random one),")
    ] = None,
    requests: Annotated[int, typer.Option(metavar="N", min=1, help="with so many requests,")] = 18,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="of which so many run at once,")] = 6,
    pages: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="and so many pages (default: 8 a row, which is tight)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """A row's block table, growing token by token; or with --html, a run of the engine."""
    of_the_row = ("tokens", "steps", "free_pages", "plot", "as_json")
    for name in of_the_row if html is not None else ("model", "requests", "rows", "pages"):
        if given(context, name):
            option = "--" + name.removeprefix("as_").replace("_", "-")
            raise UsageError(f"{option} has no meaning {'without' if html is None else 'beside'} --html")
    if html is not None:
        _devices()
        _cache_compilations()
        from paged_jax.cli.record import record_to_page

        print(record_to_page(html, model, requests=requests, rows=rows, page_size=page_size, num_pages=pages))
        return

    from paged_jax.cli.trace import as_text, trace

    traced = trace(page_size, tokens, steps, parse("--free-pages", numbers, free_pages))
    if plot is not None:
        from paged_jax.cli.plot import plot as draw

        draw(traced.end, plot)
    if as_json:
        _print_json(traced.as_dict())
        return
    _print_rich(as_text(traced))
    if plot is not None:
        print(f"\nThe pool after the last token: {plot}")


@app.command()
def info(as_json: Json = False) -> None:
    """Versions, devices, and the attention implementation that runs here."""
    devices = _devices()

    import jax

    from paged_jax.attention import paged_attention_implementation
    from paged_jax.kv_pages import default_dtype

    choice = paged_attention_implementation()
    found: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("jax", "jaxlib", "flax", "paged_jax")},
        },
        "backend": jax.default_backend(),
        "devices": [
            {
                "name": str(device),
                "kind": device.device_kind,
                "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            }
            for device in devices
        ],
        "page_dtype": jax.numpy.dtype(default_dtype()).name,
        "attention": choice._asdict(),
    }
    if as_json:
        _print_json(found)
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, version in found["versions"].items():
        table.add_row(name, version or "not installed")
    table.add_row("backend", found["backend"])
    for device in found["devices"]:
        memory = format_size(device["memory_bytes"]) if device["memory_bytes"] else "memory not reported"
        table.add_row("device", f"{device['name']}, {device['kind']}, {memory}")
    table.add_row("pages", f"{found['page_dtype']} by default")
    table.add_row("attention", f"{choice.name}: {choice.reason}")
    _print_rich(table)


def _cache_compilations() -> None:
    """A compiled loop is kept for the next run, unless the user has set up jax's cache otherwise."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "paged_jax"))


def _devices() -> list[Any]:
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where the only platform asked for is missing
        reason = str(error) or "is its plugin installed?"
        raise RuntimeError(
            f"jax found no device of JAX_PLATFORMS={os.getenv('JAX_PLATFORMS')}: {reason}"
        ) from error


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def _print_rich(what: RenderableType) -> None:
    _console().print(what)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
