"""What the program says when it fails: one line on stderr."""

import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

# Typer brings its own copy of click's exceptions or imports click, depending on its version.
UsageError: Any = typer.BadParameter.__base__


class OneLineErrors(TyperGroup):
    """Whatever a user can cause becomes one line on stderr: exit code 2 for a wrong command line, else 1."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except UsageError as error:
            hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            _fail(error.format_message() + hint, code=2)
        except (typer.Abort, KeyboardInterrupt):
            sys.exit(130)
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        except (ValueError, OverflowError, RuntimeError, ImportError, MemoryError) as error:
            _fail(str(error) or type(error).__name__)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 1) -> NoReturn:
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(code)
