"""Norm placements, Hadamard transforms and activation quantizers: values and gradients of a plain
implementation, the same bits at every layout, and gradients that recomputation does not change."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megabit.checkpoint.source import logical_tensors
from megabit.config import Config, ModelConfig, load_config
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages, num_parameters
from megabit.model.hadamard import hadamard, transform_width
from megabit.pipeline.balance import estimate_part_costs
from megabit.tensor_parallel import BlockPartition, ForwardPass, Noise, sharded_parameters
from megabit_kernels import numerics

CPU = torch.device("cpu")
NOISE = Noise(seed=3, step=4, microbatch=5)
B, S, VOCAB = 2, 8, 70
PLACEMENTS = ["subln", "prenorm", "in_linear", "per_proj"]
OPTIONS = {
    **{placement: [f"model.norm_placement={placement}"] for placement in PLACEMENTS},
    "hadamard": ["model.hadamard=true"],
    "a4.8": ["model.activations=a4.8"],
    "all": ["model.norm_placement=prenorm", "model.hadamard=true", "model.activations=a4.8"],
    "v2, in_linear": ["model.norm_placement=in_linear", "model.hadamard=true"],
}


def config_of(*settings: str) -> Config:
    # Feed-forward blocks are 12, 12, 12 and 16 wide, so that transforms are 4 wide there, 8 in
    # attention; KV heads are fewer than query heads.
    return load_config(
        [
            *("model.hidden_size=32", "model.intermediate_size=52", f"model.vocab_size={VOCAB}"),
            *("model.num_hidden_layers=2", "model.num_key_value_heads=2"),
            *("model.initializer_range=0.2", f"data.seq_length={S}", f"train.micro_batch_size={B}"),
            *settings,
        ]
    )


def random_tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (B, S), generator=generator)


def stages_of(config: Config, mesh: ParallelMesh | None = None) -> CausalLMStages:
    """With gains that are not ones: such would hide a norm in the wrong place."""
    stages = build_stages(config, mesh or ParallelMesh())
    with torch.no_grad():
        for name, parameter in sharded_parameters(stages).items():
            if parameter.dim() == 1:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                gain = 0.5 + torch.rand(parameter.shard.shape, generator=generator)
                span = parameter.shard.span
                parameter.copy_(gain[span.start : span.stop])
    return stages


# A plain implementation


def straight_through(x: Tensor, quantized: Tensor) -> Tensor:
    return x + (quantized - x).detach()


def int8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    return (x / scale).round().clamp(-128, 127), scale


def quantized(x: Tensor, kind: str) -> Tensor:
    """The textbook's formulas; the half that is kept is found by sorting."""
    x = x.detach()
    if kind == "int4":
        scale = x.abs().mean(-1, keepdim=True).clamp_min(1e-5) / 7**0.5
        return (x / scale).round().clamp(-8, 7) * scale
    codes, scale = int8_codes(x)
    if kind == "top_half":
        wanted = (x.shape[-1] + 1) // 2
        least = codes.abs().sort(-1, descending=True).values[:, wanted - 1 : wanted]
        codes = torch.where(codes.abs() >= least, codes, 0)
    return codes * scale


def sylvester(width: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < width:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


class Plain:
    """The model of one process, in plain torch."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.model, self.weights = model, weights

    def norm(self, x: Tensor, name: str, has_gain: bool = True) -> Tensor:
        gain = self.weights[f"{name}.weight"] if has_gain else None
        return F.rms_norm(x, x.shape[-1:], gain, self.model.rms_norm_eps)

    def linear(self, x: Tensor, name: str, kind: str) -> Tensor:
        if self.model.norm_placement == "per_proj" and not name.endswith(("o_proj", "down_proj")):
            x = self.norm(x, f"{name}.rms_norm")
        weight = self.weights[f"{name}.weight"]
        if self.model.linear == "dense":
            return F.linear(x, weight)
        codes, scale = numerics.absmean_ternarize(weight.detach())
        x = straight_through(x, quantized(x, kind))
        return F.linear(x, straight_through(weight, codes * scale))

    def before_rows(self, x: Tensor, norm: str, width: int) -> Tensor:
        if self.model.norm_placement != "prenorm":
            x = self.norm(x, norm, self.model.norm_placement != "in_linear")
        if self.model.hadamard:
            x = (x.unflatten(-1, (-1, width)) @ sylvester(width) / width**0.5).flatten(-2)
        return x

    def logits(self, tokens: Tensor) -> Tensor:
        model, has_gain = self.model, self.model.norm_placement != "in_linear"
        column, o = ("int4", "top_half") if model.activations == "a4.8" else ("int8", "int8")
        x = self.weights["model.embed_tokens.weight"][tokens.flatten()]
        for i in range(model.num_hidden_layers):
            layer = f"model.layers.{i}"
            h = self.norm(x, f"{layer}.input_layernorm", has_gain)
            q, k, v = (self.linear(h, f"{layer}.self_attn.{n}_proj", column) for n in "qkv")
            h = self.before_rows(self.attend(q, k, v), f"{layer}.self_attn.attn_sub_norm", 8)
            x = x + self.linear(h, f"{layer}.self_attn.o_proj", o)
            h = self.norm(x, f"{layer}.post_attention_layernorm", has_gain)
            gate, up = (self.linear(h, f"{layer}.mlp.{n}_proj", column) for n in ("gate", "up"))
            h = self.before_rows(gate.relu() ** 2 * up, f"{layer}.mlp.ffn_sub_norm", 4)
            x = x + self.linear(h, f"{layer}.mlp.down_proj", "int8")
        return F.linear(self.norm(x, "model.norm"), self.weights["model.embed_tokens.weight"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        model = self.model
        q, k, v = (x.view(B, S, -1, model.head_dim).transpose(1, 2) for x in (q, k, v))
        power = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
        angle = torch.outer(torch.arange(S), model.rope_theta**-power)
        turn = torch.polar(torch.ones_like(angle), angle)

        def rotated(x: Tensor) -> Tensor:
            turned = torch.complex(*x.chunk(2, -1)) * turn
            return torch.cat([turned.real, turned.imag], -1)

        y = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        return y.transpose(1, 2).flatten(2).flatten(0, 1)


@pytest.mark.parametrize(
    ("linear", "name"),
    [*(("ternary", name) for name in OPTIONS), *(("dense", name) for name in PLACEMENTS)],
)
def test_a_plain_implementation(linear: str, name: str) -> None:
    config = config_of(f"model.linear={linear}", "precision.compute=float64", *OPTIONS[name])
    stages, targets = stages_of(config), random_tokens(1)
    mask = torch.arange(B * S).view(B, S) % 3 > 0
    loss = stages.loss(stages(random_tokens(0)), targets, mask)
    found = torch.autograd.grad(loss, tuple(stages.parameters()))

    weights = {n: p.detach().clone().requires_grad_() for n, p in stages.named_parameters()}
    logits = Plain(config.model, weights).logits(random_tokens(0))
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none")[mask.flatten()].sum()
    wanted = torch.autograd.grad(expected, tuple(weights.values()))
    # fp64 through two layers. A code could flip only if a value lay within 1e-13 of a tie.
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for parameter, a, b in zip(weights, found, wanted, strict=True):
        largest = b.abs().max().item()
        assert largest > 0
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10 * largest, msg=parameter)


def test_options_are_different_models() -> None:
    losses = set()
    for settings in OPTIONS.values():
        stages = stages_of(config_of(*settings))
        losses.add(stages.loss(stages(random_tokens(0)), random_tokens(1), torch.ones(B, S)).item())
    assert len(losses) == len(OPTIONS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_names_and_numbers_of_parameters(placement: str, tied: bool) -> None:
    """Of what is built, and of what checkpoints and norms take them for."""
    stages = build_stages(
        config_of(f"model.norm_placement={placement}", f"model.tie_word_embeddings={tied}"),
        ParallelMesh(),
    )
    model = config_of(
        f"model.norm_placement={placement}", f"model.tie_word_embeddings={tied}"
    ).model
    found = {name: tuple(p.shape) for name, p in stages.named_parameters()}
    assert num_parameters(model) == sum(p.numel() for p in stages.parameters())
    assert found == {name: tensor.shape for name, tensor in logical_tensors(model).items()}
    gains = [name for name, shape in found.items() if len(shape) == 1 and ".layers.0." in name]
    layer = "model.layers.0."
    sub_norms = [layer + "self_attn.attn_sub_norm.weight", layer + "mlp.ffn_sub_norm.weight"]
    between = [f"{layer}{name}_layernorm.weight" for name in ("input", "post_attention")]
    own = [f"{layer}self_attn.{name}_proj.rms_norm.weight" for name in "qkv"]
    own += [f"{layer}mlp.{name}_proj.rms_norm.weight" for name in ("gate", "up")]
    expected = {
        "subln": between + sub_norms,
        "prenorm": between,
        "in_linear": [],
        "per_proj": between + sub_norms + own,
    }
    assert sorted(gains) == sorted(expected[placement])


# Layouts


def logits_of(config: Config, mesh: ParallelMesh) -> Tensor | None:
    """``[T, v]`` on the ranks of the last stage, which gets ``[t, H]`` from the one before."""
    stages, tokens, tp = stages_of(config, mesh), random_tokens(0), config.parallel.tp
    hidden = None
    if mesh.pp.rank > 0:
        hidden = torch.empty(stages.hidden_shape(B, S), dtype=stages.hidden_dtype)
        dist.recv(hidden, dist.get_rank() - tp)
    with torch.no_grad():
        hidden = stages(tokens, hidden)
        if mesh.pp.rank == mesh.pp.size - 1:
            return stages.logits(hidden)
        dist.send(hidden, dist.get_rank() + tp)
    return None


@pytest.mark.parametrize(
    ("tp", "pp"),
    [(2, 1), (4, 1), (1, 2), *(pytest.param(tp, 2, marks=pytest.mark.slow) for tp in (2, 4))],
)
def test_logits_have_the_same_bits_at_every_layout(tp: int, pp: int) -> None:
    """With sequence parallelism and without, in fp32 and bf16."""
    own = [*OPTIONS.values()]
    own += [["precision.compute=bfloat16", *OPTIONS[name]] for name in ("per_proj", "all")]
    layout = [f"parallel.tp={tp}", f"parallel.pp={pp}"]
    layout += ["parallel.layers_per_stage=[1,1]"] * (pp == 2)
    # Each option with sequence parallelism or without, by turns.
    splits = [f"parallel.sequence_parallel={tp > 1 and i % 2 == tp // 4}" for i in range(len(own))]
    configs = [config_of(*o, *layout, s) for o, s in zip(own, splits, strict=True)]

    def run() -> list[Tensor | None]:
        mesh = ParallelMesh.create(tp, pp, CPU)
        return [logits_of(config, mesh) for config in configs]

    by_rank = run_ranks(run, tp * pp)[-tp:]
    for i, settings in enumerate(own):
        expected = logits_of(config_of(*settings), ParallelMesh())
        assert expected is not None
        found = torch.cat([logits[i] for logits in by_rank], 1)  # type: ignore[misc]
        assert torch.equal(found, expected), (settings, splits[i])


def gradients_of(config: Config, mesh: ParallelMesh) -> dict[str, Any]:
    """Of a training pass, by name, with where in the logical tensor they belong."""
    stages = stages_of(config, mesh)
    mask = torch.arange(B * S).view(B, S) % 3 > 0
    hidden = stages(random_tokens(0), None, ForwardPass(NOISE))
    stages.loss(hidden, random_tokens(1), mask).backward()
    parameters = sharded_parameters(stages)
    if stages.head_use is not None:
        parameters["tied head"] = stages.head_use
    assert all(parameter.grad is not None for parameter in parameters.values())
    return {name: (p.shard, p.grad) for name, p in parameters.items()}


LAYOUTS = [(2, False), (4, True), pytest.param(2, True, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_gradients_in_layout_exact_training(tp: int, sequence_parallel: bool) -> None:
    settings = {name: ["parallel.exact=full", *own] for name, own in OPTIONS.items()}
    settings["all"] += ["train.recompute=full"]
    layout = [f"parallel.tp={tp}", f"parallel.sequence_parallel={sequence_parallel}"]

    configs = {name: config_of(*own, *layout) for name, own in settings.items()}

    def run() -> dict[str, dict[str, Any]]:
        mesh = ParallelMesh.create(tp, 1, CPU)
        return {name: gradients_of(config, mesh) for name, config in configs.items()}

    unsplit = {
        name: gradients_of(config_of(*own), ParallelMesh()) for name, own in settings.items()
    }
    for rank in run_ranks(run, tp):
        for option, gradients in rank.items():
            assert gradients.keys() == unsplit[option].keys()
            for name, (shard, gradient) in gradients.items():
                span = shard.span
                whole = unsplit[option][name][1]
                expected = whole.narrow(shard.dim, span.start, span.width)
                assert torch.equal(gradient, expected), (option, name)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), *LAYOUTS])
def test_recomputation_changes_no_gradient(tp: int, sequence_parallel: bool) -> None:
    """And sends nothing again but the int8 gathers of column inputs, in mode ``full``."""
    layout = [f"parallel.tp={tp}", f"parallel.sequence_parallel={sequence_parallel}"]
    modes = [f"train.recompute={mode}" for mode in ("none", "selective", "full")]
    configs = {
        name: [config_of(*OPTIONS[name], *layout, mode) for mode in modes]
        for name in ("per_proj", "all", "v2, in_linear")
    }

    def run() -> None:
        mesh = ParallelMesh() if tp == 1 else ParallelMesh.create(tp, 1, CPU)
        for name, by_mode in configs.items():
            results, sent = [], []
            for config in by_mode:
                mesh.tp.sent.clear()
                results.append(gradients_of(config, mesh))
                sent.append(dict(mesh.tp.sent))
            for other in results[1:]:
                for parameter, (_, gradient) in results[0].items():
                    assert torch.equal(other[parameter][1], gradient), (name, parameter)
            assert sent[0] == sent[1]
            if sequence_parallel:
                assert sent[2].pop("activations") > sent[0].pop("activations")
            assert sent[0] == sent[2]

    run_ranks(run, tp)


# The transform


def test_widths_of_transforms() -> None:
    assert transform_width(BlockPartition(32, 4)) == 8
    assert transform_width(BlockPartition(52, 4)) == 4  # 12, 12, 12, 16
    assert transform_width(BlockPartition(6912, 20)) == 4  # 344 or 348
    assert transform_width(BlockPartition(2560, 20)) == 128
    assert transform_width(BlockPartition(54, 4)) == 2  # 12, 12, 12, 18
    assert transform_width(BlockPartition(96, 4)) == 8  # 24 each
    for size, blocks in ((32, 4), (52, 4), (6912, 20)):
        partition = BlockPartition(size, blocks)
        width = transform_width(partition)
        assert all(partition.edge(block) % width == 0 for block in range(blocks + 1))


@pytest.mark.parametrize("width", [1, 2, 4, 8, 32])
def test_a_hadamard_transform(width: int) -> None:
    x = torch.randn(5, 64, dtype=torch.float64).requires_grad_()
    y = hadamard(x, width)
    expected = (x.unflatten(-1, (-1, width)) @ sylvester(width) / width**0.5).flatten(-2)
    # Sums of up to 32 numbers, in another order.
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(hadamard(y, width), x, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: hadamard(x, width), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_transform_do_not_depend_on_the_split(dtype: torch.dtype) -> None:
    x = torch.randn(7, 96).to(dtype)
    whole = hadamard(x, 8)
    assert whole.dtype == dtype
    for parts in (2, 3, 4, 12):
        split = [hadamard(part, 8) for part in x.chunk(parts, 1)]
        assert torch.equal(torch.cat(split, 1), whole)
    # Rounded once: what fp32 gives, rounded.
    assert torch.equal(whole, hadamard(x.float(), 8).to(dtype))


def test_an_outlier_costs_less_behind_a_transform() -> None:
    """What the transform is for: int8 keeps more of the other columns."""
    x = torch.randn(64, 32, dtype=torch.float64)
    x[:, 3] += 200

    def error(transform: Callable[[Tensor], Tensor]) -> float:
        y = transform(x)
        others = torch.ones(32, dtype=torch.bool)
        others[3] = False
        return float((transform(quantized(y, "int8")) - x)[:, others].square().mean())

    assert error(lambda x: hadamard(x, 32)) < 0.2 * error(lambda x: x)


def test_full_precision_activations_are_costed_as_such() -> None:
    int8, full, four = (
        estimate_part_costs(config_of(f"model.activations={kind}")).layer
        for kind in ("int8", "full", "a4.8")
    )
    assert int8 == four
    assert full.forward > 2 * int8.forward
    assert full.weight_gradient == int8.weight_gradient
    dense = replace(config_of(), model=replace(config_of().model, linear="dense"))
    assert full == estimate_part_costs(dense).layer
