"""Continue a prompt with the model as it stands, at the layout of the run: a look, not a server.

Every token is one forward pass over a window of fixed shape; there is no cache of keys and values.
"""

from functools import partial

import torch
from tokenizers import Tokenizer
from torch import Tensor

from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages
from megabit.pipeline.catalog import make_forward_schedule
from megabit.pipeline.communicate import lookahead_on
from megabit.pipeline.execute import run_schedule
from megabit.pipeline.placement import Placement
from megabit.reduce import broadcast
from megabit.tensor_parallel import ForwardPass
from megabit.tensor_parallel.logits import whole_logits


def sample_text(
    stages: CausalLMStages,
    placement: Placement,
    tokenizer: Tokenizer,
    mesh: ParallelMesh,
    prompt: str,
    num_tokens: int,
    window: int,
    *,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 50,
) -> str:
    """``prompt`` and its continuation by ``num_tokens`` tokens, the same on every rank.

    Collective over the mesh.

    Args:
        window: tokens that the model sees at once, at most its ``data.seq_length``.
        temperature: divides the logits; lower is safer text.
        top_k: draw from the so many likeliest tokens.
    """
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids or [0]
    # Sequence parallelism splits the tokens evenly, which so many copies of any window are.
    copies = mesh.tp.size if stages.context.sequence_parallel else 1
    generator = torch.Generator().manual_seed(seed)
    schedule = make_forward_schedule(placement, 1, lookahead_on(mesh.device.type))
    last = placement.rank_of(placement.num_stages - 1)
    for _ in range(num_tokens):
        seen = ids[-window:]
        tokens = torch.tensor(seen + [0] * (window - len(seen)), device=mesh.device)
        # Attention is causal, so what pads the end is not looked at.
        result = run_schedule(
            schedule,
            stages,
            [tokens.expand(copies, window)],
            partial(_logits_at, stages, len(seen) - 1),
            mesh.pp,
        )
        token = torch.zeros(1, dtype=torch.int64, device=mesh.device)
        for logits in result.outputs:  # after the last stage only
            usable = logits[: tokenizer.get_vocab_size()]
            token[0] = _draw(usable.float().cpu(), temperature, top_k, generator)
        ids.append(int(broadcast(token, source=last, axis=mesh.pp)))
    return tokenizer.decode(ids)


def _logits_at(
    stages: CausalLMStages,
    position: int,
    hidden: Tensor,
    microbatch: int,
    forward_pass: ForwardPass,
) -> Tensor:
    """Logits ``[V]`` at one position, gathered over TP."""
    own = stages.logits(hidden)[position : position + 1]
    return whole_logits(own, stages.vocab_rows, stages.context.tp)[0]


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    values, indices = logits.topk(min(top_k, len(logits)))
    choice = torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)
    return int(indices[choice])
