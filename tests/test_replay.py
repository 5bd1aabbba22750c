"""The page that replays a recording: its data, its file, the command, and what a browser makes of it."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import quick_compilation as quick_compilation
from recorded import recorded_run
from typer.testing import CliRunner

from paged_jax.cli import record as record_cli
from paged_jax.cli.app import app
from paged_jax.cli.replay import MAX_PAGES, as_dict, as_html, replacing, write_replay
from paged_jax.engine import Metrics, Recording
from paged_jax.engine.recording import Copied, Joined, Left, Occupant, Visit
from paged_jax.page_table import NO_PAGE, PageTable

HOSTILE = "</script><script>alert('\u2028')</script><!-- <script> & \\u003c ]]> RECORDING"
VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """Elements by id, the text in them, and the cells of the pool."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.cells: list[dict[str, str | None]] = []
        self._open: list[str | None] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        found = dict(attrs)
        if "data-page" in found:
            self.cells.append(found)
        if tag not in VOID:
            self._open.append(found.get("id"))

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        for name in filter(None, self._open):
            self.texts[name] = self.texts.get(name, "") + data


def replayed(data: dict) -> list[dict]:
    """Tables, holders and rows of each visit, from the changes."""
    tables: dict[int, dict[int, int]] = {row: {} for row in range(data["max_rows"])}
    counts, rows, states = [0] * data["num_pages"], {}, []
    for visit in data["visits"]:
        for row, logical_page, page in visit["entries"]:
            tables[row][logical_page] = page
        for page, count in visit["refs"]:
            counts[page] = count
        for row, *one in visit["rows"]:
            rows.pop(row, None)
            if one:
                rows[row] = tuple(one)
        held = {
            row: {entry: page for entry, page in table.items() if page != NO_PAGE}
            for row, table in tables.items()
        }
        states.append({"tables": held, "counts": list(counts), "rows": dict(rows)})
    return states


def test_the_data_is_the_recording():
    recording, _ = recorded_run()
    data = as_dict(recording, "A run")
    states = replayed(json.loads(json.dumps(data)))
    assert (data["num_pages"], data["page_size"], data["max_rows"]) == (24, 4, 4)
    for visit, state in zip(recording.visits, states, strict=True):
        table = np.full_like(visit.table.block_tables, NO_PAGE)
        for row, entries in state["tables"].items():
            for entry, page in entries.items():
                table[row, entry] = page
        np.testing.assert_array_equal(table, visit.table.block_tables)
        assert state["counts"] == visit.table.ref_counts.tolist()
        rows = {
            row: (data["requests"].index(one.request_id), one.sample, one.prompt_tokens, one.new_tokens)
            for row, one in visit.occupants.items()
        }
        assert {row: one[:4] for row, one in state["rows"].items()} == rows
        assert {row: one[4] for row, one in state["rows"].items()} == {
            row: int(visit.table.lengths[row]) for row in rows
        }


def test_the_data_tells_the_events_and_counters():
    recording, _ = recorded_run()
    data = as_dict(recording)
    for visit, found in zip(recording.visits, data["visits"], strict=True):
        assert len(found["events"]) == len(visit.events)
        for event, (kind, row, request, sample, *facts) in zip(visit.events, found["events"], strict=True):
            names = {"joined": Joined, "copied": Copied, "left": Left}
            assert names[kind](row, data["requests"][request], sample, *facts) == event
        for name in ("waiting", "preemptions", "prompt_tokens", "cached_tokens", "new_tokens"):
            assert found[name] == getattr(visit.metrics, name)


def test_the_page_holds_just_the_data_whatever_is_in_it():
    recording, _ = recorded_run()

    def renamed(visit: Visit) -> Visit:
        occupants = {
            row: dataclasses.replace(one, request_id=HOSTILE + one.request_id)
            for row, one in visit.occupants.items()
        }
        events = tuple(
            dataclasses.replace(event, request_id=HOSTILE + event.request_id) for event in visit.events
        )
        return dataclasses.replace(visit, occupants=occupants, events=events)

    hostile = dataclasses.replace(recording, visits=[renamed(visit) for visit in recording.visits])
    page = Page(as_html(hostile, HOSTILE))
    template = Page(resources.files("paged_jax.cli").joinpath("replay.html").read_text())
    assert json.loads(page.texts["recording"]) == as_dict(hostile, HOSTILE)
    assert page.tags == template.tags
    assert page.attributes == template.attributes


def test_the_page_needs_nothing_from_elsewhere():
    html = as_html(recorded_run().recording)
    assert not re.findall(r"https?:|//\w|@import|url\(|\bsrc=|fetch\(|import\(", html)
    assert re.findall(r'href="([^"]*)"', html) == ["data:,"]


def test_a_thousand_visits_of_32_rows_take_a_few_megabytes():
    """Every row gets a page each visit, and is another request every 32 visits."""
    rows, width, visits = 32, 32, []
    for number in range(1000):
        held = 1 + number % width
        pages = np.arange(rows)[:, None] * width + np.arange(width)
        table = PageTable(
            block_tables=np.where(np.arange(width) < held, pages, NO_PAGE),
            lengths=np.full(rows, 16 * held),
            ref_counts=np.isin(np.arange(rows * width), pages[:, :held]).astype(np.int32),
            free_stack=np.zeros(rows * width, np.int32),
            num_free=np.int32(rows * (width - held)),
            page_size=16,
        )
        occupants = {
            row: Occupant(f"request-{number // width * rows + row}", 0, 16, held) for row in range(rows)
        }
        visits.append(Visit(table, occupants, (), Metrics()))
    assert len(as_html(Recording(visits, 1000))) < 3_000_000


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(ValueError, match="nothing was recorded"):
        as_html(Recording([], 10))
    table = PageTable.create(MAX_PAGES + 1, 4, 1, 1)
    with pytest.raises(ValueError, match=f"at most {MAX_PAGES} pages can be shown, got {MAX_PAGES + 1}"):
        as_html(Recording([Visit(table, {}, (), Metrics())], 10))


def test_the_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "run.html"
    write_replay(recorded_run().recording, path, "A run")
    assert path.read_text() == as_html(recorded_run().recording, "A run")
    with pytest.raises(ValueError, match="nothing was recorded"):
        write_replay(Recording([], 10), path)
    assert path.read_text() == as_html(recorded_run().recording, "A run")
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    path = tmp_path / "link.html"
    path.symlink_to(tmp_path / "target.html")
    with replacing(path) as file:
        file.write("new")
    assert path.is_symlink()
    assert (tmp_path / "target.html").read_text() == "new"


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, ["trace", *map(str, arguments)])


@pytest.fixture
def no_run(monkeypatch):
    """The command has to fail before anything runs."""
    monkeypatch.setattr(record_cli, "record_run", None)
    monkeypatch.setattr(record_cli, "tiny_model", None)
    monkeypatch.setattr("paged_jax.cli.app._cache_compilations", lambda: None)


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("--html", "run.html", "--tokens", 9), "--tokens has no meaning beside --html", 2),
        (("--html", "run.html", "--free-pages", "7"), "--free-pages has no meaning beside --html", 2),
        (("--html", "run.html", "--json"), "--json has no meaning beside --html", 2),
        (("--rows", 6), "--rows has no meaning without --html", 2),
        (("--model", "x"), "--model has no meaning without --html", 2),
        (("--html", "run.html", "--pages", 5000), "a pool of at most 4096 pages can be shown, got 5000", 1),
        (("--html", "run.html", "--pages", 18), "a request of this run takes up to 19 pages", 1),
        (("--html", "", "--tokens", 9), "--tokens has no meaning beside --html", 2),
        (("--html", ""), "Not a regular file", 1),
        (("--html", "nowhere/run.html"), "nowhere/run.html: No such file or directory", 1),
        (("--html", "."), "Not a regular file", 1),
        (("--html", "/dev/null"), "/dev/null: Not a regular file", 1),
        (("--html", "run.html", "--model", "nowhere"), "nowhere", 1),
    ],
)
def test_errors_are_one_line_and_come_before_the_run(arguments, message, code, no_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.exit_code == code
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """What the command writes by default."""
    path = tmp_path_factory.mktemp("trace") / "run.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paged_jax.cli.app._cache_compilations", lambda: None)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            result = invoke("--html", path)
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first.startswith("18 requests in 6 rows, 48 pages of 4 tokens: ")
    assert second == f"The page that replays it: {path}"
    shown = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z ]+)", first.split(": ")[1])}
    assert set(shown) == {"visits", "prefix hits", "pages copied on write", "preemptions"}
    assert min(shown.values()) >= 3
    return path


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """The page's DOM once its script has run, in a browser without a window."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"needs a browser: none of {', '.join(names)} is installed")

    def browse(file: Path, fragment: str = "") -> Page:
        profile = tmp_path_factory.mktemp("profile")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        flags += ["--disable-quic"]
        flags += [f"--user-data-dir={profile}", "--virtual-time-budget=2000", "--enable-logging=stderr"]
        found = subprocess.run(
            [browser, *flags, "--dump-dom", file.as_uri() + fragment],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "CONSOLE" not in found.stderr
        return Page(found.stdout)

    return browse


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 12, 60])
def test_a_browser_shows_the_visit_in_the_address(number, page_file, browse):
    page = browse(page_file, f"#visit={number}")
    data = json.loads(page.texts["recording"])
    state = replayed(data)[number - 1]
    holders: dict[int, list[int]] = {number: [] for number in range(data["num_pages"])}
    for row, entries in state["tables"].items():
        for page_id in entries.values():
            holders[page_id].append(row)
    kinds = Counter()
    assert [int(cell["data-page"]) for cell in page.cells] == list(holders)
    for cell, (page_id, rows) in zip(page.cells, holders.items(), strict=True):
        count = state["counts"][page_id]
        kind = "shared" if len(rows) > 1 else "held" if rows else "cached" if count else "free"
        kinds[kind] += 1
        requests = list(dict.fromkeys(state["rows"][row][0] for row in rows))
        assert cell["data-state"] == kind
        assert cell["data-requests"] == " ".join(map(str, requests))
        assert ("data-pinned" in cell) == (count > len(rows))
        assert len(
            set(re.findall(r"oklch\(var\(--light\) var\(--chroma\) ([\d.]+)\)", cell["style"]))
        ) == len(requests)
        assert all(f"row {row}" in cell["aria-label"] for row in rows)
    assert page.texts["visit"] == f"{number} of {len(data['visits'])}"
    for kind in ("held", "shared", "cached", "free"):
        assert page.texts[kind] == str(kinds[kind])
    assert page.texts["running"] == f"{len(state['rows'])} of 6"
    assert page.texts["preemptions"] == str(data["visits"][number - 1]["preemptions"])
    for event in data["visits"][number - 1]["events"]:
        assert data["requests"][event[2]] in page.texts["events"]


@pytest.mark.slow
def test_a_request_has_one_colour_and_others_have_others(page_file, browse):
    page = browse(page_file, "#visit=60")
    colours: dict[str, set[str]] = {}
    for cell in page.cells:
        if cell["data-state"] == "held":
            colours.setdefault(cell["data-requests"], set()).add(
                re.search(r"--owner: ([^;]+)", cell["style"])[1]
            )
    assert len(colours) >= 3
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(colours)


@pytest.mark.slow
def test_keys_lead_from_visit_to_visit_and_from_page_to_page(page_file, browse, tmp_path):
    """Twice to the right and once back; then, in the pool, one page on."""
    driver = """
    <script>
    const press = (key, where) => where.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
    for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft"]) press(key, document.body);
    cells[0].focus();
    press("ArrowRight", cells[0]);
    </script>
    """
    driven = tmp_path / "driven.html"
    driven.write_text(page_file.read_text().replace("</body>", driver + "</body>"))
    page = browse(driven)
    assert page.texts["visit"].startswith("2 of ")
    assert page.texts["inspector"].startswith("Page 1 · 2 holders")
    assert "row 0, logical page 1 (request-0)" in page.texts["inspector"]
    assert [cell["data-page"] for cell in page.cells if cell["tabindex"] == "0"] == ["1"]


@pytest.mark.slow
def test_a_browser_takes_hostile_names_as_text(browse, tmp_path):
    write_replay(recorded_run().recording, tmp_path / "run.html", HOSTILE)
    assert browse(tmp_path / "run.html").texts["title"] == HOSTILE
