"""Every bound, with its unit, its reason, and what the worst case costs."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# ── wire ────────────────────────────────────────────────────────────────────────────────────────────────────
PROTOCOL_VERSION: Final = 2

RULES: Final = 1
"""Numbers the way in which plans are computed from adverts. Agents with other rules would come to other plans: each
kind plans by itself, so that an office can be updated PC by PC."""

HEADER_BYTES: Final = 64 * KIB
"""A frame's msgpack header. The largest honest one is an advert with `STANDINGS` plans of `PLAN_PEERS` peers, about
55 KiB. Worst case: one such buffer per message in a queue."""

BODY_BYTES: Final = 64 * MIB
"""A frame's raw body. The largest honest one is a chunk of 1,024 rows of a 16,384-wide model in f32: 64 MiB.
Worst case: a queue of `DATA_QUEUE_MESSAGES` of them from a member of the roster."""

DOOR_BYTES: Final = 4 * KIB
"""All that a stranger may send. A knock is under 1 KiB. Worst case: 4 KiB per connection, freed with it."""

MESSAGE_DEPTH: Final = 8
"""Nesting of msgpack containers. The deepest honest ones, a message with adverts and an advert itself, have 3."""

NAME_CHARS: Final = 64
"""A peer's or model's name in characters, so that a table stays a table."""

ADDRESSES: Final = 16
"""Addresses that one peer may announce; a PC with docker, VPN and WSL adapters has about 8."""

ADDRESS_CHARS: Final = 64
"""A numeric address as text; the longest IPv6 one has 45."""

ADDRESSES_READ: Final = 4096
"""Addresses that are remembered as judged: each comes again with each news of its peer, and costs 15 µs to read. Four
for each of 1,000 peers. Worst case: 1 MiB."""

CERTIFICATE_BYTES: Final = 1 * KIB
"""One member's certificate: about 400 bytes and a name of at most 256. Two of them fit into `DOOR_BYTES`."""

ADVERT_BYTES: Final = HEADER_BYTES - CERTIFICATE_BYTES - 128
"""An advert travels in a header with its author's certificate, its signature and a few bytes more."""

HOLDINGS: Final = 32
"""Models that one advert may list; further ones are served but not announced."""

LINKS: Final = 128
"""Peers that one advert may list as heard: 8 neighbours, those of the plans it stands by, and those just met. Worst
case: 24 bytes each, 3 KiB of an advert."""

BROKEN_LINKS: Final = 64
DOUBTS: Final = 64
"""Peers that one advert may name as badly linked, and as waited for in vain: 16 bytes each, 1 KiB of an advert."""

STANDINGS: Final = 4
"""Plans that one agent stands by at once: one that serves, its successor, one that is being let go of, and one for a
second model."""

PLAN_STANDBYS: Final = 96
PLAN_PEERS: Final = 96
"""Standbys of one plan (a peer counts once for each span that it stands by for), and peers that it names in all,
`ROUTE_HOPS` owners among them. Worst case: 11 KiB, so that an advert with `STANDINGS` of them fits into a header."""

STANDBYS_PER_SPAN: Final = 3
"""Standbys that share one span: each further one is one more peer that must live for it to be covered."""

PLAN_BYTES: Final = 32 * KIB
"""Where every device has the longest name. What is longer is no plan, and nothing of it is read."""

DEVICE_CHARS: Final = 32
"""A device's name, as OpenVINO writes it: `GPU.0`, or `HETERO:GPU.0,GPU.1,CPU` at the longest. It is in a plan once for
each span."""

PLANS_READ: Final = 512
"""Plans kept as they were read: each is in the adverts of all whom it names, again with each news of theirs. A mesh of
1,000 has about 300. Worst case: about 100 KiB each, 50 MiB."""

ADVERTS: Final = 64
"""Adverts in one message; about 80 small ones fill a header. Worst case: 128 signatures to check, about 20 ms."""

SUMMARY_MARKS: Final = 4096
SUMMARY_MARK_BYTES: Final = 32
CONTROL_BYTES: Final = SUMMARY_MARKS * SUMMARY_MARK_BYTES
"""A summary names every peer of the largest mesh, `ROSTER_MEMBERS`: 128 KiB, the longest frame of the control channel.
One of a mesh of 1,000 has 32 KiB."""

PROBE_BYTES: Final = 256 * KIB
"""Bytes that a link is tried with: 2 ms at 1 Gbit/s, 20 ms at 100 Mbit/s, a clear multiple of a round trip."""

# ── trust ───────────────────────────────────────────────────────────────────────────────────────────────────
ROSTER_MEMBERS: Final = 4096
"""Members that one agent knows. Beyond it strangers are refused and known ones kept, so that somebody with
a token cannot push anybody out. Worst case: about 2 KiB each, 8 MiB."""

TOKEN_CHARS: Final = 4 * KIB
"""A pasted token with whatever line breaks came with it; an honest one has about 250 characters."""

TOKEN_ADDRESSES: Final = 8
"""Addresses that a token names: any one that answers is enough."""

CLOCK_SKEW_S: Final = 86_400
"""How far two PCs' clocks may differ before a certificate counts as issued in the future."""

# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────
STEP_SEQUENCES: Final = 256
"""Sequences in one step message: above it, batching gains nothing on the devices aimed at."""

STEP_TOKENS: Final = 1024
"""Rows in one step message. Worst case with a 16,384-wide model: `BODY_BYTES`."""

DETAIL_CHARS: Final = 256
"""One sentence of explanation from a peer: enough for a cause and what to do, too short to flood a log."""

PREFILL_CHUNK_TOKENS: Final = 256
"""Tokens of a prompt in one step: long enough for the weights' cost to vanish, short enough for others to
wait little.
"""

LAYERS: Final = 1024
HIDDEN: Final = 65_536
VOCABULARY: Final = 4 * 1024 * 1024
CONTEXT_TOKENS: Final = 4 * 1024 * 1024
"""A position beyond this is refused before it reaches arithmetic with memory in it."""

UNKNOWN_CONTEXT_TOKENS: Final = 2048
"""The context of a model that does not say its own: the least that models of its kind were trained for."""

ROUTE_HOPS: Final = 64
"""Owners on one route; each adds a network hop to every token, so 64 is already beyond use."""

DATA_QUEUE_MESSAGES: Final = 256
"""Messages that may wait on one data socket per peer, in each direction; beyond it the sender is told at
once.
"""

CONTROL_QUEUE_MESSAGES: Final = 1000
"""Control messages are under `CONTROL_BYTES`, nearly all under 2 KiB: worst case 128 MB per peer that has stopped
reading, then dropped."""

WAITING_STEPS: Final = 512
"""Steps that wait for one span. Beyond it a step is refused, and its asker slows down."""

# ── sequences and answers ───────────────────────────────────────────────────────────────────────────────────
LEASE_S: Final = 120.0
"""KV of a sequence that nobody stepped or freed for so long is taken back: its asker died without a word."""

ANSWERS_RUNNING: Final = 64
"""Answers that one asker runs at once; further ones wait."""

ANSWERS_WAITING: Final = 256
"""Questions that wait at one asker; beyond it a client is told to come back later (503)."""

ANSWER_TOKENS: Final = 4096
"""Tokens of one answer where the person set no bound of their own."""

KV_BLOCK_TOKENS: Final = 32
"""Owners give KV out in blocks of at most so many tokens (CPU 32, GPU 16): askers reserve whole ones."""

PREFILL_STEPS: Final = 4
"""Steps of prompts that one asker has on a route at once: enough to keep owners busy, few enough that a
token of a running answer waits for little."""

PREFILL_CHUNKS: Final = 2
"""Of these, chunks of one prompt: the next is there when an owner is done with the one before."""

STEP_RETRIES: Final = 8
"""Replays of one answer without a new token between them. A lost owner costs one; more means that a route
never keeps what it is given."""

BUSY_PATIENCE_S: Final = 30.0
"""An answer waits so long for owners that have no room or too much work, then it fails and says so."""

RETRY_S: Final = 0.05
RETRY_MAX_S: Final = 1.0
"""The pause after an owner said that it is full or overloaded, doubled each time: under one step on a slow
PC at first, and at last no more than two small messages a second."""

STOP_STRINGS: Final = 16
STOP_STRING_CHARS: Final = 256
"""Held-back text while a stop string may be beginning is no longer than this."""

# ── chat templates ──────────────────────────────────────────────────────────────────────────────────────────
TEMPLATE_BYTES: Final = 256 * KIB
TEMPLATE_STEPS: Final = 100_000
"""Loop turns, operations on text and lists, calls (five) in one rendering: 600 turns of a conversation take
20,000. Worst case: about 0.2 s."""
TEMPLATE_WORDS: Final = 12_000
"""Words and signs of a template; one of 20 KB has about 6,000. Worst case: half a second to compile, once."""
TEMPLATE_OUTPUT_CHARS: Final = 4 * 1024 * 1024

# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────
SMALL_CONSTANT_BYTES: Final = 4 * KIB
"""Constants below this hold shapes that the reader validates; every peer has them all (FACTS: a few MB at
most).
"""

PIECE_BYTES: Final = 4 * MIB
"""Longest byte range under one hash: what is lost when a transfer breaks, and what one verification reads."""

MANIFEST_BYTES: Final = 16 * MIB
GRAPH_BYTES: Final = 64 * MIB
"""The graph's XML; SmolLM2's is 2.7 MB for 30 layers. It also bounds the nodes, of some 200 bytes at least:
300,000 at worst, which the reader takes without recursion (a chain of 200,000 was read on a stack of 1
MiB)."""

GGUF_HEADER_BYTES: Final = 256 * MIB
"""A GGUF file's metadata and tensor list; a vocabulary of 256,000 with its merges takes about 12 MB.
Worst case: empty texts of 8 bytes each, which cost Python seven times that."""

GGUF_TENSORS: Final = 32 * LAYERS
GGUF_PAIRS: Final = 4096
"""Metadata entries of a GGUF file; real ones have under 100."""

BLOB_CHUNK_BYTES: Final = 1 * MIB
"""Bytes in one bulk message: small enough that a transfer yields often."""

SMALL_CONSTANTS_BYTES: Final = 64 * MIB
"""All constants under `SMALL_CONSTANT_BYTES` of one model; SmolLM2's are 0.3 MB. Held in memory once, at
arrival.
"""

TOKENIZER_BYTES: Final = 64 * MIB
"""`tokenizer.json`; the largest known, for 256k tokens, is 33 MB."""

WEIGHTS_BYTES: Final = 4096 * GIB
"""A sparse file of this size still costs nothing before bytes arrive; no model of today reaches a tenth of
it.
"""

STOP_TOKENS: Final = 64
"""Tokens that end an answer; models of today name up to five."""

NEAR_TIE: Final = 1e-3
"""Logits closer than this may change places with the shape of a batch, even in f32 throughout (measured:
7.6e-5).
"""

ORIGINAL_DIFFERENCE: Final = 1e-3
"""How far a paged model's logits may be from those of the model as it came: other kernels sum in another
order.
"""

VERIFY_LOGITS_BYTES: Final = 256 * MIB
"""Logits of one prompt that `verify` keeps; a prompt longer than a sliding window is tried where they fit
in.
"""

GRAPH_RANK: Final = 16
GRAPH_DIMENSION: Final = 2**31 - 1
GRAPH_ELEMENTS: Final = 2**42
"""Elements of one tensor of a graph: the reader multiplies dimensions in 64 bits, and a 16,384-wide model's
largest matrix has 2**33."""

GRAPH_UNPACKED: Final = 4
GRAPH_UNPACKED_LEAST: Final = 64 * MIB
"""A tensor that constants alone determine may have so many elements for each byte of the weights, or the
least: 2-bit weights unpack to 4. Without it a few bytes of graph could ask for terabytes while it is
transformed."""

GRAPH_DEPTH: Final = 32
"""Nesting of XML elements; OpenVINO writes 7."""

# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────
HEARTBEAT_S: Final = 0.5
"""Each watched peer gets a heartbeat this often: 16 small messages a second in a large mesh. Adverts go out on a change
only."""

SILENCE_S: Final = 12.0
"""A peer whose link stands, but which says nothing for so long, is not heard any more. A process that is frozen or
gone, and a PC without its cable, lose their links within 2 s (`CONTROL_DEAD_MS`); what is left is a busy one: 7 s of
silence were measured on two cores at a load of 17. Worst case: an agent that hangs is planned with for so long; answers
do not wait for that. At 20 % loss, 24 heartbeats in a row are never lost."""

SPEAKER_S: Final = 5.0
"""Whoever speaks but is not of this mesh yet is answered for so long after its last word: ten heartbeats. It is present
before that, or gone."""

DOWN_GRACE_S: Final = 0.6
"""The same for a peer to which the own link is down: its process has ended, unless the link is back or a heartbeat
comes within this."""

GOSSIP_S: Final = 0.1
"""News waits up to so long for more before it is passed on, another time at each agent: a flood over four hops takes a
quarter of a second, and goes over each link once."""

LINGER_S: Final = 30.0
"""A peer that is heard but needs not be watched any more is watched for so long still: its successor's link must stand
first, and views that join at once must not fall apart again."""

LINKS_LATER_S: Final = 2.0
"""What changes nothing about who is present (one more link, a figure) is told this much later, with what else there is.
Below `SILENCE_S`, so that nobody takes a neighbour that has stopped speaking to it for a bad link."""

EDGES_AT_ONCE: Final = 3
"""An agent with fewer edges tells at once of each that comes."""

LINGERING: Final = 16
"""Peers watched in this way at most, as long as the mesh holds together without the others. Worst case: 32 heartbeats a
second, for half a minute."""

STRANGER_S: Final = 1.0
"""Who is heard of but not present after this is worth a link. When many start at once, most are present by then."""

SPEAKERS: Final = 8
"""Peers that are not present but speak to this agent, and are watched for it; each stays while it speaks."""

ROUND_TRIP_WINDOW_S: Final = 30.0
"""A link's round trip is the least one measured in so long: what is above it was waiting."""

ROUND_TRIP_SAMPLES: Final = 4
"""Echoes before a first figure is told. It is looked at again twice in a window: each telling is a flood."""

ROUND_TRIP_STEP_US: Final = 300
"""Differences below this are no news: half of it is what a hop costs, and that differs by as much with every token."""

ROUND_TRIP_CALM_S: Final = 60.0
ROUND_TRIP_CALM_MOST_S: Final = 960.0
"""After a figure was told the next waits so long, doubled each time, or a quarter of that where it is twice as much or
half: on a link that jitters the least of a window is never the same. Worst case: 30 floods a second among 1,000."""

BROKEN_AFTER_S: Final = 3.0
"""A peer that fell silent on one link only, and is still vouched for by others after this, has a broken link. Above the
time in which several observers notice one death (libzmq's pings, a second apart, and the flood)."""

BROKEN_S: Final = 60.0
BROKEN_MOST_S: Final = 1800.0
"""How long a link that failed stays out of routes, doubled with each time, and forgotten after as long as the most."""

FLAPS_FORGOTTEN_S: Final = 300.0
"""A link that was silent for a moment only is broken if that happens again within this."""

ABSENT_S: Final = 600.0
"""Adverts of the absent are kept so long: a split mesh finds together again by them, and old news of the dead is known
to be old."""

SUMMARY_AFTER_BEATS: Final = 2
SUMMARY_MOST_BEATS: Final = 16
"""A neighbour that knows other adverts for so many heartbeats is asked which, more rarely each time: in a mesh in which
something changes every second, two digests are seldom equal."""

SUMMARY_PART_MARKS: Final = 128
"""Marks in such a summary: 4 KiB. Eight of them cover a mesh of 1,000, one each of eight neighbours."""

ADVERTS_AT_ONCE: Final = 32
"""Adverts in one answer to a summary: about 20 KiB, and one lost message costs no more than these."""

INCARNATION_AGAIN_S: Final = 10.0
"""An agent whose clock was set back takes a number above its former life's, and not again within this: two that were
given one key by mistake must not count each other up at the network's speed."""

KNOCK_TIMEOUT_S: Final = 3.0
STEP_TIMEOUT_S: Final = 30.0
"""An answer waits so long for one step before it gives up on its route."""

# ── files of a home, and the local interface ────────────────────────────────────────────────────────────────
DOOR_PORT: Final = 29_470
"""Where a door is looked for first: below the ranges from which Linux (32768) and Windows (49152) lend
ports.
"""

CONFIG_BYTES: Final = 1 * MIB
"""A configuration file has a few hundred bytes; a larger one is another file by mistake."""

SECRET_BYTES: Final = 256 * KIB
"""Keys, membership and the note on the running agent, each under 4 KiB; read into memory whole."""

# ── network ─────────────────────────────────────────────────────────────────────────────────────────────────
CURVE_OVERHEAD_BYTES: Final = 64
"""What encryption adds to a frame before its size is checked: 33 bytes in CurveZMQ, rounded up."""

BULK_QUEUE_MESSAGES: Final = 64
"""Bulk messages that may wait per peer and direction: 64 MiB of `BLOB_CHUNK_BYTES` chunks."""

FETCHES_SERVED: Final = 64
"""Chunks that one peer may have asked for and not been sent; an honest one asks for 4 each of 4 pieces of two
transfers. Beyond it a request is refused. Worst case: 64 MiB per peer that floods us."""

MESSAGE_FRAMES: Final = 8
"""Frames of one message that are kept; the longest honest one has 2. Further ones are read and dropped."""

TURN_MESSAGES: Final = 64
"""Messages that one socket hands over before the loop may do something else: about 1 ms."""

NO_COPY_BYTES: Final = 256 * KIB
"""Frames from here on are sent without a copy. Below it the copy (10 GB/s) costs less than handing the memory
back through pyzmq's collector thread (about 20 µs, and a fight for the interpreter's lock)."""

HANDSHAKE_BYTES: Final = 1 * KIB
"""The longest command of a CURVE handshake has 300 bytes. Nothing longer is taken from a peer that we
connected to.
"""

HANDSHAKE_MS: Final = 3000
"""A connection that has not shown a key of the roster by then is closed. Worst case: a stranger holds as many
descriptors as they open connections in 3 s, about 20 KiB each."""

CONTROL_PING_MS: Final = 500
CONTROL_DEAD_MS: Final = 1500
"""A control link without a sign of life for so long is broken. libzmq's own thread answers, so a busy interpreter is
not taken for a dead PC; three pings have gone unanswered by then."""

RECONNECTED_S: Final = 0.5
HANDSHAKEN_S: Final = 1.0
"""A control link that broke by itself is down if the other end does not take a connection again within the first, or
says nothing on it within the second: a vanished PC shows in 2 s, a frozen process in 3. A PC whose cores are all taken
does both: at seven busy threads for each core, libzmq's own were late by up to 2 s."""

BODY_PING_MS: Final = 1000
BODY_DEAD_MS: Final = 20_000
"""The same for data and bulk links, where a sign of life may wait behind a body
(6 s for `BODY_BYTES` at 100 Mbit/s)."""

RECONNECT_MS: Final = 200
RECONNECT_MAX_MS: Final = 2000
"""A peer that is still known is tried again so often: it is back within two seconds of its return."""

GOODBYE_MS: Final = 250
"""What closing may wait for the last words on a control link to leave; a dead peer costs just this."""

PORT_TRIES: Final = 64
"""Agents on one PC that may each take their four ports from the base port on."""

DOOR_CONNECTIONS: Final = 128
DOOR_CONNECTIONS_PER_HOST: Final = 32
"""Strangers at the door at once, in all and from one address; further ones are turned away.
Worst case: 128 × `DOOR_BYTES`, each for no longer than `KNOCK_TIMEOUT_S`."""

DOOR_KNOCKS_PER_S: Final = 20.0
DOOR_KNOCKS_BURST: Final = 60.0
"""Knocks from one address that are answered: each costs two signatures to check, about 0.3 ms. Ten agents
that start on one PC at the same second knock 9 times each at most."""

DOOR_HOSTS: Final = 1024
"""Addresses whose rate is remembered, the longest silent forgotten first; about 200 bytes each."""

DISCOVERED_NAMES: Final = 1024
"""Announcements remembered: far above any office. Those that are there stay; further ones are not taken."""

ANNOUNCEMENT_TTL_S: Final = 600
"""An agent that died without a goodbye is forgotten after this; each browser asks again every 8 minutes."""

DISCOVERY_LOOKUPS: Final = 8
DISCOVERY_LOOKUP_MS: Final = 3000
"""Announcements that came incomplete and are being asked after, and for how long."""

INTERFACE_CHECK_S: Final = 2.0
"""How soon a change of addresses is noticed; reading them takes about 1 ms."""

QUESTION_BYTES: Final = 4 * MIB
"""Body of one request to the local interface: a prompt of a million tokens is about 4 MB of text."""

# ── the agent ───────────────────────────────────────────────────────────────────────────────────────────────
PLACES: Final = 1024
"""Places remembered. Beyond it the least trusted and oldest go: 100,000 announced names cost no more than this."""

KNOCKS_AT_ONCE: Final = 8
"""Knocks under way at once: a token with dead addresses must not delay the living ones, nor fill a small router."""

REQUESTS_IN_FLIGHT: Final = 4
"""Chunks asked for ahead: 4 MiB cover a gigabit link's delay many times over, and bound what one transfer holds."""

PIECES_IN_FLIGHT: Final = 4
"""Pieces fetched at once: one is on its way while another is hashed and written."""

PLAN_IDLE_S: Final = 2.0
"""A plan without a step for so long, and without KV of an answer that was stepped under it, is idle: an answer under
way steps ten times a second, or waits for an owner no longer than `RETRY_MAX_S`."""

MEASURE_S: Final = 0.5
"""What measuring a shard takes, unless a single step of it takes longer."""

MEASURE_AGAIN_S: Final = 5.0
MEASURE_AGAIN: Final = 4
"""How long after a shard was loaded it is measured again while nobody is answered, and how often at most: loading five
shards and a head takes 10 s on a slow PC. Worst case: a step that comes just then waits for `MEASURE_S`, and for a
chunk of as long."""

DRIFT_WINDOW_S: Final = 60.0
DRIFT_WINDOWS: Final = 3
"""A speed has drifted when so many windows in a row say so: other work of a minute or two on a PC moves no layers."""

DRIFT_DECODE_STEPS: Final = 8
DRIFT_PREFILL_STEPS: Final = 2
"""Fewer steps in a window say nothing: their fastest may still have met other work."""

DRIFT_POSITION: Final = 1024
"""Steps further into their sequence are no measure: attention over so many tokens begins to count beside weights."""

LINKS_TO_ALL: Final = 64
"""In a mesh of so many peers an agent holds links to all of them: nine sockets each, and a ping a second. In a larger
one it holds them to the peers that it watches, works for, or asks."""

GUEST_S: Final = 60.0
"""A link that only the other end needs, to get answers or parts of a model from here, is held for so long after it last
said so; it says so every two seconds."""

UNREACHED_S: Final = 60.0
"""A peer that the mesh has forgotten, and that was not reached for so long either, is not knocked at any more."""

SIGNED_ADVERTS: Final = ROSTER_MEMBERS
"""Adverts of others that are kept as they were signed, to be passed on: the newest of each author. About 2 KiB each;
worst case `HEADER_BYTES` each, from members of the roster."""

PROBE_FIRST_S: Final = 3.0
PROBE_AGAIN_S: Final = 600.0
PROBE_RETRY_S: Final = 30.0
"""When a link is measured: three to six seconds after it came up, again until there are some figures, then every ten
minutes. Three quarters of a MiB each time: with eight neighbours 80 kbit/s in the long run."""

PROBE_TIMEOUT_S: Final = 5.0
"""A probe without an answer by then met a busy peer, or a link below 0.5 Mbit/s."""

PROBE_LATE_S: Final = 0.01
"""A loop that sleeps twice as long as it asked for is too busy to measure a link."""

PROBES_PER_S: Final = 0.1
PROBES_BURST: Final = 8.0
"""Probes of one peer that are answered; an honest one sends three at a time."""

# ── agreement ───────────────────────────────────────────────────────────────────────────────────────────────
SETTLE_S: Final = 1.0
"""Plans are computed when what they depend on has been the same for so long: two heartbeats, so that ten agents that
start at the same second make one plan and not ten."""

SETTLE_AGAIN_S: Final = 0.3
"""The same where plans have been held before, and between proposals that crossed each other: three times what news
needs to reach everybody. A plan that broke is replaced in 3 s from the kill, detection (1.5 s) included."""

SETTLE_MOST_S: Final = 5.0
"""In a mesh that never rests for so long, plans are computed after this all the same."""

ALONE_SETTLE_S: Final = 2.0
"""An agent that has just started and hears nobody waits so long before it plans for itself alone: mDNS needs 1.2 s
(measured), and loading a whole model to drop it a second later helps nobody."""

ACCEPT_S: Final = 6.0
"""Whoever has not accepted a plan that names them so long after another did, is doubted. An honest peer in the midst of
changes takes `SETTLE_MOST_S`, and news a second."""

DOUBT_S: Final = 30.0
DOUBT_MOST_S: Final = 1800.0
"""A doubt lasts so long, doubled each time, up to half an hour: each one costs the mesh `ACCEPT_S` of waiting."""

KEEP_BROKEN_S: Final = 5.0
"""A broken plan that nothing can take the place of is stood by for so long: its owner may only have been cut off for a
moment, and then it goes on without a load."""

FASTER_LASTS_S: Final = 60.0
"""A working plan is replaced by a faster one when that has been possible for so long without a break: longer than a
burst of somebody's own work on their PC."""

STANDBY_LASTS_S: Final = 10.0
"""The same for a standby that is missing: a peer that has been here for so long may stay."""

RETIRE_S: Final = 60.0
"""A plan that has been replaced is served for so long at most, while answers under it end; a longer one moves on to the
new plan by replay."""

BACKOFF_S: Final = 30.0
BACKOFF_MOST_S: Final = 1800.0
"""An owner that could not load sits out of its model's plans for so long, twice as long after each failure in a row, up
to half an hour: a full disk is rarely emptied sooner, and each attempt may cost the mesh a working plan."""

LINKS_SETTLE_S: Final = 2.0
"""Links are measured anew all the time; whether that makes a better plan possible is looked at so often at most."""

NEED_AGAIN_S: Final = 2.0
"""A manifest that has not come is asked for again after so long: the peer that was asked may be gone."""

LOOK_AROUND_S: Final = 0.5
"""In a mesh of more than `ONE_CELL` peers, what happens outside an agent's own cell and plans is looked at so often."""

LOOK_SOON_S: Final = 0.1
"""There, what happens in its own cell is looked at so long after the first news: the rest of a flood, which takes as
long, is looked at together."""

ONE_CELL: Final = 32
CELL_PEERS: Final = 12
CELL_PLANS: Final = 3
"""Up to `ONE_CELL` peers plan together. A larger mesh is halved, and its halves again, where each half has at least
`CELL_PEERS` peers and memory for `CELL_PLANS` plans: enough to choose from, few enough that planning takes
milliseconds."""

SPREAD_PERCENT: Final = 150
"""Askers are spread over all usable plans that take at most this share of the fastest one's time."""
