"""What an imported model computes, and that it survives the way through megabit's checkpoints."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megabit.checkpoint.model_source import open_model
from megabit.checkpoint.ternary import write_ternary, write_training
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.interop.huggingface import (
    HuggingFaceMode,
    HuggingFaceSource,
    Quantization,
    export_huggingface,
)
from megabit.training.import_check import compare_with_huggingface, int8_logits
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
    save_random,
    some_tokens,
    stored,
)
from tests.interop.random_source import TINY

SILU = replace(TINY, hidden_act="silu", tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def _not_compiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("model", [TINY, SILU], ids=["relu2", "silu"])
def test_int8_products_differ_from_transformers_by_rounding(
    tmp_path: Path, quantization: Quantization, model: ModelConfig
) -> None:
    save_random(tmp_path, model, torch.bfloat16)
    quantize(tmp_path, quantization, torch.bfloat16)
    source = HuggingFaceSource(tmp_path)
    tokens = some_tokens(model, 4, 50)
    difference = compare_with_huggingface(source, tokens)
    # transformers rounds to bf16, 2^-9 of each number, some dozen times on the way to a logit.
    assert 0 < difference.mean < 12 * 2**-9 * difference.spread
    assert difference.equal_choices > 0.8
    with torch.no_grad():
        expected = logits(load(tmp_path), tokens).double()
    ours = int8_logits(source, tokens).double()
    assert difference.mean == pytest.approx(float((ours - expected).abs().mean()))
    assert difference.largest == float((ours - expected).abs().max())
    assert f"{difference.equal_choices:.1%} of positions" in str(difference)


def test_in_fp32_there_is_next_to_no_rounding(tmp_path: Path) -> None:
    save_random(tmp_path, TINY, torch.float32)
    quantize(tmp_path, AUTO, torch.float32)
    difference = compare_with_huggingface(HuggingFaceSource(tmp_path), some_tokens(TINY, 4, 50))
    # fp32 rounds to 2^-24. Now and then an activation at a boundary takes another int8 code, and
    # that shows in a token's logits: so it is the mean that must be small.
    assert difference.mean < 1e-3 * difference.spread


@pytest.mark.parametrize("mistake", ["scale", "activation"])
def test_a_wrong_import_differs_by_far_more(tmp_path: Path, mistake: str) -> None:
    save_random(tmp_path, TINY, torch.bfloat16)
    quantize(tmp_path, AUTO, torch.bfloat16)
    tokens = some_tokens(TINY, 4, 50)
    right = compare_with_huggingface(HuggingFaceSource(tmp_path), tokens)
    expected = logits(load(tmp_path), tokens)
    if mistake == "scale":  # divided by where it must be multiplied with
        section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        section["linear_class"] = "bitlinear"
        edit_config(tmp_path, quantization_config=section)
    else:
        edit_config(tmp_path, hidden_act="silu")
    wrong = int8_logits(HuggingFaceSource(tmp_path), tokens)
    assert (wrong - expected).abs().mean() > 10 * right.mean


@pytest.mark.parametrize("quantization", [AUTO, BIT], ids=["autobitlinear", "bitlinear"])
def test_a_ternary_checkpoint_gives_back_what_was_imported(
    tmp_path: Path, quantization: Quantization
) -> None:
    first = tmp_path / "first"
    save_random(first, SILU, torch.bfloat16)
    quantize(first, quantization, torch.bfloat16)
    source = HuggingFaceSource(first)
    write_ternary(source, tmp_path / "ternary")
    ours = open_model(tmp_path / "ternary")
    tokens = some_tokens(SILU)
    assert torch.equal(int8_logits(ours, tokens), int8_logits(source, tokens))
    export_huggingface(ours, tmp_path / "again", "offline", quantization.linear_class)
    assert_same_bits(stored(tmp_path / "again"), stored(first))
    given, written = (
        json.loads((path / "config.json").read_text()) for path in (first, tmp_path / "again")
    )
    assert written["eos_token_id"] == given["eos_token_id"] == [2, 3]
    with pytest.raises(UserError, match="name a mode"):
        compare_with_huggingface(ours, tokens)
    compare_with_huggingface(ours, tokens, HuggingFaceMode(quantization, compiled=False))


def test_a_training_checkpoint_gives_back_what_was_imported(tmp_path: Path) -> None:
    first = tmp_path / "first"
    save_random(first, TINY, torch.bfloat16)
    quantize(first, ONLINE, torch.bfloat16)
    write_training(HuggingFaceSource(first), tmp_path / "training")
    ours = open_model(tmp_path / "training")
    report = export_huggingface(ours, tmp_path / "again", "online")
    assert report.changed_codes == 0  # fp32 masters that are bf16 numbers
    assert_same_bits(stored(tmp_path / "again"), stored(first))
