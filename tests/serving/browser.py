"""A headless Chromium, driven by its DevTools protocol."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.patience import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Page:
    """A tab. Problems that its scripts meet are kept in ``errors``."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._connection.send(json.dumps(message))
        while True:
            told = json.loads(self._connection.recv(timeout=30))
            if told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(told["params"]["exceptionDetails"]))
            if told.get("method") == "Log.entryAdded":
                entry = told["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(entry["text"])
            if told.get("id") == self._number:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def wait(self, script: str, seconds: float = 20) -> Any:
        """What an expression gives, once it is true."""
        return eventually(lambda: self.run(script), seconds)

    def type(self, text: str) -> None:
        """Into what has the focus, as from a keyboard."""
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r",
                windowsVirtualKeyCode=13,
            )  # fmt: skip

    def click(self, selector: str) -> None:
        """In the middle of what is shown there."""
        box = self.wait(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found?.scrollIntoView({block: 'nearest'});"
            "const box = found?.getBoundingClientRect(); return box && box.width && "
            "[box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left",
                clickCount=1,
            )  # fmt: skip

    def text(self, selector: str) -> str:
        """Of all elements that match."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        text: str = self.run(f"{found}.map((e) => e.textContent).join('\\n')")
        return text

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def new_page(folder: Path) -> Iterator[Page]:
    """A tab of a browser of its own; skips the test where there is no browser."""
    binary = next((found for name in NAMES if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    log = folder / "browser.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [
                binary,
                "--headless=new",
                "--no-sandbox",  # containers run as root
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--no-proxy-server",
                "--disable-background-networking",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder / 'profile'}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        found = eventually(
            lambda: re.search(r"DevTools listening on ws://([^/]+)/", log.read_text()), 40
        )
        create = Request(f"http://{found[1]}/json/new?about:blank", method="PUT")
        with urlopen(create, timeout=20) as response:
            address = json.load(response)["webSocketDebuggerUrl"]
        with connect(address, max_size=None, proxy=None) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
