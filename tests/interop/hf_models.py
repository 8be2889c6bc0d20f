"""Tiny models of transformers: load an export, save one, compute logits."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabit.config import ModelConfig
from megabit.interop.huggingface import Quantization
from megabit_kernels import numerics
from megabit_kernels.formats.huggingface import encode
from megabit_kernels.packing import pack

ONLINE = Quantization("online", "autobitlinear")
AUTO = Quantization("offline", "autobitlinear")
BIT = Quantization("offline", "bitlinear")
FORMS = [pytest.param(form, id=f"{form.mode}-{form.linear_class}") for form in (ONLINE, AUTO, BIT)]


def load(path: Path, **options: Any) -> Any:
    """What ``from_pretrained`` makes of a folder, which must hold all that it wants and no more."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model.eval()


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


def some_tokens(model: ModelConfig, batch: int = 2, length: int = 17) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(model.vocab_size, (batch, length), generator=generator)


def save_random(
    path: Path, model: ModelConfig, dtype: torch.dtype, architecture: str = "BitNet"
) -> None:
    """A model of transformers with random weights and gains, and no ``quantization_config``."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        **{
            key: value
            for key, value in asdict(model).items()
            if key not in ("linear", "rope_theta")
        },
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=[2, 3],
        pad_token_id=None,
    )
    torch.manual_seed(1)
    network = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for name, parameter in network.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    network.to(dtype).save_pretrained(path)


def quantize(path: Path, quantization: Quantization, scale_dtype: torch.dtype) -> None:
    """Turn a model of ``save_random`` into a ternary one, packed if it is ``offline``."""
    edit_config(
        path,
        quantization_config={
            "quant_method": "bitnet",
            "quantization_mode": quantization.mode,
            "linear_class": quantization.linear_class,
            "modules_to_not_convert": ["lm_head"],
        },
    )
    if quantization.mode == "online":
        return
    tensors = {}
    for name, values in load_file(path / "model.safetensors").items():
        if "_proj." in name:
            codes, _ = numerics.absmean_ternarize(values)
            mean = values.float().abs().mean()
            scale = mean if quantization == AUTO else 1 / mean
            # Any number, not only one that is the rounded inverse of an fp32 γ.
            scale = torch.nextafter(scale, torch.tensor(1e9))
            tensors[f"{name}_scale"] = scale.reshape(1).to(scale_dtype)
            values = encode(pack(codes), values.shape[1])
        tensors[name] = values
    rewrite(path, tensors)


def rewrite(path: Path, tensors: Mapping[str, Tensor], name: str = "model.safetensors") -> None:
    # Saving in place would write over what is still read.
    copies = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(copies, path / name, {"format": "pt"})


def edit_config(path: Path, **values: Any) -> None:
    """Set keys of ``config.json``; ``...`` removes one."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def stored(path: Path) -> dict[str, Tensor]:
    """All tensors of all files, and nothing but what they hold."""
    tensors: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert name not in tensors
            tensors[name] = tensor
    return tensors


def assert_same_bits(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name
