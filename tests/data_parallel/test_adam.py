"""AdamW on the masters: a plain torch loop gives the same, and only NVIDIA's apex is used."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megabit.apex import fused_adam, fused_rms_norm
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.training.step import TrainingState, train_step
from tests.training.tiny import global_batch, own_batch, tiny

OPTIM = (
    *("optim.lr=[1e-2,5e-3]", "optim.weight_decay=[0.1,0.0]", "optim.betas=[0.8,0.9]"),
    *("optim.min_lr=0.0", "optim.eps=1e-7", "optim.switch=0.5", "optim.warmup_steps=1"),
    *("train.steps=4", "optim.clip_grad_norm=0.5"),
)
RATES_AND_DECAYS = [(1e-2, 0.1), (1e-2, 0.1), (5e-3 * 2 / 3, 0.0)]
"""Of three steps of four: one of warm-up, then down along lines to 0."""


@pytest.mark.parametrize("linear", ["ternary", "dense"])
def test_three_steps_equal_a_plain_torch_loop(linear: str) -> None:
    config = tiny(*OPTIM, f"model.linear={linear}", "precision.compute=float64")
    mesh = ParallelMesh()
    state = TrainingState.create(config, mesh)

    copy = build_stages(config, mesh)
    weights = dict(copy.named_parameters())
    gains = [p for name, p in weights.items() if "norm" in name]
    matrices = [p for name, p in weights.items() if "norm" not in name]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(
        groups,
        betas=(0.8, 0.9),
        eps=1e-7,
        foreach=False,
        fused=False,
    )
    for step, (lr, weight_decay) in enumerate(RATES_AND_DECAYS):
        batch = global_batch(config, step)
        logits = copy.logits(copy(batch.inputs[0]))
        losses = F.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        loss = (losses * batch.mask.flatten()).sum() / batch.mask.sum()
        adam.zero_grad()
        loss.backward()
        grads = [p.grad for p in weights.values() if p.grad is not None]
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        assert norm > 0.5  # so that clipping does something
        for grad in grads:
            grad.mul_(0.5 / norm)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.param_groups[0]["weight_decay"] = weight_decay
        adam.step()

        report = train_step(state, own_batch(config, mesh, step), step)
        # fp64 sums in another order, of at most 2^7 samples' tokens and a few steps of Adam.
        assert report.loss == pytest.approx(loss.item(), rel=1e-9)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-9)
        assert report.lr == pytest.approx(lr, rel=1e-12)
        pieces = {piece.name: piece.tensors["master"] for piece in state.optimizer.pieces()}
        assert pieces.keys() == weights.keys()
        for name, master in pieces.items():
            torch.testing.assert_close(master, weights[name].data, rtol=1e-9, atol=1e-9, msg=name)


# An apex in miniature: the classes that are looked for, and the extensions they need.
SOURCES = {
    "apex/optimizers/__init__.py": "class FusedAdam: ...",
    "apex/normalization/fused_layer_norm.py": "def fused_rms_norm_affine(): ...",
}
EXTENSIONS = {"amp_C.py": "", "fused_layer_norm_cuda.py": ""}


@pytest.mark.parametrize("find", [fused_adam, fused_rms_norm])
@pytest.mark.parametrize(
    ("files", "is_found"),
    [
        ({}, False),
        ({"apex/__init__.py": ""}, False),  # the project of that name on PyPI
        (SOURCES, False),  # not built
        ({**dict.fromkeys(SOURCES, ""), **EXTENSIONS}, False),
        ({**SOURCES, **EXTENSIONS}, True),
    ],
    ids=["absent", "another-project", "not-built", "incomplete", "complete"],
)
def test_nothing_but_a_complete_apex_is_used(
    find: Callable[[], Any],
    files: dict[str, str],
    is_found: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # whatever this machine has is not found
    names = ("apex", "amp_C", "fused_layer_norm_cuda")
    others = {name: module for name, module in sys.modules.items() if not name.startswith(names)}
    monkeypatch.setattr("sys.modules", others)
    assert (find() is not None) == is_found
