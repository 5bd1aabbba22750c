"""What the command line takes: options that several commands share, and texts that stand for numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from paged_jax.capacity import TokenShape, decoder_config

Parsed = TypeVar("Parsed")

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
PageSize = Annotated[int, typer.Option(metavar="N", min=1, help="Token slots in a page.")]


def parse(option: str, parse: Callable[[str], Parsed], text: str) -> Parsed:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def given(context: typer.Context, name: str) -> bool:
    """Whether an argument was on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(
            f"expected whole numbers with commas between them, such as 200,600, got {text!r}"
        ) from None


def bounds(text: str) -> tuple[int, int]:
    found = numbers(text)
    if len(found) != 2 or not 1 <= found[0] <= found[1]:
        raise ValueError(f"expected the least and the most, such as 8,256, got {text!r}")
    return found[0], found[1]


def head_shape(text: str) -> tuple[int, ...]:
    found = numbers(text)
    if len(found) != 3 or min(found) < 1 or found[0] % found[1]:
        raise ValueError(
            "expected query heads, a divisor of them as kv heads, and head_dim, such as 32,8,128, "
            f"got {text!r}"
        )
    return found


def read_config(path: Path, dtype: str | None) -> tuple[TokenShape, int | None]:
    """The token shape of a config.json and the model's longest context."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("a JSON object was expected")
        longest = decoder_config(config).get("max_position_embeddings")
        return TokenShape.from_config(config, dtype), longest
    except ValueError as error:
        raise ValueError(f"{path} is not a model's config: {error}") from error
