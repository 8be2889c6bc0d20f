"""Requests that a browser was tricked into: a name of somebody else's that leads to this host.

A page on such a name could read answers, as they are of its own origin to the browser (DNS
rebinding). The name is in the Host header, which the page cannot change. Only where the server
listens on a loopback address: elsewhere, it cannot know by which names it is reached.
"""

import ipaddress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from megabit.serving.api_error import ApiError

_OWN_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class HostCheck:
    """Answers requests to other names with 421.

    Args:
        host: address that the server listens on.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = _OWN_NAMES | {host.lower()} if is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._names is not None:
            given = Headers(scope=scope).getlist("host")
            # Browsers always say one; old clients of HTTP/1.0 may not.
            if any(name_in(host) not in self._names for host in given):
                error = ApiError(
                    421,
                    f"Host: {given[0][:200]!r} is no name of this server, which listens on "
                    "this host only; ask for localhost, or set server.host.",
                    code="unknown_host",
                )
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is reached from this host only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def name_in(host: str) -> str:
    """A Host header's name or address, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
