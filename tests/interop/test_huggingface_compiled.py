"""hf mode against transformers as it runs by default: with its quantizers compiled."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megabit.config import ModelConfig
from megabit.interop.huggingface import (
    HuggingFaceSource,
    Quantization,
    export_huggingface,
    huggingface_logits,
    mode_of,
)
from tests.interop.hf_models import BIT, FORMS, ONLINE, load, logits, some_tokens
from tests.interop.random_source import RandomSource

COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]

# Wide enough for bf16 activations near a rounding boundary, and for means of another order.
MODEL = ModelConfig(
    vocab_size=300,
    hidden_size=512,
    intermediate_size=768,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
)


@pytest.mark.slow
@pytest.mark.skipif(not COMPILERS, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", FORMS)
def test_compiled_quantizers(tmp_path: Path, quantization: Quantization, dtype: str) -> None:
    torch.compiler.reset()  # what one test compiled must not be another one's last resort
    mode, linear_class = quantization.mode, quantization.linear_class
    export_huggingface(RandomSource(MODEL), tmp_path / "out", mode, linear_class, dtype)
    source = HuggingFaceSource(tmp_path / "out")
    network = load(tmp_path / "out")
    tokens = some_tokens(MODEL, length=64)
    compiled = logits(network, tokens)
    assert mode_of(source).compiled
    assert torch.equal(huggingface_logits(source, tokens, mode_of(source)), compiled)

    with torch.compiler.set_stance("force_eager"):
        eager = logits(network, tokens)
    without = replace(mode_of(source), compiled=False)
    assert torch.equal(huggingface_logits(source, tokens, without), eager)
    # The two are not the same where the module says so; else this test would show little.
    if (quantization, dtype) in ((BIT, "bfloat16"), (ONLINE, "float32")):
        assert not torch.equal(compiled, eager)
