"""How a model would be served: memory, cache, time to the first token and tokens a second.

An engine is TP × PP ranks of one node; what is left of the GPUs are *replicas* of it. A forward
pass of n tokens, of which r are answered, takes on a stage

    products   the longer of reading the weights once (codes: a quarter byte each) and n
               multiply-adds with each; of the head likewise, for r rows
    attention  the longer of reading the keys and values of all sequences, and the multiply-adds
    the rest   bytes of elementwise passes, what a layer takes however small it is, and over TP
               two sums of integers and two gathers of statistics a layer

A prompt of P tokens goes in chunks of ``max_batched_tokens`` beside b sequences that are being
answered; with p stages as many batches are under way, of b/p sequences each. In a steady state of b
sequences, for each of which a prompt comes in as often as one is answered (A tokens),

    decode     one pass for all b, at the context P + A/2 on average
    per token  decode + b · prefill / A: in the long run others' prompts are computed meanwhile
    tokens/s   b / (per token), of each replica

b is the best that the cache has room for and the limits allow. Queues, HTTP and sampling are left
out.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megabit.config import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    find_problems,
)
from megabit.config.validate import divisors
from megabit.inference.kv_cache import bytes_per_block
from megabit.inference.opening import serving_costs
from megabit.model.kv_heads import HeadSplit
from megabit.pipeline.plan import StagePlan, plan_stages
from megabit.plan.collectives import seconds
from megabit.plan.machine import Machine, Term
from megabit.plan.search import USABLE_MEMORY
from megabit.training.memory import resident_bytes
from megabit.training.messages import Message
from megabit.training.shapes import RankShape
from megabit.units import MIB

MAX_SEQUENCES = 1024
INTEGER_BYTES = 4
"""Of an int32, or of an fp32."""


@dataclass(frozen=True)
class Load:
    """What clients ask for, and what they can wait for."""

    prompt_tokens: int = 512
    answer_tokens: int = 256
    ttft_s: float | None = None
    """Limit of the time to the first token."""
    tpot_s: float | None = None
    """Limit of the time for each later token."""
    sequences: int | None = None
    """Side by side in a replica; default: as many as are best."""

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True)
class Engine:
    """Settings that the engine would have."""

    compute: str
    block_size: int = 16
    max_batched_tokens: int = 512
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class ServingCandidate:
    """A layout of an engine, and what it would do."""

    tp: int
    pp: int
    replicas: int
    memory: dict[str, int]
    """Bytes by part, of the rank that has least room for keys and values."""
    blocks: int
    """Of keys and values, of each replica."""
    sequences: int
    """Side by side, of each replica."""
    ttft_s: float
    """Of a prompt that comes while all others are being answered."""
    tpot_s: float
    """Of a token after the first, others' prompts included."""
    decode_s: float
    """Of one pass that gives each sequence a token."""
    tokens_per_s: float
    """Answered, of all replicas."""
    settings: dict[str, object]
    """Keys that ``megabit serve`` takes."""

    @property
    def name(self) -> str:
        """``TP 2 × PP 1, 4 replicas``."""
        return f"TP {self.tp} × PP {self.pp}, {self.replicas} × replicated"


@dataclass(frozen=True)
class ServingFound:
    """What a search has found."""

    candidates: list[ServingCandidate]
    """Most tokens a second first."""
    rejected: dict[str, str]
    """Why, by layout."""


def plan_serving(
    model: ModelConfig, engine: Engine, world_size: int, machine: Machine, load: Load
) -> ServingFound:
    """All engines of ``world_size`` ranks or, with replicas, fewer."""
    candidates, rejected = [], {}
    for ranks in divisors(world_size):
        if ranks > machine.nodes_of:
            continue  # an engine lives on one host
        for tp in divisors(ranks):
            pp = ranks // tp
            found = _candidate(model, engine, tp, pp, world_size, machine, load)
            if isinstance(found, ServingCandidate):
                candidates.append(found)
            else:
                rejected[f"TP {tp} × PP {pp}"] = found
    candidates.sort(key=lambda candidate: -candidate.tokens_per_s)
    return ServingFound(candidates, rejected)


def _candidate(
    model: ModelConfig,
    engine: Engine,
    tp: int,
    pp: int,
    world_size: int,
    machine: Machine,
    load: Load,
) -> ServingCandidate | str:
    config = _config(model, engine, tp, pp, load)
    problems = find_problems(config, tp * pp)
    if problems:
        return problems[0]
    served = Served(config, engine, machine, world_size, _plan(config))
    megabytes = max(0, int(served.room() // MIB))
    block = max(served.block_bytes(shape) for shape in served.shapes)
    blocks = megabytes * MIB // block
    fitting = blocks // math.ceil(load.context / engine.block_size)
    if not fitting:
        needed = sum(served.weights(served.tightest).values()) / 1e9
        return (
            f"no room for the keys and values of one sequence of {load.context} tokens beside "
            f"{needed:.3g} GB of weights and buffers"
        )
    choices = [2**n for n in range(MAX_SEQUENCES.bit_length()) if 2**n <= fitting]
    if load.sequences is not None:
        if load.sequences > fitting:
            return f"{load.sequences} sequences need more room than there is for {fitting}"
        choices = [load.sequences]
    best = None
    for sequences in choices:
        ttft_s, tpot_s, decode_s = served.times(sequences, load)
        too_slow = (load.ttft_s is not None and ttft_s > load.ttft_s) or (
            load.tpot_s is not None and tpot_s > load.tpot_s
        )
        if not too_slow and (best is None or sequences / tpot_s > best[0] / best[2]):
            best = sequences, ttft_s, tpot_s, decode_s
    if best is None:
        ttft_s, tpot_s, _ = served.times(choices[0], load)
        return (
            f"too slow with {choices[0]}: {1e3 * ttft_s:.3g} ms to the first token, "
            f"{1e3 * tpot_s:.3g} ms for each later one"
        )
    sequences, ttft_s, tpot_s, decode_s = best
    replicas = world_size // (tp * pp)
    return ServingCandidate(
        tp,
        pp,
        replicas,
        {**served.weights(served.tightest), "keys and values": blocks * block},
        blocks,
        sequences,
        ttft_s,
        tpot_s,
        decode_s,
        replicas * sequences / tpot_s,
        {
            "parallel.tp": tp,
            "parallel.pp": pp,
            "engine.max_model_len": load.context,
            "engine.max_sequences": sequences,
            "engine.max_batched_tokens": max(engine.max_batched_tokens, sequences),
            "engine.block_size": engine.block_size,
            "engine.kv_cache_mb": float(megabytes),
            "engine.compute": engine.compute,
        },
    )


@dataclass(frozen=True)
class Served:
    """One engine at a layout."""

    config: Config
    engine: Engine
    machine: Machine
    world_size: int
    """Of all replicas."""
    plan: StagePlan

    @property
    def tp(self) -> int:
        return self.config.parallel.tp

    @property
    def pp(self) -> int:
        return self.config.parallel.pp

    @property
    def shapes(self) -> list[RankShape]:
        """The first rank of each stage."""
        ranks = self.tp * self.pp
        return [
            RankShape(self.config, ranks, stage * self.tp, self.plan) for stage in range(self.pp)
        ]

    @property
    def tightest(self) -> RankShape:
        """The rank with the most weights and buffers for each layer that has a cache."""
        return max(self.shapes, key=lambda shape: sum(self.weights(shape).values()))

    # Memory.

    def weights(self, shape: RankShape) -> dict[str, int]:
        """Bytes of a rank without keys and values, by part."""
        device = torch.device("cuda" if self.machine.device.cores is None else "cpu")
        held = resident_bytes(shape, device, has_updated=False)
        model, tokens = self.config.model, self.engine.max_batched_tokens
        # Hidden states twice, and the widest of what a layer makes of them; logits of 64 rows.
        wide = 2 * model.hidden_size + 3 * model.intermediate_size // self.tp
        logits = 64 * model.vocab_size // self.tp * 2 if shape.has_head else 0
        return {
            "codes": held["codes"],
            "dense weights": held["dense weights"],
            "buffers": (tokens * wide + logits) * shape.wide_bytes,
            "base": self.machine.device.base_bytes,
        }

    def block_bytes(self, shape: RankShape) -> int:
        """Of one block of keys and values on a rank."""
        model = self.config.model
        split = HeadSplit(model.num_attention_heads, model.num_key_value_heads, 0, self.tp)
        return bytes_per_block(
            len(shape.layers), self.engine.block_size, len(split.kv), model.head_dim, self.kv_dtype
        )

    @property
    def kv_dtype(self) -> torch.dtype:
        name = self.engine.kv_dtype
        dtype: torch.dtype = getattr(torch, self.engine.compute if name == "auto" else name)
        return dtype

    def room(self) -> float:
        """Bytes for keys and values, on the rank that has least."""
        device = self.machine.device
        usable = USABLE_MEMORY * device.memory_bytes
        if device.is_shared:
            usable /= self.machine.on_node(self.world_size)
        return usable - sum(self.weights(self.tightest).values())

    # Time.

    def times(self, sequences: int, load: Load) -> tuple[float, float, float]:
        """Time to the first token, for each later one, and of a pass that gives each one token."""
        each = max(1, sequences // self.pp)  # in each of the batches under way
        context = load.prompt_tokens + load.answer_tokens / 2
        decode_s = self._cycle(each, each, each * context)
        prefill_s = alone_s = 0.0
        for start in range(0, load.prompt_tokens, self.engine.max_batched_tokens):
            tokens = min(self.engine.max_batched_tokens, load.prompt_tokens - start)
            # The chunk meets what is before it, and half of itself.
            seen = start + tokens / 2
            alone = self._stage_times(tokens, 0, seen, tokens * seen)
            beside = self._stage_times(
                tokens + each, each, seen + each * context, tokens * seen + each * context
            )
            prefill_s += max(alone)
            alone_s += sum(beside) + self._hops(tokens + each)
        tpot_s = decode_s + sequences * prefill_s / load.answer_tokens
        return alone_s, tpot_s, decode_s

    def _cycle(self, tokens: int, rows: int, keys: float) -> float:
        """Until each of the batches under way has passed all stages once."""
        stages = self._stage_times(tokens, rows, keys, keys)
        return max(sum(stages) + self._hops(tokens), self.pp * max(stages))

    def _hops(self, tokens: int) -> float:
        """Between stages."""
        if self.pp == 1:
            return 0.0
        row = self.config.model.hidden_size * self.shapes[0].compute_bytes
        message = Message("pp", "activations", "send", tokens * row, 2, self.pp - 1)
        return seconds(message, self.machine, self.pp, self.tp, self.world_size // self.pp)

    def _stage_times(self, tokens: int, rows: int, keys: float, pairs: float) -> list[float]:
        """Of one pass, by stage.

        Args:
            tokens, rows: that are computed, and that are answered.
            keys: whose keys and values are read, of all sequences.
            pairs: of a query and a key.
        """
        return [self._stage_time(shape, tokens, rows, keys, pairs) for shape in self.shapes]

    def _stage_time(
        self, shape: RankShape, tokens: int, rows: int, keys: float, pairs: float
    ) -> float:
        rates = self.machine.device.rates_of(self.engine.compute).seconds
        model, layers = self.config.model, len(shape.layers)
        held = self.weights(shape)
        ternary = sum(h.numel for h in shape.parameters() if h.kind == "ternary")
        matrices = sum(h.numel for h in shape.layer_matrices()) - ternary
        width = model.hidden_size // self.tp
        head_bytes = 0
        if shape.has_head:
            head_bytes = model.hidden_size * model.vocab_size // self.tp * shape.compute_bytes
        read = rates.get("forward bytes", 0.0)
        product: Term = "ternary product" if model.linear == "ternary" else "dense product"
        layer_bytes = held["codes"] or matrices * shape.compute_bytes
        kv_bytes = self.block_bytes(shape) / self.engine.block_size
        hidden_passes = 8 * model.hidden_size + 6 * (width + model.intermediate_size // self.tp)
        work = (
            max((ternary + matrices) * tokens * rates.get(product, 0.0), layer_bytes * read)
            + max(2 * pairs * width * layers * rates.get("attention", 0.0), keys * kv_bytes * read)
            + tokens * hidden_passes * layers * shape.wide_bytes * rates.get("forward bytes", 0.0)
            + max(
                rows
                * model.hidden_size
                * model.vocab_size
                // self.tp
                * rates.get("logits product", 0.0)
                * shape.has_head,
                head_bytes * read if rows else 0.0,
            )
        )
        calls = layers * rates.get("layer forward", 0.0) + shape.has_head * rates.get("head", 0.0)
        return work * self._share + calls * max(1.0, self._share) + self._sums(layers, tokens)

    @property
    def _share(self) -> float:
        """Time on the cores that a rank has, against one core of its own; on a GPU 1."""
        device = self.machine.device
        ranks = self.machine.on_node(self.world_size)
        return 1.0 if device.cores is None else ranks / device.cores

    def _sums(self, layers: int, tokens: int) -> float:
        """Over TP, of one pass through a stage."""
        if self.tp == 1:
            return 0.0
        model = self.config.model
        sums = tokens * model.hidden_size * INTEGER_BYTES
        statistics = 2 * tokens * model.num_attention_heads * INTEGER_BYTES
        messages = [
            Message("tp", "activations", "all_reduce", sums, self.tp, 2 * layers),
            Message("tp", "statistics", "all_gather", statistics, self.tp, 2 * layers),
        ]
        groups = self.world_size // self.tp
        return sum(seconds(message, self.machine, self.tp, 1, groups) for message in messages)


def _config(model: ModelConfig, engine: Engine, tp: int, pp: int, load: Load) -> Config:
    return Config(
        model=dataclasses.replace(model),
        parallel=ParallelConfig(tp=tp, pp=pp),
        precision=PrecisionConfig(compute=engine.compute),  # type: ignore[arg-type]
        data=DataConfig(seq_length=load.context),
        train=TrainConfig(micro_batch_size=1, global_batch_size=1),
    )


def _plan(config: Config) -> StagePlan:
    """Layers on stages as the engine lays them out."""
    return plan_stages(config, 1).balanced_by(serving_costs(config))


def reasons(found: ServingFound) -> Iterator[str]:
    """Why layouts are out, a line each."""
    for name, reason in found.rejected.items():
        yield f"{name}: {reason}"
