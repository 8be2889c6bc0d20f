"""What the supervisor makes of engines that load without end, and of its own delays."""

import asyncio
import signal
import time
from dataclasses import replace

import pytest

from megabit.config import ServingConfig, load_serving_config
from megabit.config.serving import ServerConfig
from megabit.inference.messages import Failed
from megabit.serving import supervisor as supervisor_module
from megabit.serving.admission import Admission
from megabit.serving.api_error import ApiError
from megabit.serving.dispatch import Dispatcher
from megabit.serving.failures import short
from megabit.serving.restarts import Restarts
from megabit.serving.server_metrics import ServerMetrics
from megabit.serving.supervisor import EngineState, Supervisor
from tests.serving.echo_engine import EchoProcess


class Silent(EchoProcess):
    """Never ready, as when a rank is stopped while it loads."""

    @staticmethod
    def start(serving: ServingConfig, token_s: float = 0.001) -> "EchoProcess":
        process = EchoProcess.start(serving, token_s)
        process.process.send_signal(signal.SIGSTOP)
        return process


def supervised(start: object, load_s: float, *settings: str) -> Supervisor:
    config = load_serving_config(settings)
    dispatcher = Dispatcher(Admission(config.server), 4)
    return Supervisor(config, dispatcher, start, ServerMetrics("m", False), load_s)  # type: ignore[arg-type]


def test_a_model_that_is_never_loaded() -> None:
    supervisor = supervised(Silent.start, 0.4)
    began = time.monotonic()
    asyncio.run(supervisor.run())
    assert time.monotonic() - began > 0.4
    assert supervisor.state == EngineState.DEAD
    assert supervisor.reason == "the model was not loaded within 0.4 s"


def test_own_delays_are_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_GRACE_S", 5.0)

    async def run() -> None:
        # An engine is not healthy after 3 s of silence, and given up after 5.05 s here.
        supervisor = supervised(EchoProcess.start, 120, "engine.timeout_s=0.05")
        running = asyncio.create_task(supervisor.run())
        while supervisor.state != EngineState.READY:
            await asyncio.sleep(0.02)
        time.sleep(6)  # as a tokenizer that lets nothing else run
        supervisor.check_healthy()
        for _ in range(20):
            await asyncio.sleep(0.02)
            supervisor.check_healthy()
        assert supervisor.restarts == 0
        supervisor.stop()
        await running

    asyncio.run(run())


def test_a_failed_engine_is_not_ready_at_once() -> None:
    async def run() -> None:
        supervisor = supervised(EchoProcess.start, 120)
        running = asyncio.create_task(supervisor.run())
        while supervisor.state != EngineState.READY:
            await asyncio.sleep(0.02)
        told = "rank 0: [../gloo/transport/tcp/pair.cc:9] Connection closed by peer [127.0.0.1]:5"
        supervisor._report(Failed(told))
        with pytest.raises(ApiError) as refused:
            supervisor.check_ready()
        assert refused.value.code == "engine_restarting"
        assert refused.value.message.endswith(": rank 0: Connection closed by peer")
        supervisor.stop()
        await running

    asyncio.run(run())


def test_pauses_before_restarts() -> None:
    config = ServerConfig(max_restarts=3, restart_backoff_s=0.5, restart_window_s=100)
    restarts = Restarts(config)
    assert [restarts.pause(now) for now in (0, 10, 20, 30)] == [0.5, 1, 2, None]
    restarts = Restarts(config)
    assert [restarts.pause(now) for now in (0, 10, 20, 101, 115)] == [0.5, 1, 2, 2, 2]
    assert restarts.pause(500) == 0.5
    assert Restarts(replace(config, max_restarts=0)).pause(0) is None


def test_what_clients_read_of_a_failure() -> None:
    assert short("rank 1 was ended by SIGKILL") == "rank 1 was ended by SIGKILL"
    assert short("engine.x: [1, 2] is wrong\nmore") == "engine.x: [1, 2] is wrong"
    assert len(short("x" * 1000)) == 200
