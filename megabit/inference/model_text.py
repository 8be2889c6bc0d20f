"""All that text needs of a model on disk: its tokenizer, its special tokens, its chat template.

For whoever talks to an engine, which knows token ids only. Reads small files, and no torch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megabit.checkpoint.folder import find_checkpoint
from megabit.checkpoint.manifest import Manifest
from megabit.config import leaves
from megabit.data.corpus import TOKENIZER
from megabit.data.tokenizer import END_OF_TEXT, load_tokenizer, num_ids, read_tokenizer
from megabit.errors import UserError
from megabit.files import read_text
from megabit.inference.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from megabit.inference.text_stream import TextStream, TokenTexts
from megabit.interop.gguf_special_tokens import SpecialTokens, chat_template, read_json

_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class ModelTokenizer:
    """The tokenizer that travels with a model, and which of its tokens begin and end texts."""

    tokenizer: Tokenizer
    """Text that spells out a special token is ordinary text to it."""
    path: Path
    end_of_text: str
    begin_id: int
    """What stands before a text that has nothing before it: its own token for that, else the one
    that ends texts."""

    @property
    def end_id(self) -> int:
        end = self.tokenizer.token_to_id(self.end_of_text)
        assert end is not None, "load_tokenizer has checked it"
        return end

    @staticmethod
    def read(model: Path, assets: Mapping[str, Path], run: Mapping[str, Any]) -> "ModelTokenizer":
        """That of a model.

        Args:
            model: for messages.
            assets: the small files that travel with it, by name.
            run: what its manifest says of the run that saved it; empty if nothing is known.

        Raises:
            UserError: it has none, or nothing says which token ends a text.
        """
        path = assets.get(TOKENIZER)
        if path is None:
            raise UserError(f"{model}: has no {TOKENIZER}, which texts are to be encoded with")
        special = _special_tokens(path, assets)
        named = settings_of_run(run).get("data.end_of_text")
        plain = special.tokenizer
        end = plain.token_to_id(named) if isinstance(named, str) and named != END_OF_TEXT else None
        if end is None:
            end = special.eos()
        begin, end_of_text = special.find("bos"), plain.id_to_token(end)
        assert end_of_text is not None
        return ModelTokenizer(
            load_tokenizer(path, end_of_text), path, end_of_text, end if begin is None else begin
        )


class ModelText:
    """Text to token ids and back, for one model.

    Args:
        path: a checkpoint, a run's folder (then its newest checkpoint), or a folder of Hugging
            Face's.
        template: a jinja2 file; default: the template that travels with the model, or else
            ``DEFAULT_TEMPLATE``.

    Raises:
        UserError: there is no model, or no tokenizer, or a file beside it is wrong.
    """

    def __init__(self, path: Path, template: Path | None = None) -> None:
        self.path = path
        self.name = path.resolve().name
        """What clients may call the model."""
        files = _ModelFiles.of(path)
        self.vocab_size = files.vocab_size
        """Rows of its embedding; ids of tokens are below that."""
        self.max_length = files.max_length
        """Positions that it was made for; None: nothing says so."""
        found = ModelTokenizer.read(path, files.assets, files.run)
        self._literal = found.tokenizer
        special = _special_tokens(found.path, files.assets)
        self.tokenizer = special.tokenizer
        """As its file describes it: text that spells out a special token is that token."""
        self.num_ids = min(num_ids(self.tokenizer), self.vocab_size)
        """Ids from this one on are no tokens."""
        self.begin_id = found.begin_id
        settings = read_json(files.assets, "tokenizer_config.json")
        # Without settings it is a tokenizer of megabit's own, whose text forges no end of a text.
        self._is_literal = bool(settings.get("split_special_tokens", not settings))
        eot = special.eot(found.end_id)
        ends = [found.end_id, *([] if eot is None else [eot]), *self._more_ends(files.assets)]
        self.end_ids = tuple(dict.fromkeys(ends))
        """Tokens that end an answer, that of a text first."""
        named = {key: _content(settings.get(key)) for key in _NAMED_TOKENS}
        tokens = {"bos_token": "", **{key: text for key, text in named.items() if text is not None}}
        tokens["eos_token"] = named["eos_token"] or found.end_of_text
        tokens["eot_token"] = found.end_of_text if eot is None else self.token(eot)
        self.template = _template(template, files.assets, settings, tokens)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def token(self, token_id: int) -> str:
        """As the vocabulary spells it."""
        return self.tokenizer.id_to_token(token_id) or ""

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, with what the tokenizer puts around texts. Never empty: of no text, the
        token that texts begin with."""
        tokenizer = self._literal if self._is_literal else self.tokenizer
        return _ids(tokenizer, text, add_special_tokens=True) or [self.begin_id]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> list[int]:
        """A chat's ids, by the template; see ``ChatTemplate.render``.

        Special tokens are those that the template writes. A message that spells one out has
        ordinary text there, so that it cannot end its turn and speak for others.
        """
        spelled = {name for text in _texts(messages) for name in self._special if name in text}
        stand_ins = {name: chr(_STAND_IN + i) for i, name in enumerate(sorted(spelled))}
        guarded = _replaced(messages, stand_ins)
        text = self.template.render(guarded, add_generation_prompt, **more)
        if not stand_ins:
            ids = _ids(self.tokenizer, text)
        else:
            ids = [*self._encode_around(text, {c: name for name, c in stand_ins.items()})]
        return ids or [self.begin_id]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def stream(
        self,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> TextStream:
        """The text of an answer as it comes."""
        return TextStream(self.tokenizer, prompt_ids, stop, skip_special_tokens)

    def _encode_around(self, text: str, spelled: Mapping[str, str]) -> Iterator[int]:
        """Ids of a text whose special tokens are tokens, and whose stand-ins are the text that they
        stand for."""
        names = sorted(self._special, key=len, reverse=True)
        for part in re.split(f"({'|'.join(map(re.escape, names))})", text):
            if part in self._special:
                yield self._special[part]
            elif part:
                for stand_in, name in spelled.items():
                    part = part.replace(stand_in, name)
                yield from _ids(self._literal, part)

    @cached_property
    def _special(self) -> dict[str, int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def _more_ends(self, assets: Mapping[str, Path]) -> list[int]:
        """Of ``config.json`` and ``generation_config.json``, which may name several."""
        found: list[int] = []
        for name in ("config.json", "generation_config.json"):
            value = read_json(assets, name).get("eos_token_id")
            numbers = value if isinstance(value, list) else [] if value is None else [value]
            for number in numbers:
                if type(number) is not int or not 0 <= number < self.vocab_size:
                    raise UserError(
                        f"{assets[name]}: eos_token_id: must be below the {self.vocab_size} rows "
                        f"of the model's embedding, is {number!r}"
                    )
                found.append(number)
        return found


_STAND_IN = 0x10F800
"""First of the characters that stand for special tokens spelled out in messages: in a private area
of Unicode, for which no model has a use."""


@dataclass(frozen=True)
class _ModelFiles:
    """What is read of a model but its tensors."""

    assets: Mapping[str, Path]
    run: Mapping[str, Any]
    vocab_size: int
    max_length: int | None

    @staticmethod
    def of(path: Path) -> "_ModelFiles":
        if (path / "config.json").is_file():
            assets = {name: path / name for name in _FILES if (path / name).is_file()}
            config = read_json(assets, "config.json")
            vocab_size = _size(config, "vocab_size", assets)
            if vocab_size is None:
                raise UserError(f"{assets['config.json']}: vocab_size: is missing")
            length = _size(config, "max_position_embeddings", assets)
            return _ModelFiles(assets, {}, vocab_size, length)
        folder = find_checkpoint(path)
        manifest = Manifest.read(folder)
        return _ModelFiles(
            manifest.assets(folder), manifest.run, manifest.model.vocab_size, manifest.max_length
        )


def _size(config: Mapping[str, Any], key: str, assets: Mapping[str, Path]) -> int | None:
    value = config.get(key)
    if value is not None and (type(value) is not int or not 0 < value < 1 << 31):
        raise UserError(f"{assets['config.json']}: {key}: must be a positive number, not {value!r}")
    return value


def _special_tokens(path: Path, assets: Mapping[str, Path]) -> SpecialTokens:
    return SpecialTokens(
        path,
        read_tokenizer(path),
        read_json(assets, "tokenizer_config.json"),
        read_json(assets, "config.json"),
    )


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Of one text; other threads run meanwhile, which ``Tokenizer.encode`` does not let them."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def settings_of_run(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the run that saved a model, by their dotted keys; none if it says none."""
    config = run.get("config")
    return dict(leaves(config)) if isinstance(config, Mapping) else {}


def _template(
    file: Path | None,
    assets: Mapping[str, Path],
    settings: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> ChatTemplate:
    if file is not None:
        return ChatTemplate(read_text(file), str(file), tokens)
    own = chat_template(assets, settings)
    if own is None:
        return ChatTemplate(DEFAULT_TEMPLATE, "the default chat template", tokens)
    is_file = "chat_template.jinja" in assets
    name = assets["chat_template.jinja" if is_file else "tokenizer_config.json"]
    return ChatTemplate(own, str(name), tokens)


def _content(token: Any) -> str | None:
    """Of a token in ``tokenizer_config.json``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _texts(value: Any) -> Iterator[str]:
    """All that is text in a tree of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _replaced(value: Any, stand_ins: Mapping[str, str]) -> Any:
    """The tree with other texts."""
    if not stand_ins:
        return value
    if isinstance(value, str):
        for text in sorted(stand_ins, key=len, reverse=True):
            value = value.replace(text, stand_ins[text])
        return value
    if isinstance(value, Mapping):
        return {key: _replaced(item, stand_ins) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_replaced(item, stand_ins) for item in value]
    return value
