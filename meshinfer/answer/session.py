"""One answer's life, from prompt to last token: what to send next, what has come, and when it ends.

A session knows nothing of owners. It sees a route as one place that holds the first `sent` of its tokens, and
from which a row comes back for the last of them (D4). Whatever goes wrong there, it steps back to what is
still held and sends the rest again: prompt and generated tokens alike, in chunks, as a prompt is sent. Tokens
are only ever appended, so that nothing shown can change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from meshinfer import limits
from meshinfer.answer.question import Finish
from meshinfer.answer.sampling import Sampler
from meshinfer.answer.text import TextStream
from meshinfer.errors import PromptError
from meshinfer.values import SequenceId
from meshinfer.wire.messages import Entry

Tokens = npt.NDArray[np.int64]

_GROWTH_TOKENS: Final = 256


class Session:
    """One answer. `sampler` chooses its tokens (in the inference thread), `text` turns them into text."""

    __slots__ = (
        "_buffer",
        "_eos",
        "_text",
        "epoch",
        "finish",
        "in_flight",
        "length",
        "max_tokens",
        "prompt_tokens",
        "replays",
        "sampler",
        "sent",
        "sequence",
    )

    def __init__(
        self,
        sequence: SequenceId,
        prompt: Sequence[int],
        max_tokens: int,
        eos: frozenset[int],
        sampler: Sampler,
        text: TextStream,
    ) -> None:
        """`prompt` has one token at least; `max_tokens` is what `answer_tokens` gave."""
        if not prompt or max_tokens < 1:
            raise ValueError(f"no session: {len(prompt)} tokens of prompt, {max_tokens} of answer")
        self.sequence = sequence
        self.prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.finish: Finish | None = None
        self.length = len(prompt)
        """Tokens of prompt and answer so far."""
        self.sent = 0
        """Of these, how many the route holds or will hold when what is under way has run."""
        self.in_flight = 0
        """Chunks under way that still count."""
        self.epoch = 0
        """Grows with each step back; what was sent in an earlier epoch no longer counts."""
        self.replays = 0
        """Steps back since the latest token for which the route lacked what had been sent to it."""
        self._eos = eos
        self._text = text
        self._buffer: Tokens = np.empty(len(prompt) + _GROWTH_TOKENS, dtype=np.int64)
        self._buffer[: len(prompt)] = prompt

    @property
    def history(self) -> Tokens:
        """Prompt and answer so far, `[length]`. A view that stays as it is: later tokens go behind it."""
        return self._buffer[: self.length]

    @property
    def generated(self) -> int:
        """Tokens of the answer so far; a token that ends it is none of them."""
        return self.length - self.prompt_tokens

    @property
    def unsent(self) -> int:
        return self.length - self.sent

    @property
    def ready(self) -> bool:
        """Whether exactly one token is to be sent and nothing is under way: it can join a round."""
        return self.in_flight == 0 and self.length - self.sent == 1

    @property
    def reservation(self) -> int:
        """KV in tokens, in whole blocks, that it may come to hold. Its last token is never sent."""
        return _whole_blocks(self.prompt_tokens + self.max_tokens - 1)

    def take(self, most: int) -> Entry:
        """The next chunk, of at most `most` tokens, now under way; there is an unsent token."""
        count = min(most, self.length - self.sent)
        position = self.sent
        self.sent += count
        self.in_flight += 1
        return Entry(self.sequence, position, count, 1 if self.sent == self.length else 0)

    def arrived(self, epoch: int) -> bool:
        """A chunk that was taken in `epoch` has run; whether it still counts."""
        if epoch != self.epoch or self.finish is not None:
            return False
        self.in_flight -= 1
        return True

    def step_back(self, held: int) -> None:
        """The route holds the first `held` tokens at most: what is under way no longer counts."""
        self.sent = min(self.sent, held)
        self.in_flight = 0
        self.epoch += 1

    def append(self, token: int) -> str:
        """Takes the next token. Gives the text that it lets out; `finish` says whether it was the last."""
        if token in self._eos:
            return self._end(Finish.STOP)
        if self.length == self._buffer.size:
            self._buffer = np.concatenate([self._buffer, np.empty(self.length, dtype=np.int64)])
        self._buffer[self.length] = token
        self.length += 1
        self.replays = 0
        shown = self._text.push(token)
        if self._text.stopped:
            self.finish = Finish.STOP
        elif self.generated == self.max_tokens:
            shown += self._end(Finish.LENGTH)
        return shown

    def cancel(self) -> None:
        self.finish = Finish.CANCELLED

    def _end(self, finish: Finish) -> str:
        rest = self._text.finish()
        # A stop string may have been complete and waiting for one that began before it.
        self.finish = Finish.STOP if self._text.stopped else finish
        return rest


def answer_tokens(prompt_tokens: int, max_tokens: int | None, context: int, pool_tokens: int) -> int:
    """How many tokens an answer may have: what was asked for, as far as context and KV memory allow.

    `context` is the model's, in tokens; `pool_tokens` the KV room of the owner that has least. The last token
    of an answer needs no room, so that a prompt as long as the context still gets one. Raises `PromptError`.
    """
    if prompt_tokens < 1:
        raise PromptError("the prompt is empty: write what you would like to ask")
    if prompt_tokens > context:
        raise PromptError(
            f"the prompt has {prompt_tokens:,} tokens, the model's context holds {context:,}: shorten it"
        )
    room = pool_tokens // limits.KV_BLOCK_TOKENS * limits.KV_BLOCK_TOKENS
    if prompt_tokens > room:
        raise PromptError(
            f"the prompt has {prompt_tokens:,} tokens, the mesh has memory for {room:,}: shorten it, or let "
            "agents share more memory"
        )
    return min(max_tokens or limits.ANSWER_TOKENS, min(context, room) - prompt_tokens + 1)


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // limits.KV_BLOCK_TOKENS) * limits.KV_BLOCK_TOKENS
