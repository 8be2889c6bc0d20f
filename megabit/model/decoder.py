"""The decoder, as the part of it that one pipeline rank holds: a stage, or several.

Pre-norm blocks, by default with SubLN as in BitNet-2B4T (arXiv 2504.12285); ``linear`` has the
other placements of norms. Parameter names are those of Hugging Face's ``BitNetForCausalLM``, with
the layer numbers of the whole model, whatever the stage.
Tokens of a microbatch are flattened: ``T = B · S`` rows, of which a rank holds ``t`` between the
layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megabit.config import Config, ModelConfig, tree_blocks
from megabit.mesh import ParallelMesh
from megabit.model.attention import Attention
from megabit.model.dropout import Dropout
from megabit.model.huggingface_attention import HuggingFaceAttention
from megabit.model.initialize import initialize
from megabit.model.linear import has_gains
from megabit.model.mlp import MLP
from megabit.model.norm import hidden_norm
from megabit.model.recompute import recomputed
from megabit.model.rope import RotaryEmbedding
from megabit.pipeline.layout import StageLayout
from megabit.pipeline.plan import StagePlan, plan_stages
from megabit.tensor_parallel import (
    PLAIN,
    BlockPartition,
    ColumnParallelLinear,
    ForwardPass,
    LayerContext,
    ShardedParameter,
    Span,
    TernaryLayer,
    VocabParallelEmbedding,
    enter_column_parallel,
    ternarize_layers,
    ternary_layers,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits,
)
from megabit.tensor_parallel.weight_scale import WeightScale


@dataclass(frozen=True)
class LayerTraining:
    """What layers do in training only."""

    hidden_dropout: float = 0.0
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: tuple[int, ...] | None = None
    """Layers of the whole model that recompute; None: all."""

    @staticmethod
    def of(config: Config) -> "LayerTraining":
        """As configured."""
        train = config.train
        layers = train.recompute_layers
        return LayerTraining(
            train.hidden_dropout, train.recompute, None if layers is None else tuple(layers)
        )

    def recompute_of(self, layer: int) -> Literal["none", "selective", "full"]:
        """What ``layer`` recomputes."""
        chosen = self.recompute_layers is None or layer in self.recompute_layers
        return self.recompute if chosen else "none"


class DecoderLayer(nn.Module):
    """``[t, H]`` → ``[t, H]``.

    Args:
        index: of the layer in the whole model.
    """

    def __init__(
        self, model: ModelConfig, index: int, training: LayerTraining, context: LayerContext
    ) -> None:
        super().__init__()
        self.recompute = training.recompute_of(index)
        self.input_layernorm = hidden_norm(model, context, has_gains(model))
        attention_type = Attention if context.huggingface is None else HuggingFaceAttention
        self.self_attn = attention_type(model, index, context)
        self.post_attention_layernorm = hidden_norm(model, context, has_gains(model))
        self.mlp = MLP(model, context)
        self.dropouts = [
            Dropout(training.hidden_dropout, f"layers.{index}.{part}", context)
            for part in ("self_attn", "mlp")
        ]

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: int,
        forward_pass: ForwardPass = PLAIN,
    ) -> Tensor:
        selective = self.recompute == "selective" and torch.is_grad_enabled()

        def compute(x: Tensor, forward_pass: ForwardPass) -> Tensor:
            after_attention, after_mlp = self.dropouts
            h = self.input_layernorm(x, forward_pass)
            y = self.self_attn(h, rope, batch, forward_pass, selective)
            x = x + after_attention(y, forward_pass)
            y = self.mlp(self.post_attention_layernorm(x, forward_pass), forward_pass, selective)
            return x + after_mlp(y, forward_pass)

        if self.recompute == "full" and torch.is_grad_enabled():
            return recomputed(compute, (x,), forward_pass)
        return compute(x, forward_pass)


class DecoderStages(nn.Module):
    """The layers of a rank's stages, with the embedding if it has the first stage, and the norm if
    it has the last."""

    def __init__(
        self,
        model: ModelConfig,
        layouts: Sequence[StageLayout],
        rows: Span,
        max_length: int,
        training: LayerTraining,
        context: LayerContext,
        has_tied_head: bool,
    ) -> None:
        super().__init__()
        has_embedding, has_head = (any(x.embedding for x in layouts), any(x.head for x in layouts))
        tied_copy = has_tied_head and not has_embedding
        if has_embedding or tied_copy:
            if tied_copy:  # counted once, by the rank that has the first stage
                rows = rows.owning(rows.start, rows.start)
            self.embed_tokens = VocabParallelEmbedding(rows, model.hidden_size, context)
        self.embedding_dropout = Dropout(training.hidden_dropout, "embed_tokens", context)
        self.layers = nn.ModuleDict(
            {
                str(i): DecoderLayer(model, i, training, context)
                for layout in layouts
                for i in layout.layers
            }
        )
        if has_head:
            self.norm = hidden_norm(model, context)
        self.rope = RotaryEmbedding(
            model.head_dim,
            max_length,
            model.rope_theta,
            context.device,
            as_huggingface=context.huggingface is not None,
        )


class CausalLMStages(nn.Module):
    """The stages of the language model that one pipeline rank holds.

    ``forward`` maps tokens (first stage) or hidden states to hidden states; after the last stage,
    ``loss`` and ``logits`` map those further.

    Args:
        layouts: of the rank's stages, by chunk.
        has_logits: with false, there is no output head behind the last norm, neither one of its own
            nor a second use of the embedding: for an objective of hidden states.
    """

    def __init__(
        self,
        model: ModelConfig,
        layouts: Sequence[StageLayout],
        max_length: int,
        context: LayerContext,
        training: LayerTraining | None = None,
        has_logits: bool = True,
    ) -> None:
        super().__init__()
        training = training or LayerTraining()
        self.layouts = tuple(layouts)
        self.context = context
        tp = context.tp
        partition = BlockPartition(model.vocab_size, model.num_attention_heads)
        self.vocab_rows = partition.span(tp.rank, tp.size)
        self.has_head = has_logits and any(layout.head for layout in layouts)
        self.is_tied = has_logits and model.tie_word_embeddings
        has_tied_head = self.has_head and self.is_tied
        self.model = DecoderStages(
            model, layouts, self.vocab_rows, max_length, training, context, has_tied_head
        )
        if self.has_head and not self.is_tied:
            self.lm_head = ColumnParallelLinear(model.hidden_size, self.vocab_rows, context)
        self.hidden_size = model.hidden_size
        for name, module in self.named_modules():
            if isinstance(module, TernaryLayer):
                module.name = name
        # In a list, since a module would take it for a parameter of its own.
        self._head_uses: list[ShardedParameter] = []
        weight = self.embedding_weight
        if self.is_tied and self.has_head and any(layout.embedding for layout in layouts):
            assert weight is not None
            if context.tree_blocks is None and len(layouts) == 1:
                weight.uses = 2
            else:
                self._head_uses.append(weight.second_use())

    @property
    def hidden_dtype(self) -> torch.dtype:
        return self.context.compute_dtype

    @property
    def attentions(self) -> dict[int, Attention]:
        """Those of the rank's stages, by the number of their layer in the whole model."""
        return {module.layer: module for module in self.modules() if isinstance(module, Attention)}

    @property
    def embedding_weight(self) -> ShardedParameter | None:
        """The embedding matrix, where this rank has a copy of it."""
        embedding = getattr(self.model, "embed_tokens", None)
        return None if embedding is None else embedding.weight

    @property
    def head_use(self) -> ShardedParameter | None:
        """The embedding's values once more, as the tied head's weight, where both are on this rank:
        on different stages, or in layout-exact training. Else the head's gradient would be added to
        the embedding's after each microbatch, and not, as between two ranks, after the last one."""
        return self._head_uses[0] if self._head_uses else None

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int]:
        """Shape ``[t, H]`` of what goes between stages for a microbatch ``[batch, length]``."""
        ranks = self.context.tp.size if self.context.sequence_parallel else 1
        return batch * length // ranks, self.hidden_size

    def chunk_of(self, name: str) -> int:
        """The chunk in whose backward pass the parameter of that name gets its gradient."""
        part = name.removeprefix("model.")
        if part.startswith("layers."):
            layer = int(part.split(".")[1])
            return [layer in layout.layers for layout in self.layouts].index(True)
        if part.startswith("embed_tokens") and self.layouts[0].embedding:
            return 0
        # Norm, head, the second use of a tied embedding, and its copy where the first is elsewhere.
        return len(self.layouts) - 1

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor | None = None,
        forward_pass: ForwardPass = PLAIN,
        chunk: int = 0,
    ) -> Tensor:
        """Hidden states ``[t, H]`` after the layers of one of the rank's stages.

        Args:
            tokens: int64 ``[B, S]``, read by the first stage; others take their shape only.
            hidden: ``[t, H]`` from the stage before; None on the first stage.
            forward_pass: of this microbatch on this stage.
            chunk: which of the rank's stages.
        """
        batch, length = tokens.shape
        if hidden is None:
            x = self.model.embed_tokens(tokens.flatten(), forward_pass)
            x = self.model.embedding_dropout(x, forward_pass)
        else:
            x = hidden
        cache = forward_pass.cache
        rope = (
            self.model.rope.tables(length, x.dtype)
            if cache is None
            else self.model.rope.tables_at(cache.positions, x.dtype)
        )
        for index in self.layouts[chunk].layers:
            x = self.model.layers[str(index)](x, rope, batch, forward_pass)
        return x

    def ternarize(self) -> None:
        """Derive codes and scales of all ternary layers from their weights, after each update."""
        ternarize_layers(list(ternary_layers(self)), self.context.tp)

    def zero_fraction(self) -> tuple[int, int]:
        """How many of this rank's codes are zero, and how many there are."""
        zeros = total = 0
        for layer in ternary_layers(self):
            codes = layer.weight.shard.owned(layer.ternary().codes())
            zeros += int((codes == 0).sum())
            total += codes.numel()
        return zeros, total

    def logits(self, hidden: Tensor, forward_pass: ForwardPass = PLAIN) -> Tensor:
        """``[t, H]`` → ``[T, v]``, this rank's part of the vocabulary."""
        values = enter_column_parallel(self.model.norm(hidden).values, self.context)
        weight = self.model.embed_tokens.weight if self.is_tied else self.lm_head.weight
        if self.head_use is not None:
            weight = self.head_use
        if self.context.huggingface is not None:
            return F.linear(values, weight.ready().to(values.dtype))
        return vocab_parallel_logits(values, weight, self.vocab_rows, self.context, forward_pass)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        mask: Tensor,
        forward_pass: ForwardPass = PLAIN,
    ) -> Tensor:
        """Sum of the cross-entropy over the target tokens that ``mask`` keeps, in nats.

        ``targets`` int64 and ``mask`` bool are ``[B, S]``. The same on every TP rank.
        """
        losses = vocab_parallel_cross_entropy(
            self.logits(hidden, forward_pass), targets.flatten(), self.vocab_rows, self.context.tp
        )
        return (losses.objective * mask.flatten()).sum()


def build_stages(
    config: Config, mesh: ParallelMesh, plan: StagePlan | None = None
) -> CausalLMStages:
    """This rank's stages, initialised. The same values at every layout.

    Args:
        plan: that of ``config``, where it is made already.
    """
    plan = plan or plan_stages(config, mesh.dp.size)
    context = layer_context(config, mesh)
    stages = CausalLMStages(
        config.model,
        plan.of_rank(mesh.pp.rank),
        config.data.seq_length,
        context,
        LayerTraining.of(config),
        has_logits=config.loss.objective == "language_model",
    )
    initialize(stages, config.train.seed, config.model.initializer_range)
    return stages


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the logical model."""
    hidden, ffn = model.hidden_size, model.intermediate_size
    kv = model.num_key_value_heads * model.head_dim
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn
    layer += {
        "subln": 3 * hidden + ffn,  # two norms between layers, two before o and down
        "prenorm": 2 * hidden,
        "in_linear": 0,
        "per_proj": 3 * hidden + ffn + 5 * hidden,  # and those of q, k, v, gate and up
    }[model.norm_placement]
    embeddings = (1 if model.tie_word_embeddings else 2) * model.vocab_size * hidden
    return model.num_hidden_layers * layer + embeddings + hidden


def layer_context(config: Config, mesh: ParallelMesh) -> LayerContext:
    compute = getattr(torch, config.precision.compute)
    backward = config.precision.ternary_backward
    is_exact = config.parallel.exact == "full"
    return LayerContext(
        tp=mesh.tp,
        device=mesh.device,
        compute_dtype=compute,
        master_dtype=torch.promote_types(compute, torch.float32),
        ternary_backward_dtype=compute if backward == "compute" else getattr(torch, backward),
        sequence_parallel=config.parallel.sequence_parallel,
        row_reduce=config.parallel.row_reduce,
        tree_blocks=tree_blocks(config.model.num_attention_heads) if is_exact else None,
        weight_scale=WeightScale.of(config.model),
    )
