"""Text that becomes the wrong tokens is answered wrongly, and as special tokens it obeys strangers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from meshinfer import limits
from meshinfer.errors import ModelError
from meshinfer.model import gguf, gguf_tokenizer
from meshinfer.model.tokenizer import Tokenizer


def plain_library(bos: bool = False) -> Library:
    """A byte-level tokenizer as models of GPT-2's kind have, with three special tokens and one added one."""
    tokens, merges = tiny_gguf.vocabulary()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    library = Library(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken(token, special=True, normalized=False) for token in tiny_gguf.SPECIAL])
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    return library


def of(library: Library, bos: int | None = None) -> Tokenizer:
    return Tokenizer(library.to_str().encode("utf-8"), eos=(2,), bos=bos)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return of(plain_library(), bos=1)


@given(st.text())
def test_text_comes_back_whole(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


TOKENIZER = of(plain_library(), bos=1)
HOSTILE = st.lists(
    st.one_of(
        st.text(max_size=8), st.sampled_from([*tiny_gguf.SPECIAL, "<|im_", "start|>", "\ufdd0\ufde1\ufdd1"])
    )
).map("".join)


@given(HOSTILE)
def test_no_text_of_a_person_becomes_a_special_token(text: str) -> None:
    ids = TOKENIZER.encode(f"<|im_start|>{TOKENIZER.guard(text)}<|im_end|>", special=True)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert not set(ids[1:-1]) & set(TOKENIZER.special.values())
    assert not set(TOKENIZER.encode(text)) & set(TOKENIZER.special.values())


@given(HOSTILE)
def test_what_a_person_wrote_about_special_tokens_is_still_what_they_wrote(text: str) -> None:
    readable = "".join("\ufffd" if 0xFDD0 <= ord(char) <= 0xFDEF else char for char in text)
    assert TOKENIZER.decode(TOKENIZER.encode(TOKENIZER.guard(text), special=True)) == readable


@given(st.text().filter(lambda text: not any(token in text for token in tiny_gguf.SPECIAL)))
def test_guarding_an_ordinary_text_changes_no_token(text: str) -> None:
    noncharacters = any(0xFDD0 <= ord(char) <= 0xFDEF for char in text)
    assert noncharacters or TOKENIZER.guard(text) == text


def test_special_tokens_of_a_template_are_special_and_do_not_show(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>", special=True)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.eos == {2}
    assert tokenizer.spelling(1) == "<|im_start|>"
    assert tokenizer.spelling(10**9) == ""


def test_an_added_token_that_is_not_special_is_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>x", special=True)
    assert tokenizer.decode(ids) == "<think>x"
    assert tokenizer.vocabulary == ids[0] + 1, "its added tokens count as vocabulary"


@pytest.mark.parametrize("rendered", ["<|im_start|>hello", "hello"])
def test_a_prompt_begins_with_bos_exactly_once(rendered: str) -> None:
    ids = of(plain_library(bos=True), bos=1).encode_prompt(rendered)
    assert ids[0] == 1
    assert ids.count(1) == 1


def test_a_model_that_wants_no_bos_gets_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_prompt("hello") == tokenizer.encode("hello")
    assert of(plain_library(bos=True), bos=None).encode_prompt("hello") == tokenizer.encode("hello")


def test_a_file_that_asks_for_cutting_or_padding_does_not_change_a_prompt() -> None:
    library = plain_library()
    library.enable_truncation(4)
    library.enable_padding(length=64)
    assert len(of(library).encode("a b c d e f g h")) == 15


@pytest.mark.parametrize("data", [b"", b"{}", b"[1", b"\xff\xfe", b'{"model": {"type": "Evil"}}'])
def test_a_damaged_file_is_one_sentence(data: bytes) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(data)


def test_a_huge_file_is_refused_unread() -> None:
    with pytest.raises(ModelError, match="at most"):
        Tokenizer(b" " * (limits.TOKENIZER_BYTES + 1))


# ── from GGUF metadata ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def header(tmp_path: Path) -> gguf.Header:
    return gguf.read_header(tiny_gguf.write(tmp_path / "tiny.gguf"))


def changed(header: gguf.Header, **values: gguf.Value) -> gguf.Header:
    renamed = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return gguf.Header({**header.metadata, **renamed}, header.tensors)


@settings(deadline=None)
@given(st.text())
def test_a_vocabulary_from_metadata_reads_text_like_the_library(text: str) -> None:
    mine = GGUF_TOKENIZER.encode(text)
    assert GGUF_TOKENIZER.decode(mine) == text
    if not any(char.isnumeric() for char in text):
        assert mine == TOKENIZER.encode(text), "the two differ in how they split digits, and in nothing else"


def _gguf_tokenizer() -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        header = gguf.read_header(tiny_gguf.write(Path(directory) / "tiny.gguf"))
    return Tokenizer(gguf_tokenizer.tokenizer_json(header), eos=gguf_tokenizer.eos_tokens(header))


GGUF_TOKENIZER = _gguf_tokenizer()


def test_smollm_splits_digits_one_by_one() -> None:
    assert len(GGUF_TOKENIZER.encode("12")) == 2
    assert len(TOKENIZER.encode("12")) == 1, "GPT-2's way merges them"


def test_all_tokens_that_end_an_answer_are_found(header: gguf.Header) -> None:
    assert gguf_tokenizer.eos_tokens(header) == (0, 2), "<|endoftext|> ends an answer though it is not named"
    assert gguf_tokenizer.eos_tokens(changed(header, eot_token_id=5)) == (0, 2, 5)
    assert gguf_tokenizer.eos_tokens(changed(header, eos_token_id=10**9)) == (0, 2)


def test_bos_is_put_first_only_where_the_file_says_so(header: gguf.Header) -> None:
    for flag in (True, False):
        data = gguf_tokenizer.tokenizer_json(changed(header, add_bos_token=flag))
        tokenizer = Tokenizer(data, bos=gguf_tokenizer.bos_token(header))
        assert tokenizer.begins_with_bos is flag


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": "llama"}, "of the kind 'llama'"),
        ({"model": "bert"}, "of the kind 'bert'"),
        ({"pre": "unheard-of"}, "splits words by 'unheard-of'"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "spells two tokens alike"),
        ({"token_type": [1]}, "1 token types"),
        ({"merges": ["ab"]}, "is none"),
        ({"merges": ["zz yy"]}, "vocabulary is damaged"),
        ({"tokens": [1, 2]}, "no list of texts"),
        ({"tokens": [str(n) for n in range(5000)], "token_type": [1] * 5000}, "embeddings for"),
    ],
)
def test_a_vocabulary_that_would_be_read_wrongly_is_refused(
    header: gguf.Header, values: dict[str, gguf.Value], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        gguf_tokenizer.tokenizer_json(changed(header, **values))


@pytest.mark.parametrize("pre", sorted(gguf_tokenizer.SPLITS))
def test_every_known_split_gives_a_tokenizer_that_loses_nothing(header: gguf.Header, pre: str) -> None:
    tokenizer = Tokenizer(gguf_tokenizer.tokenizer_json(changed(header, pre=pre)))
    for sample in gguf_tokenizer.SAMPLES:
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
