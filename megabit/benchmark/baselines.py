"""The same model and recipe in plain torch, as a user without megabit would write them.

One process and nothing of megabit's model: ``nn.Linear``, ``F.rms_norm``, fused attention, autograd
and torch's fused AdamW. Two kinds of linear layers:

- dense;
- fake-quantized, as Hugging Face's ``AutoBitLinear`` and onebitllms have them: every forward pass
  quantizes and dequantizes weight and input, and multiplies in floating point. Straight-through, by
  adding what quantization changes as a constant.

In bf16 the master weights stay fp32 and are cast where they are used; activations are bf16. That is
faster than autocast, which keeps the residual stream in fp32 and casts it before every product.
Parameters have the names and the initial values that they have in megabit.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megabit.config import Config, ModelConfig
from megabit.data.batches import Batch
from megabit.model.initialize import logical_normal
from megabit.training.schedule import hyperparameters
from megabit_kernels.numerics import MIN_SCALE, stats_dtype

IGNORED = -100
"""The target of a prediction that does not count, for ``F.cross_entropy``."""


class DenseLinear(nn.Linear):
    """``x […, K]`` → ``[…, N]`` in the dtype of ``x``, whatever that of the weight."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class FakeQuantizedLinear(DenseLinear):
    """A BitLinear that multiplies dequantized values."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, dtype)
        self.quantize_input = QuantizeInput()
        self.quantize_weight = QuantizeWeight()

    def forward(self, input: Tensor) -> Tensor:
        weight = self.quantize_weight(self.weight)
        return F.linear(self.quantize_input(input), weight.to(input.dtype))


class QuantizeInput(nn.Module):
    """``x […, K]`` → the int8 value nearest to it, times the scale of its token."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wide = x.to(stats_dtype(x.dtype))
            scale = wide.abs().amax(-1, keepdim=True).clamp_(min=MIN_SCALE).div_(127)
            values = wide.div(scale).round_().clamp_(-128, 127).mul_(scale)
            change = values.to(x.dtype).sub_(x)
        return x + change


class QuantizeWeight(nn.Module):
    """``w [N, K]`` → its code −1, 0 or +1, times the mean magnitude of ``w``."""

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            scale = weight.abs().mean().clamp_(min=MIN_SCALE)
            change = weight.div(scale).round_().clamp_(-1, 1).mul_(scale).sub_(weight)
        return weight + change


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of ``x``, whatever that of the gain."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, tuple(self.normalized_shape), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """``x [B, S, H]`` → the same shape."""

    def __init__(self, model: ModelConfig, linear: type[DenseLinear], dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.is_grouped = model.num_key_value_heads != model.num_attention_heads
        kv_size = model.num_key_value_heads * model.head_dim
        self.q_proj = linear(model.hidden_size, model.hidden_size, dtype)
        self.k_proj = linear(model.hidden_size, kv_size, dtype)
        self.v_proj = linear(model.hidden_size, kv_size, dtype)
        self.attn_sub_norm = Norm(model.hidden_size, model.rms_norm_eps, dtype=dtype)
        self.o_proj = linear(model.hidden_size, model.hidden_size, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(
            rotated(q, cos, sin),
            rotated(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=self.is_grouped,
        )
        return self.o_proj(self.attn_sub_norm(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """``x [B, S, H]`` → the same shape."""

    def __init__(self, model: ModelConfig, linear: type[DenseLinear], dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden_act = model.hidden_act
        self.gate_proj = linear(model.hidden_size, model.intermediate_size, dtype)
        self.up_proj = linear(model.hidden_size, model.intermediate_size, dtype)
        self.ffn_sub_norm = Norm(model.intermediate_size, model.rms_norm_eps, dtype=dtype)
        self.down_proj = linear(model.intermediate_size, model.hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.silu(gate) if self.hidden_act == "silu" else F.relu(gate).square()
        return self.down_proj(self.ffn_sub_norm(gate * self.up_proj(x)))


class Layer(nn.Module):
    """``x [B, S, H]`` → the same shape."""

    def __init__(
        self, model: ModelConfig, dropout: float, linear: type[DenseLinear], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.input_layernorm = Norm(model.hidden_size, model.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(model, linear, dtype)
        self.post_attention_layernorm = Norm(model.hidden_size, model.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(model, linear, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Tokens int64 ``[B, S]`` → ``[B, S, H]`` in ``dtype``, after the final norm."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, linear: type[DenseLinear], dtype: torch.dtype) -> None:
        super().__init__()
        model, dropout = config.model, config.train.hidden_dropout
        master_dtype = torch.promote_types(dtype, torch.float32)
        self.compute_dtype = dtype
        self.dropout = nn.Dropout(dropout)
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size, dtype=master_dtype)
        self.layers = nn.ModuleList(
            Layer(model, dropout, linear, master_dtype) for _ in range(model.num_hidden_layers)
        )
        self.norm = Norm(model.hidden_size, model.rms_norm_eps, dtype=master_dtype)
        exponent = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
        positions = torch.arange(config.data.seq_length, dtype=torch.float64)
        angle = torch.outer(positions, model.rope_theta**-exponent)  # [S, head_dim/2]
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed_tokens(tokens).to(self.compute_dtype))
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)


class CausalLM(nn.Module):
    """The decoder with its head: tokens and targets int64 ``[B, S]`` → the sum of the losses."""

    def __init__(self, config: Config, linear: type[DenseLinear], dtype: torch.dtype) -> None:
        super().__init__()
        model = config.model
        self.model = Decoder(config, linear, dtype)
        self.lm_head: DenseLinear | None = None
        if not model.tie_word_embeddings:
            master_dtype = torch.promote_types(dtype, torch.float32)
            self.lm_head = DenseLinear(model.hidden_size, model.vocab_size, master_dtype)
        self._initialize(config.train.seed, model.initializer_range)

    @torch.no_grad()
    def _initialize(self, seed: int, std: float) -> None:
        for name, parameter in self.named_parameters():
            shape = tuple(parameter.shape)
            if len(shape) > 1:  # gains are ones already
                parameter.copy_(logical_normal(seed, name, shape, 0, shape[0]).mul_(std))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.model(tokens)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = F.linear(x, head.weight.to(x.dtype)).flatten(0, 1)  # [B · S, V]
        logits = logits.to(stats_dtype(logits.dtype))
        return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)


class PlainTrainer:
    """Trains the configured model: gradient accumulation, clipping, AdamW, the same schedule."""

    def __init__(
        self,
        config: Config,
        linear: type[DenseLinear],
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.config = config
        self.model = CausalLM(config, linear, dtype).to(device or torch.device("cpu"))
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() == 1]},
        ]
        betas = (config.optim.betas[0], config.optim.betas[1])
        self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=config.optim.eps, fused=True)

    def train_step(self, batch: Batch, step: int) -> float:
        """Optimizer step ``step`` (0-based) on the global ``batch``; returns its mean loss."""
        optim = self.config.optim
        self.optimizer.zero_grad()
        num_tokens = int(batch.mask.sum())
        targets = batch.targets.masked_fill(~batch.mask, IGNORED)
        total = 0.0
        for inputs, of_microbatch in zip(batch.inputs, targets, strict=True):
            loss = self.model(inputs, of_microbatch) / num_tokens
            loss.backward()
            total += loss.item()
        if optim.clip_grad_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip_grad_norm)
        # Steps are all alike here, so they count as well as tokens.
        values = hyperparameters(optim, step, self.config.train.steps, optim.warmup_steps, 1)
        matrices, gains = self.optimizer.param_groups
        matrices["lr"] = gains["lr"] = values.lr
        matrices["weight_decay"], gains["weight_decay"] = values.weight_decay, 0.0
        self.optimizer.step()
        return total


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves ``(a, b)`` of ``x [B, heads, S, D]`` by tables ``[S, D/2]``."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
