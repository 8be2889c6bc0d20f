"""Open a model on disk by what is in its folder."""

from pathlib import Path

from megabit.checkpoint.model_source import CheckpointSource, open_model
from megabit.checkpoint.progress import Report, no_report
from megabit.checkpoint.source import ModelSource
from megabit.checkpoint.verify import verify
from megabit.interop.huggingface import HuggingFaceSource


def open_verified(path: Path, report: Report = no_report) -> ModelSource:
    """``open_source`` of a model all of whose bytes are in order; reads them once for that.

    Raises:
        UserError: there is none, it cannot be read, or it is not what was saved.
    """
    source = open_source(path)
    if isinstance(source, HuggingFaceSource):
        source.verify()
    elif isinstance(source, CheckpointSource):
        sizes = {name: file.bytes for name, file in source.manifest.files.items()}
        done = 0
        for name in verify(source.path):
            report(name, done / max(1, sum(sizes.values())))
            done += sizes[name]
    return source


def open_source(path: Path, to_train: bool = False) -> ModelSource:
    """The model in a checkpoint or a run of megabit's, or in a folder of Hugging Face's.

    Args:
        to_train: its masters are to be trained on; then it need not be ternary yet.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if (path / "config.json").is_file():
        return HuggingFaceSource(path)
    return open_model(path, to_train)
