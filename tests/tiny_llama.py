"""A small random Llama for even numbers of workers: the sample model's nine heads do not divide by two. Its text is
gibberish, but deterministic under greedy decoding."""

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from glowplug.engines import vllm_sample

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_HEAD_DIM = 64


def write(directory: Path, *, num_layers: int = 4, num_heads: int = 4, vocabulary: int = 4096) -> Path:
    """Write a vLLM model: the sample's tokenizer, half as many key heads as query heads."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        if (vllm_sample.sample_dir() / name).is_file():
            shutil.copyfile(vllm_sample.sample_dir() / name, directory / name)
    hidden = num_heads * _HEAD_DIM
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    _write_tensors(directory / "model.safetensors", _shapes(num_layers, hidden, vocabulary))
    return directory


def _shapes(num_layers: int, hidden: int, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{name}.self_attn.k_proj.weight", (hidden // 2, hidden)
        yield f"{name}.self_attn.v_proj.weight", (hidden // 2, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.mlp.gate_proj.weight", (2 * hidden, hidden)
        yield f"{name}.mlp.up_proj.weight", (2 * hidden, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, 2 * hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _write_tensors(path: Path, shapes: Iterator[tuple[str, tuple[int, ...]]]) -> None:
    """Write safetensors: 8 bytes of header length, the header, each tensor's float32 values."""
    header, values, at = {}, [], 0
    chance = np.random.default_rng(7)
    for name, shape in shapes:
        if len(shape) == 1:
            tensor = np.ones(shape, np.float32)
        else:
            tensor = chance.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        values.append(tensor)
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in values:
            file.write(tensor.tobytes())


def part(whole: Path, directory: Path, stage: int, num_stages: int) -> Path:
    """Keep one stage's weights; all other values are nan, as unfetched ones might be."""
    directory.mkdir(parents=True)
    for file in whole.iterdir():
        shutil.copyfile(file, directory / file.name)
    num_layers = json.loads((whole / "config.json").read_text())["num_hidden_layers"]
    assert num_layers % num_stages == 0
    with (directory / "model.safetensors").open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        for name, facts in json.loads(file.read(length)).items():
            if _stage_of(name, num_layers // num_stages, num_stages) != stage:
                start, end = facts["data_offsets"]
                file.seek(8 + length + start)
                file.write(b"\xff" * (end - start))
    return directory


def _stage_of(tensor: str, layers_each: int, num_stages: int) -> int:
    if ".layers." in tensor:
        return int(tensor.split(".")[2]) // layers_each
    return 0 if "embed" in tensor else num_stages - 1
