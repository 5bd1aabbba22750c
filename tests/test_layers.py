"""Imports point one way, read from the source."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paged_jax"

# A file may import only from lines above its own.
ORDER = """
    under_jit
    page_table
    kv_pages ragged_batch rotary
    attention.dtypes
    attention.merge attention.schedule attention.kernel_config attention.mosaic_compat
    attention.tiles attention.hopper_warpgroups
    attention.reference attention.xla attention.mosaic_hopper
    attention.api
    attention
    nnx
    linen
    sampling
    models.tokenizer
    models.gguf_checkpoint
    models.checkpoint models.llama
    models.loading
    models
    generate testing
    beam_search
    capacity migrate
    engine.drafts engine.metrics engine.prefix_index engine.text
    engine.request engine.steps
    engine.registry engine.scheduler engine.snapshot
    engine.model_runner engine.sizes
    engine.core
    engine.engine
    engine.recording
    engine
    cli.bench cli.errors cli.options cli.plan cli.plot cli.replay cli.text cli.trace cli.tune
    cli.record cli.stream
    cli.app
    cli
    __main__
"""
LEVELS = {name: level for level, line in enumerate(ORDER.strip().splitlines()) for name in line.split()}

# What each may use of the outside, beyond the standard library, jax, jaxtyping and numpy.
USERS = {
    "flax": {
        "nnx",
        "linen",
        "models.llama",
        "models.loading",
        "generate",
        "beam_search",
        "engine.steps",
        "engine.model_runner",
        "cli.record",
    },
    "gguf": {"models.gguf_checkpoint"},
    "safetensors": {"models.checkpoint"},
    "ml_dtypes": {"models.checkpoint"},
    "tokenizers": {"models.checkpoint", "models.tokenizer"},
    "jinja2": {"models.tokenizer"},
    "rich": {
        "models.loading",
        "engine.engine",
        "cli.bench",
        "cli.app",
        "cli.plan",
        "cli.stream",
        "cli.trace",
        "cli.tune",
    },
    "typer": {"cli.app", "cli.errors", "cli.options"},
    "matplotlib": {"cli.plot"},
}
WITHOUT_JAX = (
    "engine.prefix_index",
    "engine.registry",
    "engine.request",
    "engine.scheduler",
    "engine.text",
    "engine.metrics",
    "models.tokenizer",
    "models.gguf_checkpoint",
    "models.checkpoint",
    "capacity",
    "cli.plan",
)


def module_name(file: Path) -> str:
    return (
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
    )


FILES = {module_name(file): file for file in PACKAGE.rglob("*.py")}


def imports(name: str, *, for_types: bool = True) -> set[str]:
    """Full names of the modules that a file imports, in functions too; without `for_types` only what runs."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    if not for_types:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.If)
                and isinstance(node.test, ast.Name)
                and node.test.id == "TYPE_CHECKING"
            ):
                node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import in line {node.lineno}"
            # `from package import module` imports the module, `from module import name` only its own.
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {part for part in parts if part.removeprefix("paged_jax.") in FILES}
            found |= modules | ({node.module} if len(modules) < len(parts) else set())
    return found


@pytest.mark.parametrize("name", sorted(filter(None, FILES)))
def test_a_file_imports_only_from_above(name):
    assert name in LEVELS, "a new file needs its place in ORDER"
    own = {imported for imported in imports(name) if imported.split(".")[0] == "paged_jax"}
    assert "paged_jax" not in own, "import from the module that defines it"
    below = {imported for imported in own if LEVELS[imported.removeprefix("paged_jax.")] >= LEVELS[name]}
    assert not below


def test_the_order_names_no_file_that_is_gone():
    assert set(LEVELS) <= set(FILES)


def test_kernels_take_arrays():
    """Attention knows neither page table nor pages nor batch."""
    for name in filter(lambda name: name.split(".")[0] == "attention", FILES):
        inside = {imported for imported in imports(name) if imported.startswith("paged_jax")}
        assert all(imported.startswith("paged_jax.attention") for imported in inside), name


@pytest.mark.parametrize("library", USERS)
def test_a_library_is_used_where_it_belongs(library):
    assert {name for name in FILES if library in {full.split(".")[0] for full in imports(name)}} == USERS[
        library
    ]


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_files_without_jax(name):
    assert not {full.split(".")[0] for full in imports(name, for_types=False)} & {"jax", "flax"}


def test_every_library_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["plot"]]
    known = (
        {line.split(">=")[0].replace("-", "_") for line in declared} | {"paged_jax"} | sys.stdlib_module_names
    )
    used = {full.split(".")[0] for name in FILES for full in imports(name)}
    assert used <= known
