"""One model as the asker uses it: its text, its embedding and its head."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np

from meshinfer.answer.question import Message, Question
from meshinfer.answer.sampling import Sampler, pick_rows
from meshinfer.answer.session import Session, Tokens
from meshinfer.answer.template import ChatTemplate, render_plain
from meshinfer.answer.text import TextStream
from meshinfer.engine.rows import RowsModel
from meshinfer.engine.step import Rows
from meshinfer.errors import ModelError, StepError
from meshinfer.model import mapping
from meshinfer.model.graph import PagedGraph
from meshinfer.model.manifest import TEMPLATE, TOKENIZER
from meshinfer.model.tokenizer import Tokenizer
from meshinfer.model.weights import ModelFiles
from meshinfer.values import ModelId, Precision, SequenceId

Spoken = tuple[list[int | StepError], dict[SequenceId, tuple[int, int, Rows]]]
"""The token of each row, and for those picked: position, token, and what it is embedded to."""


class Speaker:
    """Made in any thread; `embed` and `speak` belong to the inference thread, `prompt` to any."""

    def __init__(self, files: ModelFiles, device: str, precision: Precision, threads: int | None) -> None:
        """Raises ModelError for a model without a tokenizer, CapacityError where the device has no room."""
        config = files.manifest.config
        tokenizer = files.read_file(TOKENIZER)
        if tokenizer is None:
            raise ModelError(
                f"{files.name} has no tokenizer.json, so it cannot be asked: put one beside the model and pull it again"
            )
        self.model: ModelId = files.model
        self.name = files.name
        self.context = config.context
        self._eos = frozenset(config.eos)
        self._tokenizer = Tokenizer(tokenizer, config.eos, config.bos)
        template = files.read_file(TEMPLATE)
        self._template = None if template is None else ChatTemplate(template.decode("utf-8"))
        graph = PagedGraph.open(files)
        self._embedding = RowsModel(graph.embedding(), device, precision, threads)
        self._head = RowsModel(graph.head(), device, precision, threads)
        self._embedding.warm()
        self._head.warm()
        mapping.release(files.weights_path)

    # ── text ────────────────────────────────────────────────────────────────────────────────────────────────
    def prompt(self, question: Question) -> list[int]:
        """The tokens that the model is given. Raises ModelError where the template is missing or broken."""
        if question.plain:
            text = self._tokenizer.guard(render_plain(question.messages))
            return self._tokenizer.encode_prompt(text)
        if self._template is None:
            raise ModelError(
                f"{self.name} came without a chat template: ask with --plain to have a text continued, "
                "or pull a model that was made for questions"
            )
        guarded = [
            Message(message.role, self._tokenizer.guard(message.content)) for message in question.messages
        ]
        words = {
            "bos_token": self._spelling(self._tokenizer.bos),
            "eos_token": self._spelling(min(self._eos, default=None)),
        }
        rendered = self._template.render(guarded, words, now=datetime.now())
        return self._tokenizer.encode_prompt(rendered)

    def _spelling(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.spelling(token)

    def session(
        self, sequence: SequenceId, prompt: Sequence[int], max_tokens: int, question: Question, seed: int
    ) -> Session:
        """`seed` is used where the question brings none."""
        eos = frozenset[int]() if question.ignore_eos else self._eos
        text = TextStream(self._tokenizer.decode, question.stop)
        return Session(sequence, prompt, max_tokens, eos, Sampler(question.sampling, seed), text)

    # ── tensors, in the inference thread ────────────────────────────────────────────────────────────────────
    def embed(self, tokens: Tokens, positions: Tokens) -> Rows:
        """`[n]` and `[n]` to `[n, hidden]`, memory of its own."""
        return self._embedding.embed(tokens, positions)

    def speak(self, rows: Rows, sessions: Sequence[Session]) -> Spoken:
        """From the last hidden state of each session, `[n, hidden]`, to its next token, embedded for the next step."""
        logits = self._head.logits(rows)
        picked = pick_rows(
            logits, [session.sampler for session in sessions], [session.history for session in sessions]
        )
        going = [
            (session, token)
            for session, token in zip(sessions, picked, strict=True)
            if not isinstance(token, StepError)
        ]
        if not going:
            return picked, {}
        tokens = np.array([token for _, token in going], dtype=np.int64)
        positions = np.array([session.length for session, _ in going], dtype=np.int64)
        embedded = self._embedding.embed(tokens, positions)
        return picked, {
            session.sequence: (int(positions[index]), token, embedded[index : index + 1])
            for index, (session, token) in enumerate(going)
        }

    def close(self) -> None:
        """Let go of the device's memory; in the inference thread."""
        self._embedding.close()
        self._head.close()
