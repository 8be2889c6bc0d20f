"""Seeds that no two draws share, and results that a recomputation takes over."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megabit.tensor_parallel import PLAIN, ForwardPass, Kept, Noise


def test_seeds_differ_by_run_step_microbatch_and_name() -> None:
    names = ("embed_tokens", "layers.1.mlp", "layers.11.mlp", "layers.1.self_attn", "")
    numbers = (0, 1, 2, 10, 11, 21, 111)
    seeds = {
        key: Noise(*key[:3]).seed_of(key[3]) for key in product(numbers, numbers, numbers, names)
    }
    assert len(set(seeds.values())) == len(seeds) == 7**3 * 5
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    # Spread over all 63 bits, so that generators that take some of them differ too.
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds.values()) / len(seeds)
        assert abs(share - 0.5) < 5 * 0.5 / len(seeds) ** 0.5


def test_a_seed_is_the_same_each_time() -> None:
    """In any process: it is a digest, not Python's hash, which differs from run to run."""
    assert Noise(1, 2, 3).seed_of("a") == Noise(1, 2, 3).seed_of("a")
    assert Noise(1234, 5, 6).seed_of("model.layers.0.mlp.up_proj") == 1948463986968929943
    assert PLAIN.seed_of("a") == 0
    assert ForwardPass(Noise(1, 2, 3)).seed_of("a") == Noise(1, 2, 3).seed_of("a")


class Counted:
    """Gives ``[2, 3]`` of 1, 2, 3, … and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return torch.full((2, 3), float(self.calls))


def test_a_plain_pass_computes_each_time() -> None:
    compute = Counted()
    assert [PLAIN.product(compute)[0, 0].item() for _ in range(2)] == [1, 2]
    assert [PLAIN.statistics(compute)[0, 0].item() for _ in range(2)] == [3, 4]


def test_a_recomputation_takes_results_over_in_order() -> None:
    kept, compute = Kept(), Counted()

    def part(forward_pass: ForwardPass) -> list[Tensor]:
        return [
            forward_pass.statistics(compute),
            forward_pass.product(compute),
            forward_pass.statistics(compute),
            forward_pass.product(compute),
        ]

    first = part(ForwardPass(kept=kept))
    kept.end_first_pass()
    for _ in range(2):  # as often as it is asked for
        again = part(ForwardPass(kept=Kept(kept.results, is_replay=True)))
        assert compute.calls == 4
        # Tensors of their own: a graph that is built on them does not keep what is taken over.
        assert not any(a is b for a, b in zip(again, kept.results, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(again[:3], first[:3], strict=True))
        # Behind the last product nothing reads its values: it has a shape and one element.
        assert again[3].shape == first[3].shape
        assert again[3].untyped_storage().nbytes() == 4


def test_statistics_behind_the_last_product_are_kept() -> None:
    kept, compute = Kept(), Counted()
    forward_pass = ForwardPass(kept=kept)
    forward_pass.product(compute)
    forward_pass.statistics(compute)
    kept.end_first_pass()
    forward_pass = ForwardPass(kept=Kept(kept.results, is_replay=True))
    assert forward_pass.product(compute).untyped_storage().nbytes() == 4
    assert (forward_pass.statistics(compute) == 2).all()
    with pytest.raises(IndexError):  # a second pass that asks for more is another computation
        forward_pass.statistics(compute)
