"""llama.cpp reads our files and computes what we compute; skipped where it is not installed.

The models are random and the files F32 where not said otherwise. With rows of at most 256 weights,
llama.cpp's int8 activations have the same scales as ours, so that logits agree to the rounding of
fp32, but for a rare activation so near a rounding boundary that the two round it apart.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from megabit.config import Config, DataConfig, ModelConfig, PrecisionConfig
from megabit.data.tokenizer import train_tokenizer
from megabit.interop.gguf_export import GgufTensorType, export_gguf
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages
from megabit.tensor_parallel import ternary_layers
from megabit_kernels import TernaryWeight
from tests.interop.gguf_tokenizers import CORPUS, TEXTS, llama_3_tokenizer, own_tokenizer
from tests.interop.random_source import RandomSource

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed; it must be built with a C++ compiler"
)

LENGTH = 256  # llama.cpp's smallest context
MODEL = ModelConfig(
    vocab_size=420,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_act="silu",
    rms_norm_eps=3e-6,
    rope_theta=50_000.0,
)


@dataclass(frozen=True)
class EvenSource(RandomSource):
    """Token embeddings have length 0.05: else the token last seen is the likeliest next one, and
    a continuation is a single token again and again."""

    def _master(self, name: str) -> Tensor:
        master = super()._master(name)
        if name == "model.embed_tokens.weight":
            master *= 0.05 / master.norm(dim=1, keepdim=True)
        return master


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(CORPUS, 400).save(str(path))
    return {"tokenizer.json": path}


@contextmanager
def llama(path: Path) -> Iterator[Any]:
    model = llama_cpp.Llama(
        str(path),
        n_ctx=LENGTH,
        logits_all=True,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32,  # else keys and values are rounded to fp16
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    try:
        yield model
    finally:
        model.close()


def llama_logits(model: Any, ids: list[int]) -> Tensor:
    """``[tokens, V]``."""
    model.reset()
    model.eval(ids)
    return torch.from_numpy(np.array(model.scores[: len(ids)]))


def stages_of(source: RandomSource) -> CausalLMStages:
    """Our int8 forward pass, with γ as blocks of TQ types hold it."""
    config = Config(
        model=source.model,
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(seq_length=LENGTH),
    )
    stages = build_stages(config, ParallelMesh())
    with torch.no_grad():
        for name, parameter in stages.named_parameters():
            parameter.copy_(source.values(name))
    for layer in ternary_layers(stages):
        name = f"{layer.name}.weight"
        k = layer.weight.shard.shape[1]
        layer.give_up_latent()
        scale = source.scale(name).to(torch.float16).to(torch.float32)
        layer.receive(TernaryWeight.from_packed(source.codes(name), k, scale))
    return stages


@torch.no_grad()
def our_logits(stages: CausalLMStages, ids: list[int]) -> Tensor:
    """``[tokens, V]``."""
    return stages.logits(stages(torch.tensor([ids])))


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, (count, length), generator=generator).tolist()


def differences(stages: CausalLMStages, path: Path, ids: list[list[int]]) -> list[float]:
    """The largest difference of a logit in each prompt, in standard deviations of the logits."""
    found = []
    with llama(path) as model:
        for prompt in ids:
            ours = our_logits(stages, prompt)
            found.append(float((ours - llama_logits(model, prompt)).abs().max() / ours.std()))
    return found


@pytest.mark.parametrize("tensor_type", ["TQ1_0", "TQ2_0"])
def test_logits_agree(tmp_path: Path, assets: dict[str, Path], tensor_type: GgufTensorType) -> None:
    source = RandomSource(MODEL, assets=assets, max_length=LENGTH)
    export_gguf(source, tmp_path / "m.gguf", tensor_type, "F32")
    found = sorted(differences(stages_of(source), tmp_path / "m.gguf", prompts(12, 8)))
    # Sums in another order; measured: 3e-6.
    assert found[len(found) // 2] < 3e-5
    # An activation rounded apart, one of 127 steps; measured: 0.03, in one prompt of 16.
    assert found[-1] < 0.2


def test_logits_agree_where_activations_have_several_blocks(
    tmp_path: Path, assets: dict[str, Path]
) -> None:
    """Also with the embedding in fp16, as it is by default."""
    model = replace(MODEL, hidden_size=512, intermediate_size=768)
    source = RandomSource(model, assets=assets, max_length=LENGTH)
    stages = stages_of(source)
    for embedding_type in ("F32", "F16"):
        path = tmp_path / f"{embedding_type}.gguf"
        export_gguf(source, path, "TQ2_0", embedding_type)  # type: ignore[arg-type]
        # Each block of 256 activations has a scale of its own there: all of them are rounded
        # otherwise. Measured: 0.14 to 0.23, and 2 and more with another activation function.
        assert max(differences(stages, path, prompts(6, 8))) < 0.5


def test_the_warning_about_relu2_is_true(tmp_path: Path, assets: dict[str, Path]) -> None:
    """Once this fails, llama.cpp has learned ReLU², and the warning can go."""
    source = RandomSource(replace(MODEL, hidden_act="relu2"), assets=assets, max_length=LENGTH)
    report = export_gguf(source, tmp_path / "m.gguf", "TQ2_0", "F32")
    assert len(report.warnings) == 1
    assert min(differences(stages_of(source), tmp_path / "m.gguf", prompts(4, 8))) > 0.5


def test_greedy_continuations_agree(tmp_path: Path, assets: dict[str, Path]) -> None:
    """Each token that llama.cpp chooses is the likeliest here, or so near it that one activation
    rounded apart can decide; and nearly all are the likeliest."""
    count, models = 32, 4
    prompt = Tokenizer.from_file(str(assets["tokenizer.json"])).encode("They'll say").ids
    likeliest, distinct = 0, set()
    for seed in range(models):
        source = EvenSource(MODEL, seed=seed, assets=assets, max_length=LENGTH)
        export_gguf(source, tmp_path / f"{seed}.gguf", "TQ2_0", "F32")
        with llama(tmp_path / f"{seed}.gguf") as model:
            steps = model.generate(prompt, temp=0.0)
            chosen = [next(steps) for _ in range(count)]
        logits = our_logits(stages_of(source), prompt + chosen[:-1])[len(prompt) - 1 :]
        behind = logits.max(1).values - logits[range(count), chosen]
        assert behind.max() < 0.2 * logits.std()  # the tolerance of logits, as above
        likeliest += int((behind == 0).sum())
        distinct |= set(chosen)
    assert likeliest >= 0.95 * models * count  # measured: 127 of 128
    assert len(distinct) > 15  # else there was little to agree on


@pytest.mark.parametrize("make", [own_tokenizer, llama_3_tokenizer])
def test_texts_have_the_same_tokens(tmp_path: Path, make: Any) -> None:
    tokenizer = make()
    files = {"tokenizer.json": tmp_path / "tokenizer.json", "config.json": tmp_path / "config.json"}
    tokenizer.save(str(files["tokenizer.json"]))
    files["config.json"].write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    source = RandomSource(replace(MODEL, num_hidden_layers=1), assets=files, max_length=LENGTH)
    export_gguf(source, tmp_path / "m.gguf", "TQ2_0")
    with llama(tmp_path / "m.gguf") as model:
        assert (model.token_bos(), model.token_eos(), model.n_vocab()) == (0, 1, MODEL.vocab_size)
        for text in TEXTS:
            raw = text.encode()
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert model.tokenize(raw, add_bos=False, special=False) == ids
            assert model.detokenize(ids) == raw
            if text:  # with what the tokenizer itself adds
                assert model.tokenize(raw, add_bos=True) == tokenizer.encode(text).ids
        special = "<|endoftext|>" if make is own_tokenizer else "<|end_of_text|>"
        assert model.tokenize(special.encode(), add_bos=False, special=True) == [
            tokenizer.token_to_id(special)
        ]
