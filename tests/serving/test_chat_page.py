"""The chat page in a real browser, against a server whose engine says the prompt again."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.serving.browser import Page, new_page
from tests.serving.echo_engine import DIES
from tests.serving.served import Server, echo_server

ANSWER = ".message.assistant .text"
PIECES = f"""
window.pieces = [];
new MutationObserver(() => {{
  const text = document.querySelector("{ANSWER}")?.textContent ?? "";
  if (window.pieces.at(-1) !== text) window.pieces.push(text);
}}).observe(document.getElementById("messages"), {{childList: true, subtree: true}});
"""
"""Notes every text that the answer has had."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with new_page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(autouse=True)
def no_mistakes_in_scripts(page: Page) -> Iterator[None]:
    page.errors.clear()
    yield
    expected = ("the server responded with a status of", "net::ERR_")  # told in the page
    assert [e for e in page.errors if not any(part in e for part in expected)] == []


def open_page(page: Page, server: Server) -> None:
    page.open(server.url)
    page.wait("document.getElementById('state').dataset.state === 'ready'")
    page.run(PIECES)


def say(page: Page, text: str) -> None:
    page.run("document.getElementById('input').focus()")
    page.type(text)
    page.press_enter()


def wait_until_done(page: Page) -> None:
    page.wait("!document.querySelector('.busy') && document.getElementById('stop').hidden")


def test_an_answer_streams_in(page: Page, tmp_path: Path) -> None:
    with echo_server(tmp_path, token_s=0.02) as server:
        open_page(page, server)
        assert page.wait("document.getElementById('model').textContent !== 'megabit'")
        assert page.run("document.title") == "echo"
        say(page, "The quick brown fox, naïve café 👩‍👩‍👧 你好")
        wait_until_done(page)
        assert page.text(ANSWER) == "User: The quick brown fox, naïve café 👩‍👩‍👧 你好"
        pieces = page.run("window.pieces")
        assert len({len(piece) for piece in pieces}) > 5
        assert all(later.startswith(piece) for piece, later in pairwise(pieces))
        assert "\ufffd" not in "".join(pieces)
        assert "tokens/s" in page.text(".note")
        # The next message is sent with what was said before.
        say(page, "Again")
        wait_until_done(page)
        assert page.text(".message.user .text").splitlines()[-1] == "Again"
        last = page.run(f"[...document.querySelectorAll('{ANSWER}')].at(-1).textContent")
        assert last.startswith("User: The quick brown")
        page.click("#new-chat")
        assert page.run("document.getElementById('messages').childElementCount") == 0


def test_stop_ends_the_request(page: Page, tmp_path: Path) -> None:
    with echo_server(tmp_path, token_s=0.05) as server:
        open_page(page, server)
        say(page, "lazy dog " * 100)
        page.wait(f"document.querySelector('{ANSWER}')?.textContent.length > 20")
        page.click("#stop")
        wait_until_done(page)
        assert "Stopped." in page.text(".note")
        assert 20 < len(page.text(ANSWER)) < 800
        eventually(lambda: server.metric("megabit_num_requests_running") == 0)
        say(page, "on")  # and the conversation goes on
        page.wait("document.querySelectorAll('.message.assistant').length === 2")


def test_markup_in_an_answer_is_text(page: Page, tmp_path: Path) -> None:
    bad = "<img src=x onerror=\"document.title='bad'\"><script>document.title='bad'</script>"
    with echo_server(tmp_path) as server:
        open_page(page, server)
        say(page, f"{bad} `a<b>`")
        wait_until_done(page)
        assert page.text(".message.user .text") == f"{bad} `a<b>`"
        assert page.text(ANSWER) == f"User: {bad} a<b>"
        assert page.text(f"{ANSWER} code") == "a<b>"
        assert page.run("document.querySelectorAll('#messages :is(img, script, b)').length") == 0
        assert page.run("document.title") == "echo"
        assert page.run("show($('empty'), 'x\\n\\n```py\\n<i>`1`\\n```\\n\\ny')") is None
        assert page.text("#empty pre code") == "<i>`1`"
        assert page.run("$('empty').textContent") == "x<i>`1`y"


def test_a_full_server_is_told_of_and_asked_again(page: Page, tmp_path: Path) -> None:
    settings = ("engine.max_sequences=1", "server.max_waiting_requests=1")
    long = {"prompt": [9, 10, 11], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with echo_server(tmp_path, *settings, token_s=0.02) as server:
        open_page(page, server)
        waiting = threading.Thread(target=server.complete, args=([9],), kwargs={"max_tokens": 1})
        with ExitStack() as running:
            for _ in range(2):  # one more than the engine computes is handed over to it
                running.enter_context(server.http.stream("POST", "/v1/completions", json=long))
            waiting.start()
            eventually(lambda: server.metric("megabit_num_requests_waiting") == 1)
            say(page, "hello")
            wait_until_done(page)
            assert "The server is full" in page.text(".error")
            assert "Try again in" in page.text(".error")
        waiting.join()
        page.click(".error button")
        page.wait(f"document.querySelector('{ANSWER}')?.textContent === 'User: hello'")
        wait_until_done(page)
        assert page.text(".error") == ""


def test_an_engine_that_fails_is_told_of(page: Page, tmp_path: Path) -> None:
    with echo_server(tmp_path, "server.restart_backoff_s=3", token_s=0.05) as server:
        open_page(page, server)
        say(page, "lazy dog " * 50)
        page.wait(f"document.querySelector('{ANSWER}')?.textContent.length > 5")
        server.complete([DIES])
        wait_until_done(page)
        assert page.text(".error")  # in the middle of an answer
        say(page, "hello")
        page.wait("document.querySelectorAll('.error').length === 2")
        assert "Try again in" in page.text(".error")
        page.wait("document.getElementById('state').dataset.state === 'ready'")


def test_a_server_that_is_gone_is_told_of(page: Page, tmp_path: Path) -> None:
    with echo_server(tmp_path) as server:
        open_page(page, server)
        server.stop()
        say(page, "hello")
        wait_until_done(page)
        assert "cannot be reached" in page.text(".error")


def test_a_key_and_settings_are_sent(page: Page, tmp_path: Path) -> None:
    with echo_server(tmp_path, "server.api_key=secret") as server:
        open_page(page, server)
        say(page, "hello")
        wait_until_done(page)
        assert "API key" in page.text(".error")
        page.click("#open-settings")
        page.run(
            "$('key').value = 'secret'; $('key').dispatchEvent(new Event('change'));"
            "$('max_tokens').value = 3; $('system').value = 'Be brief';"
        )
        page.click(".error button")
        wait_until_done(page)
        assert page.text(".error") == ""
        assert "System: Be brief".startswith(page.text(ANSWER).strip())
        assert "3 tokens" in page.text(".note")
        assert "limit" in page.text(".note")
        page.wait("document.title === 'echo'")


def test_it_fits_a_phone(page: Page, tmp_path: Path) -> None:
    try:
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=360, height=640, deviceScaleFactor=2, mobile=True,
        )  # fmt: skip
        with echo_server(tmp_path) as server:
            open_page(page, server)
            say(page, "W" * 200)
            wait_until_done(page)
            page.click("#open-settings")
            right = "Math.max(...[...document.querySelectorAll('*')].map("
            right += "(node) => node.getBoundingClientRect().right))"
            assert page.run(right) <= 360
            assert page.run("document.getElementById('send').getBoundingClientRect().width") > 0
            bottom = page.run("document.getElementById('send').getBoundingClientRect().bottom")
            assert bottom <= 640
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
