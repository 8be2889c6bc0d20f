"""Open a model on disk by what is in its folder."""

from pathlib import Path

from megabit.checkpoint.model_source import open_model
from megabit.checkpoint.source import ModelSource
from megabit.interop.huggingface import HuggingFaceSource


def open_source(path: Path) -> ModelSource:
    """The model in a checkpoint or a run of megabit's, or in a folder of Hugging Face's.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if (path / "config.json").is_file():
        return HuggingFaceSource(path)
    return open_model(path)
