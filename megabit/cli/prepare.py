"""``megabit prepare``: from text to a tokenized corpus."""

from megabit.cli.arguments import Settings
from megabit.config import load_config


def prepare(settings: Settings = None) -> None:
    """Read data.text, hold out whole documents, train a tokenizer and write data.dir.

    'megabit train' does this by itself; use this command to do it ahead, on one host.

    Example: megabit prepare data.text=my_texts/ data.dir=data/mine model.vocab_size=8192
    """
    config = load_config(settings or [])

    from megabit.data.prepare import prepare_corpus

    prepare_corpus(config.data, config.model.vocab_size, config.train.seed, report=print)
