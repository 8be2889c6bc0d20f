"""Every setting of a served model: how it is laid over ranks, how the engine batches, what the
server lets in. The model itself, and its numerics, are in the checkpoint."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ServingParallelConfig:
    """How the model is laid over ranks, all on this host: ``tp · pp`` processes."""

    tp: int = 1
    """Tensor-parallel degree: ranks that share each layer."""
    pp: int = 1
    """Pipeline-parallel degree: ranks that the layers are spread over; as many batches are under
    way at once."""
    layers_per_stage: list[int] | None = None
    """Decoder layers on each stage; default: by the size of their products."""
    row_reduce: Literal["int32", "exact16", "int8"] = "int32"
    """How row-parallel layers add their products over TP. ``int32`` and ``exact16`` (half the
    bytes) are exact and give the same bits; ``int8`` rounds what is sent, for messages of
    ``engine.int8_min_kib`` on. On one host ``int32`` is the fastest for all but large messages."""


@dataclass(frozen=True)
class EngineConfig:
    """How requests are computed. None of it but ``arithmetic``, ``compute``, a coarser
    ``kv_dtype`` and ``parallel.row_reduce=int8`` changes what greedy decoding answers."""

    max_model_len: int | None = None
    """Tokens of a prompt and its answer together; default: what the model was made for."""
    max_sequences: int = 64
    """Sequences that are computed side by side."""
    max_batched_tokens: int = 512
    """Tokens of one forward pass; longer prompts are computed in chunks."""
    block_size: int = 16
    """Tokens whose keys and values are kept, shared and freed together."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Of keys and values; ``auto`` is that of the model, and loses nothing. ``int8`` has a scale
    for each token and head."""
    kv_cache_mb: float = 512.0
    """Memory of each rank for keys and values, in MiB."""
    prefix_cache: bool = True
    """Whether prompts that begin alike share blocks."""
    arithmetic: Literal["int8", "hf"] = "int8"
    """``int8``: exact integer products. ``hf``: the roundings of Hugging Face's
    ``BitNetForCausalLM``, for comparisons; slower, and not the same at every TP."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Activations between products; ``auto`` is what the model was trained in."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    """Threads of each rank on a CPU; 0: the cores of this host shared evenly."""
    timeout_s: float = 20.0
    """Seconds that a rank waits for another one; then the engine has failed."""
    int8_min_kib: float = 256.0
    """``row_reduce=int8``: smaller messages are sent exactly."""
    int8_max_crest: float = 8.8
    """``row_reduce=int8``: absmax over root mean square of a group, above which a message is sent
    exactly; the relative error of rounding is about 0.23 % of it."""
    accuracy_guard: str | None = None
    """A text file. Every ``accuracy_interval_s`` its loss is compared with that of exact sums, and
    ``int8`` sums are switched off when it is higher by more than ``accuracy_limit``."""
    accuracy_interval_s: float = 600.0
    accuracy_limit: float = 0.01
    rebalance: bool = False
    """Whether an engine that starts again lays out its layers as measured stage times propose."""


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; others than this host reach it only if you name another one."""
    port: int = 8000
    """0: any that is free; it is printed."""
    model_name: str | None = None
    """What clients call the model; default: the name of its folder."""
    api_key: str | None = None
    """What clients must send as ``Authorization: Bearer …``; null: nothing."""
    chat_template: str | None = None
    """A jinja2 file; default: that of the model."""
    max_waiting_requests: int = 256
    """Requests that may wait for the engine; more are answered with 429."""
    max_waiting_tokens: int = 65536
    """Prompt tokens of those, together."""
    max_body_mb: float = 4.0
    """Size of a request, in MiB."""
    first_token_timeout_s: float = 10.0
    """A request whose first token is not there by then ends with 504."""
    request_timeout_s: float = 600.0
    """A request that is not done by then ends with what it has."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, how long requests under way may take."""
    max_restarts: int = 3
    """How often a failed engine is started again, within ``restart_window_s``."""
    restart_backoff_s: float = 1.0
    """Pause before that; it doubles each time."""
    restart_window_s: float = 600.0
    chat_page: bool = True
    """Whether ``/`` is a page to chat with the model."""
    vllm_metrics: bool = False
    """Whether metrics are there under vLLM's names, too."""
    latency_factor: float = 1.5
    """Alert: end-to-end latency above so many times the baseline, which is the median of the first
    ``latency_baseline_requests``."""
    latency_baseline_requests: int = 100
    memory_limit: float = 0.9
    """Alert: a rank uses more than this share of the memory it can have."""
    comm_factor: float = 2.0
    """Alert: a collective takes so many times its baseline."""


@dataclass(frozen=True)
class ServingConfig:
    """The whole tree."""

    parallel: ServingParallelConfig = field(default_factory=ServingParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def serving_problems(config: ServingConfig) -> list[str]:
    """What is wrong with ``config`` whatever the model, one line each; empty if nothing is."""
    parallel, engine, server = config.parallel, config.engine, config.server
    positive = {
        "parallel.tp": parallel.tp,
        "parallel.pp": parallel.pp,
        "engine.max_model_len": 1 if engine.max_model_len is None else engine.max_model_len,
        "engine.max_sequences": engine.max_sequences,
        "engine.max_batched_tokens": engine.max_batched_tokens,
        "engine.block_size": engine.block_size,
        "engine.kv_cache_mb": engine.kv_cache_mb,
        "engine.timeout_s": engine.timeout_s,
        "engine.int8_max_crest": engine.int8_max_crest,
        "engine.accuracy_interval_s": engine.accuracy_interval_s,
        "engine.accuracy_limit": engine.accuracy_limit,
        "server.max_waiting_requests": server.max_waiting_requests,
        "server.max_waiting_tokens": server.max_waiting_tokens,
        "server.max_body_mb": server.max_body_mb,
        "server.first_token_timeout_s": server.first_token_timeout_s,
        "server.request_timeout_s": server.request_timeout_s,
        "server.restart_window_s": server.restart_window_s,
        "server.latency_baseline_requests": server.latency_baseline_requests,
        "server.memory_limit": server.memory_limit,
    }
    not_negative = {
        "engine.threads": engine.threads,
        "engine.int8_min_kib": engine.int8_min_kib,
        "server.drain_timeout_s": server.drain_timeout_s,
        "server.max_restarts": server.max_restarts,
        "server.restart_backoff_s": server.restart_backoff_s,
    }
    problems = [f"{k}: must be more than 0, not {v}" for k, v in positive.items() if not v > 0]
    problems += [
        f"{k}: must not be negative, is {v}" for k, v in not_negative.items() if not v >= 0
    ]
    above_one = {
        "server.latency_factor": server.latency_factor,
        "server.comm_factor": server.comm_factor,
    }
    problems += [f"{k}: must be more than 1, not {v}" for k, v in above_one.items() if not v > 1]
    if server.request_timeout_s < server.first_token_timeout_s:
        problems.append(
            f"server.request_timeout_s: {server.request_timeout_s:g} is less than "
            f"server.first_token_timeout_s={server.first_token_timeout_s:g}"
        )
    for key, text in (("server.host", server.host), ("server.api_key", server.api_key)):
        if text == "":
            problems.append(f"{key}: must not be empty; leave it out for the default")
    if engine.arithmetic == "hf" and engine.kv_dtype != "auto":
        problems.append("engine.kv_dtype: must be auto with engine.arithmetic=hf")
    if not 0 <= server.port < 65536:
        problems.append(f"server.port: must be 0 to 65535, not {server.port}")
    if engine.max_batched_tokens < engine.max_sequences:
        problems.append(
            f"engine.max_batched_tokens: {engine.max_batched_tokens} is less than one token for "
            f"each of engine.max_sequences={engine.max_sequences}"
        )
    if engine.arithmetic == "hf" and parallel.row_reduce == "int8":
        problems.append("parallel.row_reduce: int8 is for engine.arithmetic=int8")
    if parallel.row_reduce == "int8" and parallel.tp == 1:
        problems.append("parallel.row_reduce: int8 has no effect with parallel.tp=1; leave it out")
    if engine.accuracy_guard is not None and parallel.row_reduce != "int8":
        problems.append(
            "engine.accuracy_guard: has no effect, as exact sums lose nothing; "
            "set parallel.row_reduce=int8, or leave it out"
        )
    return problems
