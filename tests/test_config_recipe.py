"""Settings of a recipe that do not go together: one line, which begins with the key."""

import pytest

from megabit.config import load_config
from tests.test_config_conflicts import problems_of

RAMP = ("train.batch_ramp_start=4", "train.batch_ramp_increment=4", "train.batch_ramp_tokens=999")
DENSE = "model.linear=dense"
EMBEDDING = "loss.objective=embedding"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([DENSE, "model.scale_mult=1.5"], "model.scale_mult: has no effect with model.linear"),
        ([DENSE, "model.activations=full"], "model.activations: has no effect with model.linear"),
        ([DENSE, "model.hadamard=true"], "model.hadamard: has no effect with model.linear=dense"),
        ([DENSE, "train.quantization_ramp=0.1"], "train.quantization_ramp: has no effect with"),
        (["model.hadamard=true", "model.activations=full"], "model.hadamard: has no effect with"),
        (["model.hadamard=true", "model.intermediate_size=770"], "model.hadamard: model.inter"),
        (["model.scale_mult=0"], "model.scale_mult: must be greater than 0"),
        (["train.quantization_ramp=0.6"], "train.quantization_ramp: must lie between 0 and 0.5"),
        (["train.tokens=0"], "train.tokens: must be greater than 0"),
        (["train.batch_ramp_tokens=9"], "train.batch_ramp_tokens: has no effect without"),
        ([*RAMP, "train.batch_ramp_start=16"], "train.batch_ramp_start: must lie between 1 and"),
        ([*RAMP, "train.batch_ramp_increment=8"], "train.batch_ramp_increment: 8 must divide"),
        ([*RAMP, "train.batch_ramp_tokens=0"], "train.batch_ramp_tokens: must be greater than 0"),
        ([EMBEDDING, "loss.z_loss=1e-4"], "loss.z_loss: has no effect with loss.objective"),
        (["loss.mining_ratio=0.3"], "loss.mining_ratio: has no effect with loss.objective"),
        ([EMBEDDING, "data.seq_length=33"], "data.seq_length: 33 must be even"),
        ([EMBEDDING, "train.micro_batch_size=1"], "train.micro_batch_size: loss.objective"),
        ([EMBEDDING, "model.tie_word_embeddings=false"], "model.tie_word_embeddings: must be"),
        (["loss.label_smoothing=1"], "loss.label_smoothing: must be at least 0 and below 1"),
        (["loss.select_ratio=0.3"], "loss.select_ratio: has no effect with loss.select=all"),
        (["loss.select=hard", "loss.select_ratio=2"], "loss.select_ratio: must be 1 at most"),
        (["loss.select=excess"], "loss.teacher: loss.select=excess needs one"),
        (["loss.distill_weight=1"], "loss.teacher: loss.distill_weight needs one"),
        (["loss.teacher=models/dense"], "loss.teacher: has no effect without"),
        (["optim.schedule=cosine"], "optim.lr: must be a list of one number with optim.schedule"),
        (["optim.warmup_fraction=2"], "optim.warmup_fraction: must lie between 0 and 1"),
        (["optim.decay_fraction=-1"], "optim.decay_fraction: must lie between 0 and 1"),
        (["optim.muon_momentum=1"], "optim.muon_momentum: must be at least 0 and below 1"),
        (["optim.clip_grad_value=1"], "optim.clip_grad_value: stands instead of"),
        (["optim.clip_boost=0.5"], "optim.clip_boost: must be 1 or more"),
        (["optim.clip_boost=2", "optim.clip_grad_norm=0"], "optim.clip_boost: has no effect"),
        (["precision.loss_scale=1000"], "precision.loss_scale: must be a power of two"),
        (["data.skip_samples=[1,2,3]"], "data.skip_samples: must be pairs"),
        (["data.skip_samples=[5,5]"], "data.skip_samples: must be pairs"),
        (["telemetry.prometheus_port=70000"], "telemetry.prometheus_port: must lie between"),
        (["telemetry.prometheus_host=0.0.0.0"], "telemetry.prometheus_host: has no effect"),
        (["telemetry.peak_tflops=0"], "telemetry.peak_tflops: must be greater than 0"),
        (["parallel.exact=full", "train.quantization_ramp=0.1"], "parallel.exact: full is for"),
        (["parallel.exact=full", "precision.compute=float16"], "precision.compute: parallel.ex"),
        (["model.activations=full", "parallel.row_reduce=exact16"], "parallel.row_reduce: has no"),
    ],
)
def test_one_problem(settings: list[str], problem: str) -> None:
    found = problems_of(*settings)
    assert any(line.startswith(problem) for line in found), found


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("{watch: loss_spike, above: 6, window: 1}", "window: must be 2 or more"),
        ("{watch: loss_spike}", "above: must be greater than 0 for loss_spike"),
        ("{times: -1}", "times: must be 0 or more"),
        ("{calm_steps: 0}", "calm_steps: must be 1 or more, or null"),
        ("{watch: plateau, action: lower_lr, factor: 1.5}", "factor: must lie between 0 and 1"),
        ("{watch: loss_spike, above: 6, action: rollback}", "action: rollback needs checkpoints"),
        ("{watch: plateau, action: skip}", "action: skip does not end a plateau"),
        ("{then: skip}", "then: must be one of alert, stop, not 'skip'"),
    ],
)
def test_one_problem_of_a_rule(rule: str, problem: str) -> None:
    (found,) = problems_of(f"guard.rules=[{{}}, {rule}]")
    assert found.startswith(f"guard.rules[1].{problem}")


def test_rollbacks_are_not_forgotten() -> None:
    rule = "{watch: loss_spike, above: 6, action: rollback, calm_steps: 9}"
    (found,) = problems_of("checkpoint.save_interval=5", f"guard.rules=[{rule}]")
    assert found.startswith("guard.rules[0].calm_steps: rollbacks are never forgotten")


def test_ranks_share_the_smallest_batch() -> None:
    found = problems_of(*RAMP, world_size=2)
    assert [line.split(":")[0] for line in found] == [
        "train.batch_ramp_start",
        "train.batch_ramp_increment",
    ]


def test_what_goes_together() -> None:
    load_config([*RAMP, "optim.schedule=wsd", "optim.lr=[1e-3]", "optim.weight_decay=[0.1]"])
    load_config([EMBEDDING, "model.norm_placement=per_proj", "model.activations=a4.8"])
    load_config(["guard.rules=[]", "optim.name=muon", "model.hadamard=true"])
