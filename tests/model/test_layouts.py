"""The whole model on several ranks: logits at every TP, and gradients in layout-exact training."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megabit.config import Config, load_config
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages
from megabit.tensor_parallel import ForwardPass, Noise, Shard, sharded_parameters

CPU = torch.device("cpu")
NOISE = Noise(seed=3, step=4, microbatch=5)
B, S, VOCAB = 2, 12, 70
Gradients = dict[str, tuple[Shard, Tensor]]


def config_at(*settings: str) -> Config:
    # Blocks of unequal width; KV heads are fewer than query heads, so that tp=4 shares them.
    return load_config(
        [
            *("model.hidden_size=32", "model.intermediate_size=52", f"model.vocab_size={VOCAB}"),
            *("model.num_hidden_layers=2", "model.num_key_value_heads=2"),
            *("model.initializer_range=0.2", f"data.seq_length={S}", f"train.micro_batch_size={B}"),
            *settings,
        ]
    )


def mesh_of(config: Config) -> ParallelMesh:
    tp = config.parallel.tp
    return ParallelMesh() if tp == 1 else ParallelMesh.create(tp, 1, CPU)


def random_tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (B, S), generator=generator)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_logits_have_the_same_bits_at_every_degree(compute: str) -> None:
    """With sequence parallelism and without, and however integers are added up."""
    tokens = random_tokens(0)

    def logits_of(config: Config, mesh: ParallelMesh) -> Tensor:
        stage = build_stages(config, mesh)
        with torch.no_grad():
            return stage.logits(stage(tokens))

    precision = f"precision.compute={compute}"
    expected = logits_of(config_at(precision), ParallelMesh())
    for tp in (2, 4):
        layouts = [
            config_at(
                *(precision, f"parallel.tp={tp}", f"parallel.row_reduce={mode}"),
                f"parallel.sequence_parallel={sequence_parallel}",
            )
            for mode, sequence_parallel in product(("int32", "exact16"), (False, True))
        ]

        def run(layouts: list[Config] = layouts) -> list[Tensor]:
            mesh = mesh_of(layouts[0])
            return [logits_of(config, mesh) for config in layouts]

        for by_rank in zip(*run_ranks(run, tp), strict=True):
            assert torch.equal(torch.cat(by_rank, 1), expected)


def gradients_of(config: Config, mesh: ParallelMesh) -> Gradients:
    """Of a training pass, by name; of what serves as the output head under a name of its own."""
    stage = build_stages(config, mesh)
    mask = torch.arange(B * S).view(B, S) % 3 > 0
    stage.loss(stage(random_tokens(0), None, ForwardPass(NOISE)), random_tokens(1), mask).backward()
    parameters = sharded_parameters(stage)
    if stage.head_use is not None:
        parameters["tied head"] = stage.head_use
    gradients = {n: (p.shard, p.grad) for n, p in parameters.items() if p.grad is not None}
    assert gradients.keys() == parameters.keys()
    return gradients


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["model.tie_word_embeddings=false", "train.hidden_dropout=0.2", "train.recompute=full"],
        ["precision.ternary_backward=int8", "parallel.row_reduce=exact16"],
        ["precision.ternary_backward=bfloat16", "model.hidden_act=silu"],
        ["precision.compute=bfloat16", "train.recompute=selective"],
        # 2 blocks; a KV head is on both ranks.
        ["model.hidden_size=48", "model.num_attention_heads=6", "model.num_key_value_heads=3"],
        # 8 blocks, of which each rank has 2 or 4.
        ["model.hidden_size=64", "model.num_attention_heads=8", "model.num_key_value_heads=1"],
    ],
    ids=["plain", "untied, dropout, full", "int8", "bf16 backward", "bf16", "6 heads", "8 heads"],
)
def test_gradients_in_layout_exact_training(settings: list[str]) -> None:
    exact = ["parallel.exact=full", *settings]
    unsplit = gradients_of(config_at(*exact), ParallelMesh())
    degrees = (2,) if "model.num_attention_heads=6" in settings else (2, 4)
    for tp in degrees:
        layouts = [
            config_at(*exact, f"parallel.tp={tp}", f"parallel.sequence_parallel={on}")
            for on in (False, True)
        ]

        def run(layouts: list[Config] = layouts) -> list[Gradients]:
            mesh = mesh_of(layouts[0])
            return [gradients_of(config, mesh) for config in layouts]

        for ranks in zip(*run_ranks(run, tp), strict=True):
            for gradients in ranks:
                assert gradients.keys() == unsplit.keys()
                for name, (shard, gradient) in gradients.items():
                    span = shard.span  # all that the rank holds, owned or not
                    expected = unsplit[name][1].narrow(shard.dim, span.start, span.width)
                    assert torch.equal(gradient, expected), (tp, name)


def test_without_layout_exact_training_gradients_have_other_bits() -> None:
    """So the comparison above can fail."""
    unsplit = gradients_of(config_at(), ParallelMesh())
    config = config_at("parallel.tp=4")
    ranks = run_ranks(lambda: gradients_of(config, mesh_of(config)), 4)
    name = "model.layers.0.self_attn.q_proj.weight"
    gradient = torch.cat([gradients[name][1] for gradients in ranks])
    assert not torch.equal(gradient, unsplit[name][1])
    # fp32 through two layers, relative to the largest.
    largest = unsplit[name][1].abs().max().item()
    torch.testing.assert_close(gradient, unsplit[name][1], rtol=1e-4, atol=1e-5 * largest)


# Tied embeddings


def stage_of(*settings: str) -> CausalLMStages:
    return build_stages(config_at(*settings), ParallelMesh())


def test_a_tied_head_hands_over_a_second_gradient() -> None:
    """Of one parameter or, in layout-exact training, of a second one with the same values."""
    plain, exact = stage_of(), stage_of("parallel.exact=full")
    untied = stage_of("model.tie_word_embeddings=false", "parallel.exact=full")
    assert plain.head_use is None
    assert untied.head_use is None
    assert plain.embedding_weight is not None
    assert exact.embedding_weight is not None
    assert exact.head_use is not None
    assert (plain.embedding_weight.uses, exact.embedding_weight.uses) == (2, 1)
    assert exact.head_use.data_ptr() == exact.embedding_weight.data_ptr()
    assert sharded_parameters(exact).keys() == sharded_parameters(plain).keys()

    collected: list[Tensor] = []
    plain.embedding_weight.collect(collected.append)
    loss = plain.loss(plain(random_tokens(0)), random_tokens(1), torch.ones(B, S))
    loss.backward()
    assert len(collected) == 2
    gradients = gradients_of(config_at("parallel.exact=full"), ParallelMesh())
    assert not torch.equal(gradients["tied head"][1], gradients["model.embed_tokens.weight"][1])
