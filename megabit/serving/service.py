"""What all requests share: the model's text side, the queue, the engine's supervisor, figures."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megabit.config.serving import ServingConfig
from megabit.serving.admission import Admission
from megabit.serving.alerts import Alerts
from megabit.serving.api_error import ApiError
from megabit.serving.dispatch import Dispatcher
from megabit.serving.prompts import TextSide
from megabit.serving.server_metrics import ServerMetrics
from megabit.serving.supervisor import EngineProcess, Supervisor, shutting_down

if TYPE_CHECKING:
    from megabit.serving.generation import Generation


@dataclass(eq=False)
class Service:
    """One served model. ``create`` puts it together."""

    config: ServingConfig
    model_name: str
    text: TextSide
    admission: Admission
    dispatcher: Dispatcher
    supervisor: Supervisor
    metrics: ServerMetrics
    alerts: Alerts
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _open: "set[Generation]" = field(default_factory=set)
    _all_left: asyncio.Event = field(default_factory=asyncio.Event)

    @staticmethod
    def create(
        config: ServingConfig,
        model_name: str,
        text: TextSide,
        start: Callable[[ServingConfig], EngineProcess],
    ) -> "Service":
        """Nothing is started yet: ``supervisor.run`` does that.

        Args:
            start: starts an engine's ranks.
        """
        admission = Admission(config.server)
        metrics = ServerMetrics(model_name, config.server.vllm_metrics)
        dispatcher = Dispatcher(admission, config.engine.max_sequences)
        supervisor = Supervisor(config, dispatcher, start, metrics)
        metrics.watch(supervisor, admission)
        alerts = Alerts(config.server, metrics)
        return Service(config, model_name, text, admission, dispatcher, supervisor, metrics, alerts)

    def enter(self, generation: "Generation") -> None:
        """A request begins. Raises ApiError: 503, not now."""
        self.check_accepting()
        self._open.add(generation)

    @property
    def open_requests(self) -> int:
        """HTTP requests that have not been answered in full."""
        return len(self._open)

    def check_accepting(self) -> None:
        """Raises ApiError: 503, requests are not let in now."""
        if self.is_draining:
            raise shutting_down()
        self.supervisor.check_ready()

    def leave(self, generation: "Generation") -> None:
        """It has ended."""
        self._open.discard(generation)
        if not self._open:
            self._all_left.set()

    async def drain(self, seconds: float) -> None:
        """Let nothing in any more; wait for what is under way, then end what is left."""
        self.is_draining = True
        try:
            async with asyncio.timeout(seconds):
                while self._open:
                    self._all_left.clear()
                    await self._all_left.wait()
        except TimeoutError:
            for generation in list(self._open):
                generation.fail(shutting_down())

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer; known to whoever ``enter`` has let in."""
        assert self.supervisor.ready is not None
        return self.supervisor.ready.max_model_len

    def check_fewest(self, tokens: int, param: str) -> None:
        """Before a prompt is tokenized: it has so many tokens, or more. Raises ApiError: 400."""
        if tokens > self.max_model_len:
            raise ApiError(
                400,
                f"The prompt has at least {tokens} tokens; the model takes {self.max_model_len} "
                "in all.",
                param=param,
                code="context_length_exceeded",
            )

    def room(self, prompt: int, wanted: int | None, default: int | None) -> int:
        """Tokens that an answer may have.

        Args:
            prompt: tokens of it.
            wanted: what the client asks for.
            default: otherwise; None: all that fit.

        Raises:
            ApiError: 400, there is not so much room.
        """
        longest = self.max_model_len
        if prompt + (wanted or 0) > longest or (prompt == longest and wanted != 0):
            asked = "" if wanted is None else f" and max_tokens={wanted}"
            raise ApiError(
                400,
                f"The prompt has {prompt} tokens{asked}; the model takes {longest} in all.",
                param="max_tokens" if prompt < longest else "prompt",
                code="context_length_exceeded",
            )
        if wanted is not None:
            return wanted
        left = longest - prompt
        return left if default is None else min(default, left)
