"""`paged-jax` as its users see it: output, errors in one line, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paged_jax.attention import paged_attention_implementation
from paged_jax.cli import app as cli

EXERCISE_1 = "plan --bytes-per-token 128KiB --max-length 2048 --lengths 200,600,150,1050 --page-size 16"
EXERCISE_3 = "plan --bytes-per-token 128KiB --pool 32GiB --max-length 4096 --mean-length 500 --page-size 16"
LLAMA_3_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}


def run(command: str, *more: str):
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(cli.app, [*command.split(), *more])


def run_json(command: str, *more: str):
    result = run(command, *more, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def rows(text: str) -> list[str]:
    """The lines, with one space for however many keep the columns apart."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_plan_exercise_1():
    found = run_json(EXERCISE_1)
    assert found["contiguous_waste"] == 0.756
    assert found["paged_waste"] == 0.016
    assert (found["used_slots"], found["contiguous_slots"], found["paged_slots"]) == (2000, 8192, 2032)
    assert "ratio" not in found
    lines = rows(run(EXERCISE_1).stdout)
    assert "wasted 6,192 = 75.6 % 32 = 1.6 %" in lines
    assert "token slots 4 x 2,048 = 8,192 127 pages x 16 = 2,032" in lines


def test_plan_exercise_3():
    found = run_json(EXERCISE_3)
    assert (found["contiguous_requests"], found["paged_requests"], found["ratio"]) == (64, 512, 8.0)
    assert (found["page_bytes"], found["pool_pages"]) == (2 * 2**20, 16384)
    text = run(EXERCISE_3).stdout
    assert "16 tokens x 128 KiB = 2 MiB per page" in text
    assert "requests in 32 GiB 64 512" in rows(text)
    assert "Pages hold 8 times as many requests" in text


def test_plan_of_a_model(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_8B))
    numbers = "plan --layers 32 --kv-heads 8 --head-dim 128 --max-length 8192 --mean-length 500"
    from_numbers = run_json(f"{numbers} --pool 32GiB")
    assert from_numbers["bytes_per_token"] == 128 * 1024
    assert from_numbers == run_json("plan --mean-length 500 --pool 32GiB --config", str(config))
    assert from_numbers == run_json("plan --mean-length 500 --pool 32GiB --config", str(tmp_path))
    assert run_json(f"{numbers} --dtype float32")["bytes_per_token"] == 256 * 1024
    assert run_json(f"{numbers} --dtype int8")["bytes_per_token"] == 66 * 1024
    text = run(f"{numbers} --dtype int8").stdout
    assert "2 x 32 layers x 8 kv heads x (128 x 1 + 4) bytes = 66 KiB per token" in text
    text = run("plan --mean-length 500 --config", str(config)).stdout
    assert "2 x 32 layers x 8 kv heads x 128 x 2 bytes = 128 KiB per token" in text


def test_trace_exercise_2(tmp_path):
    picture = tmp_path / "pool.png"
    command = "trace --page-size 4 --tokens 9 --steps 4"
    found = run_json(command, "--plot", str(picture))
    assert found["block_table"] == [7, 2, 14]
    assert [step["taken"] for step in found["steps"]] == [False, False, False, True]
    assert found["steps"][-1]["block_table"] == [7, 2, 14, 9]
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = run(command, "--plot", str(picture))
    assert "[7, 2, 14, 9]" in result.stdout
    assert str(picture) in result.stdout


def test_trace_takes_the_order_of_the_pages():
    assert run_json("trace --page-size 2 --tokens 3 --steps 0 --free-pages 5,3")["block_table"] == [5, 3]


def test_info():
    found = run_json("info")
    assert set(found["versions"]) == {"python", "jax", "jaxlib", "flax", "paged_jax"}
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["backend"] == "cpu" or found["devices"][0]["memory_bytes"] > 0
    assert found["attention"] == paged_attention_implementation()._asdict()
    text = run("info").stdout
    told = f"attention {found['attention']['name']}: {found['attention']['reason']}"
    assert told in " ".join(text.split())  # it may take two lines
    assert f"backend {found['backend']}" in rows(text)


USAGE = [
    ("bogus", "No such command 'bogus'. (see paged-jax --help)"),
    ("plan --foo", "No such option"),
    ("trace extra", "unexpected extra argument"),
    ("trace --page-size 0", "--page-size"),
    ("trace --tokens x", "--tokens"),
    ("trace --free-pages 1,x", "--free-pages: expected whole numbers with commas between them"),
    ("plan", "give --bytes-per-token, or --config, or all of --layers, --kv-heads and --head-dim"),
    ("plan --layers 2 --kv-heads 2 --max-length 9 --mean-length 5", "all of --layers"),
    ("plan --bytes-per-token 1 --config x --max-length 9 --mean-length 5", "give --bytes-per-token, or"),
    ("plan --bytes-per-token 1 --max-length 9", "give either --mean-length or --lengths"),
    ("plan --bytes-per-token 1 --max-length 9 --mean-length 5 --lengths 5", "give either --mean-length"),
    ("plan --bytes-per-token 1 --mean-length 5", "give --max-length"),
    ("plan --bytes-per-token 12XB --max-length 9 --mean-length 5", "expected a size such as 4096, 128KiB"),
    ("plan --bytes-per-token 1 --dtype float32 --max-length 9 --mean-length 5", "--dtype has no meaning"),
    (
        "plan --layers 1 --kv-heads 1 --head-dim 1 --dtype int3 --max-length 9 --mean-length 5",
        "--dtype: dtype must be",
    ),
]
IMPOSSIBLE = [
    (
        "plan --bytes-per-token 1KiB --max-length 9 --mean-length 50",
        "a request of 50 tokens is longer than the maximum",
    ),
    (
        "plan --bytes-per-token 1KiB --max-length 9 --lengths 1,0",
        "lengths[1] must be a positive integer, got 0",
    ),
    (
        "plan --bytes-per-token 1KiB --max-length 9 --mean-length 5 --pool 2KiB",
        "does not hold one request of 9 tokens",
    ),
    ("plan --config /nowhere/config.json --mean-length 5", "/nowhere/config.json: No such file or directory"),
    ("trace --free-pages 3,3", "free_pages must name each page once"),
    ("trace --page-size 10000000000", "page_size must be from 1 to"),
    ("trace --plot /nowhere/pool.png", "/nowhere/pool.png: No such file or directory"),
    ("trace --plot pool.xyz", "Format 'xyz' is not supported"),
]


@pytest.mark.parametrize(
    ("command", "message", "code"),
    [(*case, 2) for case in USAGE] + [(*case, 1) for case in IMPOSSIBLE],
)
def test_errors_are_one_line(command, message, code):
    result = run(command)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.exit_code == code


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"{}", b"\x89PNG\r\n", b'{"num_hidden_layers": "32"}', b'{"text_config": [1]}'],
)
def test_a_damaged_config_is_one_line(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    result = run("plan --mean-length 5 --max-length 9 --config", str(tmp_path))
    assert f"error: {tmp_path}/config.json is not a model's config: " in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (KeyboardInterrupt(), 130, ""),
        (NotImplementedError("not\n  here"), 1, "error: not here\n"),
        (ImportError("no such extra"), 1, "error: no such extra\n"),
        (MemoryError(), 1, "error: MemoryError\n"),
        (
            FileNotFoundError(2, "No such file or directory", "weights.gguf"),
            1,
            "error: weights.gguf: No such file or directory\n",
        ),
    ],
)
def test_exceptions_of_a_command(raised, code, line, monkeypatch):
    def fail(*_):
        raise raised

    monkeypatch.setattr(cli, "Plan", fail)
    result = run(EXERCISE_1)
    assert (result.exit_code, result.stderr) == (code, line)


@pytest.mark.parametrize("command", ["", "--help"])
def test_help_lists_the_commands(command):
    result = run(command)
    assert result.exit_code == 0
    assert {"plan", "trace", "info"} <= set(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_version_is_one_line():
    assert run("--version").stdout.count("\n") == 1


def test_module_runs_as_a_program():
    found = subprocess.run(
        [sys.executable, "-m", "paged_jax", *EXERCISE_3.split(), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout)["ratio"] == 8.0
    wrong = subprocess.run(
        [sys.executable, "-m", "paged_jax", "plan"], capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


def test_plan_and_help_need_no_jax():
    """In an empty package with the same files, so that only what the program itself imports counts."""
    program = f"""
import sys, types
package = types.ModuleType("paged_jax")
package.__path__ = [{str(Path(cli.__file__).parents[1])!r}]
sys.modules["paged_jax"] = package
from typer.testing import CliRunner
from paged_jax.cli.app import app
assert CliRunner().invoke(app, {EXERCISE_3.split()!r}).exit_code == 0
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
assert "jax" not in sys.modules
assert CliRunner().invoke(app, ["trace"]).exit_code == 0
assert "jax" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
