"""What other tools' formats can't say of a model is refused; what they can say comes back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabit.checkpoint.source import ModelSource
from megabit.errors import UserError
from megabit.interop.gguf_export import export_gguf
from megabit.interop.huggingface import (
    HuggingFaceMode,
    HuggingFaceSource,
    Quantization,
    export_huggingface,
    huggingface_logits,
    mode_of,
)
from megabit.interop.huggingface.scales import stored_scale
from megabit.training.import_check import compare_with_huggingface
from megabit_kernels import numerics
from megabit_kernels.formats.huggingface import decode_scale
from tests.interop.hf_models import (
    AUTO,
    BIT,
    FORMS,
    ONLINE,
    edit_config,
    load,
    logits,
    quantize,
    rewrite,
    save_random,
    some_tokens,
    stored,
)
from tests.interop.random_source import TINY, RandomSource

SILU = replace(TINY, hidden_act="silu", tie_word_embeddings=False)
TIED = replace(TINY, tie_word_embeddings=True)
OTHERS: dict[str, Any] = {
    "norm_placement": ["prenorm", "in_linear", "per_proj"],
    "activations": ["full", "a4.8"],
    "hadamard": [True],
}


@pytest.fixture(autouse=True)
def _not_compiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


Export = Callable[[ModelSource, Path], Any]
EXPORTS: dict[str, Export] = {
    "offline": export_huggingface,
    "bitlinear": lambda source, out: export_huggingface(source, out, "offline", "bitlinear"),
    "online": lambda source, out: export_huggingface(source, out, "online"),
    "gguf": lambda source, out: export_gguf(source, out, "TQ2_0"),
}


@pytest.mark.parametrize("form", EXPORTS)
@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in OTHERS.items() for v in values])
def test_other_models_are_refused(form: str, key: str, value: Any, tmp_path: Path) -> None:
    source = RandomSource(replace(TIED, **{key: value}))
    with pytest.raises(UserError) as caught:
        EXPORTS[form](source, tmp_path / "out")
    (problem,) = caught.value.problems
    shown = "true" if value is True else value
    assert problem.startswith(f"random-model: model.{key} is {shown}; ")
    assert f"train with model.{key}=" in problem or f"train on with model.{key}=" in problem
    assert not [*tmp_path.iterdir()]


def test_each_problem_is_a_line(tmp_path: Path) -> None:
    model = replace(TIED, norm_placement="prenorm", activations="a4.8", hadamard=True)
    model = replace(model, weight_scale="absmedian", scale_mult=1.1547)
    with pytest.raises(UserError) as caught:
        export_huggingface(RandomSource(model), tmp_path / "out", "online")
    assert len(caught.value.problems) == 5
    with pytest.raises(UserError) as caught:
        export_huggingface(RandomSource(model), tmp_path / "out")
    assert len(caught.value.problems) == 3


@dataclass(frozen=True)
class OtherScales(RandomSource):
    """γ is what the model says, not mean|W|."""

    def scale(self, name: str) -> Tensor:
        return super().scale(name) * 1.1547


@pytest.mark.parametrize(("key", "value"), [("scale_mult", 1.1547), ("weight_scale", "absmedian")])
def test_other_scales_are_carried_or_refused(key: str, value: Any, tmp_path: Path) -> None:
    """Offline and GGUF files hold γ; online ones leave it to the reader, who takes mean|W|."""
    source = OtherScales(replace(TIED, **{key: value}))
    with pytest.raises(UserError, match=rf"model\.{key} is {value}; .* use mode offline"):
        export_huggingface(source, tmp_path / "online", "online")
    for linear_class in ("autobitlinear", "bitlinear"):
        out = tmp_path / linear_class
        export_huggingface(source, out, "offline", linear_class)  # type: ignore[arg-type]
        back = HuggingFaceSource(out)
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
            assert torch.equal(back.codes(name), source.codes(name))
            assert torch.equal(back.scale(name), source.scale(name))
    wide = OtherScales(replace(source.model, hidden_size=256, intermediate_size=256))
    with pytest.raises(UserError, match="tokenizer"):  # what is refused next
        export_gguf(wide, tmp_path / "m.gguf", "TQ2_0")


def test_hf_mode_is_of_models_that_transformers_has() -> None:
    tokens = some_tokens(TINY)
    for change in ({"norm_placement": "per_proj"}, {"hadamard": True}):
        with pytest.raises(UserError, match="hf mode"):
            huggingface_logits(
                RandomSource(replace(TINY, **change)),  # type: ignore[arg-type]
                tokens,
                HuggingFaceMode(AUTO, compiled=False),
            )
    source = RandomSource(replace(TINY, scale_mult=0.866))
    with pytest.raises(UserError, match="use mode offline"):
        huggingface_logits(source, tokens, HuggingFaceMode(ONLINE, compiled=False))


# Ternary models of LLaMA's architecture


def save_ternary_llama(path: Path, quantization: Quantization, tied: bool = False) -> None:
    save_random(path, replace(SILU, tie_word_embeddings=tied), torch.bfloat16, "Llama")
    quantize(path, quantization, torch.bfloat16)


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_ternary_llama_computes_what_transformers_does(
    tmp_path: Path, quantization: Quantization, tied: bool
) -> None:
    """Falcon-E's kind: norms between layers only. In hf mode bit by bit; with int8 products up to
    the roundings to bf16 (as in ``test_huggingface_import``)."""
    save_ternary_llama(tmp_path, quantization, tied)
    source = HuggingFaceSource(tmp_path)
    source.verify()
    assert source.model.norm_placement == "prenorm"
    assert source.quantization == quantization
    tokens = some_tokens(source.model, 4, 50)
    mode = mode_of(source)
    assert torch.equal(huggingface_logits(source, tokens, mode), logits(load(tmp_path), tokens))
    difference = compare_with_huggingface(source, tokens)
    assert 0 < difference.mean < 12 * 2**-9 * difference.spread
    assert difference.equal_choices > 0.8
    with pytest.raises(UserError, match="norm_placement is prenorm; BitNetForCausalLM has"):
        export_huggingface(source, tmp_path / "out")


def test_scales_of_a_ternary_llama(tmp_path: Path) -> None:
    """1/γ, as ``bitlinear`` stores it."""
    save_ternary_llama(tmp_path, BIT)
    source = HuggingFaceSource(tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"
    scale = stored(tmp_path)[f"{name}_scale"]
    assert torch.equal(stored_scale(source, name, "bitlinear"), scale)
    assert torch.equal(source.scale(name), decode_scale(scale, "bitlinear"))


def test_a_llama_with_sub_norms_is_another_architecture(tmp_path: Path) -> None:
    save_ternary_llama(tmp_path, BIT)
    extra = {"model.layers.0.self_attn.attn_sub_norm.weight": torch.ones(32)}
    rewrite(tmp_path, {**stored(tmp_path), **extra})
    with pytest.raises(UserError, match=r"attn_sub_norm\.weight, which megabit's model has not"):
        HuggingFaceSource(tmp_path)


def test_norms_in_front_of_each_layer_are_refused(tmp_path: Path) -> None:
    save_ternary_llama(tmp_path, BIT)
    section = {"quant_method": "bitnet", "use_rms_norm": True}
    edit_config(tmp_path, quantization_config=section)
    with pytest.raises(UserError, match="use_rms_norm"):
        HuggingFaceSource(tmp_path)


def test_masters_of_a_ternary_llama(tmp_path: Path) -> None:
    """Online: γ and codes are derived as in training."""
    save_ternary_llama(tmp_path, ONLINE)
    source = HuggingFaceSource(tmp_path)
    assert source.has_masters
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(source.scale(name), numerics.absmean_scale(stored(tmp_path)[name]))
