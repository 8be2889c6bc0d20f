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

from megabit.checkpoint import Checkpoint, CheckpointStore, on_all_ranks
from megabit.config import Config, to_yaml
from megabit.data.batches import BatchSource, Prefetcher
from megabit.data.corpus import CorpusInfo, check_vocab, load_corpus
from megabit.data.sampler import TrainingSampler
from megabit.errors import UserError
from megabit.evaluation.text_sets import TextSet, open_sets
from megabit.faults.collective_check import check_collectives
from megabit.faults.watchdog import Watchdog
from megabit.files import write_text
from megabit.mesh import ParallelMesh
from megabit.reduce import any_rank, is_same
from megabit.retry import Retry
from megabit.telemetry import AlertBook, EvaluationMetrics, MetricsLog
from megabit.telemetry.gpu import GpuWatch, open_gpu_reader
from megabit.training import resume
from megabit.training.accounting import take_account
from megabit.training.assets import keep_assets, kept_assets
from megabit.training.bucket_tuner import BucketTuner
from megabit.training.describe import describe, stage_table
from megabit.training.evaluate import evaluate
from megabit.training.fault_checks import FaultChecks, open_fault_checks, retry_of
from megabit.training.initial import begin_with, open_initial
from megabit.training.interval import Interval
from megabit.training.islands import Islands, over_islands
from megabit.training.lock import RunLock
from megabit.training.measures import Measures, Stopped
from megabit.training.progress import MeasuresFile
from megabit.training.results import conclude
from megabit.training.run_files import RunFiles
from megabit.training.sampler import open_sampler
from megabit.training.saver import Saver, retention_of
from megabit.training.step import StepReport, TrainingState, train_step
from megabit.training.stop import StopSignal
from megabit.training.timeline import gather_timeline, write_timeline


def train(
    config: Config, mesh: ParallelMesh, console: Console, stop: StopSignal | None = None
) -> bool:
    """Train to ``train.steps``, then evaluate, sample and draw. Collective over the mesh.

    The corpus in ``data.dir`` must be prepared. Returns False if a signal stopped the run early
    (its checkpoint is then written).

    Args:
        console: where the main rank speaks; quiet on the others.
        stop: says afterwards why the run was stopped, if it was.

    Raises:
        UserError: the corpus, the checkpoint or ``run.dir`` does not fit the configuration.
        RunError: training cannot go on; ``Stopped`` by the guard or by an alert.
    """
    if config.faults.check_collectives:
        check_collectives(mesh)
    _check_same_settings(config, mesh)
    retry = retry_of(config, mesh, console)
    corpus = open_corpus(config, mesh, retry)
    sampler = open_sampler(config, corpus, mesh, retry, console)
    sets = open_sets(config, corpus, mesh)
    files = RunFiles(Path(config.run.dir))
    alerts = AlertBook(config.telemetry.alerts)

    def alert(problem: str) -> None:
        console.print(f"ALERT {problem}", highlight=False, markup=False, soft_wrap=True)

    with (
        stop or StopSignal(mesh.world, mesh.device) as stop,
        Watchdog(mesh, config.faults, files.faults) as watchdog,
        RunLock(files.folder, mesh, alert) as lock,
    ):
        store = CheckpointStore(files.checkpoints, mesh, retention_of(config), retry)
        checkpoint = store.find(config.checkpoint.auto_fallback, alert)
        is_used = checkpoint is not None or files.metrics.exists()
        # Agreed before the main rank writes there: else a late rank would find the folder used.
        if any_rank(is_used, mesh.world, mesh.device) and not config.run.resume:
            raise UserError(
                f"run.dir: {files.folder} holds a run already; use another folder, or "
                "run.resume=true"
            )
        taken = on_all_ranks(MeasuresFile(files.measures).read, mesh)
        state, step, inherited = _begin(config, mesh, checkpoint, corpus, retry)
        if checkpoint is not None:
            for measures in (checkpoint.manifest.run.get("measures", {}), taken or {}):
                state.progress.restore_measures(measures)
        lock.make_folder()
        log = _open_run(state, corpus, inherited, files, step, console)
        for line in describe(state, corpus, step):
            console.print(line, highlight=False, soft_wrap=True)
        table = stage_table(state)
        if table is not None:
            console.print(table)
        assets = kept_assets(files.assets) if mesh.is_main else {}
        snapshots = CheckpointStore(files.snapshots, mesh, retention_of(config), retry)
        saver = Saver(state, store, snapshots, corpus, assets, log)
        checks = open_fault_checks(state, store, files, log)
        trainer = Trainer(state, corpus, sets, saver, alerts, log, files, checks)
        with log, saver:
            saver.before(step)
            step = trainer.run(sampler, step, stop, watchdog)
            if step < state.steps.steps:
                saver.require(step)
                log.say(
                    f"Stopped after step {step}, saved in {files.checkpoints}. "
                    "To go on, give the same command again."
                )
                return False
            log.say("Evaluating on all held-out text")
            result = trainer.evaluate(step)
            assert result is not None, "the second half of a run is ternary"
        conclude(state, corpus, result, files, console)
        saver.require(step)
        return True


def _begin(
    config: Config,
    mesh: ParallelMesh,
    checkpoint: Checkpoint | None,
    corpus: CorpusInfo,
    retry: Retry,
) -> tuple[TrainingState, int, Mapping[str, Path]]:
    """Where a run begins: at its newest checkpoint, with another model's weights, or with initial
    ones. Returns the state, the steps done, and the files that came with the weights."""
    if checkpoint is not None:
        resume.check_resumable(config, checkpoint, corpus.fingerprint)
        state = TrainingState.create(config, mesh)
        return state, resume.restore(state, checkpoint, retry), checkpoint.assets
    source = open_initial(config, mesh)
    state = TrainingState.create(config, mesh)
    if source is not None:
        begin_with(state, source)
    if state.outer is not None:
        state.outer.begin()
    return state, 0, {} if source is None else source.assets


def open_corpus(config: Config, mesh: ParallelMesh, retry: Retry) -> CorpusInfo:
    """The prepared corpus, if it fits the model and is the same on all hosts; collective."""
    folder = Path(config.data.dir)
    corpus = retry(lambda: load_corpus(folder), f"reading {folder}")
    check_vocab(corpus, config.model.vocab_size)
    if not is_same(bytes.fromhex(corpus.fingerprint), mesh.world, mesh.device):
        raise UserError(f"data.dir: {config.data.dir} is not the same corpus on all hosts")
    return corpus


def _check_same_settings(config: Config, mesh: ParallelMesh) -> None:
    """Refuse ranks that were started with other settings: they would train different models."""
    settings = dataclasses.asdict(config)
    # Hosts may keep their copies of the text in other places.
    for local in ("text", "dir", "validation"):
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

    def open_and_write() -> MetricsLog:
        try:
            # First: a sink that is refused is, before anything is written.
            log = MetricsLog(
                files.metrics if mesh.is_main else None,
                step,
                state.steps.steps,
                console,
                config.telemetry,
                dataclasses.asdict(config),
            )
            if mesh.is_main:
                write_text(files.config, to_yaml(config))
                keep_assets(files.assets, corpus, inherited)
        except OSError as error:
            raise UserError(f"run.dir: cannot write {files.folder} ({error.strerror})") from error
        return log

    return on_all_ranks(open_and_write, mesh)


@dataclass
class Trainer:
    """The loop and what it does beside the steps."""

    state: TrainingState
    corpus: CorpusInfo
    sets: Mapping[str, TextSet]
    """To evaluate on: held-out text and validation sets."""
    saver: Saver
    alerts: AlertBook
    log: MetricsLog
    files: RunFiles
    checks: FaultChecks

    def run(self, sampler: TrainingSampler, step: int, stop: StopSignal, watchdog: Watchdog) -> int:
        """Train from ``step`` steps done; returns the steps done when it ended or was stopped.

        Raises:
            Stopped: a rule of the guard, or an alert, has ended the run; it is saved then.
        """
        config, mesh, steps = self.state.config.train, self.state.mesh, self.state.steps.steps
        measures = Measures(self.state, self.saver, self.log, self.files)
        gpu = GpuWatch(open_gpu_reader(mesh.device, self.log.say))
        islands, tuner = Islands(self.state), BucketTuner.of(self.state, self.log)
        reader = self.read_ahead(sampler, step)
        interval = Interval(self.state, gpu)
        try:
            while step < steps and not islands.stops(stop, step):
                watchdog.begin_step(step)
                self.checks.before_step(step)
                interval.begin_step()
                batch = reader.next()
                interval.has_batch()
                self.checks.in_step()
                is_logged = _is_due(step + 1, config.log_interval) or step + 1 == steps
                tuner.before_step()
                report = train_step(self.state, batch, step, is_probed=is_logged)
                islands.after_step(step + 1)
                interval.end_step(report)
                is_bad = False
                with islands.put_off_stop():
                    is_bad = measures.take(report, step)
                if is_bad:
                    with watchdog.resting("rolling back"):
                        step = measures.roll_back(report, step)
                    reader.close()
                    reader = self.read_ahead(sampler, step)
                    interval = Interval(self.state, gpu)
                    continue
                step += 1
                tuner.after_step(report, step)
                self.log.advance(step)
                if is_logged:
                    self.report(interval, report, step)
                    interval = Interval(self.state, gpu)
                if _is_due(step, config.eval_interval) and step < steps:
                    with watchdog.resting("evaluating"):
                        self.evaluate(step, config.eval_samples)
                with watchdog.resting("saving"):
                    self.saver.after_step(step)
            watchdog.rest("saving")
            self.saver.conclude(step)
        except Stopped as stopped:
            watchdog.rest("saving")
            self.saver.conclude(stopped.step)  # the weights are still good
            raise
        finally:
            reader.close()
        return step

    def read_ahead(self, sampler: TrainingSampler, step: int) -> Prefetcher:
        """The batches from ``step`` on."""
        state = self.state
        source = BatchSource(
            sampler,
            state.steps,
            state.config.train.micro_batch_size,
            *state.place,
            state.progress.left_out,
        )
        return Prefetcher(source, step, state.config.data.prefetch)

    def report(self, interval: Interval, report: StepReport, step: int) -> None:
        """Log the interval that ends after ``step`` steps, and act on alerts."""
        metrics = over_islands(interval.metrics(step, self.corpus.train), self.state.mesh)
        self.log.interval(metrics, take_account(self.state, metrics, interval.reports))
        if self.state.outer is not None and (text := self.state.outer.meeting()):
            self.log.say(f"step {step:>6}  {text}")
        if self.state.config.telemetry.trace:
            self.trace(report, step)
        for alert in self.alerts.judge(metrics.row(), self.checks.where(metrics)):
            self.log.event(alert.event(step))
            if alert.rule.action == "checkpoint":
                self.saver.save_now(step)
            elif alert.rule.action == "stop":
                raise Stopped(step, f"step {step}: {alert.text}; telemetry.alerts says stop")

    def evaluate(self, step: int, limit: int | None = None) -> EvaluationMetrics | None:
        """How good the model is after ``step`` steps, on ``limit`` windows of each text or on all;
        None while it is not ternary yet."""
        share = self.state.quantization_of(step).share
        if share < 1:
            self.log.say(f"step {step:>6}  not evaluated: λ = {share:.2f}, it is not ternary yet")
            return None
        result = evaluate(self.state, self.sets, step, limit)
        self.log.evaluation(result)
        return result

    def trace(self, report: StepReport, step: int) -> None:
        """Write the timeline of the step that was just done; collective over the pipeline."""
        mesh, placement = self.state.mesh, self.state.plan.schedule.placement
        timeline = gather_timeline(report.pipeline.spans, placement, mesh.pp, mesh.device)
        if mesh.is_main:
            name = self.state.config.parallel.schedule
            folder = self.files.timeline
            self.log.try_to_write(
                folder, lambda: self.log.say(write_timeline(timeline, folder, step, name))
            )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
