"""What is wrong with a checkpoint is said in one line that names the file, before it is used."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabit.errors import UserError
from megabit.interop.huggingface import HuggingFaceSource, export_huggingface
from tests.interop.hf_models import (
    AUTO,
    BIT,
    ONLINE,
    edit_config,
    quantize,
    rewrite,
    save_random,
    stored,
)
from tests.interop.random_source import TINY, RandomSource

Q, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"
NORM = "model.layers.1.mlp.ffn_sub_norm.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def refusal(path: Path) -> str:
    """The one line with which a checkpoint is refused, when it is opened or looked through."""
    with pytest.raises(UserError) as caught:
        HuggingFaceSource(path).verify()
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(path))
    return line.removeprefix(f"{path}").removeprefix("/")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed")
    save_random(path, replace(TINY, tie_word_embeddings=False), torch.bfloat16)
    quantize(path, AUTO, torch.bfloat16)
    HuggingFaceSource(path).verify()
    return path


@pytest.fixture
def folder(packed: Path, tmp_path: Path) -> Path:
    """A copy of a sound packed checkpoint, to be spoiled."""
    return Path(shutil.copytree(packed, tmp_path / "model"))


def test_no_folder_and_no_files(tmp_path: Path, folder: Path) -> None:
    assert "is not a folder" in refusal(tmp_path / "none")
    (folder / FILE).unlink()
    assert refusal(folder).startswith(": has no model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cposix\nsystem\n")
    assert refusal(folder).startswith("pytorch_model.bin: is a pickle, which may run code")


def test_a_file_that_is_cut_off_or_no_safetensors_file(folder: Path) -> None:
    whole = (folder / FILE).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    huge = (1 << 62).to_bytes(8, "little") + whole[8:]
    cut = [whole[:-1], whole[: header + 5], whole[: header - 9], whole[:5], b"", whole + b"x"]
    for content in (*cut, huge, b"not safetensors at all, and longer than eight bytes"):
        (folder / FILE).write_bytes(content)
        assert refusal(folder).startswith(f"{FILE}: cannot read it (")


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (Q, lambda w: w[:-1], "must be packed codes of shape (32/4, 32), not torch.uint8 (7, 32)"),
        (Q, lambda w: w.t(), "not torch.uint8 (32, 8)"),
        (Q, lambda w: w.view(torch.int8), "not torch.int8 (8, 32)"),
        (Q, lambda w: w.view(torch.float8_e4m3fn), "not an unknown dtype (8, 32)"),
        (Q, lambda w: w.view(4, 8, 8), "not torch.uint8 (4, 8, 8)"),
        (Q, lambda w: w | 3, "it holds code 3; only 0, 1 and 2"),
        (Q, lambda w: torch.full_like(w, 0b01010101), "is zero everywhere"),
        (f"{Q}_scale", lambda s: s * math.nan, "must be positive and finite, not nan"),
        (f"{Q}_scale", lambda s: s * math.inf, "must be positive and finite, not inf"),
        (f"{Q}_scale", lambda s: s * 0, "must be positive and finite, not 0.0"),
        (f"{Q}_scale", lambda s: -s, "must be positive and finite, not -"),
        (f"{Q}_scale", lambda s: s.expand(32), "must be one float, not torch.bfloat16 (32,)"),
        (f"{Q}_scale", lambda s: s.to(torch.int32), "must be one float, not torch.int32 (1,)"),
        (NORM, lambda g: g[1:], "must be floats of shape (48,), not torch.bfloat16 (47,)"),
        (NORM, lambda g: g.to(torch.int64), "not torch.int64 (48,)"),
        (NORM, lambda g: g / 0, "has values that are not finite"),
        ("lm_head.weight", lambda w: w[:-1], "must be floats of shape (300, 32)"),
        ("lm_head.weight", lambda w: w.index_fill(0, torch.tensor(299), math.nan), "not finite"),
    ],
)
def test_a_tensor_that_is_not_what_it_must_be(
    folder: Path, name: str, change: Callable[[Tensor], Tensor], problem: str
) -> None:
    tensors = stored(folder)
    rewrite(folder, {**tensors, name: change(tensors[name]).contiguous()})
    line = refusal(folder)
    assert line.startswith(f"{FILE}: {name}: ")
    assert problem in line


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: torch.zeros_like(w), "is zero everywhere"),
        (lambda w: w.index_fill(1, torch.tensor(3), math.nan), "not finite"),
        (lambda w: w.index_fill(1, torch.tensor(3), -math.inf), "not finite"),
        (lambda w: w.view(torch.int16), "must be floats of shape (48, 32), not torch.int16"),
    ],
)
def test_masters_that_are_none(
    tmp_path: Path, change: Callable[[Tensor], Tensor], problem: str
) -> None:
    save_random(tmp_path, TINY, torch.bfloat16)
    quantize(tmp_path, ONLINE, torch.bfloat16)
    tensors = stored(tmp_path)
    rewrite(tmp_path, {**tensors, GATE: change(tensors[GATE])})
    line = refusal(tmp_path)
    assert GATE in line
    assert problem in line


def test_codes_as_floats(tmp_path: Path) -> None:
    source = RandomSource(replace(TINY, intermediate_size=50))
    export_huggingface(source, tmp_path / "model", "offline", "autobitlinear", "float32")
    tensors = stored(tmp_path / "model")
    for value in (0.5, 2.0, math.nan):
        tensors[GATE][3, 3] = value
        rewrite(tmp_path / "model", tensors)
        assert "must hold −1, 0 and 1 only" in refusal(tmp_path / "model")
    # ``bitlinear`` multiplies bytes.
    save_random(tmp_path / "bit", TINY, torch.bfloat16)
    quantize(tmp_path / "bit", BIT, torch.bfloat16)
    tensors = stored(tmp_path / "bit")
    rewrite(tmp_path / "bit", {**tensors, Q: torch.ones(32, 32, dtype=torch.bfloat16)})
    assert "must be packed codes of shape (32/4, 32)" in refusal(tmp_path / "bit")


def test_a_scale_whose_inverse_fp32_cannot_hold(tmp_path: Path) -> None:
    save_random(tmp_path, TINY, torch.bfloat16)
    quantize(tmp_path, BIT, torch.bfloat16)
    tensors = stored(tmp_path)
    for scale in (1e-300, 1e300):
        name = f"{Q}_scale"
        rewrite(tmp_path, {**tensors, name: torch.tensor([scale], dtype=torch.float64)})
        assert f"{name}: must be positive and finite, not {scale}" in refusal(tmp_path)


def test_tensors_that_are_missing_or_unknown(folder: Path) -> None:
    tensors = stored(folder)
    for name in (Q, f"{Q}_scale", NORM, "lm_head.weight"):
        rewrite(folder, {key: value for key, value in tensors.items() if key != name})
        assert refusal(folder).startswith(f": has no {name};")
    rewrite(folder, {key: value for key, value in tensors.items() if "layers.1" not in key})
    assert refusal(folder).startswith(": has no model.layers.1.")
    assert " and 15 more; get all of its files" in refusal(folder)
    rewrite(folder, {**tensors, f"{Q}_scale": tensors[f"{Q}_scale"].reshape(())})
    HuggingFaceSource(folder).verify()
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.2.x", "\n; rm", "é" * 999):
        rewrite(folder, {**tensors, name: torch.ones(32)})
        line = refusal(folder)
        assert line.startswith(f"{FILE}: has ")
        assert "which megabit's model has not" in line
        assert len(line) < 300
    rewrite(folder, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    HuggingFaceSource(folder).verify()


def test_a_tied_head_of_another_kind(tmp_path: Path) -> None:
    save_random(tmp_path, TINY, torch.bfloat16)
    tensors = stored(tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    for head in (embedding[1:], torch.ones(()), embedding.view(torch.int16)):
        rewrite(tmp_path, {**tensors, "lm_head.weight": head})
        assert "lm_head.weight: must be floats of shape (300, 32)" in refusal(tmp_path)
    for same in (embedding.float(), embedding):
        rewrite(tmp_path, {**tensors, "lm_head.weight": same})
        assert HuggingFaceSource(tmp_path).model.tie_word_embeddings
    point = {name: torch.ones(()) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    rewrite(tmp_path, {**tensors, **point})
    assert "must be floats of shape (300, 32)" in refusal(tmp_path)


@pytest.fixture
def sharded(packed: Path, tmp_path: Path) -> Path:
    path = tmp_path / "sharded"
    export_huggingface(HuggingFaceSource(packed), path, max_shard_bytes=5000)
    HuggingFaceSource(path).verify()
    return path


def edit_index(path: Path, **places: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"].update(places)
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not ...}
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "place",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "..",
        "",
        "model.bin",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_cannot_lead_elsewhere(sharded: Path, place: object) -> None:
    # There is something to be read at the first of these places.
    shutil.copy(next(sharded.glob("*.safetensors")), sharded.parent / FILE)
    edit_index(sharded, **{Q: place})
    line = refusal(sharded)
    assert line.startswith(f"{INDEX}: weight_map.{Q}: must be the name of a .safetensors file")


def test_an_index_that_does_not_fit_its_shards(sharded: Path) -> None:
    whole = (sharded / INDEX).read_text()
    places = json.loads(whole)["weight_map"]
    files = sorted({*places.values()})
    last = files[-1]

    edit_index(sharded, **{Q: last})
    assert f"has {Q}, which {INDEX} does not place there" in refusal(sharded)
    edit_index(sharded, **{Q: ...})
    assert f"has {Q}, which {INDEX} does not place there" in refusal(sharded)
    (sharded / INDEX).write_text(whole)
    edit_index(sharded, ghost=last)
    assert refusal(sharded).startswith(f"{last}: has no ghost")
    edit_index(sharded, ghost="other.safetensors")
    assert refusal(sharded).startswith("other.safetensors: cannot read it (")

    for content in ("", "[]", "{", '{"weight_map": 3}', '{"weight_map": {}}', "{}", "\x00"):
        (sharded / INDEX).write_text(content)
        assert refusal(sharded).startswith(f"{INDEX}: ")
    (sharded / INDEX).write_bytes(b"\xff\xfe")
    assert refusal(sharded).startswith(f"{INDEX}: is not JSON")
    (sharded / INDEX).write_text(whole)
    (sharded / last).unlink()
    assert refusal(sharded).startswith(f"{last}: cannot read it (")


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_config_that_is_no_object(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert refusal(folder).startswith("config.json: ")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("hidden_size", [..., None, "32", 32.0, True, 0, -32, 2**31, 10**400, [32]]),
        ("num_hidden_layers", [..., 10**9, "2"]),
        ("num_attention_heads", [0, 3, None]),
        ("num_key_value_heads", [..., 0, 3, "2"]),
        ("vocab_size", [..., 0, 1.5]),
        ("max_position_embeddings", [0, 2**30, "64", None]),
        ("rms_norm_eps", [0, -1e-5, "1e-5", math.nan, math.inf, None, 10**400, True]),
        ("hidden_act", ["gelu", "", None, 3, ["silu"]]),
        ("tie_word_embeddings", ["false", 1]),
        ("initializer_range", [0, "0.02"]),
        ("architectures", [..., [], None, "BitNetForCausalLM", ["GPT2LMHeadModel"], [1], [[]]]),
        ("attention_bias", [True, "yes"]),
        ("mlp_bias", [True]),
        ("head_dim", [16, "8"]),
        ("partial_rotary_factor", [0.5, "1"]),
        ("sliding_window", [32, "none"]),
        ("dtype", ["int8", 7, "float64", {}]),
        ("quantization_config", ["bitnet", {}, {"quant_method": "gptq"}, []]),
    ],
)
def test_a_config_with_values_that_megabit_has_not(
    folder: Path, key: str, values: list[object]
) -> None:
    before = (folder / "config.json").read_text()
    for value in values:
        (folder / "config.json").write_text(before)
        edit_config(folder, **{key: value})
        line = refusal(folder)
        assert line.startswith("config.json: ")
        assert key in line
        assert len(line) < 400


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "default", "factor": 4.0, "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("rope_parameters", 10_000.0),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("quantization_config", {"linear_class": "linear"}),
        ("quantization_config", {"quantization_mode": "sometimes"}),
        ("quantization_config", {"quantization_mode": "online", "linear_class": "bitlinear"}),
        ("quantization_config", {"use_rms_norm": True}),
        ("quantization_config", {"modules_to_not_convert": []}),
        ("quantization_config", {"modules_to_not_convert": ["lm_head", "down_proj"]}),
        ("quantization_config", {"modules_to_not_convert": ["lm_head", "(a+)+$"]}),
        ("quantization_config", {"modules_to_not_convert": [["lm_head"]]}),
    ],
)
def test_a_section_that_megabit_has_not(folder: Path, section: str, values: Any) -> None:
    if isinstance(values, dict) and section == "quantization_config":
        values = {"quant_method": "bitnet", **values}
    edit_config(folder, rope_parameters=..., rope_theta=1e4)
    HuggingFaceSource(folder)
    edit_config(folder, **{section: values})
    assert refusal(folder).startswith(f"config.json: {section}")


def test_qwen2_has_biases(tmp_path: Path) -> None:
    model = replace(TINY, hidden_act="silu")
    save_random(tmp_path, model, torch.bfloat16, "Qwen2")
    assert "q_proj.bias" in refusal(tmp_path)
    rewrite(tmp_path, {k: v for k, v in stored(tmp_path).items() if "bias" not in k})
    HuggingFaceSource(tmp_path).verify()
    edit_config(tmp_path, use_sliding_window=True)
    assert refusal(tmp_path).startswith("config.json: use_sliding_window")


def test_token_ids_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for ids in ('"1"', "1.0", "true", "-1", "[1, null]", str(1 << 40), "{}"):
        path.write_text(f'{{"eos_token_id": {ids}}}')
        source = RandomSource(assets={"config.json": path})
        with pytest.raises(UserError, match=r"config\.json: eos_token_id: must be the number of"):
            export_huggingface(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        export_huggingface(RandomSource(assets={"tokenizer.json": path}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
