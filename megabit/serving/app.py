"""The routes. No torch is imported in the process that this runs in."""

import hmac
import uuid
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megabit import __version__
from megabit.serving import chat, completions
from megabit.serving.api_error import ApiError
from megabit.serving.chat import ChatWriter
from megabit.serving.completions import CompletionWriter
from megabit.serving.event_stream import EventStream
from megabit.serving.generation import Generation, Wanted
from megabit.serving.host_check import HostCheck
from megabit.serving.openai_types import ChatRequest, CompletionRequest, parse
from megabit.serving.requests import ClientGone, read_body, unless_gone
from megabit.serving.service import Service
from megabit.units import MIB

_GONE = 499
"""For logs and counts only: nobody is there to get it."""

Answer = Callable[[Request, Generation], Awaitable[Response]]


def create_app(service: Service) -> FastAPI:
    """The server's application.

    There are no pages about the API: those of FastAPI load their scripts from elsewhere.
    """
    app = FastAPI(title="megabit", openapi_url=None, docs_url=None, redoc_url=None)
    routes = _Routes(service)
    app.add_api_route("/v1/completions", routes.complete, methods=["POST"])
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"])
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET", "HEAD"])
    app.add_api_route("/ready", routes.ready, methods=["GET", "HEAD"])
    app.add_api_route("/version", routes.version, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics, methods=["GET"])
    if routes.has_page:
        app.add_api_route("/", routes.page, methods=["GET"])
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(HTTPException, _unknown_route)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(HostCheck, host=service.config.server.host)
    app.add_middleware(_Counted, service=service)
    return app


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._max_bytes = int(service.config.server.max_body_mb * MIB)
        key = service.config.server.api_key
        self._expected = None if key is None else f"Bearer {key}".encode()
        page = files("megabit.serving") / "assets" / "chat.html"
        self.has_page = service.config.server.chat_page and page.is_file()
        self._page = page.read_text(encoding="utf-8") if self.has_page else ""

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, "cmpl", self._complete)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, "chatcmpl", self._chat)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request, name: str) -> Response:
        self._check_key(request)
        self._check_model(name)
        return JSONResponse(self._model())

    async def health(self) -> Response:
        """200 as long as the engine itself says that it lives."""
        supervisor = self._service.supervisor
        supervisor.check_healthy()
        return JSONResponse({"status": "ok", "heartbeat_s": round(supervisor.heartbeat_age, 3)})

    async def ready(self) -> Response:
        """200 if a request would be let in."""
        self._service.check_accepting()
        self._service.supervisor.check_healthy()
        return JSONResponse({"status": "ready"})

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self) -> Response:
        text = self._service.metrics.exposition()
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def page(self) -> Response:
        return HTMLResponse(self._page, headers={"Cache-Control": "no-cache"})

    async def _generate(self, request: Request, prefix: str, answer: Answer) -> Response:
        self._check_key(request)
        generation = Generation(self._service, f"{prefix}-{uuid.uuid4().hex}")
        try:
            response = await answer(request, generation)
        except ApiError as error:
            generation.close(error)
            raise
        except BaseException:  # the client is gone, or the mistake is ours
            generation.close()
            raise
        if not isinstance(response, EventStream):
            generation.close()
        return response

    async def _complete(self, request: Request, generation: Generation) -> Response:
        body: CompletionRequest = parse(CompletionRequest, await self._body(request))
        self._check_model(body.model)
        wanted = completions.wanted_of(self._service, body)

        def writer() -> CompletionWriter:
            return CompletionWriter(self._service, body, generation)

        return await self._answer(request, generation, wanted, bool(body.stream), writer)

    async def _chat(self, request: Request, generation: Generation) -> Response:
        body: ChatRequest = parse(ChatRequest, await self._body(request))
        self._check_model(body.model)
        wanted = chat.wanted_of(self._service, body)

        def writer() -> ChatWriter:
            return ChatWriter(self._service, body, generation)

        return await self._answer(request, generation, wanted, bool(body.stream), writer)

    async def _answer(
        self,
        request: Request,
        generation: Generation,
        wanted: Wanted,
        is_streamed: bool,
        writer: Callable[[], CompletionWriter | ChatWriter],
    ) -> Response:
        """Nothing is sent before the engine's first word, so that the status can tell what is
        wrong until then."""
        receive = request.receive
        await unless_gone(receive, generation.start(wanted))
        if is_streamed:
            return EventStream(writer().chunks(), generation.close)
        return JSONResponse(await unless_gone(receive, writer().whole()))

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._max_bytes)

    def _check_key(self, request: Request) -> None:
        if self._expected is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._expected):
            text = "The API key is missing or wrong; send it as Authorization: Bearer KEY."
            raise ApiError(401, text, code="invalid_api_key")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._service.model_name:
            raise ApiError(
                404,
                f"There is no model {name[:200]!r} here; there is {self._service.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    def _model(self) -> dict[str, Any]:
        ready = self._service.supervisor.ready
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "megabit",
            "max_model_len": None if ready is None else ready.max_model_len,
        }


class _Counted:
    """Counts requests by route and status; pure ASGI, so that nothing is buffered."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._metrics = service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            # Only known routes and methods: labels must not be what clients make up.
            route = scope.get("route")
            handler = getattr(route, "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.http(handler, method, status)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_GONE)


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}."
    known = ApiError(error.status_code, text, code="unknown_route")
    return JSONResponse(known.body, known.status, {**(error.headers or {}), **known.headers})


async def _failed(request: Request, error: Exception) -> Response:
    """A mistake of ours; the traceback is in the log."""
    known = ApiError(500, "The server has made a mistake; its log has more.", code="internal")
    return JSONResponse(known.body, known.status)
