"""A question that cannot be meant is refused before anything runs, and the parameter is named."""

from __future__ import annotations

import math

import pytest

from meshinfer import limits
from meshinfer.answer.question import Message, Question, SamplingParams
from meshinfer.errors import MeshinferError, ParameterError, PromptError, UserError

HELLO = (Message("user", "Hello"),)
HUGE = 10**400


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        ("temperature", [math.nan, -0.1, 2.01, math.inf, HUGE, -HUGE, "1", None, True, [1]]),
        ("top_p", [math.nan, -0.1, 1.01, math.inf, HUGE, "1", None, False]),
        ("min_p", [math.nan, -0.1, 1.01, math.inf, HUGE, "1", None, False]),
        ("top_k", [-1, 1.0, math.nan, HUGE, "40", None, True]),
        ("repetition_penalty", [math.nan, -1, 0, 1e-300, 10.5, math.inf, "1", None, True]),
        ("seed", [-1, 1.5, math.nan, 2**64, HUGE, "7", True]),
    ],
)
def test_a_wrong_sampling_parameter_is_named(parameter: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ParameterError, match=parameter) as caught:
            SamplingParams(**{parameter: value})  # type: ignore[arg-type]
        assert caught.value.parameter == parameter
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        ("max_tokens", [0, -1, 1.5, math.nan, HUGE, "9", True]),
        ("stop", ["\n", ["\n"], ("",), ("x" * (limits.STOP_STRING_CHARS + 1),), (None,), ("\ud800",)]),
        ("stop", [("a",) * (limits.STOP_STRINGS + 1)]),
        ("model", [7, b"x", "\udfff"]),
        ("plain", ["yes", None, 1]),
        ("ignore_eos", ["yes", None, 0]),
        ("sampling", [None, {"temperature": 1}]),
    ],
)
def test_a_wrong_parameter_of_a_question_is_named(parameter: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ParameterError, match=parameter) as caught:
            Question(HELLO, **{parameter: value})  # type: ignore[arg-type]
        assert caught.value.parameter == parameter


def test_the_limits_themselves_are_accepted() -> None:
    SamplingParams(
        temperature=2, top_p=0, top_k=limits.VOCABULARY, min_p=1, repetition_penalty=10, seed=2**64 - 1
    )
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=0.1, seed=0)
    stops = tuple("x" * limits.STOP_STRING_CHARS for _ in range(limits.STOP_STRINGS))
    Question(HELLO, max_tokens=limits.CONTEXT_TOKENS, stop=stops)


def test_whole_numbers_are_numbers() -> None:
    assert isinstance(SamplingParams(temperature=1).temperature, float)


@pytest.mark.parametrize("content", ["", " \n\t", "\u3000"])
def test_an_empty_prompt_says_so(content: str) -> None:
    with pytest.raises(PromptError, match="empty"):
        Question((Message("system", "Be brief."), Message("user", content)))
    with pytest.raises(PromptError, match="empty"):
        Question(())


@pytest.mark.parametrize(
    ("role", "content", "parameter"),
    [
        ("", "x", "role"),
        ("r" * 33, "x", "role"),
        (None, "x", "role"),
        ("user", 7, "content"),
        ("user", "\ud83d", "content"),
    ],
)
def test_a_message_that_is_no_text_is_refused(role: object, content: object, parameter: str) -> None:
    with pytest.raises(ParameterError, match=parameter):
        Message(role, content)  # type: ignore[arg-type]


def test_plain_takes_one_text() -> None:
    assert Question(HELLO, plain=True).plain
    with pytest.raises(ParameterError, match="plain"):
        Question((*HELLO, Message("assistant", "Hi")), plain=True)


def test_messages_must_be_messages() -> None:
    with pytest.raises(ParameterError, match="messages"):
        Question([Message("user", "x")])  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="messages"):
        Question(({"role": "user", "content": "x"},))  # type: ignore[arg-type]


def test_every_refusal_is_the_persons_to_mend() -> None:
    assert issubclass(ParameterError, UserError)
    assert issubclass(ParameterError, MeshinferError)
