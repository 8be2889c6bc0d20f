"""hf mode of the modules: the bits of transformers, of whole sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabit.checkpoint.source import ModelSource
from megabit.config import Config, DataConfig, ModelConfig, PrecisionConfig
from megabit.errors import UserError
from megabit.interop.huggingface import (
    HuggingFaceMode,
    HuggingFaceSource,
    Quantization,
    export_huggingface,
    huggingface_logits,
    mode_of,
)
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages
from megabit.model.decoder import layer_context
from megabit.model.huggingface_linear import form_of
from megabit.model.load import load_stages
from megabit.pipeline.layout import stage_layouts
from megabit.tensor_parallel import HuggingFaceForm, LayerContext
from tests.interop.hf_models import AUTO, BIT, FORMS, ONLINE, load, logits, save_random, some_tokens
from tests.interop.random_source import TINY, RandomSource

# Wide enough for bf16 activations near a rounding boundary, and for sums of another order.
WIDE = ModelConfig(
    vocab_size=300,
    hidden_size=256,
    intermediate_size=344,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
AS_QUANTIZATION = {"online": ONLINE, "autobitlinear": AUTO, "bitlinear": BIT}
SILU = replace(WIDE, hidden_act="silu", tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def _not_compiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def hf_stages(
    source: ModelSource,
    form: HuggingFaceForm,
    dtype: Any,
    mesh: ParallelMesh,
    layers: Sequence[int] | None = None,
) -> CausalLMStages:
    """All layers of ``source``, on stages of as many ``layers``."""
    config = Config(
        model=source.model,
        data=DataConfig(seq_length=source.max_length),
        precision=PrecisionConfig(compute=dtype),
    )
    context = replace(layer_context(config, mesh), huggingface=form)
    layouts = stage_layouts(layers or [source.model.num_hidden_layers])
    stages = CausalLMStages(source.model, layouts, source.max_length, context).eval()
    load_stages(stages, source)
    return stages


@torch.no_grad()
def whole_logits(stages: CausalLMStages, tokens: Tensor) -> Tensor:
    """``[B, S, V]``, of the vocabulary that this rank has."""
    hidden: Tensor | None = None
    for chunk in range(len(stages.layouts)):
        hidden = stages(tokens, hidden, chunk=chunk)
    assert hidden is not None
    return stages.logits(hidden).unflatten(0, tokens.shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("model", [WIDE, SILU], ids=["relu2", "silu"])
def test_logits_have_the_bits_of_transformers(
    tmp_path: Path, model: ModelConfig, quantization: Quantization, dtype: Any
) -> None:
    mode, linear_class = quantization.mode, quantization.linear_class
    export_huggingface(RandomSource(model), tmp_path / "out", mode, linear_class, dtype)
    source = HuggingFaceSource(tmp_path / "out")
    tokens = some_tokens(model, 3, 50)
    expected = logits(load(tmp_path / "out"), tokens)
    stages = hf_stages(source, form_of(source), dtype, ParallelMesh(), [1, 1])
    assert torch.equal(whole_logits(stages, tokens), expected)
    # And those of the independent computation that imports are checked against.
    theirs = huggingface_logits(source, tokens, replace(mode_of(source), compiled=False))
    assert torch.equal(theirs, expected)
    # One token attends to itself only.
    one = tokens[:1, :1]
    assert torch.equal(whole_logits(stages, one), logits(load(tmp_path / "out"), one))


@pytest.mark.parametrize("form", ["online", "autobitlinear", "bitlinear"])
def test_any_model_may_be_computed_in_any_form(form: HuggingFaceForm) -> None:
    source = RandomSource(WIDE)
    tokens = some_tokens(WIDE)
    mode = HuggingFaceMode(AS_QUANTIZATION[form], torch.bfloat16, compiled=False)
    stages = hf_stages(source, form, "bfloat16", ParallelMesh())
    assert torch.equal(whole_logits(stages, tokens), huggingface_logits(source, tokens, mode))


@pytest.mark.parametrize("form", ["online", "autobitlinear", "bitlinear"])
def test_tensor_parallel_ranks_add_floats(form: HuggingFaceForm) -> None:
    source, tokens = RandomSource(WIDE), some_tokens(WIDE)

    def run() -> tuple[Tensor, int]:
        mesh = ParallelMesh.create(2, 1, torch.device("cpu"))
        stages = hf_stages(source, form, "float32", mesh)
        held = sum(p.numel() for p in stages.parameters())
        return whole_logits(stages, tokens), held

    (a, a_held), (b, b_held) = run_ranks(run, 2)
    one = hf_stages(source, form, "float32", ParallelMesh())
    expected = whole_logits(one, tokens)
    both = torch.cat([a, b], -1)
    # Sums of fp32 in another order, 2^-24 of each; now and then that is another int8 code, 1/127 of
    # a token's largest activation.
    assert (both - expected).abs().mean() < 1e-3 * expected.std()
    assert both.argmax(-1).eq(expected.argmax(-1)).float().mean() > 0.95
    assert a_held < sum(p.numel() for p in one.parameters()) > b_held


def test_the_form_of_a_checkpoint(tmp_path: Path) -> None:
    assert form_of(RandomSource()) == "autobitlinear"
    save_random(tmp_path / "dense", TINY, torch.float32, "Llama")
    with pytest.raises(UserError, match="is a dense LlamaForCausalLM; hf mode is for ternary"):
        form_of(HuggingFaceSource(tmp_path / "dense"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear": "dense"}, "is a dense model"),
        ({"norm_placement": "per_proj"}, "model.norm_placement is per_proj; hf mode has norms"),
        ({"activations": "a4.8"}, "readers of hf mode quantize activations to int8"),
        ({"hadamard": True}, "hf mode has no such transform"),
        ({"weight_scale": "absmedian"}, "model.weight_scale is absmedian"),
    ],
)
def test_models_that_transformers_does_not_have(change: dict[str, Any], message: str) -> None:
    source = RandomSource(replace(TINY, **change))
    with pytest.raises(UserError, match=message):
        hf_stages(source, "online", "float32", ParallelMesh())


def test_codes_have_no_masters() -> None:
    with pytest.raises(UserError, match="has no masters"):
        hf_stages(RandomSource(has_masters=False), "online", "float32", ParallelMesh())


def test_it_is_not_for_sequence_parallelism() -> None:
    context = LayerContext.single()
    with pytest.raises(ValueError, match="has no sequence parallelism"):
        replace(context, huggingface="online", sequence_parallel=True)
