"""A model on disk, served: from its path and settings to the end of the process."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megabit.config import ServingConfig, load_serving_config
from megabit.errors import UserError
from megabit.inference.fit import check_fit
from megabit.inference.model_text import ModelText
from megabit.inference.ranks import RankProcesses


def serve_model(path: Path, settings: Sequence[str], announce: Callable[[str, str], None]) -> int:
    """Serve until a signal comes; returns the exit code.

    Args:
        path: a checkpoint, a run's folder, or a folder of Hugging Face's.
        settings: YAML files and ``key=value``, as for ``load_serving_config``.
        announce: hears the model's name and the server's URL, before the model is loaded: requests
            are answered with 503 until it is.

    Raises:
        UserError: settings, the model's small files or the port are wrong; nothing was started.
        RunError: the engine could not be started, or has failed for good.
    """
    try:
        from megabit.serving.prompts import TextSide
        from megabit.serving.run import bind, serve, url_of
        from megabit.serving.service import Service
    except ImportError as error:
        raise UserError(
            f"megabit serve: needs the package {error.name}; pip install 'megabit[serve]'"
        ) from error
    config = load_serving_config(settings)
    check_fit(path, config)
    template = config.server.chat_template
    text = ModelText(path, None if template is None else Path(template))
    name = config.server.model_name or text.name

    def start(serving: ServingConfig) -> RankProcesses:
        return RankProcesses.start(path, serving)

    service = Service.create(config, name, TextSide(text), start)
    with bind(config.server.host, config.server.port) as sock:
        announce(name, url_of(sock))
        return serve(service, sock)
