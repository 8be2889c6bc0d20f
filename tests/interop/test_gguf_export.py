"""GGUF files: what the ``gguf`` package reads back is what was exported."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from megabit.checkpoint.source import Index, logical_tensors
from megabit.config import ModelConfig
from megabit.data.tokenizer import train_tokenizer
from megabit.errors import UserError
from megabit.interop.gguf_export import ROWS, GgufTensorType, export_gguf
from megabit_kernels import packing
from megabit_kernels.formats import gguf as formats
from tests.interop.random_source import RandomSource

MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_act="silu",
    rms_norm_eps=3e-6,
    rope_theta=50_000.0,
)
TERNARY = [name for name, tensor in logical_tensors(MODEL).items() if tensor.is_ternary]
TYPES: tuple[GgufTensorType, ...] = ("TQ1_0", "TQ2_0", "I2_S")

# Names as llama.cpp's converter gives them.
NAMES = {
    "model.embed_tokens": gguf.MODEL_TENSOR.TOKEN_EMBD,
    "model.norm": gguf.MODEL_TENSOR.OUTPUT_NORM,
    "input_layernorm": gguf.MODEL_TENSOR.ATTN_NORM,
    "self_attn.q_proj": gguf.MODEL_TENSOR.ATTN_Q,
    "self_attn.k_proj": gguf.MODEL_TENSOR.ATTN_K,
    "self_attn.v_proj": gguf.MODEL_TENSOR.ATTN_V,
    "self_attn.attn_sub_norm": gguf.MODEL_TENSOR.ATTN_SUB_NORM,
    "self_attn.o_proj": gguf.MODEL_TENSOR.ATTN_OUT,
    "post_attention_layernorm": gguf.MODEL_TENSOR.FFN_NORM,
    "mlp.gate_proj": gguf.MODEL_TENSOR.FFN_GATE,
    "mlp.up_proj": gguf.MODEL_TENSOR.FFN_UP,
    "mlp.ffn_sub_norm": gguf.MODEL_TENSOR.FFN_SUB_NORM,
    "mlp.down_proj": gguf.MODEL_TENSOR.FFN_DOWN,
}


class Reader(gguf.GGUFReader):
    """Reads I2_S too, whose number the package does not know: into ``i2_s``, by name."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        self.i2_s: dict[str, Tensor] = {}
        others = []
        for field in fields:
            _, name, _, dims, type_id, offset = field.parts
            if type_id[0] == formats.TensorType.I2_S:
                size = int(np.prod(dims)) // 4 + formats.I2_S_TAIL_BYTES
                data = self._get(int(start_offs + offset[0]), np.uint8, size)
                self.i2_s[bytes(name).decode()] = torch.from_numpy(data.copy())
            else:
                others.append(field)
        super()._build_tensors(start_offs, others)

    def value(self, key: str) -> Any:
        return self.fields[key].contents()

    def dense(self, name: str) -> Tensor:
        found = {tensor.name: tensor for tensor in self.tensors}[name]
        return torch.from_numpy(found.data.copy())

    def ternary(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Canonical codes and γ."""
        if name in self.i2_s:
            return formats.decode_i2_s(self.i2_s[name], *shape)
        found = {tensor.name: tensor for tensor in self.tensors}[name]
        assert tuple(reversed(found.shape.tolist())) == shape
        decode = {"TQ1_0": formats.decode_tq1_0, "TQ2_0": formats.decode_tq2_0}
        return decode[found.tensor_type.name](torch.from_numpy(found.data.copy()))


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on so little text that it has fewer tokens than ``MODEL``."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["the cat and the hat and the rat"] * 3, MODEL.vocab_size).save(str(path))
    return path


@pytest.fixture
def source(tokenizer_json: Path) -> RandomSource:
    return RandomSource(MODEL, assets={"tokenizer.json": tokenizer_json}, max_length=96)


def gguf_name(name: str) -> str:
    for own, tensor in NAMES.items():
        if f"{own}.weight" in name:
            layer = name.split(".")[2]
            return gguf.TENSOR_NAMES[tensor].format(bid=layer) + ".weight"
    raise KeyError(name)


# What is in a file


@pytest.mark.parametrize("has_masters", [True, False])
@pytest.mark.parametrize("tensor_type", TYPES)
def test_codes_and_scales_come_back(
    source: RandomSource, tmp_path: Path, tensor_type: GgufTensorType, has_masters: bool
) -> None:
    source = replace(source, has_masters=has_masters)
    export_gguf(source, tmp_path / "m.gguf", tensor_type)
    reader = Reader(tmp_path / "m.gguf")
    for name in TERNARY:
        codes, scale = reader.ternary(gguf_name(name), logical_tensors(MODEL)[name].shape)
        expected = source.scale(name)
        if tensor_type != "I2_S":
            expected = expected.to(torch.float16).to(torch.float32)
        assert torch.equal(codes, source.codes(name))
        assert torch.equal(scale, expected)


@pytest.mark.parametrize("tensor_type", ["TQ1_0", "TQ2_0"])
def test_the_package_dequantizes_to_the_weights(
    source: RandomSource, tmp_path: Path, tensor_type: GgufTensorType
) -> None:
    """With its own code for the types, not ours."""
    export_gguf(source, tmp_path / "m.gguf", tensor_type)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for name in TERNARY:
        tensor = found[gguf_name(name)]
        weights = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        codes = packing.unpack(source.codes(name), logical_tensors(MODEL)[name].shape[1])
        scale = source.scale(name).to(torch.float16).to(torch.float32)
        assert torch.equal(weights, codes * scale)


@pytest.mark.parametrize("embedding_type", ["F16", "F32"])
def test_dense_tensors_come_back(source: RandomSource, tmp_path: Path, embedding_type: str) -> None:
    export_gguf(source, tmp_path / "m.gguf", "TQ2_0", embedding_type)  # type: ignore[arg-type]
    reader = Reader(tmp_path / "m.gguf")
    dense = [name for name in logical_tensors(MODEL) if name not in TERNARY]
    for name in dense:
        values = source.values(name)
        if values.dim() == 2 and embedding_type == "F16":
            values = values.to(torch.float16)
        found = reader.dense(gguf_name(name))
        assert found.dtype == values.dtype
        assert torch.equal(found, values)


def test_a_large_embedding_comes_back(source: RandomSource, tmp_path: Path) -> None:
    """It is read in several parts."""
    source = replace(source, model=replace(MODEL, vocab_size=2 * ROWS + 5))
    export_gguf(source, tmp_path / "m.gguf", "TQ2_0", "F32")
    found = Reader(tmp_path / "m.gguf").dense("token_embd.weight")
    assert torch.equal(found, source.values("model.embed_tokens.weight"))


def test_the_tensors_are_those_of_the_architecture(source: RandomSource, tmp_path: Path) -> None:
    report = export_gguf(source, tmp_path / "m.gguf", "TQ2_0")
    found = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors]
    assert found == [gguf_name(name) for name in logical_tensors(MODEL)]
    known = {
        gguf.TENSOR_NAMES[tensor].format(bid=layer) + ".weight"
        for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.BITNET]
        for layer in range(MODEL.num_hidden_layers)
    }
    assert set(found) == known
    assert report.tensors == len(found)
    assert report.bytes == (tmp_path / "m.gguf").stat().st_size


@pytest.mark.parametrize(
    ("tensor_type", "hidden_act", "architecture", "file_type"),
    [
        ("TQ1_0", "silu", "bitnet", gguf.LlamaFileType.MOSTLY_TQ1_0),
        ("TQ2_0", "relu2", "bitnet", gguf.LlamaFileType.MOSTLY_TQ2_0),
        ("I2_S", "silu", "bitnet", 40),
        ("I2_S", "relu2", "bitnet-b1.58", 40),
    ],
)
def test_metadata(
    source: RandomSource,
    tmp_path: Path,
    tensor_type: GgufTensorType,
    hidden_act: Any,
    architecture: str,
    file_type: int,
) -> None:
    source = replace(source, model=replace(MODEL, hidden_act=hidden_act))
    export_gguf(source, tmp_path / "m.gguf", tensor_type)
    reader = Reader(tmp_path / "m.gguf")
    assert reader.value("general.architecture") == architecture
    own = {key.removeprefix(f"{architecture}."): key for key in reader.fields}
    values = {key: reader.value(full) for key, full in own.items() if full.startswith(architecture)}
    assert values == {
        "vocab_size": 320,
        "context_length": 96,
        "embedding_length": 256,
        "block_count": 2,
        "feed_forward_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": float(np.float32(3e-6)),
        "rope.dimension_count": 64,
        "rope.freq_base": 50_000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 1.0,
        "hidden_activation": hidden_act,
    }
    assert reader.value("general.file_type") == file_type
    assert reader.value("general.quantization_version") == gguf.GGML_QUANT_VERSION
    assert reader.value("general.type") == "model"
    assert reader.value("general.name") == "random-model"


# What is reported


def test_the_largest_change_of_a_scale(source: RandomSource, tmp_path: Path) -> None:
    changes = {}
    for name in TERNARY:
        gamma = source.scale(name).double()
        changes[name] = abs(float(gamma.to(torch.float16).double() / gamma) - 1)
    report = export_gguf(source, tmp_path / "a.gguf", "TQ2_0")
    assert report.scale_change == pytest.approx(max(changes.values()), rel=1e-6)
    assert 0 < report.scale_change <= 2**-11  # half a unit of fp16's last place
    assert export_gguf(source, tmp_path / "b.gguf", "I2_S").scale_change == 0


@pytest.mark.parametrize("tensor_type", TYPES)
@pytest.mark.parametrize("hidden_act", ["silu", "relu2"])
def test_warnings_where_a_reader_is_wrong(
    source: RandomSource, tmp_path: Path, tensor_type: GgufTensorType, hidden_act: Any
) -> None:
    source = replace(source, model=replace(MODEL, hidden_act=hidden_act))
    warnings = export_gguf(source, tmp_path / "m.gguf", tensor_type).warnings
    assert len(warnings) == (tensor_type == "I2_S") + (hidden_act == "relu2")
    assert all(warning.startswith("experimental: ") for warning in warnings)
    assert all("\n" not in warning for warning in warnings)
    assert any("SiLU" in warning for warning in warnings) == (hidden_act == "relu2")
    assert any("cannot read I2_S" in warning for warning in warnings) == (tensor_type == "I2_S")


# What is refused: one line, and nothing is left behind


@pytest.mark.parametrize(
    ("change", "tensor_type", "expected"),
    [
        ({"linear": "dense"}, "TQ2_0", ["model.linear is dense"]),
        ({"tie_word_embeddings": False}, "I2_S", ["model.tie_word_embeddings is false"]),
        (
            {"intermediate_size": 640},
            "TQ1_0",
            [
                "model.layers.0.mlp.down_proj.weight (and every layer's) has rows of 640 weights, "
                "no multiple of 256, the block of TQ1_0; I2_S would fit"
            ],
        ),
        (
            {"intermediate_size": 576},
            "I2_S",
            ["mlp.down_proj.weight", "no ternary type would fit"],
        ),
    ],
)
def test_a_model_without_a_place_in_the_format(
    source: RandomSource,
    tmp_path: Path,
    change: dict[str, Any],
    tensor_type: GgufTensorType,
    expected: list[str],
) -> None:
    source = replace(source, model=replace(MODEL, **change))
    with pytest.raises(UserError) as caught:
        export_gguf(source, tmp_path / "m.gguf", tensor_type)
    (problem,) = caught.value.problems
    assert problem.startswith("random-model: ")
    assert all(part in problem for part in expected)
    assert list(tmp_path.iterdir()) == []


def test_every_weight_that_does_not_fit_is_named(source: RandomSource, tmp_path: Path) -> None:
    source = replace(source, model=replace(MODEL, hidden_size=192))
    with pytest.raises(UserError) as caught:
        export_gguf(source, tmp_path / "m.gguf", "TQ2_0")
    assert [problem.split(":")[1].split()[0] for problem in caught.value.problems] == [
        name for name in TERNARY if ".0." in name and "down_proj" not in name
    ]


def test_an_existing_file_is_kept(source: RandomSource, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    out.write_text("mine")
    with pytest.raises(UserError, match=r"m\.gguf: exists"):
        export_gguf(source, out, "TQ2_0")
    assert out.read_text() == "mine"


def test_a_folder_that_is_not_there(source: RandomSource, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"m\.gguf: its folder does not exist"):
        export_gguf(source, tmp_path / "no" / "m.gguf", "TQ2_0")


@dataclass(frozen=True)
class ChangedSource(RandomSource):
    """One tensor has another value or scale."""

    name: str = ""
    value: float = 0.0

    def values(self, name: str, index: Index | None = None) -> Tensor:
        values = super().values(name)
        if name == self.name:
            values[-1] = self.value
        return values[index or ...]

    def scale(self, name: str) -> Tensor:
        return torch.tensor(self.value) if name == self.name else super().scale(name)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model.embed_tokens.weight", 7e4, "torch.float16; write the embedding as F32"),
        ("model.norm.weight", float("nan"), "values not finite in torch.float32"),
        (TERNARY[-1], 1e-9, "must be in the range of fp16"),
        (TERNARY[-1], float("nan"), "must be positive and finite"),
    ],
)
def test_values_that_the_format_cannot_hold(
    source: RandomSource, tmp_path: Path, name: str, value: float, expected: str
) -> None:
    bad = ChangedSource(MODEL, assets=source.assets, name=name, value=value)
    with pytest.raises(UserError) as caught:
        export_gguf(bad, tmp_path / "m.gguf", "TQ2_0")
    (problem,) = caught.value.problems
    assert problem.startswith(f"random-model: {name}")
    assert expected in problem
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class DamagedSource(RandomSource):
    """Code 3 in the last byte of every ternary weight."""

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        codes = super().codes(name, index)
        codes[-1, -1] |= 3
        return codes


@pytest.mark.parametrize("tensor_type", TYPES)
def test_codes_that_are_none(
    source: RandomSource, tmp_path: Path, tensor_type: GgufTensorType
) -> None:
    bad = DamagedSource(MODEL, assets=source.assets)
    with pytest.raises(UserError, match=f"random-model: {TERNARY[0]}: codes holds code 3"):
        export_gguf(bad, tmp_path / "m.gguf", tensor_type)
    assert list(tmp_path.iterdir()) == []


def test_what_fp16_cannot_hold_can_be_written_as_f32(source: RandomSource, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    large = ChangedSource(MODEL, assets=source.assets, name=name, value=7e4)
    export_gguf(large, tmp_path / "m.gguf", "TQ2_0", "F32")
    found = Reader(tmp_path / "m.gguf").dense("token_embd.weight")
    assert torch.equal(found, large.values(name))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(source: RandomSource, tmp_path: Path) -> None:
    """A limit on the size of files acts like one."""
    with (
        file_size_limit(200_000),
        pytest.raises(UserError, match=r"m\.gguf: cannot write it"),
    ):
        export_gguf(source, tmp_path / "m.gguf", "TQ2_0")
    assert list(tmp_path.iterdir()) == []


# Memory

MEASURE_MEMORY = """
import resource, sys, torch
from dataclasses import dataclass, replace
from pathlib import Path
from megabit.checkpoint.source import logical_tensors
from megabit.config import ModelConfig
from megabit.interop.gguf_export import export_gguf

@dataclass
class Zeros:
    model: ModelConfig
    assets: dict
    path: Path = Path("zeros")
    max_length: int = 64
    has_masters: bool = False

    def values(self, name, index=None):
        return torch.zeros(()).expand(logical_tensors(self.model)[name].shape)[index or ...]

    def codes(self, name, index=None):
        n, k = logical_tensors(self.model)[name].shape
        return torch.tensor(0b01010101, dtype=torch.uint8).expand(n, k // 4)

    def scale(self, name):
        return torch.tensor(0.5)

torch.set_num_threads(1)
folder, assets = Path(sys.argv[1]), {"tokenizer.json": Path(sys.argv[2])}
model = ModelConfig(vocab_size=320, hidden_size=1024, intermediate_size=1024, hidden_act="silu")
for layers in (1, 20):
    source = Zeros(replace(model, num_hidden_layers=layers), assets)
    report = export_gguf(source, folder / f"{layers}.gguf", "TQ2_0")
    print(report.bytes, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_one_tensor_is_in_memory_at_a_time(tokenizer_json: Path, tmp_path: Path) -> None:
    """Twenty layers take hardly more memory than one, and 31 MB more on disk."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE_MEMORY, str(tmp_path), str(tokenizer_json)],
        capture_output=True,
        text=True,
        check=True,
    )
    (small, before), (large, after) = (
        map(int, line.split()) for line in result.stdout.splitlines()
    )
    assert large - small > 30e6
    # What an allocator keeps varies by a tensor's temporary copies, 1 MB each.
    assert after - before < 10e6
