"""A server in front of the echo engine, as a process of its own.

    python tests/serving/echo_server.py FOLDER SECONDS_PER_TOKEN SETTINGS…

FOLDER has what is text of a model. It prints its URL.
"""

import logging
import sys
from pathlib import Path

from megabit.config import ServingConfig, load_serving_config
from megabit.errors import RunError
from megabit.inference.model_text import ModelText
from megabit.serving.prompts import TextSide
from megabit.serving.run import bind, serve, url_of
from megabit.serving.service import Service
from tests.serving.echo_engine import EchoProcess


def main() -> int:
    path, token_s, *settings = sys.argv[1:]
    config = load_serving_config(settings)
    text = TextSide(ModelText(Path(path)))

    def start(serving: ServingConfig) -> EchoProcess:
        logging.info("starting with %s", serving.parallel.layers_per_stage)
        return EchoProcess.start(serving, float(token_s))

    service = Service.create(config, config.server.model_name or "echo", text, start)
    sock = bind(config.server.host, config.server.port)
    print(url_of(sock), flush=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return serve(service, sock)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
