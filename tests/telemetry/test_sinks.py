"""All sinks get the same numbers, and a run outlives each of them."""

import json
import logging
import math
import resource
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megabit.config import TelemetryConfig
from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.telemetry import EvaluationMetrics, MetricsLog
from megabit.telemetry.metrics import flatten, read_metrics
from megabit.telemetry.prometheus import PrometheusEndpoint
from megabit.telemetry.prometheus_names import PROMETHEUS_METRICS
from megabit.telemetry.tensorboard import tag_of
from tests.patience import PATIENCE_S
from tests.telemetry.rows import ALERT, Score, full_metrics, log, metrics, said

EVALUATION = EvaluationMetrics(10, 3.5, 1.75, {"laws of 1789": Score(2.0, 1.0)})
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values by name and labels."""


def report(run: MetricsLog) -> None:
    """A run of 10 steps."""
    run.interval(metrics(5))
    run.interval(full_metrics(10, skipped=1, loss=2.25))
    run.evaluation(EVALUATION)
    run.event(ALERT)


def scraped(text: str) -> Samples:
    """As Prometheus' own parser understands it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def expected_samples(rows: list[dict[str, Any]]) -> Samples:
    """Every number of the last interval and the last evaluation, in base units, and the event."""
    interval = next(row for row in reversed(rows) if "loss" in row)
    evaluation = next(row for row in reversed(rows) if "held_out_loss" in row)
    samples: Samples = {}
    for metric in PROMETHEUS_METRICS:
        for row in (interval, evaluation):
            if metric.key == "step" and row is evaluation:
                continue
            for labels, value in metric.samples(row) if metric.key != "event" else ():
                named = tuple(sorted(zip(metric.labels, labels, strict=True)))
                assert (metric.name, named) not in samples
                samples[metric.name, named] = value
    numbers = {**flatten(interval), **flatten(evaluation)}
    assert len(samples) == len(numbers), "a number has no name in Prometheus"
    event = (("action", "alert"), ("kind", "alert"), ("name", "gradient norm"))
    return samples | {("megabit_events_total", event): 1.0}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of each tag, as TensorBoard shows them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MetricsLog]:
    """With all sinks but W&B."""
    config = TelemetryConfig(
        tensorboard=True,
        prometheus_port=0,
        prometheus_textfile=str(tmp_path / "megabit.prom"),
    )
    with log(tmp_path / "metrics.jsonl", telemetry=config) as run:
        yield run


def url_of(run: MetricsLog) -> str:
    (line,) = (line for line in said(run) if line.startswith("Prometheus: "))
    return line.removeprefix("Prometheus: ")


def fetch(url: str) -> str:
    with urlopen(url, timeout=PATIENCE_S) as response:
        return response.read().decode()


def test_every_sink_gets_the_same_numbers(run: MetricsLog, tmp_path: Path) -> None:
    report(run)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 4
    expected = expected_samples(rows)
    assert scraped(fetch(url_of(run))) == expected
    assert scraped((tmp_path / "megabit.prom").read_text()) == expected
    # Some by hand: names, labels and units.
    assert expected["megabit_loss", ()] == 2.25
    assert expected["megabit_exposed_seconds", (("axis", "tp"),)] == 0.02
    assert expected["megabit_sent_bytes", (("axis", "tp"),)] == 1.5e6
    purpose = (("axis", "pp"), ("purpose", "activation gradients"))
    assert expected["megabit_sent_by_purpose_bytes", purpose] == 0.3e6
    assert expected["megabit_memory_peak_bytes", ()] == 321.5 * 2**20
    assert expected["megabit_rank_flops_per_second", ()] == 0.015e12
    layer = (("layer", "model.layers.0.mlp.down_proj"),)
    assert expected["megabit_layer_code_flips_ratio", layer] == 5e-4
    assert expected["megabit_validation_perplexity", (("dataset", "laws of 1789"),)] == math.exp(2)
    assert expected["megabit_gpu_temperature_celsius", ()] == 61.0
    shown = scalars(tmp_path / "tensorboard")
    written: dict[str, list[tuple[int, float]]] = {}
    for row in rows[:3]:
        step = row.pop("step")
        for name, value in flatten(row).items():
            written.setdefault(tag_of(name), []).append((step, float(np.float32(value))))
    assert shown == written
    assert shown["exposed_s/tp"] == [(step, float(np.float32(0.02))) for step in (5, 10)]
    assert "layers/model.layers.0.mlp.down_proj/code_flips" in shown


def test_the_event_is_a_text_in_tensorboard(run: MetricsLog, tmp_path: Path) -> None:
    run.event(ALERT)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = events.Tensors("event/alert/text_summary")
    assert text.step == 10
    assert text.tensor_proto.string_val == [b"gradient norm: 12.5"]


def test_numbers_that_are_none(run: MetricsLog, tmp_path: Path) -> None:
    """What is not finite arrives as such where that is possible; None is left out, also where there
    was a number before."""
    run.interval(full_metrics(5))
    run.interval(metrics(10, loss=math.nan, grad_norm=math.inf))
    samples = scraped(fetch(url_of(run)))
    assert math.isnan(samples["megabit_loss", ()])
    assert samples["megabit_grad_norm", ()] == math.inf
    assert ("megabit_mfu_ratio", ()) not in samples
    assert not [name for name, _ in samples if name.startswith("megabit_gpu")]
    shown = scalars(tmp_path / "tensorboard")
    assert math.isnan(shown["loss"][1][1])
    assert shown["mfu"] == [(5, float(np.float32(0.41)))]


def test_tensorboard_hides_what_a_run_does_again(run: MetricsLog, tmp_path: Path) -> None:
    for step in (4, 5, 6, 7):
        run.interval(metrics(step))
    run.rewind(5)
    run.interval(metrics(6, loss=2.0))
    folder = tmp_path / "tensorboard"
    assert scalars(folder)["loss"] == [(4, 2.5), (5, 2.5), (6, 2.0)]
    with log(tmp_path / "metrics.jsonl", 4, TelemetryConfig(tensorboard=True)) as resumed:
        resumed.interval(metrics(5, loss=1.0))
    assert scalars(folder)["loss"] == [(4, 2.5), (5, 1.0)]


def test_the_endpoint_is_for_this_machine_only_and_goes_with_the_run(tmp_path: Path) -> None:
    with log(tmp_path / "metrics.jsonl", telemetry=TelemetryConfig(prometheus_port=0)) as run:
        url = url_of(run)
        assert url.startswith("http://127.0.0.1:")
        assert scraped(fetch(url)) == {}
    with pytest.raises(URLError):
        fetch(url)


def test_the_textfile_can_be_read_by_others(run: MetricsLog, tmp_path: Path) -> None:
    """node_exporter is another user; and nothing but ``.prom`` is left in the folder."""
    run.interval(metrics(5))
    assert stat.S_IMODE((tmp_path / "megabit.prom").stat().st_mode) & stat.S_IROTH
    assert [path.name for path in tmp_path.glob("*megabit*")] == ["megabit.prom"]


def refusal(folder: Path, **settings: Any) -> str:
    """Why a run does not start; it has written nothing then."""
    path = folder / "run" / "metrics.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"step": 3}\n')
    with pytest.raises(UserError) as caught:
        log(path, telemetry=TelemetryConfig(tensorboard=True, **settings))
    assert path.read_text() == '{"step": 3}\n'
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]
    (problem,) = caught.value.problems
    return problem


def test_a_taken_port_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        problem = refusal(tmp_path, prometheus_port=port)
    assert problem.startswith(f"telemetry.prometheus_port: cannot listen on 127.0.0.1:{port} (")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"prometheus_port": 0, "prometheus_host": "192.0.2.1"},
            "telemetry.prometheus_port: cannot listen on 192.0.2.1:0",
        ),
        (
            {"prometheus_port": 0, "prometheus_host": "no such host"},
            "telemetry.prometheus_host: no such host is no address of this machine",
        ),
        (
            {"prometheus_port": 99_999},
            "telemetry.prometheus_port: cannot listen on 127.0.0.1:99999",
        ),
        (
            {"prometheus_textfile": "x.txt"},
            "telemetry.prometheus_textfile: x.txt must end in .prom",
        ),
        (
            {"prometheus_textfile": "nowhere/x.prom"},
            "telemetry.prometheus_textfile: nowhere is no folder",
        ),
    ],
    ids=["address", "name", "port", "ending", "folder"],
)
def test_what_cannot_be_opened_is_refused(
    tmp_path: Path, settings: Mapping[str, Any], problem: str
) -> None:
    assert refusal(tmp_path, **settings).startswith(problem)


def test_a_refused_run_gives_its_port_back(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    refusal(tmp_path, prometheus_port=port, prometheus_textfile="x.txt")
    PrometheusEndpoint("127.0.0.1", port).close(failed=False)


@pytest.mark.parametrize(
    ("module", "setting", "package"),
    [
        ("torch.utils.tensorboard", {"tensorboard": True}, "tensorboard"),
        ("prometheus_client", {"prometheus_port": 0}, "prometheus-client"),
        ("prometheus_client", {"prometheus_textfile": "x.prom"}, "prometheus-client"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    setting: dict[str, Any],
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (name,) = setting
    with pytest.raises(UserError, match=f"^telemetry.{name}: needs the package {package};"):
        log(tmp_path / "metrics.jsonl", telemetry=TelemetryConfig(**setting))
    assert list(tmp_path.iterdir()) == []


def test_sinks_that_fail_are_one_alert_each_and_the_others_go_on(
    run: MetricsLog, tmp_path: Path
) -> None:
    """Two folders become files: nothing can be created there, by root neither."""
    textfile = tmp_path / "megabit.prom"
    run.interval(metrics(5))
    textfile.unlink()
    textfile.mkdir()
    (textfile / "in the way").touch()
    for step in (6, 7):
        run.interval(metrics(step))
    assert [line for line in said(run) if line.startswith("ALERT")] == [
        f"ALERT {textfile} cannot be written (Is a directory); training goes on"
    ]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert scraped(fetch(url_of(run)))["megabit_step", ()] == 7
    (textfile / "in the way").unlink()
    textfile.rmdir()
    run.interval(metrics(8))
    assert scraped(textfile.read_text())["megabit_step", ()] == 8


def test_tensorboard_goes_on_in_a_new_file_after_a_full_disk(tmp_path: Path) -> None:
    """In a fork, since the limit is a process's; what was cut short is left out when it is read."""
    folder = tmp_path / "tensorboard"

    def report_with_a_limit() -> list[str]:
        threading.excepthook = lambda _: None  # TensorBoard's thread ends by the error
        with log(tmp_path / "metrics.jsonl", telemetry=TelemetryConfig(tensorboard=True)) as run:
            run.interval(metrics(1))
            (file,) = folder.iterdir()
            limit = file.stat().st_size + 10
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            for step in (2, 3):
                run.interval(metrics(step))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            run.interval(metrics(4))
            return [line for line in said(run) if "TensorBoard" in line]

    (alerts,) = run_ranks(report_with_a_limit, 1)
    assert len(alerts) == 1
    assert alerts[0].startswith("ALERT TensorBoard's event file cannot be written (")
    steps = [step for step, _ in scalars(folder)["loss"]]
    assert {1, 4} <= set(steps)
    assert len(steps) == len(set(steps))


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "metrics.jsonl"
    with log(path, telemetry=TelemetryConfig(wandb_project="megabit-test")) as run:
        report(run)
        run.rewind(5)
        run.interval(metrics(6))
    history = [row for row in wandb_rows(tmp_path / "run" / "wandb") if "_step" in row]
    rows = read_metrics(path)
    written = [
        *[flatten(full_metrics(10, skipped=1, loss=2.25).row())],
        *[flatten(row) for row in rows if "event" not in row],
    ]
    logged = [
        {key: value for key, value in row.items() if not key.startswith("_")} for row in history
    ]
    assert {"step": 10, "event/alert": "gradient norm: 12.5"} in logged
    for row in written:
        assert row in logged
    assert len(logged) == 5


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """What is in the file that ``wandb sync`` sends."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (file,) = folder.glob("offline-run-*/*.wandb")
    for _ in range(600):  # wandb's own process may write a little after ``finish`` has returned
        store, rows, is_over = DataStore(), [], False
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            is_over |= record.HasField("exit")
            if record.HasField("history"):
                items = record.history.item
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in items
                    }
                )
        if is_over:
            return rows
        time.sleep(0.1)
    logging.getLogger(__name__).warning("%s has no end", file)
    return rows
