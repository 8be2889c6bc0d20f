"""Activation recomputation: the same gradients, no collective or row product twice, less memory."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megabit.config import Config, load_config
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages
from megabit.model.decoder import LayerTraining
from megabit.tensor_parallel import ForwardPass, Noise, bitlinear, ternary_layers

Recompute: TypeAlias = Literal["none", "selective", "full"]
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
CPU = torch.device("cpu")
NOISE = Noise(seed=3, step=4, microbatch=5)
LAYERS, B, S, H = 2, 2, 8, 32
T = B * S
LAYOUTS = [(1, False), (2, False), (2, True), (4, True)]


def config_at(*settings: str) -> Config:
    # KV heads are fewer than query heads, so that tp=4 shares them.
    return load_config(
        [
            *(f"model.hidden_size={H}", "model.intermediate_size=48", "model.vocab_size=64"),
            *(f"model.num_hidden_layers={LAYERS}", "model.num_key_value_heads=2"),
            *(f"data.seq_length={S}", f"train.micro_batch_size={B}", *settings),
        ]
    )


def at_layout(tp: int, sequence_parallel: bool, *settings: str) -> Callable[[Recompute], Config]:
    """The configuration at a layout, for each way to recompute."""
    layout = f"parallel.tp={tp}", f"parallel.sequence_parallel={sequence_parallel}"
    return lambda recompute: config_at(*layout, *settings, f"train.recompute={recompute}")


def make_mesh(tp: int) -> ParallelMesh:
    return ParallelMesh() if tp == 1 else ParallelMesh.create(tp, 1, CPU)


def loss_of(stage: CausalLMStages) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(64, (2, B, S), generator=generator)
    mask = torch.rand((B, S), generator=generator) < 0.7
    return stage.loss(stage(tokens, None, ForwardPass(NOISE)), targets, mask)


def gradients_of(stage: CausalLMStages) -> dict[str, Tensor]:
    """The loss, and the gradient of each parameter."""
    stage.zero_grad()
    loss = loss_of(stage)
    loss.backward()
    gradients = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(stage.parameters()))
    return {"loss": loss.detach(), **gradients}


# Gradients


SETTINGS = {
    "dropout": ["train.hidden_dropout=0.2"],
    "silu, exact16": ["model.hidden_act=silu", "parallel.row_reduce=exact16"],
    "int8": ["precision.ternary_backward=int8", "train.hidden_dropout=0.2"],
    "bf16, untied": ["precision.compute=bfloat16", "model.tie_word_embeddings=false"],
    "exact": ["parallel.exact=full", "train.hidden_dropout=0.2"],
    "dense": ["model.linear=dense", "train.hidden_dropout=0.2"],
}


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_gradients_are_those_without_recomputation(tp: int, sequence_parallel: bool) -> None:
    """Bit by bit, in every mode of the layers."""

    def run() -> None:
        mesh = make_mesh(tp)
        for name, settings in SETTINGS.items():
            at = at_layout(tp, sequence_parallel, *settings)
            expected, *others = (gradients_of(build_stages(at(mode), mesh)) for mode in MODES)
            for mode, found in zip(MODES[1:], others, strict=True):
                for parameter, gradient in expected.items():
                    assert torch.equal(found[parameter], gradient), (name, mode, parameter)

    run_ranks(run, tp)


def test_chosen_layers_recompute() -> None:
    at = at_layout(1, False)
    expected = gradients_of(build_stages(at("none"), ParallelMesh()))
    config = config_at("train.recompute=full", "train.recompute_layers=[1]")
    stage = build_stages(config, ParallelMesh())
    assert [layer.recompute for layer in stage.model.layers.values()] == ["none", "full"]
    found = gradients_of(stage)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_layers_are_those_of_the_whole_model() -> None:
    training = LayerTraining(recompute="selective", recompute_layers=(0, 3))
    assert [training.recompute_of(i) for i in range(4)] == [
        "selective",
        "none",
        "none",
        "selective",
    ]
    assert LayerTraining(recompute="full").recompute_of(7) == "full"

    def recompute() -> dict[str, str]:
        config = config_at("parallel.pp=2", "train.recompute=full", "train.recompute_layers=[1]")
        layers = build_stages(config, ParallelMesh.create(1, 2, CPU)).model.layers
        return {number: layer.recompute for number, layer in layers.items()}

    assert run_ranks(recompute, 2) == [{"0": "none"}, {"1": "full"}]


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_recomputes_nothing(mode: Recompute) -> None:
    stage = build_stages(at_layout(1, False)(mode), ParallelMesh())
    with torch.no_grad(), counting_products() as products:
        loss = loss_of(stage)
    assert not loss.requires_grad
    assert products["linear"] == 7 * LAYERS


# What is done twice


class Log(Counter[str]):
    """Bytes sent by purpose; also each collective, as (purpose, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, float]] = []

    def __setitem__(self, purpose: str, total: float) -> None:
        self.collectives.append((purpose, total - self[purpose]))
        super().__setitem__(purpose, total)  # type: ignore[assignment]


@contextmanager
def counting_products() -> Iterator[Counter[str]]:
    """``linear``: products that are scaled at once; ``matmul``: those of int32 for a sum over TP.
    Codes must be there: no layer derives them anew."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            counts[name] += 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("linear", "matmul"):
            original = getattr(bitlinear, f"ternary_{name}")
            monkeypatch.setattr(bitlinear, f"ternary_{name}", counted(name, original))
        yield counts


@pytest.mark.parametrize("exact", ["forward", "full"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_what_is_repeated(tp: int, sequence_parallel: bool, exact: str) -> None:
    """``full`` repeats column products and, under sequence parallelism, the gathers of their
    inputs; ``selective`` repeats neither products nor collectives. Nothing repeats row products."""

    def run() -> dict[Recompute, tuple[Counter[str], Counter[tuple[str, float]]]]:
        mesh = make_mesh(tp)
        at = at_layout(tp, sequence_parallel, f"parallel.exact={exact}")
        done = {}
        for mode in MODES:
            stage = build_stages(at(mode), mesh)
            stage.ternarize()
            mesh.tp.sent = log = Log()
            with counting_products() as products:
                gradients_of(stage)
            done[mode] = products, Counter(log.collectives)
        return done

    row = "linear" if tp == 1 else "matmul"
    once = Counter({"linear": 5 * LAYERS}) + Counter({row: 2 * LAYERS})
    # Of qkv's and of gate's and up's input: int8 and a 4-byte scale of each token.
    share = (tp - 1) / tp
    gathers = {
        ("activations", share * T * H): 2 * LAYERS,
        ("activations", share * T * 4): 2 * LAYERS,
    }
    for done in run_ranks(run, tp):
        for mode in MODES:
            products, collectives = done[mode]
            is_full = mode == "full"
            assert products == once + Counter({"linear": 5 * LAYERS * is_full})
            repeated = collectives.copy()
            repeated.subtract(done["none"][1])
            assert +repeated == (gathers if is_full and sequence_parallel else {})
            assert -repeated == {}
        # Without recomputation there is something that could be repeated.
        assert sum(done["none"][1].values()) >= (8 * LAYERS if tp > 1 else 0)


def test_codes_stay_the_same_between_the_passes() -> None:
    """Whoever changes a weight in between changes no gradient of the pass under way."""
    at = at_layout(1, False)
    expected = gradients_of(build_stages(at("none"), ParallelMesh()))
    stage = build_stages(at("full"), ParallelMesh())
    stage.ternarize()
    codes = [layer.ternary() for layer in ternary_layers(stage)]
    gradients = gradients_of(stage)
    assert all(torch.equal(gradients[name], value) for name, value in expected.items())
    after = [layer.ternary() for layer in ternary_layers(stage)]
    assert all(a is b for a, b in zip(codes, after, strict=True))


# Memory


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that are made inside the block and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in before:  # else it was written to, or is looked at
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _storages(tensors: Any) -> list[torch.UntypedStorage]:
    found = (x for x in tree_leaves(tensors) if isinstance(x, Tensor))
    return [x.untyped_storage() for x in found if x.device.type == "cpu"]


def test_live_bytes_of_a_known_graph() -> None:
    outside = torch.zeros(1000)
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a.exp()  # 400 bytes, kept for backward
        assert live.now == live.peak == 800
        del a
        assert live.now == 400
        outside.add_(1)
        c = b[:10]  # a view
        del b
        assert live.now == 400
        del c
        assert live.now == 0
    assert live.peak == 800


HIDDEN, FFN, KV = 128, 256, 64
LENGTHS = (64, 128)


def live_bytes(mode: Recompute, layers: int, tokens: int, dropout: float) -> tuple[int, int]:
    """What is there of a microbatch before its backward pass, and the most in the whole step."""
    config = config_at(
        *(f"data.seq_length={tokens // B}", f"train.recompute={mode}"),
        *(f"model.hidden_size={HIDDEN}", f"model.intermediate_size={FFN}"),
        *(f"model.num_hidden_layers={layers}", f"train.hidden_dropout={dropout}"),
    )
    stage = build_stages(config, ParallelMesh())
    stage.ternarize()
    ids = torch.zeros(B, tokens // B, dtype=torch.int64)
    with LiveBytes() as live:
        hidden = stage(ids, None, ForwardPass(NOISE))
        kept = live.now
        hidden.sum().backward()
    return kept, live.peak


@pytest.mark.parametrize("dropout", [0, 0.2])
def test_what_is_kept(dropout: float) -> None:
    """For each token and layer, in fp32 numbers; what does not grow with both is left aside."""

    def kept_of(mode: Recompute) -> float:
        (a, b), (c, d) = (
            [live_bytes(mode, layers, tokens, dropout)[0] for tokens in LENGTHS]
            for layers in (1, 3)
        )
        return ((d - c) - (b - a)) / (LENGTHS[1] - LENGTHS[0]) / 2 / 4

    # The layer's input, and the sum over TP that is o_proj's output.
    assert kept_of("full") == 2 * HIDDEN
    # The inputs of two norms with their 1/rms, int8 of what they give with a scale, and what q, k,
    # v, gate and up made of it.
    selective = 2 * (HIDDEN + 1 + HIDDEN / 4 + 1) + HIDDEN + 2 * KV + 2 * FFN
    assert kept_of("selective") == selective
    # Beside that at least the input of both sub-norms and their int8; attention keeps more.
    assert kept_of("none") > selective + 1.25 * (HIDDEN + FFN)


def test_the_peak_of_a_step_falls() -> None:
    """Backward of a layer leaves nothing of it behind, so that at no time there is much more than
    what was kept: of 8 layers, the graph of one."""

    def growth(mode: Recompute) -> tuple[float, float]:
        (kept, peak), (long_kept, long_peak) = (live_bytes(mode, 8, t, 0.2) for t in (256, 512))
        return long_kept - kept, long_peak - peak

    (kept, none), (kept_selective, selective), (kept_full, full) = map(growth, MODES)
    of_a_layer = kept / 8
    assert full < 0.25 * none
    assert full < kept_full + 1.5 * of_a_layer
    assert selective < kept_selective + 1.5 * of_a_layer
    assert selective < none


def test_what_a_layer_kept_is_freed_by_its_backward_pass() -> None:
    """Also while the graph of the other layers, or the loss, is still held."""
    for mode in MODES:
        stage = build_stages(at_layout(1, False)(mode), ParallelMesh())
        gradients_of(stage)  # what is made once, and the gradients, are there
        with LiveBytes() as live:
            loss = loss_of(stage)
            before = live.now
            loss.backward()
            after = live.now
        assert before > 16_000
        assert after < 512, mode  # the loss itself, and a few scalars that nodes of the graph hold
