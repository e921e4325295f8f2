"""Makes a `tokenizer.json` from the vocabulary, merges and flags in a GGUF file's metadata.

GGUF names the splitting of text into words only by a key (`tokenizer.ggml.pre`); the expressions behind the
keys are those of llama.cpp (`llama-vocab.cpp`) and of the models' own `tokenizer.json`. An unknown key is
refused: a wrong split gives tokens that look right and are not. `SAMPLES` are encoded by this tokenizer and
by the one that the converter writes, and must agree, wherever the converter knows the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshinfer import limits
from meshinfer.errors import ModelError
from meshinfer.model.gguf import INSTEAD, Header

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Split:
    """How text falls into words before merging. Without `pattern`, GPT-2's expression is used.

    `known` is whether the converter knows this key; for others it falls back to another split, so no
    comparison.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    composed: bool = False
    bos: bool = False
    known: bool = False


_LLAMA3_SPLIT: Final = Split(_LLAMA3, whole_words=True, bos=True)
_QWEN2_SPLIT: Final = Split(_QWEN2, composed=True)
SPLITS: Final[dict[str, Split]] = {
    "smollm": Split(single_digits=True, known=True),
    "gpt-2": Split(),
    "llama-bpe": Split(_LLAMA3, whole_words=True, bos=True, known=True),
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": Split(_QWEN2, composed=True, known=True),
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "megrez": _QWEN2_SPLIT,
}

SAMPLES: Final = (
    "The capital of France is Paris.",
    "  two  spaces,   three   ",
    "line\n\n\nbreaks \t and\ttabs \r\n end",
    "It's we'll they'd I'm you've",
    "2024-01-01 3.14159 1234567 1,000,000",
    "def f(x: int) -> list[int]:\n    return [x ** 2 for _ in range(10)]  # done\n",
    '{"key": [1, 2.5, null], "path": "C:\\\\x"}',
    "Straße, naïve café, Ångström, Győr",
    "日本語のテキストと漢字。中文，한국어 문장",
    "Привет, мир! مرحبا بالعالم שלום",
    "👩‍👩‍👧‍👦 🎉🇩🇪 ❤️",
    "<b>tags</b> <|not_special|> §±¿",
    " ",
    "\n",
    "x",
)
"""Composed forms only: a model that composes (NFC) differs from the converter elsewhere, and is right."""

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

# llama.cpp ends an answer at tokens of these spellings whatever the metadata says: many files name only one
# of theirs.
_ENDS: Final = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
)


def split_of(header: Header) -> Split:
    """Raises `ModelError` for a vocabulary of a kind that cannot be made into the model's own tokenizer."""
    kind = header.text("tokenizer.ggml.model", "none")
    if kind != "gpt2":
        raise ModelError(
            f"the GGUF file's vocabulary is of the kind {kind[:32]!r},"
            f" and only byte-level BPE ('gpt2') is converted: {INSTEAD}"
        )
    pre = header.text("tokenizer.ggml.pre", "none")
    if pre not in SPLITS:
        raise ModelError(
            f"the GGUF file splits words by {pre[:32]!r}, which is not known here"
            f" ({', '.join(SPLITS)} are): {INSTEAD}"
        )
    return SPLITS[pre]


def tokenizer_json(header: Header) -> bytes:
    """The file's tokenizer in the form that the `tokenizers` library reads. Raises `ModelError`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    split = split_of(header)
    tokens, kinds = _vocabulary(header)
    merges = [_merge(merge) for merge in header.texts("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words))
    except Exception as error:  # The library raises bare Exception, for a merge outside the vocabulary say.
        raise ModelError(f"the GGUF file's vocabulary is damaged: {str(error)[:200]}") from error
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        spellings = [token for token, its in zip(tokens, kinds, strict=True) if its == kind and token]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in spellings])
    bos = bos_token(header)
    if bos is not None and header.flag("tokenizer.ggml.add_bos_token", split.bos):
        # To the library, "add special tokens" means what the post-processor puts there.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer.to_str().encode("utf-8")


def eos_tokens(header: Header) -> tuple[int, ...]:
    """The tokens that end an answer, ascending."""
    tokens, kinds = _vocabulary(header)
    named = {header.number(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot", "eom")}
    spelled = {index for index, token in enumerate(tokens) if kinds[index] == _CONTROL and token in _ENDS}
    return tuple(sorted(index for index in named | spelled if 0 <= index < len(tokens)))


def bos_token(header: Header) -> int | None:
    """The token that begins a text; whether it is put there is said in the tokenizer's post-processor."""
    token = header.number("tokenizer.ggml.bos_token_id", -1)
    return token if 0 <= token < len(header.texts("tokenizer.ggml.tokens")) else None


def _vocabulary(header: Header) -> tuple[list[str], list[int]]:
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = header.numbers("tokenizer.ggml.token_type")
    if not tokens or len(tokens) > limits.VOCABULARY or len(kinds) != len(tokens):
        raise ModelError(
            f"the GGUF file has {len(tokens)} tokens and {len(kinds)} token types: it is damaged"
        )
    if len(set(tokens)) != len(tokens):
        raise ModelError("the GGUF file's vocabulary spells two tokens alike: it is damaged")
    rows = next((tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"), 0)
    if rows < len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens and embeddings for {rows}: it is damaged")
    return tokens, kinds


def _merge(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelError(f"the GGUF file's merge {merge[:32]!r} is none: it is damaged")
    return left, right


def _pre_tokenizer(split: Split) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if split.pattern is not None:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        if split.single_digits
        else gpt2
    )
