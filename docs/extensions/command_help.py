"""For the reference: `<!-- paged-jax plan --help -->` becomes what this command prints."""

import re
import shlex

from rich.text import Text
from typer.testing import CliRunner

from paged_jax.cli.app import app

MARKER = re.compile(r"<!-- (paged-jax[^>]*--help) -->")
COLUMNS = "88"


def on_page_markdown(markdown: str, **kwargs) -> str:
    return MARKER.sub(_printed, markdown)


def _printed(marker: re.Match) -> str:
    program, *arguments = shlex.split(marker[1])
    environment = {"COLUMNS": COLUMNS, "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, arguments, prog_name=program, env=environment)
    if result.exit_code != 0:
        raise ValueError(f"{marker[1]} failed: {result.output}")
    plain = Text.from_ansi(result.output).plain  # the environment may have forced colours
    lines = [line.rstrip() for line in plain.strip("\n").splitlines()]
    return "\n".join(["```text", *lines, "```"])
