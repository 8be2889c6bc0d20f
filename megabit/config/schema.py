"""Every setting of a run, with its default, its unit and its meaning.

The tree is frozen: a value that depends on others is a property or is computed where it is used,
never a setting. Model keys carry the names that Hugging Face's ``BitNetConfig`` uses.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """The model, whatever the layout. Shapes are those of the logical (unsharded) tensors."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    """Width of the gated feed-forward layer (F)."""
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    """Also the number of blocks that every tensor-parallel axis is cut into: tp must divide it."""
    num_key_value_heads: int = 4
    """Grouped-query attention; tp need not divide it (KV heads are replicated as needed)."""
    hidden_act: Literal["silu", "relu2"] = "relu2"
    """Activation of the gate: ``silu`` makes a SwiGLU, ``relu2`` the ReLU² GLU of BitNet-2B4T."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = True
    """Whether the output head uses the embedding matrix."""
    initializer_range: float = 0.02
    """Standard deviation of every weight matrix at initialisation."""
    linear: Literal["ternary", "dense"] = "ternary"
    """``ternary``: BitNet b1.58 layers; ``dense``: ordinary linear layers in the same places."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


SCHEDULE_CHUNKS = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "zb-v": 2,
    "v-half": 2,
    "v-min": 2,
}
"""The schedules that ``parallel.schedule`` knows, and how many stages a rank has in each; that of
``interleaved`` may be more. ``pipeline.catalog`` makes them."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid over ranks. The data-parallel degree follows from the world size."""

    tp: int = 1
    """Tensor-parallel degree: ranks that share each layer."""
    pp: int = 1
    """Pipeline-parallel degree: ranks that the layers are spread over."""
    vpp: int | None = None
    """Stages that each pipeline rank has (Megatron's virtual pipeline size); default: what the
    schedule needs. ``interleaved`` takes 2 or more."""
    sequence_parallel: bool = False
    """Split tokens over the TP ranks between the layers (norms, residuals); needs tp > 1."""
    schedule: str = "1f1b"
    """Order in which ranks compute: gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half or v-min
    (``megabit schedule`` compares them), or a function of yours, ``my_file.py:my_schedule``."""
    layers_per_stage: list[int] | None = None
    """Decoder layers on each stage, in the order of the model; default: as ``balance`` says."""
    balance: Literal["estimated", "measured"] = "estimated"
    """How layers are laid on stages so that ranks have equally much to do, embedding and head
    included: by the size of their products, or by timing each part when a run begins."""
    bucket_mb: float = 25.0
    """Gradients that travel together over DP, in MiB; at more than 8 DP ranks in proportion more,
    so that what each rank sends to each other stays large enough for the network."""
    row_reduce: Literal["int32", "exact16"] = "int32"
    """How row-parallel layers add integers over TP. ``exact16`` sends int16, checks that all fit
    and else sends int32: the same result for half the bytes (3/4 with fp32 activations and no
    sequence parallelism)."""
    exact: Literal["forward", "full"] = "forward"
    """What is bit-equal at every layout: the forward pass, or the whole training (slower; see
    docs/architecture.md)."""

    @property
    def chunks(self) -> int:
        """Stages on each pipeline rank, v."""
        return SCHEDULE_CHUNKS.get(self.schedule, 1) if self.vpp is None else self.vpp


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Master weights, moments and sums of gradients are fp32 (fp64 if compute
    is)."""

    compute: Literal["float32", "bfloat16", "float64"] = "float32"
    """Activations and dense products. ``float64`` is for parity checks only: it is slow."""
    ternary_backward: Literal["compute", "bfloat16", "int8"] = "compute"
    """Operands of a ternary layer's two backward products; the forward product is always int8.
    ``int8`` rounds gradients stochastically: fastest on a CPU, and noisier."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Gradients on the wire over DP. Ranks add them up in fp32 either way."""


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and where its tokens are kept."""

    text: str | None = None
    """A .txt, .md, .jsonl or .parquet file, a folder of them, or a wheel that holds them."""
    text_field: str = "text"
    """The column that holds the text in JSONL and Parquet."""
    tokenizer: str | None = None
    """A ``tokenizer.json`` to encode the text with, such as that of the model in
    ``run.init_from``; default: one is learned from the text."""
    end_of_text: str = "<|endoftext|>"
    """The token that ends every document; of a tokenizer of your own, whichever it has for that."""
    dir: str = "data/corpus"
    """Folder of the prepared corpus: train/held_out .bin + .idx, tokenizer.json, manifest.json."""
    held_out_fraction: float = 0.05
    """Share of the documents that is never trained on (whole documents, at least one)."""
    seq_length: int = 256
    """Tokens in a sample (S)."""
    prefetch: int = 4
    """Batches that the reader thread keeps ready."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, in what steps, and how often to report."""

    steps: int = 100
    global_batch_size: int = 16
    """Samples in an optimizer step, over all ranks."""
    micro_batch_size: int = 4
    """Samples in one forward pass of one rank."""
    seed: int = 1234
    """Of initialisation and data order; a run depends on nothing else that is random."""
    log_interval: int = 10
    eval_interval: int = 100
    """Steps between held-out evaluations; 0: only at the end."""
    eval_samples: int = 64
    """Samples of an evaluation during training; the final one always uses every token."""
    hidden_dropout: float = 0.0
    """Share of the embedding's and of each attention and feed-forward layer's outputs that is
    zeroed in training."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again to save memory: ``selective`` attention and elementwise work,
    ``full`` all of a layer but its row-parallel products."""
    recompute_layers: list[int] | None = None
    """Layers that recompute, by number; default: all."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with BitNet's two-stage schedule (Training Tips, table 2)."""

    lr: list[float] = field(default_factory=lambda: [2e-3, 1.3e-3])
    """Peak learning rate of each stage. Both are *virtual* peaks of lines over the whole run."""
    weight_decay: list[float] = field(default_factory=lambda: [0.1, 0.0])
    """Weight decay of each stage, on matrices only."""
    switch: float = 0.5
    """Where the second stage begins, as a share of all steps."""
    warmup_steps: int = 20
    min_lr: float = 3e-5
    """Where both lines end."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    clip_grad_norm: float = 1.0
    """Global L2 norm that gradients are scaled down to; 0: no clipping."""
    zero_stage: int = 1
    """What DP ranks share out. 0: nothing; 1: master weights and moments; 2: sums of gradients as
    well, at the price of a reduction in each microbatch."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved in ``run.dir``, when, and what is kept. Any layout can load it."""

    save_interval: int = 0
    """Steps between checkpoints; 0: only at the end and when stopped."""
    asynchronous: bool = True
    """Train on while a copy of the weights is written."""
    keep_last: int = 0
    """So many of the newest checkpoints are kept; 0: all."""
    keep_every: int = 0
    """Of older ones, those whose step is a multiple of this are kept, too."""
    snapshot_interval: int = 0
    """Steps between snapshots of codes and scales only: for evaluation and serving, a sixteenth of
    the size of the master weights. They cannot resume a run. 0: none."""
    auto_fallback: bool = False
    """Go on from the checkpoint before if the newest one is damaged (``--auto-fallback``)."""


@dataclass(frozen=True)
class TelemetryConfig:
    """What is recorded beside the metrics."""

    trace: bool = False
    """Record when each pipeline rank computed what, in the last step before each log line: in
    ``run.dir/timeline`` as text, as a picture and as a Chrome trace."""


@dataclass(frozen=True)
class RunConfig:
    """This run on this machine."""

    dir: str = "runs/default"
    """Folder of checkpoints, config, metrics, curve and summary."""
    init_from: str | None = None
    """Begin with the weights of this model and a new optimizer: a checkpoint of megabit's, or a
    folder of Hugging Face's (BitNet with master weights, or a dense LLaMA-style model)."""
    resume: bool = True
    """Go on from the newest checkpoint in ``dir``; with false, a used folder is refused."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``cuda`` uses NCCL, ``cpu`` gloo; ``auto`` takes cuda where there is one."""
    sample_prompt: str = "ROMEO:"
    sample_tokens: int = 120
    """Length of the text sample at the end; 0: none."""
    timeout_s: float = 1800.0
    """Seconds that a rank waits for another one before it ends with an error."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (WANDB_MODE=offline keeps it local)."""


@dataclass(frozen=True)
class Config:
    """The whole tree."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    run: RunConfig = field(default_factory=RunConfig)
