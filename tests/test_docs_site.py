"""The site builds without a warning, its links lead somewhere, and every public name is in the reference."""

import importlib
import inspect
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer
from test_public_names import FOR_USERS, PUBLIC

from paged_jax.cli.app import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FILES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *PAGES]
FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)
needs_mkdocs = pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("mkdocstrings") is None,
    reason='mkdocs and mkdocstrings are not installed: pip install -e ".[docs]"',
)


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == [
        page.relative_to(DOCS).as_posix() for page in PAGES
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_between_the_files_lead_somewhere(file):
    assert [link for link in links(file) if not leads_somewhere(file, link)] == []


def links(file: Path) -> list[str]:
    found = ["".join(groups) for groups in LINK.findall(prose(file))]
    return [link for link in found if not urlsplit(link).scheme]


def leads_somewhere(file: Path, link: str) -> bool:
    path, _, anchor = unquote(link).partition("#")
    target = (file.parent / path).resolve() if path else file
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    # Anchors that are made from docstrings are there in the built site only, and looked for there.
    return not anchor or anchor.startswith("paged_jax") or anchor in anchors(target)


def prose(file: Path) -> str:
    return re.sub(r"`[^`\n]+`", "``", FENCE.sub("", file.read_text(encoding="utf-8")))


def anchors(file: Path) -> set[str]:
    """Of the headings, as GitHub makes them; the site's are equal or fail its strict build."""
    headings = HEADING.findall(FENCE.sub("", file.read_text(encoding="utf-8")))
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in plain}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert build.returncode == 0, build.stdout
    return folder


class Page(HTMLParser):
    """What a built page links to, what it loads, which anchors it has, and its text."""

    def __init__(self, file: Path):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name == "src" or (name == "href" and tag == "link"):
                self.loads.append(value or "")
            elif name == "href":
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html")}


@needs_mkdocs
@pytest.mark.slow
def test_links_of_the_built_site_lead_somewhere(site, pages):
    assert len(pages) > len(PAGES)
    broken = [
        f"{file.relative_to(site)}: {link}"
        for file, page in pages.items()
        for link in (*page.links, *page.loads)
        if not urlsplit(link).scheme and not is_in(site, pages, file, link)
    ]
    assert broken == []


def is_in(site: Path, pages: dict[Path, Page], file: Path, link: str) -> bool:
    path, _, anchor = unquote(link).partition("#")
    folder = site if path.startswith("/") else file.parent
    target = (folder / path.lstrip("/").partition("?")[0]).resolve() if path else file
    target = target / "index.html" if target.is_dir() else target
    return target.is_file() and (not anchor or anchor == "__" or anchor in pages[target].anchors)


@needs_mkdocs
@pytest.mark.slow
def test_pages_ask_no_other_server_for_anything(site, pages):
    outside = re.compile(r"^(https?:)?//")
    assert [load for page in pages.values() for load in page.loads if outside.match(load)] == []
    styles = [
        style for file in site.rglob("*.css") for style in re.findall(r"url\(([^)]+)\)", file.read_text())
    ]
    assert [style for style in styles if outside.match(style.strip("'\""))] == []


@needs_mkdocs
@pytest.mark.slow
def test_every_public_name_has_an_entry_in_the_reference(site):
    # The inventory that other projects link by: a header of four lines, then an entry a line.
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    entries = {name: uri for name, _, _, uri, *_ in (line.split(" ", 4) for line in lines)}
    names = set(public_names())
    assert len(names) > 60
    assert sorted(name for name in names if not entries.get(name, "").startswith("reference/")) == []


def public_names() -> Iterator[str]:
    for package, names in PUBLIC.items():
        module = importlib.import_module(package)
        yield from (f"{package}.{name}" for name in names if not inspect.ismodule(getattr(module, name)))
    for name in FOR_USERS:
        module = importlib.import_module(f"paged_jax.{name}")
        for key, value in inspect.getmembers(module, lambda v: inspect.isfunction(v) or inspect.isclass(v)):
            if value.__module__ == module.__name__ and not key.startswith("_"):
                yield f"{module.__name__}.{key}"


@needs_mkdocs
@pytest.mark.slow
def test_the_reference_shows_shapes_and_the_comments_of_fields(site, pages):
    page_table = pages[site / "reference" / "page_table.html"].text
    assert 'block_tables: Int32[Array, "rows max_pages_per_row"]' in page_table
    assert "logical page -> page id or NO_PAGE" in page_table
    assert "Grant(granted: Bool" in page_table
    assert "guesses that were right" in pages[site / "reference" / "engine.html"].text


@needs_mkdocs
@pytest.mark.slow
def test_the_reference_shows_the_help_of_every_command(site, pages):
    text = pages[site / "reference" / "command_line.html"].text
    for name, command in typer.main.get_command(app).commands.items():
        help_text = text.partition(f"Usage: paged-jax {name} ")[2].partition("Usage: ")[0]
        assert command.help.split("\n")[0] in " ".join(help_text.split())
        assert [option for param in command.params for option in param.opts if option not in help_text] == []
