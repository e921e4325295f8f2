"""A conversation as the one text that a model was trained on, by the chat template that came with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, NoReturn

from meshinfer import limits
from meshinfer.answer.question import Message
from meshinfer.errors import MeshinferError, ModelError, PromptError
from meshinfer.text import printable

if TYPE_CHECKING:
    from jinja2 import Template

_DIRECTIVE: Final = re.compile(r"%(-?)([aAbBdHIjmMpSyY])")
"""The parts of a date that mean the same on every system; `-` drops a leading zero, which Windows cannot."""

_WORD: Final = re.compile(r"\w+|[^\w\s]")

_REASON_CHARS: Final = 200


class ChatTemplate:
    """A model's chat template, compiled: make one for each model and keep it (some milliseconds to make).

    A template is foreign code. It can reach nothing but what it is given, and its steps, memory and output
    are bounded (`limits.TEMPLATE_STEPS` and others), without a clock.
    """

    def __init__(self, source: str | None) -> None:
        """Raises `ModelError` when there is none, or it is broken or asks for what no chat template needs."""
        if not source or not source.strip():
            raise ModelError(
                "the model came without a chat template, so it cannot hold a conversation: "
                "use a model made for chat, or ask it to continue a plain text"
            )
        if len(source.encode("utf-8", errors="surrogatepass")) > limits.TEMPLATE_BYTES:
            raise ModelError(f"the model's chat template has more than {limits.TEMPLATE_BYTES:,} bytes")
        if sum(1 for _ in _WORD.finditer(source)) > limits.TEMPLATE_WORDS:
            raise ModelError(f"the model's chat template has more than {limits.TEMPLATE_WORDS:,} words")
        self._template = _compiled(source)

    def render(
        self,
        messages: Sequence[Message],
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """The text of `messages`, ready for the model to answer when `add_generation_prompt`.

        `special_tokens` are spellings by name (`bos_token`, `eos_token`, …); `now` is what templates
        that state the date may read, with `strftime_now`. Raises `PromptError` when the template refuses the
        conversation, `ModelError` when it is broken or exceeds its bounds.
        """
        from meshinfer.answer.template_budget import Budget, spending

        if sum(len(message.content) for message in messages) > limits.TEMPLATE_OUTPUT_CHARS // 2:
            raise PromptError("the conversation is longer than any model's context: shorten it")
        context = self._template.new_context(
            {
                **special_tokens,
                **_functions(now),
                "messages": [{"role": message.role, "content": message.content} for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "tools": None,
                "documents": None,
            }
        )
        try:
            # Not Template.render: it would rewrite tracebacks, thousands of frames of them after a recursion.
            return spending(Budget(), lambda: "".join(self._template.root_render_func(context)))
        except MeshinferError:
            raise
        except Exception as error:  # foreign code: whatever it raises is its own failure
            raise ModelError(f"the model's chat template fails: {_reason(error)}") from error


def render_plain(messages: Sequence[Message]) -> str:
    """The one message's text as it stands, for a person who asked that it be continued without a template."""
    if len(messages) != 1:
        raise PromptError(f"a plain prompt is one text, not {len(messages)} messages")
    return messages[0].content


def _compiled(source: str) -> Template:
    from meshinfer.answer.template_sandbox import Sandbox

    try:
        return Sandbox().from_string(source)
    except MeshinferError:
        raise
    except Exception as error:  # Jinja's parser and Python's compiler, on foreign text
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        raise ModelError(f"the model's chat template cannot be read{where}: {_reason(error)}") from error


def _functions(now: datetime | None) -> dict[str, object]:
    def raise_exception(message: object) -> NoReturn:
        reason = printable(str(message), _REASON_CHARS)
        raise PromptError(f"the model's chat template refuses this conversation: {reason}")

    def strftime_now(pattern: str) -> str:
        return _strftime(pattern, now) if now else ""

    functions: dict[str, object] = {"raise_exception": raise_exception}
    if now:
        functions["strftime_now"] = strftime_now
    return functions


def _strftime(pattern: str, now: datetime) -> str:
    def part(match: re.Match[str]) -> str:
        text = now.strftime(f"%{match[2]}")
        return text.lstrip("0") or "0" if match[1] else text

    return _DIRECTIVE.sub(part, pattern)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself too deeply"
    return printable(str(error), _REASON_CHARS) or type(error).__name__
