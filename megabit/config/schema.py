"""Every setting of a run, with its default, its unit and its meaning.

The tree is frozen: a value that depends on others is a property or is computed where it is used,
never a setting. Model keys carry the names that Hugging Face's ``BitNetConfig`` uses.
"""

from dataclasses import dataclass, field
from typing import Literal

from megabit.config.cluster import CommunicationConfig, FaultsConfig, OuterConfig, SiteConfig


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
    norm_placement: Literal["subln", "prenorm", "in_linear", "per_proj"] = "subln"
    """Where RMSNorms are. ``subln`` (BitNet-2B4T): before each half of a layer, and before o_proj
    and down_proj. ``prenorm`` (LLaMA, TriLM, Falcon-E): the former only. ``in_linear`` (Training
    Tips): where ``subln`` has them, within the linear layers, so without gains. ``per_proj``: as
    ``subln``, and one more with a gain of its own before each of q, k, v, gate and up."""
    weight_scale: Literal["absmean", "absmedian"] = "absmean"
    """What γ is made of: mean or median of |W| over the whole logical tensor."""
    scale_mult: float = 1.0
    """γ is so many times that; 0.866 and 1.1547 (√3/2 and its inverse) are in circulation."""
    activations: Literal["int8", "full", "a4.8"] = "int8"
    """What ternary weights are multiplied with. ``int8``: absmax per token. ``full``: activations
    as they are (W1.58A16). ``a4.8`` (arXiv 2411.04965): int4 before q, k, v, gate and up, the
    larger half in int8 before o_proj, int8 before down_proj."""
    hadamard: bool = False
    """Rotate the inputs of o_proj and down_proj by a Hadamard matrix before they are quantized
    (BitNet v2, arXiv 2504.18415), in blocks that no TP degree cuts."""

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
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
    docs/numerics.md)."""

    @property
    def chunks(self) -> int:
        """Stages on each pipeline rank, v."""
        return SCHEDULE_CHUNKS.get(self.schedule, 1) if self.vpp is None else self.vpp


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Master weights, moments and sums of gradients are fp32 (fp64 if compute
    is)."""

    compute: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Activations and dense products. ``float16`` scales the loss (``loss_scale``); ``float64`` is
    for parity checks only: it is slow."""
    ternary_backward: Literal["compute", "bfloat16", "int8"] = "compute"
    """Operands of a ternary layer's two backward products; the forward product is always int8.
    ``int8`` rounds gradients stochastically: fastest on a CPU, and noisier."""
    gradients: Literal["float32", "bfloat16", "int8", "int4", "topk", "ternary"] = "float32"
    """Gradients on the wire over DP. Ranks add them up in fp32 in any case. All but the first two
    lose something: see ``communication``, and docs/communication.md for how much."""
    loss_scale: float = 65536.0
    """What the loss is multiplied with at first if ``compute`` is float16; a power of two. It is
    halved when a gradient overflows, and doubled after ``loss_scale_interval`` steps without."""
    loss_scale_interval: int = 1000


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
    validation: list[str] = field(default_factory=list)
    """More texts to evaluate on, each by itself under its file's name; kinds as of ``text``."""
    skip_samples: list[int] = field(default_factory=list)
    """Samples that training leaves out, as pairs: ``[a, b, c, d]`` leaves out a to b−1 and c to
    d−1. Those that a rollback leaves out are kept by the run itself."""
    held_out_fraction: float = 0.05
    """Share of the documents that is never trained on (whole documents, at least one)."""
    seq_length: int = 256
    """Tokens in a sample (S)."""
    prefetch: int = 4
    """Batches that the reader thread keeps ready."""
    cache: Literal["none", "ram"] = "none"
    """``ram``: read the tokens into memory when a run begins, for disks that are slow to seek;
    else files are memory-mapped. Each rank has a copy."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, in what steps, and how often to report."""

    steps: int = 100
    tokens: int | None = None
    """Length of the run in tokens instead: as many steps as it takes to consume them."""
    global_batch_size: int = 16
    """Samples in an optimizer step, over all ranks."""
    batch_ramp_start: int | None = None
    """Samples in the first steps; their number grows evenly to ``global_batch_size``."""
    batch_ramp_increment: int = 0
    """By so many samples at a time."""
    batch_ramp_tokens: int = 0
    """Over so many tokens."""
    quantization_ramp: float = 0.0
    """Share of the run's tokens over which quantization is faded in: weights W + λ(γ·code − W) and
    activations likewise, λ going from 0 to 1 in a straight line; at most 0.5. Below λ = 1 a model
    is not ternary: nothing evaluates or exports it."""
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
class LossConfig:
    """What is minimised. The plain cross-entropy of all tokens is logged in any case."""

    objective: Literal["language_model", "embedding"] = "language_model"
    """``embedding``: mean-pooled sentence embeddings, by a triplet loss over a microbatch."""
    z_loss: float = 0.0
    """Weight of log² Σexp(logits), which keeps logits small (PaLM: 1e-4)."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the vocabulary."""
    select: Literal["all", "hard", "excess"] = "all"
    """Tokens that count. ``hard``: in each sample, those with the largest loss (OHEM); ``excess``:
    with the largest loss beyond that of ``teacher`` (Rho-1, arXiv 2404.07965). Biased, and so is a
    perplexity of it."""
    select_ratio: float = 0.5
    """Share of them."""
    teacher: str | None = None
    """A dense model to learn from, as for ``run.init_from``."""
    distill_weight: float = 0.0
    """Weight of KL(teacher ‖ model) over the vocabulary, beside the cross-entropy."""
    distill_temperature: float = 5.0
    """Both are softened by it; the term is scaled by its square (arXiv 1503.02531)."""
    triplet_margin: float = 0.3
    """``embedding``: by so much a positive is to be nearer than a negative, in cosine distance."""
    mining_ratio: float = 0.5
    """``embedding``: share of the triplets of a microbatch that count, the hardest ones."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW or Muon, with schedules that are functions of the tokens consumed."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon``: orthogonalised momentum for the matrices of the layers, AdamW for the rest."""
    schedule: Literal[
        "two_stage_linear", "two_stage_cosine", "linear", "cosine", "wsd", "constant"
    ] = "two_stage_linear"
    """Of the learning rate, after warm-up. ``two_stage_linear`` is BitNet's (Training Tips, table
    2); ``wsd`` is warm-up, constant, decay."""
    lr: list[float] = field(default_factory=lambda: [2e-3, 1.3e-3])
    """Peak learning rate: one number, or one for each stage of a two-stage schedule. Those are
    *virtual* peaks of curves over the whole run."""
    weight_decay: list[float] = field(default_factory=lambda: [0.1, 0.0])
    """On matrices only; likewise one or two."""
    switch: float = 0.5
    """Where the second stage begins, as a share of all tokens."""
    warmup_steps: int = 20
    warmup_fraction: float | None = None
    """Warm-up as a share of all tokens, instead of ``warmup_steps``."""
    decay_fraction: float = 0.2
    """``wsd``: the share of all tokens, at the end, over which the rate decays."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """``wsd``: how it decays; ``sqrt`` is 1 − √x (arXiv 2405.18392)."""
    min_lr: float = 3e-5
    """Where every curve ends."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    muon_momentum: float = 0.95
    muon_iterations: int = 5
    """Newton-Schulz iterations that orthogonalise a matrix."""
    clip_grad_norm: float = 1.0
    """Global L2 norm that gradients are scaled down to; 0: no clipping."""
    clip_boost: float = 1.0
    """Gradients below ``clip_grad_norm`` are scaled up to it, by this factor at most; 1: not. See
    ``training.clip``."""
    clip_grad_value: float = 0.0
    """Magnitude that single elements are cut down to, instead of ``clip_grad_norm``; 0: not."""
    zero_stage: int = 1
    """What DP ranks share out. 0: nothing; 1: master weights and moments; 2: sums of gradients as
    well, at the price of a reduction in each microbatch."""


GuardAction = Literal["skip", "rollback", "lower_lr", "a16", "alert", "stop"]
"""What the stability guard does about a step; docs/training.md says what each one means."""


@dataclass(frozen=True)
class GuardRule:
    """When a step is bad, and what is done about it. All ranks judge by the same numbers."""

    watch: Literal[
        "nonfinite", "loss_spike", "grad_norm", "grad_norm_spike", "grad_norm_std", "plateau"
    ] = "nonfinite"
    """``nonfinite``: loss or gradient. ``loss_spike``, ``grad_norm_spike``: robust z-score, that is
    distance from the median in units of 1.4826 · median distance, of the last ``window`` steps.
    ``grad_norm``: itself. ``grad_norm_std``: its standard deviation over ``window`` steps.
    ``plateau``: the mean loss of the last ``window`` steps is not lower than that of the ``window``
    before by more than ``above``."""
    above: float = 0.0
    """The value beyond which the rule fires."""
    window: int = 64
    """Steps that it looks back; it stays quiet until there are as many."""
    action: GuardAction = "alert"
    """``skip``: leave weights as they are. ``rollback``: go back to the last good checkpoint, and
    leave out the data from there to here (PaLM, arXiv 2204.02311, section 5.1). ``lower_lr``:
    multiply the rate by ``factor`` from now on. ``a16``: full-precision activations from now on.
    ``alert``: say so. ``stop``: end the run, with a checkpoint."""
    factor: float = 0.5
    """For ``lower_lr``."""
    times: int = 3
    """How often it acts; from then on ``then`` is done instead."""
    calm_steps: int | None = None
    """Its actions are forgotten after so many steps without one; null: never."""
    then: Literal["alert", "stop"] = "stop"


@dataclass(frozen=True)
class GuardConfig:
    """What keeps a run alive."""

    rules: list[GuardRule] = field(
        default_factory=lambda: [
            GuardRule(watch="nonfinite", action="skip", times=9, calm_steps=1, then="stop")
        ]
    )
    """In order; of several that fire, the gravest action is taken."""


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
class AlertRule:
    """A condition on the metrics of log intervals, how long it must hold, and what is done."""

    name: str = ""
    when: str = ""
    """``metric > number``, or ``<``; ``metric is nan``. Names as in ``metrics.jsonl``, parts of a
    table by a dot: ``exposed_s.dp``."""
    intervals: int = 1
    """Log intervals in a row for which it must hold."""
    action: Literal["alert", "checkpoint", "stop"] = "alert"


def shipped_alerts() -> list[AlertRule]:
    """Those that every run has, unless ``telemetry.alerts`` names others."""
    return [
        AlertRule("loss is not a number", "loss is nan"),
        AlertRule("gradient norm", "grad_norm > 10"),
        AlertRule("gradient norm varies", "grad_norm_std > 0.05", intervals=10),
        AlertRule("exposed communication", "exposed_share > 0.1", intervals=3),
        AlertRule("GPU is idle", "gpu_utilization < 0.9", intervals=3),
        AlertRule("waits for data", "data_share > 0.01", intervals=3),
        AlertRule("straggler", "straggler_ratio > 1.3", intervals=2),
    ]


@dataclass(frozen=True)
class TelemetryConfig:
    """What is recorded, and where it goes beside the console and ``run.dir/metrics.jsonl``."""

    trace: bool = False
    """Record when each pipeline rank computed what, in the last step before each log line: in
    ``run.dir/timeline`` as text, as a picture and as a Chrome trace."""
    per_layer: bool = False
    """Zeros, code flips, threshold distance and saturation of each layer, too, once an interval."""
    tensorboard: bool = False
    """Event files in ``run.dir/tensorboard``."""
    wandb_project: str | None = None
    """A Weights & Biases project (WANDB_MODE=offline keeps it local)."""
    prometheus_port: int | None = None
    """The main rank answers scrapes on this port; 0 takes a free one."""
    prometheus_host: str = "127.0.0.1"
    """The address that it listens on."""
    prometheus_textfile: str | None = None
    """A ``.prom`` file for node_exporter's textfile collector."""
    peak_tflops: float | None = None
    """Of one device, in TFLOP/s, that MFU is a share of; default: that of a GPU which is known, in
    the compute dtype. On a CPU there is no MFU without it."""
    alerts: list[AlertRule] = field(default_factory=shipped_alerts)


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


@dataclass(frozen=True)
class Config:
    """The whole tree."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    site: SiteConfig = field(default_factory=SiteConfig)
    run: RunConfig = field(default_factory=RunConfig)
