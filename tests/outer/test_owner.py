"""The owner: who may join, its file, and the command."""

import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megabit.errors import RunError, UserError
from megabit.launch import run_ranks
from megabit.outer import owner as owner_module
from megabit.outer.owner import Owner
from megabit.outer.owner_link import OwnerLink, split_address
from tests.command import megabit, refused
from tests.outer.jobs import (
    Background,
    Job,
    StaleRun,
    both,
    free_port,
    owner_here,
    owner_process,
    stale_config,
    wait_until,
)


def refusal(run: StaleRun) -> str:
    with pytest.raises(UserError) as refused:
        run.outer.begin()
    return str(refused.value)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("outer.lr=0.5", "outer.lr is '0.5' there and 0.7 here"),
        ("outer.inner_steps=4", "outer.inner_steps is '4' there and 3 here"),
        ("outer.staleness=1", "outer.staleness is '1' there and 0 here"),
        ("train.seed=3", "train.seed is '3' there and 1234 here"),
        ("model.vocab_size=304", "model.vocab_size is '304' there and 300 here"),
    ],
)
def test_an_island_of_another_run_is_refused(setting: str, reason: str, tmp_path: Path) -> None:
    with owner_here(tmp_path) as (port, lines, _):
        told = refusal(StaleRun.create(stale_config(port, 1, setting)))
        assert told.startswith(f"outer.owner: 127.0.0.1:{port} refuses island 1: settings: ")
        assert reason in told
        wait_until(lambda: any(reason in line for line in lines))
    assert not [*tmp_path.iterdir()]


def test_an_island_with_other_initial_weights_is_refused(tmp_path: Path) -> None:
    with owner_here(tmp_path) as (port, _, _):
        first, other = (StaleRun.create(stale_config(port, island)) for island in (0, 1))
        other.masters()[0].view(-1)[0] += 1e-6
        first.outer.begin()
        assert "other initial weights than the first" in refusal(other)
        other.masters()[0].copy_(first.masters()[0])
        other.outer.begin()


def test_an_island_that_has_trained_needs_an_owner_with_weights(tmp_path: Path) -> None:
    with owner_here(tmp_path) as (port, _, _):
        run = StaleRun.create(stale_config(port, 1))
        run.state.optimizer.updates = 7
        with pytest.raises(UserError, match="the owner has no weights, but island 1 has trained"):
            run.outer.resume({"round": 2, "base": 2, "base_id": "x"})


def test_of_two_jobs_with_one_number_the_later_one_stays(tmp_path: Path) -> None:
    with owner_here(tmp_path) as (port, lines, _):
        first, second = (StaleRun.create(stale_config(port, 1)) for _ in range(2))
        first.outer.begin()
        second.outer.begin()
        assert "island 1 dropped: it was refused: another job is island 1 now" in lines
        with pytest.raises(RunError, match="another job is island 1 now"):
            first.walk(0)
        alone = Background(lambda: second.walk(1))
        with_it = StaleRun.create(stale_config(port, 0))
        with_it.outer.begin()
        with_it.walk(2)
        alone.result()


def test_ranks_of_an_island_come_all_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is alone is sent away, to try again with the others; they may come then."""
    monkeypatch.setattr(owner_module, "TOGETHER_S", 0.5)
    with owner_here(tmp_path) as (port, lines, owner):
        run = StaleRun.create(stale_config(port, 1))
        hello = run.outer._hello("a")
        alone = OwnerLink(f"127.0.0.1:{port}", type(hello)(**{**vars(hello), "ranks": 2}))
        with pytest.raises(Exception, match="its ranks have not all come") as told:
            alone.join([])
        assert not told.value.is_final  # type: ignore[attr-defined]
        wait_until(lambda: "island 1: it was refused: its ranks have not all come" in lines)

        def both_ranks() -> int:
            pair = StaleRun.create(stale_config(port, 1, "parallel.tp=2"))
            pair.outer.begin()
            return len(pair.said)

        Job.start(lambda: run_ranks(both_ranks, 2)).result()
        wait_until(lambda: owner.rounds.islands[1].state == "dropped")  # it has gone again
        assert "island 1 joined in round 0" in lines


def test_if_a_rank_dies_its_island_does(tmp_path: Path) -> None:
    with owner_here(tmp_path, "outer.staleness=1") as (port, lines, owner):
        run = StaleRun.create(stale_config(port, 0, "outer.staleness=1"))
        hello = run.outer._hello("a")
        ranks = [{"rank": 0, "ranks": 2}, {"rank": 1, "ranks": 2, "gives": ()}]
        links = [
            OwnerLink(f"127.0.0.1:{port}", type(hello)(**{**vars(hello), **rank})) for rank in ranks
        ]
        masters = [p.tensors["master"] for p in run.state.optimizer.pieces(owned=True)]
        joins = [
            Background(lambda link=link, x=x: link.join(x))
            for link, x in zip(links, (masters, []), strict=True)
        ]
        assert {join.result().round for join in joins} == {0}
        waiting = Background(lambda: links[0].go_on(1, 1, 0))
        links[1].close()
        with pytest.raises(Exception, match=r"ended|reset"):
            waiting.result()
        wait_until(lambda: "island 0 dropped: rank 1: its connection has ended" in lines)
        assert owner.rounds.islands[0].state == "dropped"


def walk_together(fast: StaleRun, slow: StaleRun, seed: int) -> None:
    together = Background(lambda: fast.walk(seed))
    slow.walk(100 + seed)
    together.result()


def test_the_file_is_the_newest_anchor_and_is_checked(tmp_path: Path) -> None:
    state = tmp_path / "outer.safetensors"
    with owner_here(tmp_path) as (port, _, _), both(port) as (fast, slow):
        assert state.exists()
        walk_together(fast, slow, 0)
        names = [piece.name for piece in fast.state.optimizer.pieces()]
        with safe_open(state, framework="pt") as file:
            anchors = {name: file.get_tensor(f"anchor/{name}") for name in names}
        assert all(
            torch.equal(anchors[name], x) for name, x in zip(names, fast.masters(), strict=True)
        )
    assert [path.name for path in tmp_path.iterdir()] == ["outer.safetensors"]

    lines: list[str] = []
    Owner(stale_config(1), state, report=lines.append)
    assert lines == [f"goes on after round 1 from {state}"]
    with pytest.raises(UserError, match=r"outer.safetensors: belongs to another run: outer.lr is"):
        Owner(stale_config(1, 0, "outer.lr=0.5"), state)
    whole = state.read_bytes()
    for damage in (whole[:-5], b"", whole.replace(b"anchor/", b"nchora/")):
        state.write_bytes(damage)
        with pytest.raises(UserError, match=r"outer.safetensors: is damaged"):
            Owner(stale_config(1), state)
    save_file({"x": torch.zeros(1)}, state)
    with pytest.raises(UserError, match="holds no outer weights; name another --state"):
        Owner(stale_config(1), state)
    with pytest.raises(UserError, match="--state: cannot write to"):
        Owner(stale_config(1), tmp_path / "nowhere" / "outer.safetensors")


def test_islands_of_a_history_that_is_lost_begin_anew(tmp_path: Path) -> None:
    """An owner that goes back to an older file has other weights of the same version."""
    state = tmp_path / "outer.safetensors"
    with owner_here(tmp_path) as (port, _, _), both(port) as (fast, slow):
        walk_together(fast, slow, 0)
        older = state.read_bytes()
        walk_together(fast, slow, 1)
        kept = fast.outer.state()
    assert kept["round"] == 2
    state.write_bytes(older)
    with owner_here(tmp_path) as (port, lines, _), both(port) as (fast, slow):
        walk_together(fast, slow, 2)  # this is another round 1
        fast.outer.close()
        again = StaleRun.create(stale_config(port, 0))
        again.state.optimizer.updates = 6
        assert again.outer.resume(kept)
        assert "island 0 came back in round 2, with the newest weights" in lines
        assert all(map(torch.equal, again.masters(), slow.masters()))
        again.outer.close()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["outer.method=none"], "outer.method: an owner is for stale, not none"),
        (["outer.owner=nowhere"], "outer.owner: stale needs the address of 'megabit owner', host:"),
        (["outer.owner=a:70000"], "outer.owner: stale needs the address of 'megabit owner', host:"),
        (["outer.wire=int8"], "outer.wire: int8 is for outer.method=diloco; stale sends float32"),
        (["precision.compute=float64"], "precision.compute: float64 is for checks, and outer.meth"),
        (["--bind", "127.0.0.1"], "--bind: '127.0.0.1' is not host:port, such as 127.0.0.1:7000"),
        (["--bind", "192.0.2.1:7000"], "--bind: cannot listen on 192.0.2.1:7000 ("),
        (["--state", "nowhere/outer.st"], "--state: cannot write to nowhere; name another file"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], line: str) -> None:
    settings = [] if "outer.method=none" in arguments else ["outer.method=stale"]
    address = f"outer.owner=127.0.0.1:{free_port()}"
    settings += [address] if settings and not arguments[0].startswith("outer.owner") else []
    assert refused("owner", *settings, *arguments).startswith(line)


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = refused("owner", "outer.method=stale", f"outer.owner={address}")
    assert told.startswith(f"--bind: cannot listen on {address} (Address already in use); name")


def test_help_has_the_command() -> None:
    code, out, _ = megabit("owner", "--help")
    assert code == 0
    assert "no authentication" in " ".join(" ".join(out).split()).replace("│ │", "").replace(
        "  ", " "
    )


@pytest.mark.parametrize(
    ("address", "expected"),
    [("a.b:1", ("a.b", 1)), ("[::1]:7000", ("::1", 7000)), ("10.0.0.1:65535", ("10.0.0.1", 65535))],
)
def test_an_address(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:b", "a:65536", "::1:7000", "[a:1", ""])
def test_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)


@pytest.mark.slow
def test_a_process_listens_where_it_is_told_and_says_who_may_connect(tmp_path: Path) -> None:
    port = free_port()
    bind = ("--bind", f"0.0.0.0:{port}")
    with owner_process(port, tmp_path / "outer.safetensors", *bind) as (process, said):
        assert f"listens on 0.0.0.0:{port} for 2 islands" in said.read_text()
        assert "no authentication: whoever reaches this port can take part" in said.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert not (tmp_path / "outer.safetensors").exists()
