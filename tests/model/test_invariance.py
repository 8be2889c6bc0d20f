"""A token's logits have the same bits whatever is computed along with them, in training too."""

import pytest
import torch

from megabit.config import Config, DataConfig, ModelConfig, PrecisionConfig
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages
from megabit_kernels import native

LENGTH = 37
MODEL = ModelConfig(
    vocab_size=97,
    hidden_size=96,
    intermediate_size=136,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    initializer_range=0.3,  # large, so that attention is far from a mean
)


def stage_of(compute: str) -> CausalLMStages:
    precision = PrecisionConfig(compute=compute)  # type: ignore[arg-type]
    config = Config(model=MODEL, precision=precision, data=DataConfig(seq_length=LENGTH))
    return build_stages(config, ParallelMesh())


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float64"])
def test_samples_alone_and_cut_short_have_the_same_logits(compute: str) -> None:
    stage = stage_of(compute)
    tokens = torch.randint(97, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = stage.logits(stage(tokens)).view(3, LENGTH, -1)
        for sample in range(3):
            for length in (1, 16, 36, LENGTH):
                one = stage.logits(stage(tokens[sample : sample + 1, :length]))
                assert torch.equal(one.view(length, -1), whole[sample, :length]), length


@pytest.mark.skipif(native.library() is None, reason="training's own sums are torch's then")
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_training_computes_what_evaluation_does(compute: str) -> None:
    stage = stage_of(compute)
    tokens = torch.randint(97, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    trained = stage.logits(stage(tokens))
    assert trained.requires_grad
    with torch.no_grad():
        assert torch.equal(stage.logits(stage(tokens)), trained)
