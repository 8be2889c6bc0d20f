"""Checks of how a model is trained: quantization, loss, optimizer, schedules, guard."""

import math
from collections.abc import Iterator

from megabit.config.schema import (
    Config,
    GuardRule,
    LossConfig,
    ModelConfig,
    OptimConfig,
    TelemetryConfig,
    TrainConfig,
)

TERNARY_ONLY = ("weight_scale", "scale_mult", "activations", "hadamard")
TWO_STAGES = ("two_stage_linear", "two_stage_cosine")
LANGUAGE_MODEL_ONLY = ("z_loss", "label_smoothing", "select", "teacher", "distill_weight")
EMBEDDING_ONLY = ("triplet_margin", "mining_ratio")


def recipe_problems(config: Config) -> Iterator[str]:
    """What is wrong with ``config``'s recipe, one line each. Signs have been checked before."""
    yield from _quantization(config)
    yield from _batch_ramp(config.train)
    yield from _loss(config)
    yield from _optim(config.optim)
    yield from _precision(config)
    for number, rule in enumerate(config.guard.rules):
        yield from (f"guard.rules[{number}].{line}" for line in _rule(rule, config))
    yield from _data_and_telemetry(config)
    yield from _without_effect(config)


def _without_effect(config: Config) -> Iterator[str]:
    """Settings that are not the default and that nothing reads."""
    optim, loss, two_stages = config.optim, config.loss, config.optim.schedule in TWO_STAGES
    for section, keys, is_used, why in (
        ("train", ("steps",), config.train.tokens is None, "train.tokens is set; set that to null"),
        ("optim", ("warmup_steps",), optim.warmup_fraction is None, "warmup_fraction is set"),
        ("optim", ("decay_fraction", "decay_shape"), optim.schedule == "wsd", "it is for wsd"),
        ("optim", ("switch",), two_stages, f"optim.schedule={optim.schedule} has one stage"),
        ("optim", ("min_lr",), optim.schedule != "constant", "optim.schedule is constant"),
        (
            "optim",
            ("muon_momentum", "muon_iterations"),
            optim.name == "muon",
            f"optim.name is {optim.name}",
        ),
        (
            "precision",
            ("loss_scale", "loss_scale_interval"),
            config.precision.compute == "float16",
            "it is for precision.compute=float16",
        ),
        ("loss", ("distill_temperature",), loss.distill_weight > 0, "distill_weight is 0"),
    ):
        own = getattr(config, section)
        for key in keys if not is_used else ():
            if getattr(own, key) != getattr(type(own), key):
                yield f"{section}.{key}: has no effect: {why}"


def _quantization(config: Config) -> Iterator[str]:
    model, ramp = config.model, config.train.quantization_ramp
    if model.linear == "dense":
        for key in TERNARY_ONLY:
            if getattr(model, key) != getattr(ModelConfig, key):
                yield f"model.{key}: has no effect with model.linear=dense; leave it out"
        if ramp:
            yield "train.quantization_ramp: has no effect with model.linear=dense; leave it out"
    elif model.hadamard and model.activations == "full":
        yield "model.hadamard: has no effect with model.activations=full; leave it out"
    if model.hadamard and model.intermediate_size % 4:
        yield (
            f"model.hadamard: model.intermediate_size={model.intermediate_size} must be a multiple "
            "of 4: blocks of fewer columns are not worth a rotation"
        )
    if not 0 <= ramp <= 0.5:
        yield (
            f"train.quantization_ramp: must lie between 0 and 0.5, not {ramp}: at least the second "
            "half of a run trains the ternary model"
        )


def _batch_ramp(train: TrainConfig) -> Iterator[str]:
    start, increment, size = (
        train.batch_ramp_start,
        train.batch_ramp_increment,
        train.global_batch_size,
    )
    if train.tokens is not None and train.tokens <= 0:
        yield f"train.tokens: must be greater than 0, not {train.tokens}"
    if start is None:
        for key in ("batch_ramp_increment", "batch_ramp_tokens"):
            if getattr(train, key):
                yield f"train.{key}: has no effect without train.batch_ramp_start"
        return
    if not 0 < start < size:
        yield (
            f"train.batch_ramp_start: must lie between 1 and "
            f"train.global_batch_size={size}, not {start}"
        )
        return
    if not increment or (size - start) % increment:
        yield (
            f"train.batch_ramp_increment: {increment} must divide train.global_batch_size - "
            f"train.batch_ramp_start = {size - start}"
        )
    if not train.batch_ramp_tokens:
        yield "train.batch_ramp_tokens: must be greater than 0 with train.batch_ramp_start"
    for key, count in (("batch_ramp_start", start), ("batch_ramp_increment", increment)):
        if count % train.micro_batch_size:
            yield (
                f"train.{key}: {count} is not a multiple of "
                f"train.micro_batch_size={train.micro_batch_size}"
            )


def _loss(config: Config) -> Iterator[str]:
    loss = config.loss
    other = LANGUAGE_MODEL_ONLY if loss.objective == "embedding" else EMBEDDING_ONLY
    for key in other:
        if getattr(loss, key) != getattr(LossConfig, key):
            yield f"loss.{key}: has no effect with loss.objective={loss.objective}; leave it out"
    if not 0 <= loss.label_smoothing < 1:
        yield f"loss.label_smoothing: must be at least 0 and below 1, not {loss.label_smoothing}"
    for key in ("select_ratio", "mining_ratio"):
        if getattr(loss, key) > 1:
            yield f"loss.{key}: must be 1 at most, not {getattr(loss, key)}"
    if loss.select == "all" and loss.select_ratio != LossConfig.select_ratio:
        yield "loss.select_ratio: has no effect with loss.select=all; leave it out"
    needs = [
        f"loss.{key}"
        for key, is_used in (
            ("select=excess", loss.select == "excess"),
            ("distill_weight", loss.distill_weight > 0),
        )
        if is_used
    ]
    if needs and loss.teacher is None:
        yield f"loss.teacher: {' and '.join(needs)} needs one: a checkpoint or a model folder"
    if loss.teacher is not None and not needs:
        yield "loss.teacher: has no effect without loss.distill_weight or loss.select=excess"
    if loss.objective == "embedding":
        if config.train.micro_batch_size < 2:
            yield "train.micro_batch_size: loss.objective=embedding needs 2 or more: negatives"
        if config.data.seq_length % 2:
            yield (
                f"data.seq_length: {config.data.seq_length} must be even with "
                "loss.objective=embedding: its halves are a pair"
            )
        if not config.model.tie_word_embeddings:
            yield (
                "model.tie_word_embeddings: must be true with loss.objective=embedding, which "
                "trains no head"
            )
        if config.parallel.exact == "full":
            yield "parallel.exact: full is for loss.objective=language_model"


def _optim(optim: OptimConfig) -> Iterator[str]:
    stages = 2 if optim.schedule in TWO_STAGES else 1
    count = "two numbers" if stages == 2 else "one number"
    for key, values in (("optim.lr", optim.lr), ("optim.weight_decay", optim.weight_decay)):
        if len(values) != stages:
            yield (
                f"{key}: must be a list of {count} with optim.schedule={optim.schedule}, "
                f"not {values}"
            )
        elif min(values) < 0:
            yield f"{key}: must not be negative, not {values}"
    if len(optim.betas) != 2:
        yield f"optim.betas: must be a list of two numbers, not {optim.betas}"
    elif min(optim.betas) < 0:
        yield f"optim.betas: must not be negative, not {optim.betas}"
    elif max(optim.betas) >= 1:
        yield f"optim.betas: must be below 1, not {optim.betas}"
    if optim.zero_stage not in (0, 1, 2):
        yield f"optim.zero_stage: must be 0, 1 or 2, not {optim.zero_stage}"
    if not 0 <= optim.switch <= 1:
        yield f"optim.switch: must lie between 0 and 1, not {optim.switch}"
    for key in ("warmup_fraction", "decay_fraction"):
        share = getattr(optim, key)
        if share is not None and not 0 <= share <= 1:
            yield f"optim.{key}: must lie between 0 and 1, not {share}"
    if optim.eps <= 0:
        yield f"optim.eps: must be greater than 0, not {optim.eps}"
    is_falling = optim.schedule != "constant"
    if optim.lr and is_falling and not 0 <= optim.min_lr <= min(optim.lr):
        yield f"optim.min_lr: must lie between 0 and the smallest of optim.lr={optim.lr}"
    if not 0 <= optim.muon_momentum < 1:
        yield f"optim.muon_momentum: must be at least 0 and below 1, not {optim.muon_momentum}"
    if optim.clip_grad_value and optim.clip_grad_norm:
        yield (
            "optim.clip_grad_value: stands instead of optim.clip_grad_norm="
            f"{optim.clip_grad_norm}; set that to 0"
        )
    if optim.clip_boost < 1:
        yield f"optim.clip_boost: must be 1 or more, not {optim.clip_boost}"
    elif optim.clip_boost > 1 and not optim.clip_grad_norm:
        yield "optim.clip_boost: has no effect without optim.clip_grad_norm"


def _precision(config: Config) -> Iterator[str]:
    precision = config.precision
    if math.frexp(precision.loss_scale)[0] != 0.5:
        yield (
            f"precision.loss_scale: must be a power of two, not {precision.loss_scale}: it may "
            "round nothing"
        )


def _rule(rule: GuardRule, config: Config) -> Iterator[str]:
    """Lines begin with the key."""
    if rule.window < 2:
        yield f"window: must be 2 or more, not {rule.window}"
    if rule.times < 0:
        yield f"times: must be 0 or more, not {rule.times}"
    if rule.calm_steps is not None and rule.calm_steps < 1:
        yield f"calm_steps: must be 1 or more, or null, not {rule.calm_steps}"
    if not math.isfinite(rule.above):
        yield f"above: must be a finite number, not {rule.above}"
    if rule.watch not in ("nonfinite", "plateau") and rule.above <= 0:
        yield f"above: must be greater than 0 for {rule.watch}, not {rule.above}"
    if rule.action == "lower_lr" and not 0 < rule.factor < 1:
        yield f"factor: must lie between 0 and 1, not {rule.factor}"
    if rule.action == "rollback":
        if not config.checkpoint.save_interval:
            yield "action: rollback needs checkpoints to go back to; set checkpoint.save_interval"
        if rule.calm_steps is not None:
            yield "calm_steps: rollbacks are never forgotten, else they might never end"
    if rule.action == "a16":
        for key, value in (("linear", "dense"), ("activations", "full")):
            if getattr(config.model, key) == value:
                yield f"action: a16 has no effect with model.{key}={value}"
    for key, is_used in (
        ("factor", rule.action == "lower_lr"),
        ("window", rule.watch not in ("nonfinite", "grad_norm")),
        ("above", rule.watch != "nonfinite"),
    ):
        if not is_used and getattr(rule, key) != getattr(GuardRule, key):
            yield f"{key}: has no effect for watch={rule.watch}, action={rule.action}"
    if rule.action == "skip" and rule.watch == "plateau":
        yield "action: skip does not end a plateau; use lower_lr, alert or stop"


def _data_and_telemetry(config: Config) -> Iterator[str]:
    pairs, telemetry = config.data.skip_samples, config.telemetry
    for number, rule in enumerate(telemetry.alerts):
        if rule.when.strip().startswith("layers.") and not telemetry.per_layer:
            yield f"telemetry.alerts[{number}].when: layers are known with telemetry.per_layer=true"
    starts, stops = pairs[::2], pairs[1::2]
    if len(pairs) % 2 or any(not 0 <= a < b for a, b in zip(starts, stops, strict=False)):
        yield (
            "data.skip_samples: must be pairs of a first sample and one behind the last, "
            f"not {pairs}"
        )
    file = telemetry.prometheus_textfile
    if file is not None and not file.endswith(".prom"):
        yield f"telemetry.prometheus_textfile: {file} must end in .prom, or nobody collects it"
    port = telemetry.prometheus_port
    if port is not None and not 0 <= port < 65_536:
        yield f"telemetry.prometheus_port: must lie between 0 and 65535, not {port}"
    if port is None and telemetry.prometheus_host != TelemetryConfig.prometheus_host:
        yield "telemetry.prometheus_host: has no effect without telemetry.prometheus_port"
    if telemetry.peak_tflops is not None and not telemetry.peak_tflops > 0:
        yield f"telemetry.peak_tflops: must be greater than 0, not {telemetry.peak_tflops}"
