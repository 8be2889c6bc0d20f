"""The small files beside an exported model: its tokenizer, and which tokens begin and end texts.

A model that was imported keeps the files that it came with. One that megabit trained has a
``tokenizer.json`` of its own, for which the settings of a ``tokenizer_config.json`` are known.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabit.checkpoint.source import ModelSource
from megabit.data.corpus import TOKENIZER
from megabit.data.tokenizer import END_OF_TEXT, read_tokenizer
from megabit.files import sync, write_text
from megabit.interop.json_fields import MAX_SIZE, Fields, read_json

SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
COPIED = (
    TOKENIZER,
    SETTINGS,
    GENERATION,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
)


def token_ids(source: ModelSource) -> dict[str, Any]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` as ``config.json`` has them: a
    number, several, or null.

    Raises:
        UserError: a file that says so holds something else.
    """
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    if "config.json" in source.assets:
        path = source.assets["config.json"]
        fields = Fields(path, read_json(path))
        return {key: _checked_ids(fields, key) for key in keys}
    end = _end_of_text(source)
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}


def write_tokenizer_files(source: ModelSource, folder: Path, ids: Mapping[str, Any]) -> None:
    """Copy what travels with the model into ``folder``, and add what transformers needs besides."""
    assets = source.assets
    for name in COPIED:
        if name in assets:
            shutil.copyfile(assets[name], folder / name)
            sync(folder / name)
    if GENERATION not in assets:
        _write_json(folder / GENERATION, {**ids, "_from_model_config": True})
    if SETTINGS not in assets and _end_of_text(source) is not None:
        _write_json(
            folder / SETTINGS,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": END_OF_TEXT,
                "eos_token": END_OF_TEXT,
                "model_max_length": source.max_length,
                "clean_up_tokenization_spaces": False,
                # As in training: text that spells the token out is no end of a document.
                "split_special_tokens": True,
            },
        )


def _end_of_text(source: ModelSource) -> int | None:
    """The id of what ends a document in a tokenizer of megabit's; None if it is another's."""
    if TOKENIZER not in source.assets or SETTINGS in source.assets:
        return None
    return read_tokenizer(source.assets[TOKENIZER]).token_to_id(END_OF_TEXT)


def _checked_ids(fields: Fields, key: str) -> int | list[int] | None:
    value = fields.get(key)
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    for number in numbers:
        if type(number) is not int or not 0 <= number <= MAX_SIZE:
            fields.refuse(key, "the number of a token, several, or null")
    return value


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(tree, indent=2) + "\n", durable=True)
