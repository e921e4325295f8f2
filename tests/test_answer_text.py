"""Text streams whole: no half characters, nothing doubled or lost, and no part of a stop string gets out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from meshinfer.answer.text import TextStream

SAMPLES = [
    "The capital of France is Paris. 👩‍👩‍👧 says: naïve café, e\u0301",
    "日本語のテキスト、한국어 텍스트, עברית, العربية, हिन्दी, ไทย",
    "🏳️‍🌈🇫🇷 x = [1, 2]\n\tdef f(): return 'ÿ\ufffd'\u200d",
]
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.lists(st.sampled_from([*"aéß日本👩🏽\u200d\u0301 \n\ufffd", "the", " cat"]), max_size=40).map("".join),
)


@cache
def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM2 have it; merges may end in the middle of a character."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return tokenizer


@cache
def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral have it: `▁` for a space, one token per byte of unknown characters, and a
    decoder that drops the leading space and shows a run of bytes as broken until all of it is whole."""
    alphabet = [*"▁abcdefghijklmnopqrstuvwxyzTP.,é日", "▁the", "▁cat"]
    vocabulary = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocabulary)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def stream(text: TextStream, ids: Sequence[int]) -> list[str]:
    """All pieces up to the stop, what was held back last."""
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.finish()]


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_single_bytes_stream_as_whole_characters(text: str) -> None:
    pieces = stream(TextStream(decode_bytes), text.encode())
    assert "".join(pieces) == text
    assert [piece for piece in pieces[:-1] if "\ufffd" in piece and "\ufffd" not in text] == []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 339), max_size=60))
def test_any_tokens_of_a_byte_level_model_stream_as_they_decode_at_once(ids: list[int]) -> None:
    """Whatever the model says, invalid bytes included."""
    tokenizer = byte_level()
    ids = [token for token in ids if token < tokenizer.get_vocab_size()]
    assert "".join(stream(TextStream(tokenizer.decode), ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(TEXT, st.sampled_from(["bytes", "fallback"]))
def test_text_streams_as_it_was_written(text: str, kind: str) -> None:
    tokenizer = byte_level() if kind == "bytes" else byte_fallback()
    if kind == "fallback":
        text = text.replace("\ufffd", "")  # whole, it looks there like an unfinished run of bytes
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = stream(TextStream(tokenizer.decode), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["▁", "▁the", "▁cat", "a", "日", "</s>", "<0xE6>+<0x9C>+<0xAC>"]), max_size=60)
)
def test_spaces_survive_whatever_comes_between(spellings: list[str]) -> None:
    """A special token in the middle, or a space as a token of its own, must not swallow a space."""
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(part) for spelling in spellings for part in spelling.split("+")]
    assert "".join(stream(TextStream(tokenizer.decode), ids)) == tokenizer.decode(ids)


def test_special_tokens_show_nothing() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    ids = [end, *tokenizer.encode("café").ids, end, end, *tokenizer.encode(" 日").ids, *[end] * 50]
    assert "".join(stream(TextStream(tokenizer.decode), ids)) == "café 日"


def test_bytes_that_are_no_text_come_out_at_last_and_good_text_after_them() -> None:
    text = TextStream(decode_bytes)
    assert [text.push(byte) for byte in b"a\xff"] == ["a", ""]
    assert "".join(text.push(byte) for byte in b"\xff" * 100).count("\ufffd") >= 97
    assert "".join([*(text.push(byte) for byte in b"ok"), text.finish()]).endswith("ok")


def test_a_character_cut_off_by_the_end_is_shown_as_broken_and_not_before() -> None:
    text = TextStream(decode_bytes)
    assert "".join(text.push(byte) for byte in "日".encode()[:2]) == ""
    assert text.finish() == "\ufffd"


def test_a_token_costs_the_same_however_long_the_answer() -> None:
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode_bytes(ids)

    for source in (b"a" * 3000, "日本".encode() * 500, b"\xff" * 3000, b"\xc3\xa9" * 1500):
        text = TextStream(decode)
        for byte in source:
            text.push(byte)
    assert max(lengths) <= 13
    assert len(lengths) < 2 * 12_000


def test_tokens_that_always_end_inside_a_character_do_not_pile_up() -> None:
    """Chinese in a byte-level vocabulary: each token ends one character and begins the next."""
    source = ("é" * 2000).encode()
    tokens = [source[:1], *(source[i : i + 2] for i in range(1, len(source), 2))]
    text = TextStream(lambda ids: b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace"))
    pieces = [text.push(i) for i in range(len(tokens))]
    assert max(map(len, pieces)) <= 4
    assert "".join(pieces) + text.finish() == "é" * 2000


# ── stop strings ────────────────────────────────────────────────────────────────────────────────
def cut(text: str, stops: Sequence[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


@settings(max_examples=500, deadline=None)
@given(
    st.text("abc é", max_size=40),
    st.lists(st.text("abc é", min_size=1, max_size=4), max_size=4),
)
def test_the_text_ends_where_the_first_stop_string_begins(text: str, stops: list[str]) -> None:
    stream_ = TextStream(decode_bytes, stops)
    shown = ""
    for byte in text.encode():
        shown += stream_.push(byte)
        assert cut(text, stops).startswith(shown)
        if stream_.stopped:
            break
    shown += stream_.finish()
    assert shown == cut(text, stops)
    assert stream_.stopped == (shown != text)


@settings(max_examples=200, deadline=None)
@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3), st.data())
def test_how_the_text_is_cut_into_tokens_does_not_matter(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    tokens, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        tokens.append(rest[:size])
        rest = rest[size:]
    stream_ = TextStream(lambda ids: "".join(tokens[i] for i in ids), stops)
    assert "".join(stream(stream_, range(len(tokens)))) == cut(text, stops)


def test_no_part_of_a_stop_string_leaks() -> None:
    text = TextStream(decode_bytes, ["<|im_end|>"])
    pieces = [text.push(byte) for byte in b"done<|im_end|>"]
    assert "".join(pieces) == "done"
    assert text.stopped
    assert text.push(65) == ""
    assert text.finish() == ""


def test_what_only_looked_like_a_stop_string_is_not_lost() -> None:
    text = TextStream(decode_bytes, ["\n\n", "Question:"])
    assert "".join([*(text.push(byte) for byte in b"a\nQuestion? b\n"), text.finish()]) == "a\nQuestion? b\n"
    assert not text.stopped


def test_an_empty_stop_string_is_a_defect_of_the_caller() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(decode_bytes, [""])


def test_the_longest_stop_strings_cost_little() -> None:
    stops = ["a" * 255 + chr(98 + i) for i in range(16)]
    text = TextStream(decode_bytes, stops)
    start = time.perf_counter()
    shown = "".join(text.push(97) for _ in range(2000))
    assert time.perf_counter() - start < 2.0
    assert 2000 - 256 <= len(shown) <= 2000 - 255
