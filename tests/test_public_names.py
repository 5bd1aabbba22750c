"""What a user can import, by name, and that all of it says what it is."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import paged_jax

PUBLIC = {
    "paged_jax": [
        "NO_PAGE",
        "Engine",
        "Grant",
        "KVPages",
        "Llama3Scaling",
        "PageTable",
        "RaggedBatch",
        "RotaryEmbedding",
        "SamplingParams",
        "Tiling",
        "merge_attention",
        "page_table",
        "paged_attention",
        "paged_attention_implementation",
    ],
    "paged_jax.attention": [
        "Choice",
        "KernelConfig",
        "Tiling",
        "merge_attention",
        "paged_attention",
        "paged_attention_implementation",
    ],
    "paged_jax.engine": [
        "Completion",
        "Delta",
        "Engine",
        "Metrics",
        "Recording",
        "RequestOutput",
        "SamplingParams",
        "record",
    ],
    "paged_jax.models": ["Llama", "LlamaConfig", "Loaded", "Tokenizer", "load"],
}
# Modules whose own public functions and classes are for users.
FOR_USERS = ("page_table", "nnx", "linen", "sampling", "generate", "testing", "migrate", "beam_search")
MODULES = sorted(info.name for info in pkgutil.walk_packages(paged_jax.__path__, "paged_jax."))
PACKAGE = Path(paged_jax.__file__).parent


@pytest.mark.parametrize("package", PUBLIC)
def test_names(package):
    module = importlib.import_module(package)
    assert module.__all__ == PUBLIC[package]
    assert all(hasattr(module, name) for name in PUBLIC[package])


@pytest.mark.parametrize("package", PUBLIC)
def test_every_name_has_a_docstring(package):
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in PUBLIC[package] if name != "NO_PAGE"}
    assert not [name for name, value in values.items() if not written_doc(value)]


@pytest.mark.parametrize("name", FOR_USERS)
def test_every_function_and_class_for_users_has_a_docstring(name):
    module = importlib.import_module(f"paged_jax.{name}")
    members = inspect.getmembers(module, lambda value: inspect.isfunction(value) or inspect.isclass(value))
    own = [value for key, value in members if value.__module__ == module.__name__ and not key.startswith("_")]
    assert own
    assert not [value for value in own if not written_doc(value)]


@pytest.mark.parametrize("name", ["paged_jax", *(name for name in MODULES if not name.endswith("__main__"))])
def test_every_module_has_a_docstring(name):
    assert importlib.import_module(name).__doc__


def test_packages_hold_only_imports_and_names():
    for file in PACKAGE.rglob("__init__.py"):
        docstring, *body = ast.parse(file.read_text(encoding="utf-8")).body
        assert isinstance(docstring, ast.Expr), file
        assert all(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) for node in body), file
        assigned = [ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)]
        assert assigned == ["__all__"], file


def written_doc(value) -> str | None:
    """The docstring, where somebody wrote one: dataclasses and named tuples make one of their fields."""
    doc = value.__doc__
    return None if doc and doc.startswith(f"{getattr(value, '__name__', '')}(") else doc
