"""Settings that are wrong or do not go together: one line for each, naming the way out."""

import pytest

from megabit.config import SCHEDULE_CHUNKS, load_config
from megabit.errors import UserError


def problems_of(*settings: str, world_size: int | None = None) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        load_config(list(settings), world_size)
    for problem in caught.value.problems:
        assert "\n" not in problem
    return caught.value.problems


@pytest.mark.parametrize(
    "key",
    [
        "model.vocab_size",
        "model.hidden_size",
        "model.intermediate_size",
        "model.num_hidden_layers",
        "model.num_attention_heads",
        "model.num_key_value_heads",
        "model.rms_norm_eps",
        "model.rope_theta",
        "model.initializer_range",
        "parallel.tp",
        "parallel.pp",
        "parallel.vpp",
        "parallel.bucket_mb",
        "data.seq_length",
        "data.prefetch",
        "train.steps",
        "train.global_batch_size",
        "train.micro_batch_size",
        "train.log_interval",
        "train.eval_samples",
        "run.timeout_s",
    ],
)
def test_what_must_be_positive(key: str) -> None:
    for value in (0, -1):
        (problem,) = problems_of(f"{key}={value}")
        assert problem.startswith(f"{key}: must be greater than 0, not {value}")


@pytest.mark.parametrize(
    "key",
    [
        "train.seed",
        "train.eval_interval",
        "checkpoint.save_interval",
        "checkpoint.keep_last",
        "checkpoint.snapshot_interval",
        "optim.warmup_steps",
        "optim.clip_grad_norm",
        "run.sample_tokens",
    ],
)
def test_what_must_not_be_negative(key: str) -> None:
    (problem,) = problems_of(f"{key}=-1")
    assert problem.startswith(f"{key}: must be 0 or more, not -1")
    load_config([f"{key}=0"])


@pytest.mark.parametrize(
    ("settings", "world_size", "problem"),
    [
        (
            "data.end_of_text=</s>",
            None,
            "data.end_of_text: has no effect without data.tokenizer",
        ),
        (
            "checkpoint.keep_every=100",
            None,
            "checkpoint.keep_every: has no effect while checkpoint.keep_last=0 keeps all",
        ),
        (
            "checkpoint.snapshot_interval=1 model.linear=dense",
            None,
            "checkpoint.snapshot_interval: holds ternary codes",
        ),
        (
            "model.hidden_size=258",
            None,
            "model.hidden_size: 258 is not a multiple of model.num_attention_heads=4",
        ),
        ("model.hidden_size=24", None, "model.hidden_size: the head size 24/4 = 6 must be a mult"),
        (
            "model.num_key_value_heads=3",
            None,
            "model.num_key_value_heads: 3 does not divide model.num_attention_heads=4; "
            "use one of 1, 2, 4",
        ),
        (
            "model.intermediate_size=131076",
            None,
            "model: a ternary layer's input may be at most 131072 wide to be exact, not 131076",
        ),
        (
            "parallel.tp=3",
            None,
            "parallel.tp: 3 does not divide model.num_attention_heads=4; use one of 1, 2, 4",
        ),
        (
            "model.intermediate_size=12",
            None,
            "model.intermediate_size: must be at least 4 · model.num_attention_heads = 16, not 12",
        ),
        (
            "model.vocab_size=15",
            None,
            "model.vocab_size: must be at least 4 · model.num_attention_heads = 16, not 15",
        ),
        (
            "parallel.sequence_parallel=true",
            None,
            "parallel.sequence_parallel: has no effect at parallel.tp=1; set it to false",
        ),
        (
            "parallel.sequence_parallel=true parallel.tp=4 train.micro_batch_size=2 "
            "data.seq_length=7",
            None,
            "parallel.sequence_parallel: parallel.tp=4 does not divide the 14 tokens",
        ),
        (
            "parallel.pp=5",
            None,
            "parallel.pp: 5 stages (parallel.pp · parallel.vpp) for model.num_hidden_layers=4; "
            "use at most 4",
        ),
        (
            "parallel.pp=3 parallel.vpp=2 parallel.schedule=zb-v",
            None,
            "parallel.pp: 6 stages (parallel.pp · parallel.vpp) for model.num_hidden_layers=4; "
            "use at most 4",
        ),
        (
            "parallel.schedule=1f1b1",
            None,
            "parallel.schedule: unknown schedule '1f1b1' (did you mean '1f1b'?); "
            "a function of your own is named like my_file.py:my_schedule",
        ),
        (
            "parallel.schedule=zbv",
            None,
            "parallel.schedule: unknown schedule 'zbv' (did you mean 'zb-v'?)",
        ),
        (
            "parallel.schedule=interleave parallel.vpp=2",
            None,
            "parallel.schedule: unknown schedule 'interleave' (did you mean 'interleaved'?)",
        ),
        (
            "parallel.schedule=best",
            None,
            "parallel.schedule: unknown schedule 'best' (known: gpipe, 1f1b, interleaved, zb-h1, "
            "zb-v, v-half, v-min); a function of your own is named like my_file.py:my_schedule",
        ),
        (
            "parallel.schedule=interleaved parallel.vpp=1",
            None,
            "parallel.vpp: interleaved needs 2 or more stages on each rank, not 1; or use 1f1b",
        ),
        *(
            (
                f"parallel.schedule={name} parallel.vpp={vpp}",
                None,
                f"parallel.vpp: must be {right} for parallel.schedule={name}, not {vpp}",
            )
            for name, right in SCHEDULE_CHUNKS.items()
            for vpp in (1, 2, 3)
            if vpp != right and name != "interleaved"
        ),
        (
            "parallel.layers_per_stage=[2,2]",
            None,
            "parallel.layers_per_stage: has 2 entries, must have one for each of the 1 stages "
            "(parallel.pp · parallel.vpp)",
        ),
        (
            "parallel.pp=2 parallel.vpp=2 parallel.schedule=zb-v parallel.layers_per_stage=[2,2]",
            None,
            "parallel.layers_per_stage: has 2 entries, must have one for each of the 4 stages "
            "(parallel.pp · parallel.vpp)",
        ),
        (
            "parallel.vpp=2 parallel.schedule=my_file.py:my_schedule parallel.layers_per_stage=[4]",
            None,
            "parallel.layers_per_stage: has 1 entries, must have one for each of the 2 stages",
        ),
        (
            "parallel.pp=2 parallel.layers_per_stage=[2,2] parallel.balance=measured",
            None,
            "parallel.balance: has no effect where parallel.layers_per_stage is set",
        ),
        (
            "parallel.pp=2 parallel.layers_per_stage=[5,-1]",
            None,
            "parallel.layers_per_stage: [5, -1] has a negative entry",
        ),
        (
            "parallel.pp=2 parallel.layers_per_stage=[1,2]",
            None,
            "parallel.layers_per_stage: [1, 2] adds up to 3 layers, must be "
            "model.num_hidden_layers=4",
        ),
        (
            "parallel.tp=2 parallel.pp=2",
            6,
            "world size: 6 ranks do not fit parallel.tp=2 × parallel.pp=2; start a multiple of 4",
        ),
        (
            "parallel.tp=2 train.micro_batch_size=8",
            6,
            "train.global_batch_size: 16 is not a multiple of dp=3 × train.micro_batch_size=8 = 24",
        ),
        (
            "train.global_batch_size=18",
            None,
            "train.global_batch_size: 18 is not a multiple of train.micro_batch_size=4",
        ),
        (
            "data.held_out_fraction=0",
            None,
            "data.held_out_fraction: must lie between 0 and 1, not 0.0",
        ),
        (
            "data.held_out_fraction=1",
            None,
            "data.held_out_fraction: must lie between 0 and 1, not 1.0",
        ),
        (
            "precision.ternary_backward=bfloat16 model.linear=dense",
            None,
            "precision.ternary_backward: has no effect with model.linear=dense; use 'compute'",
        ),
        (
            "precision.ternary_backward=bfloat16 precision.compute=float64",
            None,
            "precision.ternary_backward: bfloat16 is a saving only where precision.compute=float32",
        ),
        (
            "precision.ternary_backward=int8 model.linear=dense",
            None,
            "precision.ternary_backward: has no effect with model.linear=dense; use 'compute'",
        ),
        (
            "precision.ternary_backward=int8 precision.compute=float64",
            None,
            "precision.ternary_backward: int8 rounds, precision.compute=float64 is for checks",
        ),
        (
            "precision.ternary_backward=int8 train.micro_batch_size=8 data.seq_length=16385",
            None,
            "precision.ternary_backward: int8 adds at most 131072 tokens exactly, not 131080 "
            "(train.micro_batch_size · data.seq_length)",
        ),
        (
            "precision.gradients=bfloat16 precision.compute=float64",
            None,
            "precision.gradients: bfloat16 rounds, precision.compute=float64 is for checks",
        ),
        (
            "parallel.row_reduce=exact16 model.linear=dense",
            None,
            "parallel.row_reduce: has no effect with model.linear=dense; use int32",
        ),
        (
            "train.hidden_dropout=1",
            None,
            "train.hidden_dropout: must be at least 0 and below 1, not 1.0",
        ),
        (
            "train.hidden_dropout=-0.1",
            None,
            "train.hidden_dropout: must be at least 0 and below 1, not -0.1",
        ),
        (
            "train.recompute_layers=[0]",
            None,
            "train.recompute_layers: has no effect with train.recompute=none",
        ),
        (
            "train.recompute=full train.recompute_layers=[0,4,-1]",
            None,
            "train.recompute_layers: [4, -1] are not among the layers 0 to 3",
        ),
        ("optim.zero_stage=3", None, "optim.zero_stage: must be 0, 1 or 2, not 3"),
        ("optim.zero_stage=-1", None, "optim.zero_stage: must be 0, 1 or 2, not -1"),
        (
            "parallel.exact=full model.linear=dense",
            None,
            "parallel.exact: full is for ternary models; model.linear=dense adds floats over TP",
        ),
        (
            "parallel.exact=full optim.zero_stage=2",
            None,
            "optim.zero_stage: 2 adds the gradients of ranks in each microbatch, which "
            "parallel.exact=full cannot; use 0 or 1",
        ),
        (
            "parallel.exact=full run.device=cuda",
            None,
            "run.device: parallel.exact=full holds on the CPU only; use cpu",
        ),
        (
            "parallel.exact=full precision.gradients=bfloat16",
            None,
            "precision.gradients: parallel.exact=full needs float32",
        ),
        (
            "parallel.exact=full model.hidden_size=96 model.num_attention_heads=12 parallel.tp=6",
            None,
            "parallel.tp: parallel.exact=full adds in 4 blocks for model.num_attention_heads=12; "
            "use one of 1, 2, 4",
        ),
        (
            "parallel.exact=full train.micro_batch_size=2 data.seq_length=7",
            None,
            "train.micro_batch_size: parallel.exact=full cuts a microbatch into 4 blocks, which do "
            "not divide its 14 tokens",
        ),
        (
            "parallel.exact=full parallel.tp=2 train.global_batch_size=24",
            6,
            "world size: parallel.exact=full adds the 6 microbatches of a step in 2 blocks, which "
            "dp=3 does not divide; use one of 1, 2",
        ),
        (
            "optim.lr=[1e-3]",
            None,
            "optim.lr: must be a list of two numbers with optim.schedule=two_stage_linear, not",
        ),
        ("optim.weight_decay=[0,-1]", None, "optim.weight_decay: must not be negative, not [0.0,"),
        ("optim.betas=[0.9,1]", None, "optim.betas: must be below 1, not [0.9, 1.0]"),
        ("optim.switch=1.5", None, "optim.switch: must lie between 0 and 1, not 1.5"),
        ("optim.eps=0", None, "optim.eps: must be greater than 0, not 0.0"),
        (
            "optim.min_lr=0.002",
            None,
            "optim.min_lr: must lie between 0 and the smallest of optim.lr=[0.002, 0.0013]",
        ),
    ],
)
def test_what_does_not_go_together(settings: str, world_size: int | None, problem: str) -> None:
    (found,) = problems_of(*settings.split(), world_size=world_size)
    assert found.startswith(problem)


SINGLE_NUMBERS = ["optim.eps", "train.hidden_dropout"]


@pytest.mark.parametrize("key", ["optim.lr", "optim.weight_decay", "optim.betas", *SINGLE_NUMBERS])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(key: str, value: str) -> None:
    setting = value if key in SINGLE_NUMBERS else f"[1e-3,{value}]"
    assert any(problem.startswith(f"{key}: ") for problem in problems_of(f"{key}={setting}"))


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ("model.intermediate_size=131076 model.linear=dense", None),
        ("model.intermediate_size=16 model.vocab_size=16 parallel.tp=4", 4),
        ("model.num_key_value_heads=1 parallel.tp=4", 4),
        ("model.hidden_size=80 model.num_attention_heads=20 model.num_key_value_heads=5 "
         "parallel.tp=10", 10),
        ("parallel.sequence_parallel=true parallel.tp=2", 2),
        ("parallel.pp=2 parallel.layers_per_stage=[0,4]", 2),
        ("parallel.pp=4", 16),
        ("parallel.pp=2 parallel.balance=measured", 2),
        ("parallel.pp=2 parallel.vpp=2 parallel.schedule=interleaved", 2),
        ("parallel.vpp=4 parallel.schedule=interleaved", 1),
        ("parallel.pp=2 parallel.vpp=2 parallel.schedule=zb-v "
         "parallel.layers_per_stage=[4,0,0,0]", 2),
        ("parallel.pp=2 parallel.vpp=2 parallel.schedule=my_file.py:my_schedule", 2),
        ("run.timeout_s=0.5", None),
        ("optim.switch=0 optim.min_lr=0 optim.betas=[0,0]", None),
        ("precision.ternary_backward=bfloat16", None),
        ("precision.ternary_backward=int8 train.micro_batch_size=8 data.seq_length=16384", None),
        ("precision.ternary_backward=int8 precision.compute=bfloat16", None),
        ("parallel.row_reduce=exact16 parallel.tp=2 parallel.sequence_parallel=true", 2),
        ("precision.gradients=bfloat16 optim.zero_stage=2", 2),
        ("train.hidden_dropout=0.999 train.recompute=selective train.recompute_layers=[0,3]", None),
        ("parallel.exact=full precision.ternary_backward=int8 parallel.row_reduce=exact16 "
         "parallel.tp=4 train.hidden_dropout=0.1 optim.zero_stage=0", 16),
        # 6 heads and 6 microbatches: trees of 2 blocks.
        ("parallel.exact=full model.hidden_size=96 model.num_attention_heads=6 "
         "model.num_key_value_heads=3 parallel.tp=2 train.global_batch_size=24", 4),
    ],
)  # fmt: skip
def test_what_goes_together(settings: str, world_size: int | None) -> None:
    load_config(settings.split(), world_size)


def test_all_conflicts_are_listed() -> None:
    problems = problems_of(
        "parallel.tp=3", "parallel.pp=9", "optim.eps=0", "model.hidden_size=25", world_size=1
    )
    assert [problem.split(":")[0] for problem in problems] == [
        "model.hidden_size",
        "parallel.tp",
        "parallel.pp",
        "optim.eps",
    ]


def test_a_wrong_schedule_leaves_the_number_of_stages_open() -> None:
    """So nothing is said of a layout that may fit the right one."""
    layout = ("parallel.pp=2", "parallel.layers_per_stage=[1,1,1,1]")
    for chosen in (
        ("parallel.schedule=zb-w", "parallel.vpp=2"),
        ("parallel.schedule=zb-v", "parallel.vpp=1"),
    ):
        (problem,) = problems_of(*layout, *chosen)
        assert problem.startswith(("parallel.schedule: ", "parallel.vpp: "))


def test_all_conflicts_with_layout_exact_training_are_listed() -> None:
    problems = problems_of(
        *("parallel.exact=full", "model.linear=dense", "optim.zero_stage=2", "parallel.tp=2"),
        *("precision.gradients=bfloat16", "model.num_attention_heads=1"),
        *("model.num_key_value_heads=1", "train.global_batch_size=24"),
        world_size=6,
    )
    assert [problem.split(":")[0] for problem in problems] == [
        "parallel.tp",
        "parallel.exact",
        "optim.zero_stage",
        "precision.gradients",
        "parallel.tp",
        "world size",
    ]
