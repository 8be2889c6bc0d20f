"""All checks that span settings, as one list of problems, before any process group exists."""

import dataclasses
import difflib
import math
import os.path
from collections.abc import Iterator

from megabit.config.schema import SCHEDULE_CHUNKS, Config, DataConfig, ParallelConfig
from megabit.config.validate_cluster import cluster_problems, islands_in_world
from megabit.config.validate_recipe import recipe_problems


def find_problems(config: Config, world_size: int | None = None) -> list[str]:
    """What is wrong with ``config``, one line each; empty if nothing is.

    ``world_size`` is the number of ranks, where it is known; the data-parallel degree is
    ``world_size / (islands · tp · pp)``.
    """
    problems = [*_not_finite(config), *_not_positive(config)]
    if problems:  # the checks below divide by these
        return problems
    return [
        *_model(config),
        *_parallel(config, world_size),
        *_train(config),
        *recipe_problems(config),
        *_data(config),
        *_checkpoint(config),
        *cluster_problems(config, world_size),
        *_exact(config, world_size),
    ]


def tree_blocks(count: int) -> int:
    """Blocks that layout-exact training cuts ``count`` heads or microbatches into: the largest
    power of two up to 8 that divides it."""
    return next(blocks for blocks in (8, 4, 2, 1) if count % blocks == 0)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _not_finite(config: Config) -> Iterator[str]:
    for section in dataclasses.fields(config):
        keys = getattr(config, section.name)
        for key in dataclasses.fields(keys):
            value = getattr(keys, key.name)
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, float) and not math.isfinite(number):
                    yield f"{section.name}.{key.name}: must be a finite number, not {number}"


def _not_positive(config: Config) -> Iterator[str]:
    model, parallel, data, train = config.model, config.parallel, config.data, config.train
    counts = {
        "model.vocab_size": model.vocab_size,
        "model.hidden_size": model.hidden_size,
        "model.intermediate_size": model.intermediate_size,
        "model.num_hidden_layers": model.num_hidden_layers,
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_key_value_heads": model.num_key_value_heads,
        "model.rms_norm_eps": model.rms_norm_eps,
        "model.rope_theta": model.rope_theta,
        "model.initializer_range": model.initializer_range,
        "model.scale_mult": model.scale_mult,
        "parallel.tp": parallel.tp,
        "parallel.pp": parallel.pp,
        "parallel.vpp": parallel.chunks,
        "parallel.bucket_mb": parallel.bucket_mb,
        "data.seq_length": data.seq_length,
        "data.prefetch": data.prefetch,
        "train.steps": train.steps,
        "train.global_batch_size": train.global_batch_size,
        "train.micro_batch_size": train.micro_batch_size,
        "train.log_interval": train.log_interval,
        "train.eval_samples": train.eval_samples,
        "precision.loss_scale": config.precision.loss_scale,
        "precision.loss_scale_interval": config.precision.loss_scale_interval,
        "loss.distill_temperature": config.loss.distill_temperature,
        "loss.select_ratio": config.loss.select_ratio,
        "loss.mining_ratio": config.loss.mining_ratio,
        "optim.muon_iterations": config.optim.muon_iterations,
        "run.timeout_s": config.run.timeout_s,
    }
    for key, value in counts.items():
        if not value > 0:
            yield f"{key}: must be greater than 0, not {value}"
    non_negative = {
        "train.seed": train.seed,
        "train.eval_interval": train.eval_interval,
        "checkpoint.save_interval": config.checkpoint.save_interval,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "checkpoint.snapshot_interval": config.checkpoint.snapshot_interval,
        "optim.warmup_steps": config.optim.warmup_steps,
        "optim.clip_grad_norm": config.optim.clip_grad_norm,
        "optim.clip_grad_value": config.optim.clip_grad_value,
        "train.batch_ramp_increment": train.batch_ramp_increment,
        "train.batch_ramp_tokens": train.batch_ramp_tokens,
        "loss.z_loss": config.loss.z_loss,
        "loss.distill_weight": config.loss.distill_weight,
        "loss.triplet_margin": config.loss.triplet_margin,
        "run.sample_tokens": config.run.sample_tokens,
    }
    for key, value in non_negative.items():
        if not value >= 0:
            yield f"{key}: must be 0 or more, not {value}"


def _model(config: Config) -> Iterator[str]:
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if model.hidden_size % heads:
        yield (
            f"model.hidden_size: {model.hidden_size} is not a multiple of "
            f"model.num_attention_heads={heads}"
        )
    elif model.head_dim % 4:
        yield (
            f"model.hidden_size: the head size {model.hidden_size}/{heads} = {model.head_dim} "
            "must be a multiple of 4 (packed ternary codes are cut at multiples of 4)"
        )
    if heads % kv_heads:
        yield (
            f"model.num_key_value_heads: {kv_heads} does not divide "
            f"model.num_attention_heads={heads}; use one of {_listed(divisors(heads))}"
        )
    # int32 sums of 128 · K and, where a product runs in fp32, exact integers below 2^24.
    widest = max(model.hidden_size, model.intermediate_size)
    if model.linear == "ternary" and widest > 131_072:
        yield f"model: a ternary layer's input may be at most 131072 wide to be exact, not {widest}"


def _parallel(config: Config, world_size: int | None) -> Iterator[str]:
    model, parallel, train = config.model, config.parallel, config.train
    heads = model.num_attention_heads
    if heads % parallel.tp:
        yield (
            f"parallel.tp: {parallel.tp} does not divide model.num_attention_heads={heads}; "
            f"use one of {_listed(divisors(heads))}"
        )
    for key, size in (
        ("model.intermediate_size", model.intermediate_size),
        ("model.vocab_size", model.vocab_size),
    ):
        if size < 4 * heads:
            yield f"{key}: must be at least 4 · model.num_attention_heads = {4 * heads}, not {size}"
    if parallel.sequence_parallel:
        tokens = train.micro_batch_size * config.data.seq_length
        if parallel.tp == 1:
            yield "parallel.sequence_parallel: has no effect at parallel.tp=1; set it to false"
        elif tokens % parallel.tp:
            yield (
                f"parallel.sequence_parallel: parallel.tp={parallel.tp} does not divide the "
                f"{tokens} tokens of a microbatch (train.micro_batch_size · data.seq_length)"
            )
    yield from _stages(config)
    if world_size is not None:
        yield from _world(config, world_size)


def _stages(config: Config) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.num_hidden_layers
    problems = [*_schedule(parallel)]
    yield from problems
    if problems:
        return  # it is not known how many stages there should be
    num_stages, counts = parallel.pp * parallel.chunks, parallel.layers_per_stage
    stages = f"{num_stages} stages (parallel.pp · parallel.vpp)"
    if counts is None:
        if num_stages > layers:
            yield (
                f"parallel.pp: {stages} for model.num_hidden_layers={layers}; use at most {layers}"
            )
        return
    if len(counts) != num_stages:
        yield (
            f"parallel.layers_per_stage: has {len(counts)} entries, must have one for each of the "
            f"{stages}"
        )
    if any(count < 0 for count in counts):
        yield f"parallel.layers_per_stage: {counts} has a negative entry"
    if sum(counts) != layers:
        yield (
            f"parallel.layers_per_stage: {counts} adds up to {sum(counts)} layers, "
            f"must be model.num_hidden_layers={layers}"
        )
    if parallel.balance == "measured":
        yield "parallel.balance: has no effect where parallel.layers_per_stage is set"


def _schedule(parallel: ParallelConfig) -> Iterator[str]:
    name = parallel.schedule
    if ":" in name:  # a function of the user's, which is tried when it is loaded
        return
    if name not in SCHEDULE_CHUNKS:
        near = difflib.get_close_matches(name, SCHEDULE_CHUNKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(SCHEDULE_CHUNKS)
        yield (
            f"parallel.schedule: unknown schedule {name!r} ({hint}); "
            "a function of your own is named like my_file.py:my_schedule"
        )
        return
    if name == "interleaved":
        if parallel.chunks < 2:
            yield (
                f"parallel.vpp: {name} needs 2 or more stages on each rank, not {parallel.chunks}; "
                "or use 1f1b"
            )
    elif parallel.chunks != SCHEDULE_CHUNKS[name]:
        yield (
            f"parallel.vpp: must be {SCHEDULE_CHUNKS[name]} for parallel.schedule={name}, not "
            f"{parallel.chunks}; leave it out"
        )


def _world(config: Config, world_size: int) -> Iterator[str]:
    parallel, train = config.parallel, config.train
    if config.model.num_attention_heads % parallel.tp:
        return  # reported; no number of ranks would do
    islands = islands_in_world(config.outer)
    model_ranks = parallel.tp * parallel.pp * islands
    if world_size % model_ranks:
        of_islands = f" × outer.islands={islands}" if islands > 1 else ""
        yield (
            f"world size: {world_size} ranks do not fit parallel.tp={parallel.tp} × "
            f"parallel.pp={parallel.pp}{of_islands}; start a multiple of {model_ranks} "
            f"(--nproc-per-node {model_ranks}, or torchrun)"
        )
        return
    # Of all islands: they share out a step's samples like DP ranks.
    dp = world_size // (parallel.tp * parallel.pp)
    if config.outer.method == "stale":
        dp *= config.outer.islands
    per_step = dp * train.micro_batch_size
    for key, size in (
        ("train.global_batch_size", train.global_batch_size),
        ("train.batch_ramp_start", train.batch_ramp_start or 0),
        ("train.batch_ramp_increment", train.batch_ramp_increment),
    ):
        if size % per_step:
            yield (
                f"{key}: {size} is not a multiple of "
                f"dp={dp} × train.micro_batch_size={train.micro_batch_size} = {per_step}"
                + _fitting_dp(size, train.micro_batch_size)
            )


def _fitting_dp(size: int, micro_batch_size: int) -> str:
    if size % micro_batch_size:
        return ""
    return f"; dp may be one of {_listed(divisors(size // micro_batch_size))}"


def _train(config: Config) -> Iterator[str]:
    train, data = config.train, config.data
    if train.global_batch_size % train.micro_batch_size:
        yield (
            f"train.global_batch_size: {train.global_batch_size} is not a multiple of "
            f"train.micro_batch_size={train.micro_batch_size}"
        )
    if not 0 <= train.hidden_dropout < 1:
        yield f"train.hidden_dropout: must be at least 0 and below 1, not {train.hidden_dropout}"
    layers = config.model.num_hidden_layers
    if train.recompute_layers is not None:
        if train.recompute == "none":
            yield "train.recompute_layers: has no effect with train.recompute=none"
        wrong = [layer for layer in train.recompute_layers if not 0 <= layer < layers]
        if wrong:
            yield f"train.recompute_layers: {wrong} are not among the layers 0 to {layers - 1}"
    if not 0 < data.held_out_fraction < 1:
        yield f"data.held_out_fraction: must lie between 0 and 1, not {data.held_out_fraction}"
    if os.path.normpath(data.dir) == os.path.normpath(config.run.dir):
        yield f"run.dir: {config.run.dir} is data.dir as well; give the run a folder of its own"
    precision = config.precision
    # Without integers, a product and its backward pass are those of a dense layer.
    for key in ("linear=dense", "activations=full"):
        if key not in (f"linear={config.model.linear}", f"activations={config.model.activations}"):
            continue
        if precision.ternary_backward != "compute":
            yield f"precision.ternary_backward: has no effect with model.{key}; use 'compute'"
        if config.parallel.row_reduce != "int32":
            yield f"parallel.row_reduce: has no effect with model.{key}; use int32"
    if precision.compute == "float64":
        if precision.ternary_backward == "int8":
            yield "precision.ternary_backward: int8 rounds, precision.compute=float64 is for checks"
        if precision.gradients == "bfloat16":
            yield "precision.gradients: bfloat16 rounds, precision.compute=float64 is for checks"
    tokens = train.micro_batch_size * data.seq_length
    if precision.ternary_backward == "int8" and tokens > 131_072:
        yield (
            f"precision.ternary_backward: int8 adds at most 131072 tokens exactly, not {tokens} "
            "(train.micro_batch_size · data.seq_length)"
        )
    if precision.ternary_backward == "bfloat16" and precision.compute != "float32":
        yield (
            "precision.ternary_backward: bfloat16 is a saving only where "
            f"precision.compute=float32, not {precision.compute}; use 'compute'"
        )


def _data(config: Config) -> Iterator[str]:
    if config.data.tokenizer is None and config.data.end_of_text != DataConfig.end_of_text:
        yield "data.end_of_text: has no effect without data.tokenizer, whose token it names"


def _checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.keep_every and not checkpoint.keep_last:
        yield "checkpoint.keep_every: has no effect while checkpoint.keep_last=0 keeps all"
    if checkpoint.snapshot_interval and config.model.linear != "ternary":
        yield "checkpoint.snapshot_interval: holds ternary codes, which model.linear=dense has not"


def _exact(config: Config, world_size: int | None) -> Iterator[str]:
    """What layout-exact training asks for."""
    model, parallel, train = config.model, config.parallel, config.train
    if parallel.exact != "full":
        return
    if model.linear == "dense":
        yield "parallel.exact: full is for ternary models; model.linear=dense adds floats over TP"
    if model.activations == "full":
        yield "parallel.exact: full is for integers; model.activations=full adds floats over TP"
    if train.quantization_ramp:
        yield "parallel.exact: full is for integers; train.quantization_ramp adds floats over TP"
    if any(rule.action == "a16" for rule in config.guard.rules):
        yield "guard.rules: a16 adds floats over TP, which parallel.exact=full cannot"
    if config.precision.compute == "float16":
        yield "precision.compute: parallel.exact=full is for float32 and bfloat16"
    if config.optim.zero_stage == 2:
        yield (
            "optim.zero_stage: 2 adds the gradients of ranks in each microbatch, which "
            "parallel.exact=full cannot; use 0 or 1"
        )
    if config.run.device == "cuda":
        yield "run.device: parallel.exact=full holds on the CPU only; use cpu"
    if config.precision.gradients != "float32":
        yield "precision.gradients: parallel.exact=full needs float32: one process rounds nothing"
    if config.outer.method != "none":
        yield "outer.method: parallel.exact=full is for a world that trains together; use none"
    blocks = tree_blocks(model.num_attention_heads)
    if blocks % parallel.tp:
        yield (
            f"parallel.tp: parallel.exact=full adds in {blocks} blocks for "
            f"model.num_attention_heads={model.num_attention_heads}; "
            f"use one of {_listed(divisors(blocks))}"
        )
    tokens = train.micro_batch_size * config.data.seq_length
    if tokens % blocks:
        yield (
            f"train.micro_batch_size: parallel.exact=full cuts a microbatch into {blocks} blocks, "
            f"which do not divide its {tokens} tokens"
        )
    microbatches = train.global_batch_size // train.micro_batch_size
    blocks = tree_blocks(microbatches)
    if world_size is not None and world_size % (parallel.tp * parallel.pp) == 0:
        dp = world_size // (parallel.tp * parallel.pp)
        if blocks % dp:
            yield (
                f"world size: parallel.exact=full adds the {microbatches} microbatches of a step "
                f"in {blocks} blocks, which dp={dp} does not divide; use one of "
                f"{_listed(divisors(blocks))}"
            )


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
