"""Snapshots of a run: every layout writes the codes and scales of one process, each once."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megabit.checkpoint import Part
from megabit.checkpoint.verify import expected_tensors
from megabit.launch import run_ranks
from megabit.training.snapshot import ternary_parts
from tests.checkpoint.saved import trained
from tests.training.tiny import tiny

STEPS = 2
EXACT = ("parallel.exact=full", "train.micro_batch_size=1")
"""So that all layouts have the same weights after some steps."""
ZB_V = ("parallel.pp=2", "parallel.schedule=zb-v", "model.num_hidden_layers=4")


@dataclass
class Received:
    """What is put together of one tensor."""

    values: Tensor
    count: Tensor


def parts_of(*settings: str) -> list[Part]:
    return ternary_parts(trained(tiny(*EXACT, *settings), STEPS))


def assembled(ranks: list[list[Part]]) -> dict[str, Tensor]:
    """Whole tensors; every element must come from exactly one rank."""
    tensors: dict[str, Received] = {}
    for parts in ranks:
        names = [part.name for part in parts]
        assert len({*names}) == len(names), "a file has one part of a tensor"
        for part in parts:
            new = Received(part.values.new_zeros(part.shape), torch.zeros(part.shape))
            whole = tensors.setdefault(part.name, new)
            assert (whole.values.dtype, whole.values.shape) == (part.values.dtype, part.shape)
            index = tuple(
                slice(start, start + size)
                for start, size in zip(part.offset, part.values.shape, strict=True)
            )
            assert whole.values[index].shape == part.values.shape
            whole.values[index] = part.values
            whole.count[index] += 1
    assert all((tensor.count == 1).all() for tensor in tensors.values())
    return {name: tensor.values for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        (("parallel.tp=2",), 2),
        (("parallel.tp=4",), 4),  # shares KV heads
        (("parallel.pp=2", "model.tie_word_embeddings=false"), 2),
        (("parallel.pp=2",), 2),  # the tied embedding is on two ranks
        (("optim.zero_stage=0",), 2),
        (("optim.zero_stage=1", "precision.compute=bfloat16"), 4),
        (("parallel.tp=2", "parallel.sequence_parallel=true"), 4),
        (ZB_V, 2),
    ],
    ids=["tp2", "tp4", "pp2-untied", "pp2", "dp2-zero0", "dp4-bf16", "tp2_dp2_sp", "zb-v"],
)
def test_parts_make_up_the_model_of_one_process(settings: tuple[str, ...], world_size: int) -> None:
    model = [setting for setting in settings if not setting.startswith(("parallel", "optim"))]
    single = assembled([parts_of(*model)])
    split = assembled(run_ranks(lambda: parts_of(*settings), world_size))
    shapes = expected_tensors("ternary", tiny(*model).model)
    assert {name: tuple(tensor.shape) for name, tensor in split.items()} == shapes
    assert all(torch.equal(tensor, split[name]) for name, tensor in single.items())


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float64"])
def test_they_are_what_the_model_computes_with(compute: str) -> None:
    """Of dense weights the replica, of ternary ones codes and scale; gains and scales in fp32."""
    state = trained(tiny(f"precision.compute={compute}"), STEPS)
    parts = {part.name: part.values for part in ternary_parts(state)}
    matrix = torch.bfloat16 if compute == "bfloat16" else torch.float32
    for name, parameter in state.stages.named_parameters():
        if name in state.optimizer.publisher.layers:
            ternary = state.optimizer.publisher.layers[name].ternary()
            assert torch.equal(parts[f"{name}.codes"], ternary.packed())
            assert torch.equal(parts[f"{name}.scale"], ternary.scale.float())
            continue
        assert parts[name].dtype == (matrix if parameter.dim() > 1 else torch.float32)
        assert torch.equal(parts[name], parameter.detach().to(parts[name].dtype))
