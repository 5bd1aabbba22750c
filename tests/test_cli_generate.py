"""`paged-jax generate`: what it prints, as JSON, on a terminal and in a pipe, and to bad input."""

import io
import json
import shutil
from pathlib import Path

import pytest
from engines import quick_compilation as quick_compilation
from rich.console import Console
from typer.testing import CliRunner

from paged_jax.cli.app import app
from paged_jax.cli.stream import stream_text, usage_text
from paged_jax.cli.text import TextGeneration
from paged_jax.engine import SamplingParams
from paged_jax.engine.core import EngineCore
from paged_jax.generate import generate
from paged_jax.models import load

TINY = Path(__file__).parent / "golden" / "tiny_llama3"
STORY = "Once upon a time, there was a little"
STORY_GOES_ON = (
    " girl named Emma who loved to play in the sun. She would often go to the beach "
    "and play with her friends."
)


@pytest.fixture(autouse=True)
def cache_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.setattr("paged_jax.cli.app._cache_compilations", lambda: None)


@pytest.fixture(scope="module")
def tiny():
    return load(TINY)


def run(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def run_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def text_generation(tiny, prompts, max_new_tokens=8, **options):
    return TextGeneration(tiny, prompts, SamplingParams(max_tokens=max_new_tokens), **options)


def test_json_is_what_generate_gives(tiny):
    prompts = ["The quick brown", "a"]
    found = run_json("--model", TINY, *(x for p in prompts for x in ("--prompt", p)), "--max-tokens", 6)
    ids = [tiny.tokenizer.encode(prompt) for prompt in prompts]
    expected = generate(tiny.model, ids, max_new_tokens=6, stop_token_ids=tiny.tokenizer.eos_token_ids)
    for prompt, got, completion in zip(prompts, found["completions"], expected, strict=True):
        assert got == {
            "prompt": prompt,
            "text": tiny.tokenizer.decode(completion.token_ids),
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
        }


def test_summary_counts_pages_and_slots():
    found = run_json(
        "--model", TINY, "--prompt", "abcdefghij", "--prompt", "a", "--max-tokens", 6, "--page-size", 4
    )
    summary, rows = found["summary"], found["completions"]
    new = [len(row["token_ids"]) for row in rows]
    prompt_tokens = [len(load(TINY).tokenizer.encode(row["prompt"])) for row in rows]
    stored = [p + n - 1 for p, n in zip(prompt_tokens, new, strict=True)]
    assert summary["prompt_tokens"] == sum(prompt_tokens)
    assert summary["new_tokens"] == sum(new)
    assert summary["used_slots"] == sum(stored)
    assert summary["wasted_slots"] == sum(-n % 4 for n in stored)
    assert summary["peak_pages"] == sum(-(-n // 4) for n in stored)
    assert summary["contiguous_slots"] == 2 * (max(prompt_tokens) + 6)
    assert summary["bytes_per_token"] == 2 * 3 * 2 * 16 * 4
    assert summary["tokens_per_second"] > 0


def test_a_row_does_not_depend_on_the_others():
    sampled = ("--temperature", 1.0, "--top-k", 50, "--seed", 7, "--max-tokens", 8, "--model", TINY)
    (alone,) = run_json("--prompt", "The quick", *sampled)["completions"]
    together = run_json("--prompt", "a", "--prompt", "The quick", *sampled)["completions"]
    assert together[1] == alone


def test_a_tight_pool_changes_nothing_but_the_order():
    options = (
        "--prompt",
        "abcdefgh",
        "--prompt",
        "hgfedcba",
        "--model",
        TINY,
        "--max-tokens",
        24,
        "--page-size",
        4,
    )
    roomy = run_json(*options)
    assert roomy["summary"]["peak_pages"] > 12
    tight = run_json(*options, "--pages", 12)
    assert tight["completions"] == roomy["completions"]
    assert tight["summary"]["peak_pages"] <= tight["summary"]["num_pages"] == 12


def test_pool_of_a_memory_budget():
    # 384 bytes a token, 16 tokens a page, 5 % kept back, and the tables.
    found = run_json("--model", TINY, "--prompt", "ab", "--max-tokens", 4, "--pool", "1MiB")
    page_bytes = 16 * found["summary"]["bytes_per_token"]
    assert (1 << 20) * 0.93 < found["summary"]["num_pages"] * page_bytes <= (1 << 20) * 0.95


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("prompts", [["The quick"], ["The quick", "[b]a[/b]"]], ids=["one", "two"])
def test_text_on_the_screen(tiny, terminal, prompts):
    screen = io.StringIO()
    generation = text_generation(tiny, prompts)
    console = Console(
        file=screen, force_terminal=terminal, width=200, markup=False, highlight=False, color_system=None
    )
    stream_text(generation, console)
    console.print(usage_text(generation.usage()))
    for completion in generation.completions():
        assert completion.prompt in screen.getvalue()
        assert completion.text.split("\n")[0] in screen.getvalue()
    for word in ("tokens", "pages", "wasted", "contiguous"):
        assert word in screen.getvalue()


def test_pieces_add_up_to_the_text(tiny):
    generation = text_generation(tiny, ["The quick", "a"], max_new_tokens=20)
    texts = ["", ""]
    for pieces in generation:
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == [completion.text for completion in generation.completions()]


def test_chat_uses_the_template(tiny):
    found = run_json("--model", TINY, "--prompt", "hello", "--chat", "--max-tokens", 3)
    rendered = tiny.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    ids = tiny.tokenizer.encode(rendered, add_special_tokens=False)
    assert found["summary"]["prompt_tokens"] == len(ids)
    (expected,) = generate(tiny.model, [ids], max_new_tokens=3, stop_token_ids=tiny.tokenizer.eos_token_ids)
    assert found["completions"][0]["token_ids"] == list(expected.token_ids)


def test_new_tokens_end_with_the_context(tiny):
    prompt = "a" * 505
    length = len(tiny.tokenizer.encode(prompt))
    (row,) = run_json("--model", TINY, "--prompt", prompt, "--max-tokens", 1000)["completions"]
    assert len(row["token_ids"]) <= tiny.model.config.max_length - length


def test_interrupt_keeps_what_is_written(monkeypatch):
    visit = EngineCore.visit
    visits = []

    def interrupted(self):
        visits.append(self)
        if len(visits) == 3:
            raise KeyboardInterrupt
        visit(self)

    monkeypatch.setattr(EngineCore, "visit", interrupted)
    result = run("--model", TINY, "--prompt", "The quick", "--prompt", "a", "--max-tokens", 40)
    assert result.exit_code == 130
    assert "The quick" in result.stdout
    assert "[interrupted]" in result.stdout
    assert "Traceback" not in result.output


def cut_off(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "model-00001-of-00002.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "without a tokenizer"),
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{}"), "no chat template"),
    ],
)
def test_damaged_folder_is_one_line(tmp_path, damage, message):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    damage(folder)
    expect_error(run("--model", folder, "--prompt", "a", "--chat"), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "no-such-model", "--prompt", "a"), "no-such-model"),
        (("--model", __file__, "--prompt", "a"), "not a model"),
        (("--model", TINY, "--prompt", ""), "empty"),
        (("--model", TINY, "--prompt", "a", "--prompt", ""), "empty"),
        (("--model", TINY, "--prompt", "", "--chat"), "empty"),
        (("--model", TINY, "--prompt", "a" * 2000), "longer than the model's context"),
        (("--model", TINY, "--prompt", "a" * 40, "--pages", 1), "pool"),
        (("--model", TINY, "--prompt", "a", "--pool", "1KiB"), "budget"),
        (("--model", TINY, "--prompt", "a", "--pool", "tiny"), "--pool"),
        (("--model", TINY, "--prompt", "a", "--pool", "1MiB", "--pages", 4), "not both"),
        (("--model", TINY, "--prompt", "a", "--pages", 10**12), "TiB"),
        (("--model", TINY), "--prompt"),
        (("--model", TINY, "--prompt", "a", "--temperature", -1), "temperature"),
        (("--model", TINY, "--prompt", "a", "--top-p", 1.5), "top_p"),
        (("--model", TINY, "--prompt", "a", "--seed", 2**40), "seed"),
        (("--model", TINY, "--prompt", "a", "--max-tokens", 0), "max-tokens"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    expect_error(run(*arguments), message)


def test_damaged_gguf_is_one_line(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 40)
    expect_error(run("--model", path, "--prompt", "a"), "model.gguf")


def expect_error(result, message):
    assert result.exit_code not in (0, None)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.slow
def test_real_weights():
    found = run_json("--model", "smollm2-135m", "--prompt", STORY, "--max-tokens", 24, "--temperature", 0)
    (row,) = found["completions"]
    assert row["text"] == STORY_GOES_ON
    assert row["finish_reason"] == "length"
