"""One answer under way: its tokens, its blocks, and how far it is computed."""

from dataclasses import dataclass, field
from typing import Any

from megabit.inference.block_pool import ROOT, BlockPool, Digest, chained
from megabit.inference.messages import AddRequest, SamplingParams
from megabit.inference.noise import noise_seed


@dataclass(eq=False)
class Sequence:
    """Answer ``index`` to a request."""

    request: AddRequest
    index: int
    max_length: int
    """Tokens at most, of prompt and answer."""
    seed: int
    """Of the request's noise."""
    leader: "Sequence | None" = None
    """Another answer to the same prompt, which computes that first."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far."""
    blocks: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    """Of its first blocks, as far as they are known to be full."""
    computed: int = 0
    """Tokens whose keys and values are in ``blocks``, or will be when what is under way is done."""
    in_flight: int = 0
    """Batches under way that it is in."""
    cached_tokens: int = 0
    """Tokens that it found computed when it was first let in."""
    prompt_asked: int = 0
    """Tokens of the prompt whose log probabilities were asked for."""
    is_finished: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_answered(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_new(self) -> int:
        """Tokens that could be computed now."""
        return len(self.tokens) - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Still; only the first of several answers asks."""
        is_asked = self.sampling.prompt_logprobs is not None and self.index == 0
        return is_asked and self.prompt_asked < self.num_prompt - 1

    def full_digests(self, block_size: int) -> list[Digest]:
        """Digests of all blocks that its tokens but the last one fill: the last has to be computed
        in any case, since what follows it is wanted."""
        digests: list[Digest] = []
        parent = ROOT
        for end in range(block_size, len(self.tokens), block_size):
            parent = chained(parent, self.tokens[end - block_size : end])
            digests.append(parent)
        return digests

    def remember_full_blocks(self, pool: BlockPool) -> None:
        """Let others share the blocks that are full by now."""
        size = pool.block_size
        while (len(self.digests) + 1) * size <= self.computed:
            number = len(self.digests)
            parent = self.digests[-1] if self.digests else ROOT
            digest = chained(parent, self.tokens[number * size : (number + 1) * size])
            self.digests.append(digest)
            pool.remember(self.blocks[number], digest)

    def give_up_blocks(self, pool: BlockPool) -> None:
        """Forget what is computed."""
        pool.free(self.blocks)
        self.blocks, self.digests, self.computed = [], [], 0

    def row_sampling(self) -> dict[str, Any] | None:
        """Fields of ``sampling.RowSampling`` for its next token; None: the likeliest one."""
        s = self.sampling
        has_penalty = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
        if s.temperature == 0 and not has_penalty:
            return None
        fields: dict[str, Any] = {
            "temperature": s.temperature,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "min_p": s.min_p,
            "noise": noise_seed(self.seed, self.index, len(self.tokens)),
        }
        if has_penalty:
            fields |= {
                "repetition_penalty": s.repetition_penalty,
                "presence_penalty": s.presence_penalty,
                "frequency_penalty": s.frequency_penalty,
                "prompt_tokens": self.tokens[: self.num_prompt],
                "answer_tokens": self.tokens[self.num_prompt :],
            }
        return fields
