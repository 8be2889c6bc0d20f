"""One server with the echo engine for all tests of a file that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.serving.served import Server, echo_server


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with echo_server(tmp_path_factory.mktemp("echo")) as server:
        yield server
