"""GGUF files: what comes out is what was put in, and damaged files are one clear error."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.models.checkpoint import open_checkpoint

LLAMA = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
GGUF_SHAPES = {"token_embd.weight": (20, 32), "output_norm.weight": (32,)}


def random_tensors(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, metadata=(), tensors=None, architecture="llama", types=None) -> Path:
    """`metadata` overrides LLAMA, None drops a key; `types` stores a tensor's data as that type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**LLAMA, **dict(metadata)}.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(f"llama.{key}", value)
    for name, values in (random_tensors(**GGUF_SHAPES) | (tensors or {})).items():
        type_ = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in GGUF's order: the two that a rotary frequency turns together are adjacent."""
    size = len(rows) // heads
    order = [half * (size // 2) + i for i in range(size // 2) for half in (0, 1)]
    return np.concatenate([head_rows[order] for head_rows in np.split(rows, heads)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (9, 3, 4), (6, 1, 16), (2, 2, 2)])
def test_gguf_rows_come_back_in_order(tmp_path, heads, kv_heads, head_dim, bias):
    kind = "bias" if bias else "weight"
    columns = () if bias else (32,)
    tensors = random_tensors(
        q_proj=(heads * head_dim, *columns),
        k_proj=(kv_heads * head_dim, *columns),
        v_proj=(kv_heads * head_dim, *columns),
    )
    path = write_gguf(
        tmp_path / "m.gguf",
        {
            "attention.head_count": heads,
            "attention.head_count_kv": kv_heads,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
        },
        {
            f"blk.0.attn_q.{kind}": interleave(tensors["q_proj"], heads),
            f"blk.0.attn_k.{kind}": interleave(tensors["k_proj"], kv_heads),
            f"blk.0.attn_v.{kind}": tensors["v_proj"],
        },
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["head_dim"] == head_dim
    assert checkpoint.config["attention_bias"] == bias
    for name, values in tensors.items():
        tensor = checkpoint.tensors[f"model.layers.0.self_attn.{name}.{kind}"]
        assert tensor.shape == values.shape
        np.testing.assert_array_equal(tensor.read(), values)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_types_are_dequantised(tmp_path, type_name):
    type_ = gguf.GGMLQuantizationType[type_name]
    values = np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32)
    name = "blk.0.ffn_gate.weight"
    path = write_gguf(tmp_path / "m.gguf", tensors={name: values}, types={name: type_})
    tensor = open_checkpoint(path).tensors["model.layers.0.mlp.gate_proj.weight"]
    assert tensor.shape == (48, 64)
    read = tensor.read()
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, gguf.dequantize(gguf.quantize(values, type_), type_))


def test_gguf_tensors_are_read_when_asked_for(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tensors={"output.weight": np.ones((20, 32), np.float32)})
    tensor = open_checkpoint(path).tensors["lm_head.weight"]
    contents = path.read_bytes()
    path.write_bytes(contents.replace(struct.pack("<f", 1.0), struct.pack("<f", 2.0)))
    np.testing.assert_array_equal(tensor.read(), 2.0)


def test_gguf_names(tmp_path):
    layer = {
        "attn_norm": "input_layernorm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    tensors = random_tensors(**{f"blk.11.{name}.weight": (1 + i, 32) for i, name in enumerate(layer)})
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    for name, new_name in layer.items():
        read = checkpoint.tensors[f"model.layers.11.{new_name}.weight"].read()
        np.testing.assert_array_equal(read, tensors[f"blk.11.{name}.weight"])
    assert {"model.embed_tokens.weight", "model.norm.weight"} < checkpoint.tensors.keys()
    assert checkpoint.name == "m"


@pytest.mark.parametrize("version", [2, 3])
def test_gguf_header_with_every_type_of_value(tmp_path, version):
    tensors = random_tensors(**GGUF_SHAPES)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(4096)
    for width in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{width}")(f"other.{width}", 100)
        writer.add_array(f"other.array.{width}", [100, 101])
    writer.add_bool("other.bool", True)
    writer.add_float64("llama.rope.freq_base", 1.5)
    writer.add_array("other.floats", [0.5, 1.5])
    writer.add_array("other.strings", ["a", "", "ü"])
    for key, value in LLAMA.items():
        writer.add_key_value(f"llama.{key}", value, gguf.GGUFValueType.get_type(value))
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    contents = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(contents[:4] + bytes([version]) + contents[5:])

    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config["rope_theta"] == 1.5
    assert checkpoint.config["hidden_size"] == LLAMA["embedding_length"]
    read = checkpoint.tensors["model.embed_tokens.weight"].read()
    np.testing.assert_array_equal(read, tensors["token_embd.weight"])


@pytest.mark.parametrize(
    ("metadata", "tensors", "expected"),
    [
        ({}, {}, {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}),
        ({}, {}, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": []}),
        ({}, {}, {"max_position_embeddings": 64, "rope_theta": 10000.0, "rope_scaling": None}),
        ({"attention.head_count_kv": None}, {}, {"num_key_value_heads": 4}),
        ({"rope.freq_base": 5e5}, {}, {"rope_theta": 5e5}),
        ({}, {}, {"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}),
        ({}, {"output.weight": (20, 32)}, {"tie_word_embeddings": False}),
        ({}, {"blk.0.ffn_gate.bias": (48,)}, {"mlp_bias": True}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, {"rope_scaling": None}),
        ({"rope.scale_linear": 2.0}, {}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
            {},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        ),
    ],
)
def test_gguf_config(tmp_path, metadata, tensors, expected):
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata, random_tensors(**tensors))).config
    assert {key: config[key] for key in expected} == expected


def test_gguf_rotary_factors(tmp_path):
    factors = np.array([1, 1, 2.5, 8], np.float32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors}))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": [1, 1, 2.5, 8]}
    assert checkpoint.tensors.keys() == {"model.embed_tokens.weight", "model.norm.weight"}


UNSUPPORTED_GGUF = {
    "another architecture": ({"architecture": "gemma2"}, "gemma2"),
    "zero heads": ({"metadata": {"attention.head_count": 0}}, "positive number"),
    "no heads": ({"metadata": {"attention.head_count": None}}, "attention.head_count"),
    "heads differ by layer": ({"metadata": {"attention.head_count": [4, 2]}}, "positive number"),
    "partly rotated": ({"metadata": {"rope.dimension_count": 4}}, "rope.dimension_count"),
    "experts": ({"tensors": random_tensors(**{"blk.0.ffn_gate_exps.weight": (2, 48, 32)})}, "ffn_gate_exps"),
    "heads do not divide": ({"tensors": random_tensors(**{"blk.0.attn_q.weight": (36, 32)})}, "4 heads"),
    "unknown tensor": ({"tensors": random_tensors(surprise=(2,))}, "surprise"),
}


@pytest.mark.parametrize("case", UNSUPPORTED_GGUF)
def test_unsupported_gguf(tmp_path, case):
    arguments, message = UNSUPPORTED_GGUF[case]
    path = write_gguf(tmp_path / "m.gguf", **arguments)
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{message}"):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def sound_gguf(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    names = {"rope.scaling.type": "none", "some.array": [1, 2, 3], "some.names": ["a", "b"]}
    return write_gguf(path, names, random_tensors(**{"blk.0.attn_q.weight": (32, 32)})).read_bytes()


@pytest.fixture(scope="module")
def damaged_gguf(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "m.gguf"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda contents: b"", "cut off"),
        (lambda contents: b"PK\3\4" + contents[4:], "magic"),
        (lambda contents: contents[:4] + b"\x63" + contents[5:], "version"),
        (lambda contents: contents[:-1], "cut off or damaged"),
    ],
)
def test_damaged_gguf(sound_gguf, damaged_gguf, damage, message):
    damaged_gguf.write_bytes(damage(sound_gguf))
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{message}"):
        open_checkpoint(damaged_gguf)


def test_gguf_cut_off_anywhere(sound_gguf, damaged_gguf):
    for num_bytes in range(0, len(sound_gguf), 11):
        damaged_gguf.write_bytes(sound_gguf[:num_bytes])
        with pytest.raises(ValueError, match=r"m\.gguf"):
            open_checkpoint(damaged_gguf)


@given(st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_gguf_with_changed_bytes_opens_or_is_refused(sound_gguf, damaged_gguf, data):
    contents = bytearray(sound_gguf)
    header_size = sound_gguf.index(b"blk.0.attn_q.weight") + 64
    for _ in range(data.draw(st.integers(1, 3))):
        contents[data.draw(st.integers(4, header_size))] = data.draw(st.integers(0, 255))
    damaged_gguf.write_bytes(contents)
    try:
        checkpoint = open_checkpoint(damaged_gguf)
    except ValueError:
        return
    assert all(tensor.read().shape == tensor.shape for tensor in checkpoint.tensors.values())
