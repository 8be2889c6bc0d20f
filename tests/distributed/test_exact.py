"""``parallel.exact: full``: after many steps on real text nothing differs from one process.

Compared bit by bit: every master weight, both moments, every code, all losses and gradient norms.
The model is awkward on purpose: 2 KV heads for 4 heads, so that TP 4 shares them; feed-forward and
vocabulary in blocks of unequal width; 3 layers for 2 stages; a tied embedding; dropout; clipping
and weight decay in every step; loss masks that differ between samples (``parity.uneven_batch``).
``tests/training/test_exact.py`` shows that a sum in another order is caught.
"""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megabit.config import Config, load_config
from megabit.data.prepare import prepare_corpus
from megabit.telemetry.metrics import read_metrics
from megabit.training.parity import Layout, Record, compare, record, sample_source

STEPS = 100
FEWER_STEPS = 25
"""Of more than two ranks, which share this machine's cores; ``make test-exhaustive`` runs all."""
FEW_STEPS = 10
REPOSITORY = Path(__file__).parents[2]
MODEL = [
    "model.vocab_size=301",
    "model.hidden_size=64",
    "model.intermediate_size=210",
    "model.num_hidden_layers=3",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "data.seq_length=32",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    f"train.steps={STEPS}",
    "train.hidden_dropout=0.1",
    "optim.warmup_steps=10",
    "optim.clip_grad_norm=0.5",
    "parallel.bucket_mb=0.1",  # several buckets
    "parallel.exact=full",
]
LAYOUTS = [
    Layout(tp, pp, dp, sp)
    for tp, pp, dp, sp in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (False, True))
    if (tp > 1 or not sp) and 1 < tp * pp * dp <= 8
]


@functools.cache
def corpus(folder: Path) -> str:
    """A corpus of this repository's own prose; returns the setting that names it."""
    text = folder / "text"
    text.mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "LICENSE"):
        (text / f"{Path(name).stem}.txt").write_text((REPOSITORY / name).read_text())
    setting = f"data.dir={folder / 'corpus'}"
    config = load_config([*MODEL, setting, f"data.text={text}"])
    prepare_corpus(config.data, config.model.vocab_size, config.train.seed, lambda line: None)
    return setting


@pytest.fixture(scope="module")
def real_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return corpus(tmp_path_factory.mktemp("exact"))


@functools.cache
def one_process(steps: int, *settings: str) -> Record:
    return run(load_config([*MODEL, *settings]), Layout(), steps)


def run(config: Config, layout: Layout, steps: int) -> Record:
    return record(layout.apply(config), layout, steps, sample_source(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        *((layout, STEPS if layout.world_size <= 2 else FEWER_STEPS) for layout in LAYOUTS),
        *(
            pytest.param(layout, STEPS, marks=pytest.mark.exhaustive)
            for layout in LAYOUTS
            if layout.world_size > 2
        ),
    ],
    ids=str,
)
def test_training_is_bit_equal_at_every_layout(layout: Layout, steps: int, real_text: str) -> None:
    own = run(load_config([*MODEL, real_text]), layout, steps)
    reference = one_process(steps, real_text)
    for kind in ("weights", "moments", "codes", "gradients"):
        expected = getattr(reference, kind)
        assert expected.keys() == getattr(own, kind).keys()
        for name, tensor in expected.items():
            assert torch.equal(getattr(own, kind)[name], tensor), (kind, name)
    assert own.losses == reference.losses
    assert own.grad_norms == reference.grad_norms
    assert reference.losses[-1] < 0.9 * reference.losses[0]  # it has learned something


@pytest.mark.parametrize(
    "settings",
    [
        ["precision.compute=bfloat16"],
        ["precision.ternary_backward=int8", "train.recompute=full"],
        ["optim.zero_stage=0", "parallel.row_reduce=exact16", "train.recompute=selective"],
        ["model.tie_word_embeddings=false", "parallel.schedule=gpipe"],
    ],
    ids=lambda settings: settings[0].split(".")[1],
)
def test_other_settings_are_bit_equal_as_well(settings: list[str], real_text: str) -> None:
    settings = [*settings, real_text]
    config = load_config([*MODEL, *settings])
    for layout in (Layout(tp=2, sequence_parallel=True), Layout(dp=2), Layout(pp=2)):
        own = run(config, layout, FEW_STEPS)
        assert compare(layout, own, one_process(FEW_STEPS, *settings)).is_identical


@pytest.mark.slow
def test_the_number_of_threads_does_not_matter(real_text: str, tmp_path: Path) -> None:
    """torch cuts long bf16 sums over threads; the command computes with one, whatever it is told
    to."""
    shape = ["model.hidden_size=256", "model.intermediate_size=512", "model.num_hidden_layers=1"]
    heads = ["model.num_attention_heads=16", "model.num_key_value_heads=16", "train.steps=1"]
    batch = ["data.seq_length=256", "train.micro_batch_size=16", "train.global_batch_size=16"]
    others = ["precision.compute=bfloat16", "train.eval_interval=0", "run.sample_tokens=0"]
    norms = []
    for threads in (1, 2):
        folder = tmp_path / str(threads)
        settings = [*MODEL, real_text, *shape, *heads, *batch, *others, f"run.dir={folder}"]
        paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths}
        command = [sys.executable, "-m", "megabit", "train", *settings]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        norms.append(read_metrics(folder / "metrics.jsonl")[0]["grad_norm"])
    assert norms[0] == norms[1]
