"""Checks of what is between ranks: ``communication``, ``outer``, ``faults`` and ``site``."""

import re
from collections.abc import Iterator
from dataclasses import fields

from megabit.config.cluster import CommunicationConfig, OuterConfig
from megabit.config.schema import Config

COMPRESSED = ("int8", "int4", "topk", "ternary")
"""Values of ``precision.gradients`` that lose something and need a bucket's layout for it."""
ENVIRONMENT = (
    *("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "OMP_", "MKL_"),
    *("CUDA_", "CUBLAS_", "UCX_", "FI_"),
)
"""What variables that ``site.environment`` sets begin with."""
_ADDRESS = re.compile(r"(\[[\w.:%]+\]|[\w.-]+):(\d{1,5})")


def islands_in_world(outer: OuterConfig) -> int:
    """Islands among the ranks that are launched together."""
    return 1 if outer.method in ("none", "stale") else outer.islands


def cluster_problems(config: Config, world_size: int | None) -> Iterator[str]:
    """What is wrong, one line each."""
    yield from _numbers(config)
    yield from _compression(config)
    yield from _topology(config, world_size)
    yield from _outer(config)
    yield from _faults(config)
    for name in config.site.environment:
        if not name.startswith(ENVIRONMENT):
            yield (
                f"site.environment.{name}: is for variables of communication, which begin with "
                + ", ".join(ENVIRONMENT)
            )


def _numbers(config: Config) -> Iterator[str]:
    communication, outer, faults = config.communication, config.outer, config.faults
    for key, value, least in (
        ("communication.block", communication.block, 1),
        ("communication.min_numel", communication.min_numel, 0),
        ("communication.tune_steps", communication.tune_steps, 1),
        ("outer.islands", outer.islands, 1),
        ("outer.inner_steps", outer.inner_steps, 1),
        ("outer.fragments", outer.fragments, 1),
        ("outer.staleness", outer.staleness, 0),
        ("outer.island", outer.island, 0),
        ("faults.heartbeat_s", faults.heartbeat_s, 0),
        ("faults.hang_s", faults.hang_s, 0),
        ("faults.check_codes_interval", faults.check_codes_interval, 0),
        ("faults.retries", faults.retries, 0),
        ("faults.retry_pause_s", faults.retry_pause_s, 0),
    ):
        if value < least:
            yield f"{key}: must be {least} or more, not {value}"
    for key, number in (
        ("communication.topk_ratio", communication.topk_ratio),
        ("outer.lr", outer.lr),
        ("outer.patience_s", outer.patience_s),
    ):
        if not number > 0:
            yield f"{key}: must be greater than 0, not {number}"
    if communication.topk_ratio > 1:
        yield f"communication.topk_ratio: is a share, at most 1, not {communication.topk_ratio}"
    if not 0 <= outer.momentum < 1:
        yield f"outer.momentum: must be at least 0 and below 1, not {outer.momentum}"


def _compression(config: Config) -> Iterator[str]:
    wire, communication, model = config.precision.gradients, config.communication, config.model
    if wire == "ternary" and model.num_key_value_heads % config.parallel.tp:
        yield (
            "precision.gradients: ternary draws random numbers, which KV heads that several TP "
            f"ranks hold cannot share; parallel.tp must divide model.num_key_value_heads="
            f"{model.num_key_value_heads}, or use int8"
        )
    default, is_outer_int8 = CommunicationConfig(), config.outer.wire == "int8"
    loses = wire in ("int8", "int4", "topk")
    for key, has_effect in (
        ("min_numel", wire in COMPRESSED),
        ("block", wire in ("int8", "int4") or is_outer_int8),
        ("topk_ratio", wire == "topk"),
        ("error_feedback", loses),
        ("tune_steps", communication.tune_buckets),
    ):
        if not has_effect and getattr(communication, key) != getattr(default, key):
            because = "tune_buckets=false" if key == "tune_steps" else f"gradients={wire}"
            section = "communication" if key == "tune_steps" else "precision"
            yield f"communication.{key}: has no effect with {section}.{because}"
    if loses and communication.error_feedback and config.precision.compute == "float16":
        yield (
            "communication.error_feedback: keeps what is lost in units of the loss scale, which "
            "precision.compute=float16 changes; use bfloat16, or error_feedback=false"
        )
    if wire in COMPRESSED and config.precision.compute == "float64":
        yield f"precision.gradients: {wire} rounds, precision.compute=float64 is for checks"
    if communication.tune_buckets and config.outer.method != "none":
        yield (
            "communication.tune_buckets: is for a world that trains together; with outer.method="
            f"{config.outer.method} set parallel.bucket_mb by hand"
        )


def _topology(config: Config, world_size: int | None) -> Iterator[str]:
    communication = config.communication
    intra = communication.dp_intra
    if intra is None:
        return
    if intra < 1:
        yield f"communication.dp_intra: must be 1 or more, not {intra}"
    elif communication.topology == "flat":
        yield "communication.dp_intra: has no effect with communication.topology=flat"
    elif world_size is not None:
        ranks = config.parallel.tp * config.parallel.pp * islands_in_world(config.outer)
        if world_size % ranks == 0 and (world_size // ranks) % intra:
            yield f"communication.dp_intra: {intra} does not divide dp={world_size // ranks}"


def _outer(config: Config) -> Iterator[str]:
    outer, default = config.outer, OuterConfig()
    if outer.method == "none":
        for key in (field.name for field in fields(outer)):
            if key != "method" and getattr(outer, key) != getattr(default, key):
                yield f"outer.{key}: has no effect with outer.method=none; use diloco"
        return
    if outer.method != "stale":
        for key in ("staleness", "owner", "island", "patience_s"):
            if getattr(outer, key) != getattr(default, key):
                yield f"outer.{key}: has no effect with outer.method={outer.method}; use stale"
    elif not _is_address(outer.owner):
        yield (
            f"outer.owner: stale needs the address of 'megabit owner', host:port, not {outer.owner}"
        )
    elif outer.island >= outer.islands:
        yield f"outer.island: {outer.island} is not below outer.islands={outer.islands}"
    elif 0 < config.faults.hang_s <= outer.patience_s:
        yield (
            f"outer.patience_s: {outer.patience_s} is as long as faults.hang_s="
            f"{config.faults.hang_s}, after which a rank that waits ends; use less"
        )
    if outer.method == "stale" and outer.wire != "float32":
        yield f"outer.wire: {outer.wire} is for outer.method=diloco; stale sends float32"
    if outer.method == "stale" and config.precision.compute == "float64":
        yield "precision.compute: float64 is for checks, and outer.method=stale sends float32"
    if outer.method != "diloco" and outer.fragments > 1:
        yield f"outer.fragments: are for outer.method=diloco, not {outer.method}"
    if outer.method == "gossip":
        for key in ("lr", "momentum", "wire"):
            if getattr(outer, key) != getattr(default, key):
                yield f"outer.{key}: has no effect with outer.method=gossip, which takes means"
    if outer.method == "gossip" and outer.islands < 2:
        yield "outer.islands: gossip needs 2 or more"
    if outer.fragments > outer.inner_steps:
        yield (
            f"outer.fragments: {outer.fragments} do not fit outer.inner_steps="
            f"{outer.inner_steps}; use at most as many"
        )
    for rule in config.guard.rules:
        if rule.action in ("rollback", "lower_lr", "a16"):
            yield (
                f"guard.rules: {rule.action} would be one island's only, with outer.method="
                f"{outer.method}; use skip, alert or stop"
            )
    if config.train.quantization_ramp:
        yield "outer.method: train.quantization_ramp is not for islands; use one of them"


def _is_address(address: str | None) -> bool:
    match = _ADDRESS.fullmatch(address or "")
    return match is not None and int(match[2]) < 65536


def _faults(config: Config) -> Iterator[str]:
    faults = config.faults
    if faults.hang_s and not faults.heartbeat_s:
        yield "faults.hang_s: needs signs of life, but faults.heartbeat_s is 0; set it to 0, too"
    if faults.hang_s and faults.hang_s < 2 * faults.heartbeat_s:
        yield (
            f"faults.hang_s: {faults.hang_s} must be at least twice faults.heartbeat_s="
            f"{faults.heartbeat_s}"
        )
    for number, drill in enumerate(faults.drills):
        place = f"faults.drills[{number}]"
        if drill.rank < 0:  # how many ranks there will be, an elastic job does not know
            yield f"{place}.rank: must be 0 or more, not {drill.rank}"
        if drill.step < 0:
            yield f"{place}.step: must be 0 or more, not {drill.step}"
        if not drill.seconds > 0:
            yield f"{place}.seconds: must be greater than 0, not {drill.seconds}"
