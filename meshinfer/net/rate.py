"""How often each stranger may be heard."""

from __future__ import annotations

from meshinfer import limits


class Rate:
    """A token bucket for each host: `per_s` in the long run, `burst` at once.

    Remembers `DOOR_HOSTS` hosts; of more, the one that came longest ago starts afresh, so an attacker with
    that many addresses gains `burst` for each and no memory.
    """

    def __init__(
        self, per_s: float = limits.DOOR_KNOCKS_PER_S, burst: float = limits.DOOR_KNOCKS_BURST
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: dict[str, tuple[float, float]] = {}  # host → (tokens, when); oldest first

    def allow(self, host: str, now: float) -> bool:
        """Whether `host` may be heard at `now` (seconds, monotonic); counts it if so."""
        tokens, when = self._buckets.pop(host, (self._burst, now))
        tokens = min(self._burst, tokens + (now - when) * self._per_s)
        allowed = tokens >= 1
        self._buckets[host] = (tokens - allowed, now)
        if len(self._buckets) > limits.DOOR_HOSTS:
            del self._buckets[next(iter(self._buckets))]
        return allowed
