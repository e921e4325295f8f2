"""Every bound, with its unit, its reason, and what the worst case costs."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# ── wire ────────────────────────────────────────────────────────────────────────────────────────────────────────
PROTOCOL_VERSION: Final = 1

HEADER_BYTES: Final = 64 * KIB
"""A frame's msgpack header. The largest honest one is an advert with a plan of 64 owners, about 20 KiB.
Worst case: one such buffer per message in a queue."""

BODY_BYTES: Final = 64 * MIB
"""A frame's raw body. The largest honest one is a chunk of 1,024 rows of a 16,384-wide model in f32: 64 MiB.
Worst case: a queue of `DATA_QUEUE_MESSAGES` of them from a member of the roster."""

DOOR_BYTES: Final = 4 * KIB
"""All that a stranger may send. A knock is under 1 KiB. Worst case: 4 KiB per connection, freed with it."""

MESSAGE_DEPTH: Final = 8
"""Nesting of msgpack containers. The deepest honest message, an advert with a plan, has 6."""

NAME_CHARS: Final = 64
"""A peer's or model's name in characters, so that a table stays a table."""

ADDRESSES: Final = 16
"""Addresses that one peer may announce; a PC with docker, VPN and WSL adapters has about 8."""

HOLDINGS: Final = 32
"""Models that one advert may list; further ones are served but not announced."""

# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────
STEP_SEQUENCES: Final = 256
"""Sequences in one step message: above it, batching gains nothing on the devices aimed at."""

STEP_TOKENS: Final = 1024
"""Rows in one step message. Worst case with a 16,384-wide model: `BODY_BYTES`."""

PREFILL_CHUNK_TOKENS: Final = 256
"""Tokens of a prompt in one step: long enough for the weights' cost to vanish, short enough for others to wait little."""

LAYERS: Final = 1024
HIDDEN: Final = 65_536
VOCABULARY: Final = 4 * 1024 * 1024
CONTEXT_TOKENS: Final = 4 * 1024 * 1024
"""A position beyond this is refused before it reaches arithmetic with memory in it."""

ROUTE_HOPS: Final = 64
"""Owners on one route; each adds a network hop to every token, so 64 is already beyond use."""

DATA_QUEUE_MESSAGES: Final = 256
"""Messages that may wait on one data socket per peer, in each direction; beyond it the sender is told at once."""

CONTROL_QUEUE_MESSAGES: Final = 1000
"""Control messages are under 64 KiB: worst case 64 MB per peer that has stopped reading, then dropped."""

WAITING_STEPS: Final = 512
"""Steps that wait for one span. Beyond it a step is refused, and its asker slows down."""

# ── sequences and answers ───────────────────────────────────────────────────────────────────────────────────────
LEASE_S: Final = 120.0
"""KV of a sequence that nobody stepped or freed for so long is taken back: its asker died without a word."""

ANSWERS_RUNNING: Final = 64
"""Answers that one asker runs at once; further ones wait."""

ANSWERS_WAITING: Final = 256
"""Questions that wait at one asker; beyond it a client is told to come back later (503)."""

ANSWER_TOKENS: Final = 4096
"""Tokens of one answer where the person set no bound of their own."""

STOP_STRINGS: Final = 16
STOP_STRING_CHARS: Final = 256
"""Held-back text while a stop string may be beginning is no longer than this."""

# ── chat templates ──────────────────────────────────────────────────────────────────────────────────────────────
TEMPLATE_BYTES: Final = 256 * KIB
TEMPLATE_STEPS: Final = 100_000
"""Loop turns and calls in one rendering: a long conversation takes about a thousand. Worst case: about 50 ms."""
TEMPLATE_OUTPUT_CHARS: Final = 4 * 1024 * 1024

# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────
SMALL_CONSTANT_BYTES: Final = 4 * KIB
"""Constants below this hold shapes that the reader validates; every peer has them all (FACTS: a few MB at most)."""

PIECE_BYTES: Final = 4 * MIB
"""Longest byte range under one hash: what is lost when a transfer breaks, and what one verification reads."""

MANIFEST_BYTES: Final = 16 * MIB
GRAPH_BYTES: Final = 64 * MIB
"""The graph's XML; SmolLM2's is 2.7 MB for 30 layers."""

BLOB_CHUNK_BYTES: Final = 1 * MIB
"""Bytes in one bulk message: small enough that a transfer yields often."""

# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────
HEARTBEAT_S: Final = 0.5
"""Adverts go out this often, and at once on a change. 20 peers × 1 KB × 2/s = 40 KB/s."""

SILENCE_S: Final = 5.0
"""A peer that was silent for so long is out of the view. Ten heartbeats: a busy PC misses a few."""

KNOCK_TIMEOUT_S: Final = 3.0
STEP_TIMEOUT_S: Final = 30.0
"""An answer waits so long for one step before it gives up on its route."""
