"""transformers loads what ``export_huggingface`` writes, and both compute the same bits."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabit.checkpoint.source import logical_tensors
from megabit.data.tokenizer import END_OF_TEXT, train_tokenizer
from megabit.errors import UserError
from megabit.interop.huggingface import (
    HuggingFaceSource,
    Quantization,
    export_huggingface,
    huggingface_logits,
    mode_of,
)
from megabit.interop.huggingface.scales import stored_scale
from megabit_kernels import numerics
from megabit_kernels.formats.huggingface import decode_scale
from tests.interop.hf_models import FORMS, load, logits, some_tokens, stored
from tests.interop.random_source import TINY, RandomSource


@pytest.fixture(autouse=True)
def _not_compiled() -> Iterator[None]:
    """transformers compiles its quantizers, which takes a while (``test_huggingface_compiled``)."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("activation", ["relu2", "silu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_and_hf_mode_compute_the_same_logits(
    tmp_path: Path, quantization: Quantization, is_tied: bool, activation: str, dtype: str
) -> None:
    model = replace(TINY, hidden_act=activation, tie_word_embeddings=is_tied, rope_theta=1e6)
    source = RandomSource(model)
    export_huggingface(
        source, tmp_path / "out", quantization.mode, quantization.linear_class, dtype
    )
    network = load(tmp_path / "out")
    tokens = some_tokens(model)
    expected = logits(network, tokens)
    assert expected.dtype == getattr(torch, dtype)
    assert expected.std() > 0.01
    back = HuggingFaceSource(tmp_path / "out")
    mode = mode_of(back)
    assert torch.equal(huggingface_logits(back, tokens, mode), expected)
    # What was exported computes the same before it is: megabit's own checkpoints are checked so.
    assert torch.equal(huggingface_logits(source, tokens, mode), expected)


@pytest.mark.parametrize("quantization", FORMS[1:])
def test_eager_attention_and_a_single_token(tmp_path: Path, quantization: Quantization) -> None:
    source = RandomSource(TINY)
    export_huggingface(source, tmp_path / "out", "offline", quantization.linear_class)
    back = HuggingFaceSource(tmp_path / "out")
    for attention in ("sdpa", "eager"):
        network = load(tmp_path / "out", attn_implementation=attention)
        for length in (1, 40):
            tokens = some_tokens(TINY, 3, length)
            mode = replace(mode_of(back), attention=attention)
            ours = huggingface_logits(back, tokens, mode)
            assert torch.equal(ours, logits(network, tokens))


@pytest.mark.parametrize("quantization", FORMS)
def test_what_is_written_in_fp32_is_read_back_exactly(
    tmp_path: Path, quantization: Quantization
) -> None:
    source = RandomSource(replace(TINY, tie_word_embeddings=False, num_hidden_layers=3))
    report = export_huggingface(
        source, tmp_path / "out", quantization.mode, quantization.linear_class, "float32"
    )
    back = HuggingFaceSource(tmp_path / "out")
    back.verify()
    assert (back.model, back.max_length) == (source.model, source.max_length)
    assert (back.quantization, back.dtype) == (quantization, torch.float32)
    for name, tensor in logical_tensors(source.model).items():
        if tensor.is_ternary:
            assert torch.equal(back.codes(name), source.codes(name))
            assert torch.equal(back.scale(name), source.scale(name))
        else:
            assert torch.equal(back.values(name), source.values(name))
    assert report.changed_codes == 0
    assert report.tensors == len(stored(tmp_path / "out"))
    assert report.bytes == (tmp_path / "out/model.safetensors").stat().st_size


def test_scales_of_bitlinear_give_any_gamma_back() -> None:
    # One γ in seven needs fp64: no fp32 number has it as its rounded inverse.
    gammas = 1e-3 + torch.rand(2000, generator=torch.Generator().manual_seed(0))
    needs_fp64 = 0
    for gamma in gammas:
        source = OneScale(gamma=gamma)
        scale = stored_scale(source, "w", "bitlinear")
        assert torch.equal(decode_scale(scale, "bitlinear"), gamma)
        assert torch.equal(stored_scale(source, "w", "autobitlinear"), gamma.reshape(1))
        needs_fp64 += scale.dtype == torch.float64
    assert 0 < needs_fp64 < 2000
    in_bf16 = decode_scale(torch.tensor([43.25], dtype=torch.bfloat16), "bitlinear")
    scale = stored_scale(OneScale(gamma=in_bf16), "w", "bitlinear", torch.bfloat16)
    assert scale.dtype == torch.bfloat16
    assert scale.item() == 43.25


@dataclass(frozen=True)
class OneScale(RandomSource):
    gamma: Tensor = field(kw_only=True)

    def scale(self, name: str) -> Tensor:
        return self.gamma


def test_codes_that_bf16_masters_change_are_counted(tmp_path: Path) -> None:
    source = RandomSource(replace(TINY, hidden_size=64, intermediate_size=256))
    report = export_huggingface(source, tmp_path / "out", "online")
    back = HuggingFaceSource(tmp_path / "out")
    names = [name for name, tensor in logical_tensors(source.model).items() if tensor.is_ternary]
    expected = 0
    for name in names:
        rounded = source.values(name).bfloat16()
        assert torch.equal(back.values(name), rounded)
        codes, _ = numerics.absmean_ternarize(rounded)
        expected += int((codes != numerics.absmean_ternarize(source.values(name))[0]).sum())
    assert 0 < report.changed_codes == expected
    assert report.total_codes == sum(source.values(name).numel() for name in names)


def test_masters_whose_gamma_bf16_changes(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Biased(RandomSource):
        """1 + 2^-8, which bf16 makes 1, and a 0.5 in each row: below γ/2, and above it then."""

        def _master(self, name: str) -> Tensor:
            values = super()._master(name)
            if values.dim() == 2:
                values = torch.full_like(values, 1 + 2**-8)
                values[:, 3] = 0.5
            return values

    source = Biased(replace(TINY, hidden_size=256, intermediate_size=256))
    report = export_huggingface(source, tmp_path / "out", "online")
    assert report.changed_codes == report.total_codes / 256


@pytest.mark.parametrize("quantization", FORMS)
def test_shards_and_their_index(tmp_path: Path, quantization: Quantization) -> None:
    model = replace(TINY, tie_word_embeddings=False)
    source = RandomSource(model)
    limit = 3000
    mode, linear_class = quantization.mode, quantization.linear_class
    export_huggingface(source, tmp_path / "one", mode, linear_class)
    report = export_huggingface(
        source, tmp_path / "many", mode, linear_class, max_shard_bytes=limit
    )
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    one, many = stored(tmp_path / "one"), stored(tmp_path / "many")
    assert one.keys() == many.keys()
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    sizes = dict.fromkeys(files, 0)
    for name, tensor in many.items():
        assert torch.equal(tensor, one[name])
        sizes[index["weight_map"][name]] += tensor.nbytes
    assert index["metadata"]["total_size"] == sum(sizes.values())
    largest = max(tensor.nbytes for tensor in many.values())
    assert max(sizes.values()) <= max(limit, largest)
    assert report.bytes == sum((tmp_path / "many" / file).stat().st_size for file in files)
    tokens = some_tokens(model)
    expected = logits(load(tmp_path / "one"), tokens)
    assert torch.equal(logits(load(tmp_path / "many"), tokens), expected)
    back = HuggingFaceSource(tmp_path / "many")
    back.verify()
    assert torch.equal(huggingface_logits(back, tokens, mode_of(back)), expected)


def test_rows_that_four_does_not_divide(tmp_path: Path) -> None:
    model = replace(TINY, intermediate_size=50)
    source = RandomSource(model)
    with pytest.raises(UserError, match=r"gate_proj\.weight has 50 rows.*use autobitlinear"):
        export_huggingface(source, tmp_path / "bit", "offline", "bitlinear")
    assert not list(tmp_path.iterdir())
    export_huggingface(source, tmp_path / "auto", "offline", "autobitlinear")
    back = HuggingFaceSource(tmp_path / "auto")
    back.verify()
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(back.codes(name), source.codes(name))
    tokens = some_tokens(model)
    expected = logits(load(tmp_path / "auto"), tokens)
    assert torch.equal(huggingface_logits(back, tokens, mode_of(back)), expected)


def test_the_tokenizer_travels(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "To be, or not to be: that is the question.  \n\nWhether 'tis nobler in the mind …"
    tokenizer = train_tokenizer([text], 290)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = RandomSource(TINY, assets={"tokenizer.json": tmp_path / "tokenizer.json"})
    export_huggingface(source, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (end, end)
    assert theirs.model_max_length == source.max_length
    for sample in (text, "  a\tb ", f"no {END_OF_TEXT} here", "日本 \u2028 é\x00", ""):
        ids = tokenizer.encode(sample, add_special_tokens=False).ids
        assert theirs(sample)["input_ids"] == ids
        assert theirs.decode(ids) == sample
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / "out" / name).read_text())
        assert (settings["eos_token_id"], settings["pad_token_id"]) == (end, None)


def test_files_of_an_imported_tokenizer_are_kept_as_they_are(tmp_path: Path) -> None:
    assets = {}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        assets[name] = tmp_path / name
        assets[name].write_text(f"of another tool: {name}")
    assets["config.json"] = tmp_path / "config.json"
    assets["config.json"].write_text('{"bos_token_id": 7, "eos_token_id": [8, 9]}')
    export_huggingface(RandomSource(assets=assets), tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == f"of another tool: {name}"
    assert not (tmp_path / "out/LICENSE").exists()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["BitNetForCausalLM"]
    ids = [config[f"{role}_token_id"] for role in ("bos", "eos", "pad")]
    assert ids == [7, [8, 9], None]


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    no_masters = RandomSource(has_masters=False)
    refused = [
        (no_masters, ("online", "autobitlinear"), "smaller γ; use mode offline"),
        (RandomSource(), ("online", "bitlinear"), "bitlinear holds packed codes only"),
        (RandomSource(replace(TINY, linear="dense")), ("offline", "bitlinear"), "is a dense model"),
    ]
    for source, form, problem in refused:
        with pytest.raises(UserError, match=problem):
            export_huggingface(source, out, *form)
    assert not list(tmp_path.iterdir())
    export_huggingface(no_masters, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(UserError, match=r"out: exists already"):
        export_huggingface(RandomSource(seed=1), out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_a_source_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    class Broken(RandomSource):
        def codes(self, name: str, index: object = None) -> Tensor:
            if "layers.1" in name:
                raise UserError(f"{name}: is gone")
            return super().codes(name, None)

    with pytest.raises(UserError, match="is gone"):
        export_huggingface(Broken(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
