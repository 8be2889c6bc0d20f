"""The slow link between two hosts, and what is measured over it. Needs root and iproute2."""

import subprocess
from collections.abc import Iterator

import pytest

from megabit.benchmark import link, overlap
from megabit.benchmark.link import Network, network
from megabit.errors import UserError
from tests.hosts.job import hosts as hosts_or_skip

TINY = (
    "model.vocab_size=256",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=4",
    "data.seq_length=64",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "parallel.bucket_mb=0.1",
)


@pytest.fixture
def hosts() -> Iterator[Network]:
    with hosts_or_skip(2) as found:
        yield found


def test_the_link_is_limited(hosts: Network) -> None:
    hosts.limit(8)
    shown = subprocess.run(
        hosts.run_on(1, ["tc", "qdisc", "show", "dev", hosts.device]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "tbf" in shown.stdout
    assert "rate 8Mbit" in shown.stdout


@pytest.mark.usefixtures("hosts")
def test_times_over_a_slow_link() -> None:
    """What is measured is there and plausible; how much is hidden is for the benchmark to say."""
    mbit_per_s, unlimited, limited = overlap.measure_overlap(0.5, 1, TINY)
    assert unlimited.sent_bytes == limited.sent_bytes > 0
    # The reduction alone cannot be faster than the link that it is sent over: half of it in each
    # direction, less the burst that passes freely.
    free_bytes = 1024 * link.BURST_KB * 2
    assert limited.alone_s > 8e-6 * (limited.sent_bytes - free_bytes) / mbit_per_s
    assert limited.step_s > limited.blocked_s >= 0


def test_the_namespaces_go_away() -> None:
    try:
        with network(2) as found:
            assert set(found.hosts) <= set(namespaces())
            raise KeyboardInterrupt
    except UserError as error:
        pytest.skip(f"this machine has no network namespaces for us: {error}")
    except KeyboardInterrupt:
        assert not set(found.hosts) & set(namespaces())


def namespaces() -> list[str]:
    return subprocess.run(
        ["ip", "netns"], capture_output=True, text=True, check=True
    ).stdout.split()


def test_without_permission_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link.shutil, "which", lambda command: None)
    overlap.report(0.5, 1)
    assert capsys.readouterr().out.startswith("skipped: needs the command 'ip'")
