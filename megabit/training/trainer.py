"""The training loop: data → step → report, with evaluation, checkpoints and a clean stop.

Everything that is the same on all ranks is said and written by the main one.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megabit.checkpoint import Checkpoint, CheckpointStore
from megabit.checkpoint.model_source import CHECKPOINTS, SNAPSHOTS
from megabit.config import Config, to_yaml
from megabit.data.batches import BatchSource, Prefetcher
from megabit.data.corpus import CorpusInfo, check_vocab, load_corpus
from megabit.data.sampler import HeldOutWindows, TrainingSampler
from megabit.errors import RunError, UserError
from megabit.files import write_text
from megabit.mesh import ParallelMesh
from megabit.model import num_parameters
from megabit.reduce import any_rank, first_problem, is_same
from megabit.telemetry import MetricsLog
from megabit.training import resume
from megabit.training.accounting import largest_peak_mib, take_account
from megabit.training.assets import keep_assets, kept_assets
from megabit.training.describe import describe, stage_table
from megabit.training.evaluate import Evaluation, evaluate
from megabit.training.initial import begin_with, open_initial
from megabit.training.interval import Interval
from megabit.training.lock import RunLock
from megabit.training.report import draw_curve
from megabit.training.sample import sample_text
from megabit.training.saver import Saver, retention_of
from megabit.training.step import StepReport, TrainingState, train_step
from megabit.training.stop import StopSignal
from megabit.training.timeline import gather_timeline, write_timeline

MAX_SKIPS = 10
"""Steps in a row without a finite gradient after which a run ends."""


class TooManySkips(RunError):
    """Training does not go on: no gradient is finite any more."""


@dataclass(frozen=True)
class RunFiles:
    """The files in ``run.dir``."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        return self.folder / "loss_curve.png"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def assets(self) -> Path:
        return self.folder / "assets"

    @property
    def snapshots(self) -> Path:
        return self.folder / SNAPSHOTS

    @property
    def timeline(self) -> Path:
        return self.folder / "timeline"


def train(config: Config, mesh: ParallelMesh, console: Console) -> bool:
    """Train to ``train.steps``, then evaluate, sample and draw. Collective over the mesh.

    The corpus in ``data.dir`` must be prepared. Returns False if a signal stopped the run early
    (its checkpoint is then written).

    Args:
        console: where the main rank speaks; quiet on the others.

    Raises:
        UserError: the corpus, the checkpoint or ``run.dir`` does not fit the configuration.
        RunError: training cannot go on.
    """
    _check_same_settings(config, mesh)
    corpus = open_corpus(config, mesh)
    sampler = TrainingSampler(corpus.open_train(), config.data.seq_length, config.train.seed)
    windows = open_windows(config, corpus)
    files = RunFiles(Path(config.run.dir))

    def alert(problem: str) -> None:
        console.print(f"ALERT {problem}", highlight=False, markup=False, soft_wrap=True)

    with RunLock(files.folder, mesh, alert) as lock:
        store = CheckpointStore(files.checkpoints, mesh, retention_of(config))
        checkpoint = store.find(config.checkpoint.auto_fallback, alert)
        is_used = checkpoint is not None or files.metrics.exists()
        # Agreed before the main rank writes there: else a late rank would find the folder used.
        if any_rank(is_used, mesh.world, mesh.device) and not config.run.resume:
            raise UserError(
                f"run.dir: {files.folder} holds a run already; use another folder, or "
                "run.resume=true"
            )
        state, step, inherited = _begin(config, mesh, checkpoint, corpus)
        lock.make_folder()
        log = _open_run(state, corpus, inherited, files, step, console)
        for line in describe(state, corpus, step):
            console.print(line, highlight=False, soft_wrap=True)
        table = stage_table(state)
        if table is not None:
            console.print(table)
        assets = kept_assets(files.assets) if mesh.is_main else {}
        snapshots = CheckpointStore(files.snapshots, mesh, retention_of(config))
        saver = Saver(state, store, snapshots, corpus, assets, log.say)
        trainer = Trainer(state, corpus, windows, saver, log, files)
        with log, saver:
            step = trainer.run(sampler, step)
            if step < config.train.steps:
                saver.require(step)
                log.say(
                    f"Stopped after step {step}, saved in {files.checkpoints}. "
                    "To go on, give the same command again."
                )
                return False
            log.say("Evaluating on all held-out text")
            result = trainer.evaluate(step)
        conclude(state, corpus, result, files, console)
        saver.require(step)
        return True


def open_windows(config: Config, corpus: CorpusInfo) -> HeldOutWindows:
    """All held-out text, in samples."""
    end_of_text = corpus.load_tokenizer().token_to_id(corpus.end_of_text)
    assert end_of_text is not None, "load_tokenizer has checked it"
    return HeldOutWindows(corpus.open_held_out(), config.data.seq_length, end_of_text)


def _begin(
    config: Config, mesh: ParallelMesh, checkpoint: Checkpoint | None, corpus: CorpusInfo
) -> tuple[TrainingState, int, Mapping[str, Path]]:
    """Where a run begins: at its newest checkpoint, with another model's weights, or with initial
    ones. Returns the state, the steps done, and the files that came with the weights."""
    if checkpoint is not None:
        resume.check_resumable(config, checkpoint, corpus.fingerprint)
        state = TrainingState.create(config, mesh)
        return state, resume.restore(state, checkpoint), checkpoint.assets
    source = open_initial(config, mesh)
    state = TrainingState.create(config, mesh)
    if source is None:
        return state, 0, {}
    begin_with(state, source)
    return state, 0, source.assets


def open_corpus(config: Config, mesh: ParallelMesh) -> CorpusInfo:
    """The prepared corpus, if it fits the model and is the same on all hosts; collective."""
    corpus = load_corpus(Path(config.data.dir))
    check_vocab(corpus, config.model.vocab_size)
    if not is_same(bytes.fromhex(corpus.fingerprint), mesh.world, mesh.device):
        raise UserError(f"data.dir: {config.data.dir} is not the same corpus on all hosts")
    return corpus


def _check_same_settings(config: Config, mesh: ParallelMesh) -> None:
    """Refuse ranks that were started with other settings: they would train different models."""
    settings = dataclasses.asdict(config)
    for local in ("text", "dir"):  # hosts may keep their copies of the text in other places
        del settings["data"][local]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()
    if not is_same(digest, mesh.world, mesh.device):
        raise UserError("settings: ranks were started with different ones; give all hosts the same")


def _open_run(
    state: TrainingState,
    corpus: CorpusInfo,
    inherited: Mapping[str, Path],
    files: RunFiles,
    step: int,
    console: Console,
) -> MetricsLog:
    """Write what a run keeps in ``run.dir``, and open the log; fails on all ranks if the main one
    cannot."""
    config, mesh = state.config, state.mesh
    log, problem = None, None
    try:
        if mesh.is_main:
            write_text(files.config, to_yaml(config))
            keep_assets(files.assets, corpus, inherited)
        log = MetricsLog(
            files.metrics if mesh.is_main else None,
            step,
            config.train.steps,
            console,
            config.run.wandb_project,
            dataclasses.asdict(config),
        )
    except OSError as error:
        problem = f"run.dir: cannot write {files.folder} ({error.strerror})"
    except UserError as error:
        problem = str(error)
    problem = first_problem(problem, mesh.world, mesh.device)
    if log is None or problem is not None:
        raise UserError(problem or "")
    return log


@dataclass
class Trainer:
    """The loop and what it does beside the steps."""

    state: TrainingState
    corpus: CorpusInfo
    windows: HeldOutWindows
    saver: Saver
    log: MetricsLog
    files: RunFiles

    def run(self, sampler: TrainingSampler, step: int) -> int:
        """Train from ``step`` steps done; returns the steps done when it ended or was stopped."""
        config, mesh = self.state.config.train, self.state.mesh
        batch_size = config.global_batch_size
        source = BatchSource(
            sampler, batch_size, config.micro_batch_size, mesh.dp.rank, mesh.dp.size
        )
        prefetcher = Prefetcher(
            source, step * batch_size, batch_size, self.state.config.data.prefetch
        )
        interval = Interval(self.state)
        skips = 0
        try:
            with StopSignal(mesh.world, mesh.device) as stop:
                while step < config.steps and not stop.agreed():
                    interval.begin_step()
                    report = train_step(self.state, prefetcher.next(), step)
                    interval.end_step(report)
                    skips = self._check_skipped(report, step, skips)
                    step += 1
                    self.log.advance(step)
                    if _is_due(step, config.log_interval) or step == config.steps:
                        metrics = interval.metrics(step, self.corpus.train)
                        account = take_account(self.state, metrics, interval.steps)
                        self.log.interval(metrics, account)
                        if self.state.config.telemetry.trace:
                            self.trace(report, step)
                        interval = Interval(self.state)
                    if _is_due(step, config.eval_interval) and step < config.steps:
                        self.evaluate(step, config.eval_samples)
                    self.saver.after_step(step)
                self.saver.conclude(step)
        except TooManySkips:
            self.saver.conclude(step)  # the weights are still good
            raise
        finally:
            prefetcher.close()
        return step

    def _check_skipped(self, report: StepReport, step: int, skips: int) -> int:
        """How many steps in a row have been skipped; says so, and gives up after too many."""
        if not report.is_skipped:
            return 0
        self.log.say(f"step {step + 1:>6}  skipped: its gradient is infinite or not a number")
        if skips + 1 == MAX_SKIPS:
            raise TooManySkips(
                f"step {step + 1}: the gradients of {MAX_SKIPS} steps in a row were infinite or "
                f"not a number; the weights stay those after step {step + 1 - MAX_SKIPS}. "
                "Lower optim.lr, or look at the data of these steps"
            )
        return skips + 1

    def evaluate(self, step: int, limit: int | None = None) -> Evaluation:
        """Held-out loss after ``step`` steps, on ``limit`` windows or on all text."""
        result = evaluate(self.state, self.windows, self.corpus.held_out, limit)
        self.log.evaluation(step, result.loss, result.bits_per_byte)
        return result

    def trace(self, report: StepReport, step: int) -> None:
        """Write the timeline of the step that was just done; collective over the pipeline."""
        mesh, schedule = self.state.mesh, self.state.plan.schedule
        timeline = gather_timeline(report.pipeline.spans, schedule.placement, mesh.pp, mesh.device)
        if mesh.is_main:
            name = self.state.config.parallel.schedule
            folder = self.files.timeline
            self.log.try_to_write(
                folder, lambda: self.log.say(write_timeline(timeline, folder, step, name))
            )


def conclude(
    state: TrainingState,
    corpus: CorpusInfo,
    result: Evaluation,
    files: RunFiles,
    console: Console,
) -> None:
    """Sample text, draw the curve and write the summary of a finished run; collective."""
    config, mesh = state.config, state.mesh
    sample = None
    if config.run.sample_tokens:
        sample = sample_text(
            state.stages,
            state.plan.schedule.placement,
            corpus.load_tokenizer(),
            mesh,
            config.run.sample_prompt,
            config.run.sample_tokens,
            config.data.seq_length,
            seed=config.train.seed,
        )
        console.rule("sample")
        console.print(sample, markup=False, highlight=False, soft_wrap=True)
        console.rule()
    peak_memory_mib = largest_peak_mib(mesh)
    if not mesh.is_main:
        return
    try:
        _write_results(state, result, sample, peak_memory_mib, files)
    except OSError as error:
        raise RunError(
            f"{files.folder}: cannot write the curve and the summary ({error})"
        ) from error
    console.print(
        f"Held-out bits per byte: {result.bits_per_byte:.4f}\n"
        f"Curve: {files.curve}\nSummary: {files.summary}",
        highlight=False,
        soft_wrap=True,
    )


def _write_results(
    state: TrainingState,
    result: Evaluation,
    sample: str | None,
    peak_memory_mib: float,
    files: RunFiles,
) -> None:
    """The curve and the summary."""
    config, mesh = state.config, state.mesh
    layout = {"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size}
    title = " × ".join(f"{axis.upper()} {size}" for axis, size in layout.items())
    draw_curve(files.metrics, files.curve, f"{config.model.linear}, {title}")
    summary = {
        "steps": config.train.steps,
        "parameters": num_parameters(config.model),
        "layout": layout,
        "peak_memory_mib": round(peak_memory_mib, 1),
        "held_out_loss": result.loss,
        "held_out_bits_per_byte": result.bits_per_byte,
        "held_out_tokens": result.num_tokens,
        "sample": sample,
    }
    write_text(files.summary, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
