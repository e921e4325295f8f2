"""What a model's files say about text: tokenizer, template, first and last tokens, context. All untrusted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshinfer import limits
from meshinfer.errors import ModelError
from meshinfer.model import gguf_tokenizer
from meshinfer.model.gguf import Header
from meshinfer.model.tokenizer import Tokenizer

_CONFIG_BYTES: Final = 16 * limits.MIB
_CONTEXT_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "seq_length",
)


@dataclass(frozen=True, slots=True)
class TextFiles:
    """`tokenizer` and `template` are the files' bytes, None where the model has none (it is kept, but cannot
    be asked).

    `context` is in tokens, None where nothing says it. `eos` is ascending.
    """

    tokenizer: bytes | None
    template: bytes | None
    eos: tuple[int, ...]
    bos: int | None
    context: int | None


def of_gguf(header: Header) -> TextFiles:
    """Raises `ModelError` for a vocabulary that cannot be made into the model's own tokenizer."""
    template = header.text("tokenizer.chat_template").encode("utf-8")
    return TextFiles(
        tokenizer=gguf_tokenizer.tokenizer_json(header),
        template=_bounded_template(template) if template else None,
        eos=gguf_tokenizer.eos_tokens(header)[: limits.STOP_TOKENS],
        bos=gguf_tokenizer.bos_token(header),
        context=_context({"n_ctx": header.metadata.get(f"{header.architecture}.context_length")}),
    )


def of_directory(directory: Path) -> TextFiles:
    """From the files that Hugging Face puts beside a model. Raises `ModelError` for a damaged one."""
    config = _json(directory / "config.json")
    generation = _json(directory / "generation_config.json")
    about = _json(directory / "tokenizer_config.json")
    data = _bytes(directory / "tokenizer.json", limits.TOKENIZER_BYTES)
    tokenizer = Tokenizer(data) if data is not None else None
    # Multimodal models keep their language model's settings one level down.
    inner = config.get("text_config")
    settings: dict[str, Any] = {**config, **inner} if isinstance(inner, dict) else config
    eos = _tokens(generation.get("eos_token_id")) | _tokens(settings.get("eos_token_id"))
    bos = _tokens(settings.get("bos_token_id")) or _tokens(generation.get("bos_token_id"))
    if tokenizer is not None:
        eos |= _spelled(about.get("eos_token"), tokenizer)
        bos = _spelled(about.get("bos_token"), tokenizer) or bos
    return TextFiles(
        tokenizer=data,
        template=_template(directory, about),
        eos=tuple(sorted(eos))[: limits.STOP_TOKENS],
        bos=min(bos, default=None),
        context=_context(settings),
    )


def _template(directory: Path, about: dict[str, Any]) -> bytes | None:
    alone = _bytes(directory / "chat_template.jinja", limits.TEMPLATE_BYTES)
    if alone is not None:
        return alone
    template = about.get("chat_template") or _json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        # Some models have several, for tools or retrieval: the one for conversations is named "default".
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return _bounded_template(template.encode("utf-8")) if isinstance(template, str) and template else None


def _bounded_template(template: bytes) -> bytes:
    if len(template) > limits.TEMPLATE_BYTES:
        raise ModelError(
            f"the model's chat template has {len(template):,} bytes;"
            f" at most {limits.TEMPLATE_BYTES:,} are accepted"
        )
    return template


def _context(settings: dict[str, Any]) -> int | None:
    for key in _CONTEXT_KEYS:
        value = settings.get(key)
        if type(value) is int and 1 <= value <= limits.CONTEXT_TOKENS:
            return value
    return None


def _tokens(value: object) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {token for token in values if type(token) is int and 0 <= token < limits.VOCABULARY}


def _spelled(value: object, tokenizer: Tokenizer) -> set[int]:
    spelling = value.get("content") if isinstance(value, dict) else value
    token = tokenizer.special.get(spelling) if isinstance(spelling, str) else None
    return set() if token is None else {token}


def _json(path: Path) -> dict[str, Any]:
    data = _bytes(path, _CONFIG_BYTES)
    if data is None:
        return {}
    try:
        tree = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: it is not JSON; fetch the model again") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{path} is damaged: it holds no settings; fetch the model again")
    return tree


def _bytes(path: Path, most: int) -> bytes | None:
    """None where there is no such file. Raises `ModelError` for one that is too long or cannot be read."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error})") from error
    if len(data) > most:
        raise ModelError(f"{path} is longer than {most:,} bytes, which no model's is: fetch the model again")
    return data
