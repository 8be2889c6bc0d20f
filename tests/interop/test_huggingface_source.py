"""``HuggingFaceSource`` reads what transformers saves, whole or in parts."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megabit.checkpoint.source import Index, logical_tensors
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.interop.huggingface import (
    HuggingFaceSource,
    Quantization,
    export_huggingface,
    huggingface_logits,
    mode_of,
)
from megabit_kernels import numerics
from megabit_kernels.packing import pack, unpack
from tests.interop.hf_models import (
    AUTO,
    BIT,
    FORMS,
    ONLINE,
    assert_same_bits,
    edit_config,
    load,
    logits,
    quantize,
    rewrite,
    save_random,
    some_tokens,
    stored,
)
from tests.interop.random_source import TINY

UNTIED = replace(TINY, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def _not_compiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model", [TINY, replace(UNTIED, hidden_act="silu")], ids=["tied", "silu"])
def test_a_model_that_transformers_saved(
    tmp_path: Path, quantization: Quantization, dtype: torch.dtype, model: ModelConfig
) -> None:
    first, saved, again = (tmp_path / name for name in ("first", "saved", "again"))
    save_random(first, model, dtype)
    quantize(first, quantization, dtype)
    network = load(first)
    tokens = some_tokens(model)
    expected = logits(network, tokens)
    # transformers 5.24 cannot put codes that it has unpacked back into bytes, and saves floats.
    network.save_pretrained(saved, save_original_format=quantization != AUTO)
    for path in (first, saved):
        source = HuggingFaceSource(path)
        source.verify()
        assert source.model == model
        assert (source.max_length, source.quantization) == (64, quantization)
        assert source.has_masters == (quantization == ONLINE)
        assert torch.equal(huggingface_logits(source, tokens, mode_of(source)), expected)
        assert torch.equal(logits(load(path), tokens), expected)
    dtype_name = str(dtype).removeprefix("torch.")
    packed = saved if quantization != AUTO else first
    export_huggingface(
        HuggingFaceSource(saved), again, quantization.mode, quantization.linear_class, dtype_name
    )
    assert_same_bits(stored(again), stored(packed))
    written, given = (json.loads((path / "config.json").read_text()) for path in (again, saved))
    same = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "rope_parameters")
    assert {key: written[key] for key in same} == {key: given[key] for key in same}


def test_what_transformers_saved_in_shards(tmp_path: Path) -> None:
    save_random(tmp_path / "one", UNTIED, torch.bfloat16)
    quantize(tmp_path / "one", ONLINE, torch.bfloat16)
    load(tmp_path / "one").save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = HuggingFaceSource(tmp_path / "one"), HuggingFaceSource(tmp_path / "many")
    for name in logical_tensors(UNTIED):
        assert torch.equal(many.values(name), one.values(name))


@pytest.mark.parametrize("form", ["online", "packed", "packed 1/γ", "loose", "one file of many"])
def test_parts_are_those_of_the_whole(tmp_path: Path, form: str) -> None:
    path = tmp_path / "model"
    save_random(path, TINY, torch.float32)
    quantization = {"online": ONLINE, "packed 1/γ": BIT}.get(form, AUTO)
    quantize(path, quantization, torch.float32)
    if form == "loose":
        load(path).save_pretrained(tmp_path / "loose", save_original_format=False)
        path = tmp_path / "loose"
    elif form == "one file of many":
        export_huggingface(HuggingFaceSource(path), tmp_path / "many", max_shard_bytes=5000)
        path = tmp_path / "many"
    source = HuggingFaceSource(path)
    name = "model.layers.1.mlp.gate_proj.weight"  # 48 × 32, so quarters of 12 rows
    whole = unpack(source.codes(name), 32)
    masters = load_file(tmp_path / "model/model.safetensors") if form == "online" else {}
    if masters:
        codes, gamma = numerics.absmean_ternarize(masters[name])
        assert torch.equal(whole, codes)
        assert torch.equal(source.scale(name), gamma)
    parts: list[Index] = [
        (slice(0, 48), slice(0, 32)),
        (slice(0, 12), slice(8, 32)),
        (slice(12, 24), slice(0, 4)),
        (slice(5, 43), slice(4, 12)),
        (slice(11, 13), slice(0, 32)),
        (slice(47, 48), slice(28, 32)),
    ]
    for part in parts:
        assert torch.equal(source.codes(name, part), pack(whole[part].contiguous()))
    embedding = source.values("model.embed_tokens.weight")
    rows = (slice(17, 40), slice(3, 9))
    assert torch.equal(source.values("model.embed_tokens.weight", rows), embedding[rows])
    if masters:
        assert torch.equal(source.values(name, parts[3]), masters[name][parts[3]])
    else:
        with pytest.raises(UserError, match="no master weights"):
            source.values(name)


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    save_random(tmp_path, TINY, torch.float32)
    quantize(tmp_path, AUTO, torch.float32)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = stored(tmp_path)
    tensors[name][5] = 0b11  # rows 5, 13, 21 and 29, of which the first is no code then
    rewrite(tmp_path, tensors)
    source = HuggingFaceSource(tmp_path)
    for rows in (slice(0, 5), slice(6, 13), slice(14, 21), slice(30, 32)):
        source.codes(name, (rows, slice(0, 32)))
    with pytest.raises(UserError, match=r"model\.safetensors: .*q_proj\.weight: it holds code 3"):
        source.codes(name, (slice(4, 6), slice(0, 32)))


@pytest.mark.parametrize("architecture", ["Llama", "Mistral"])
def test_a_dense_model_is_a_start_for_training(tmp_path: Path, architecture: str) -> None:
    model = replace(UNTIED, hidden_act="silu", rms_norm_eps=1e-6)
    save_random(tmp_path, model, torch.bfloat16, architecture)
    if architecture == "Mistral":
        edit_config(tmp_path, sliding_window=None)
    source = HuggingFaceSource(tmp_path)
    source.verify()
    assert source.model == replace(model, norm_placement="prenorm")
    assert (source.has_masters, source.quantization) == (True, None)
    on_disk = stored(tmp_path)
    for name, tensor in logical_tensors(source.model).items():
        values = source.values(name)
        assert torch.equal(values, on_disk.pop(name))
        if tensor.is_ternary:
            codes, gamma = numerics.absmean_ternarize(values)
            assert torch.equal(source.codes(name), pack(codes))
            assert torch.equal(source.scale(name), gamma)
    assert not on_disk
    gains = source.values("model.layers.0.input_layernorm.weight", (slice(10, 30),))
    assert torch.equal(gains, stored(tmp_path)["model.layers.0.input_layernorm.weight"][10:30])
    with pytest.raises(UserError, match=f"is a dense {architecture}ForCausalLM"):
        mode_of(source)
    with pytest.raises(UserError, match="norm_placement is prenorm"):
        export_huggingface(source, tmp_path / "out")


def test_a_dense_bitnet_keeps_its_gains(tmp_path: Path) -> None:
    save_random(tmp_path, TINY, torch.float32)
    source = HuggingFaceSource(tmp_path)
    name = "model.layers.0.self_attn.attn_sub_norm.weight"
    assert torch.equal(source.values(name), stored(tmp_path)[name])
    with pytest.raises(UserError, match="with quantization_config"):
        mode_of(source)


def test_tied_heads_are_read_as_transformers_does(tmp_path: Path) -> None:
    save_random(tmp_path, TINY, torch.bfloat16)
    quantize(tmp_path, AUTO, torch.bfloat16)
    tensors = stored(tmp_path)
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    tokens = some_tokens(TINY)
    expected = logits(load(tmp_path), tokens)

    # Both are there and equal; only the head is there.
    both = {**tensors, "lm_head.weight": embedding}
    head_only = {key: value for key, value in both.items() if "embed_tokens" not in key}
    for variant in (both, head_only):
        rewrite(tmp_path, variant)
        source = HuggingFaceSource(tmp_path)
        source.verify()
        assert source.model.tie_word_embeddings
        assert torch.equal(source.values("model.embed_tokens.weight"), embedding)
        assert torch.equal(huggingface_logits(source, tokens, mode_of(source)), expected)
        assert torch.equal(logits(load(tmp_path), tokens), expected)

    # Both are there and differ: then transformers does not tie them, whatever is configured.
    rewrite(tmp_path, {**tensors, "lm_head.weight": embedding.flip(0)})
    source = HuggingFaceSource(tmp_path)
    assert not source.model.tie_word_embeddings
    expected = logits(load(tmp_path), tokens)
    assert torch.equal(huggingface_logits(source, tokens, mode_of(source)), expected)


def test_keys_that_are_absent_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    model = replace(UNTIED, rope_theta=500_000.0, hidden_act="relu2")
    save_random(tmp_path, model, torch.bfloat16)
    quantize(tmp_path, BIT, torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    section = {**config["quantization_config"], "modules_to_not_convert": None}
    del section["linear_class"], section["quantization_mode"]
    absent = dict.fromkeys(
        ("rope_parameters", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "dtype"), ...
    )
    edit_config(tmp_path, quantization_config=section, max_position_embeddings=..., **absent)
    source = HuggingFaceSource(tmp_path)
    assert source.model == model
    assert (source.max_length, source.quantization) == (2048, BIT)
    tokens = some_tokens(model)
    expected = logits(load(tmp_path), tokens)
    assert torch.equal(huggingface_logits(source, tokens, mode_of(source)), expected)


def test_rotary_positions_of_old_files(tmp_path: Path) -> None:
    save_random(tmp_path, TINY, torch.bfloat16)
    quantize(tmp_path, AUTO, torch.bfloat16)
    edit_config(tmp_path, rope_parameters=..., rope_theta=300, rope_scaling=None)
    source = HuggingFaceSource(tmp_path)
    assert source.model == replace(TINY, rope_theta=300.0)
    tokens = some_tokens(TINY)
    expected = logits(load(tmp_path), tokens)
    assert torch.equal(huggingface_logits(source, tokens, mode_of(source)), expected)


def test_assets_are_the_files_that_are_there(tmp_path: Path) -> None:
    save_random(tmp_path, TINY, torch.bfloat16)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("about it")
    assert HuggingFaceSource(tmp_path).assets == {
        name: tmp_path / name
        for name in ("config.json", "generation_config.json", "tokenizer.json")
    }
