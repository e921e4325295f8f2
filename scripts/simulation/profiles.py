"""How bad the office is: what goes wrong, how often, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from simulation.network import Weather


@dataclass(frozen=True, slots=True)
class Profile:
    """`seconds` is how long faults go on; `every_s` the mean time between two of them, `kinds` their weights by name.

    `weather` holds while faults go on, `after` once they are over.
    """

    name: str
    seconds: float
    every_s: float = 0.0
    kinds: Mapping[str, float] = field(default_factory=dict)
    weather: Weather = field(default_factory=Weather)
    after: Weather = field(default_factory=Weather)
    latency_s: float = 0.001
    load_failures: float = 0.0
    unseen: float = 0.0
    start_within_s: float = 1.0
    defects: bool = False
    scars: bool = False
    """Some links stay broken when the faults end, and some agents stay away."""
    contacts_only: float = 0.0
    """How likely multicast is blocked in this office."""


_HARSH_KINDS = {
    "kill": 3.0,
    "power_cut": 1.5,
    "leave": 1.5,
    "start": 1.0,
    "restart_at_once": 1.0,
    "freeze": 2.0,
    "starve": 2.0,
    "split": 1.5,
    "isolate": 1.5,
    "cut": 1.5,
    "one_way": 1.5,
    "flap": 1.0,
    "storm": 0.7,
    "change": 2.0,
    "turn_clock": 0.5,
    "lose_shard": 1.0,
}

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("none", seconds=60.0),
        Profile("loss20", seconds=60.0, weather=Weather(loss=0.2), after=Weather(loss=0.2)),
        Profile(
            "churn",
            seconds=60.0,
            every_s=2.0,
            kinds={"kill": 1.0, "leave": 1.0, "start": 2.0, "restart_at_once": 1.0},
            weather=Weather(loss=0.01, delay_s=0.05),
        ),
        Profile(
            "harsh",
            seconds=12.0,
            every_s=1.0,
            kinds=_HARSH_KINDS,
            weather=Weather(loss=0.2, duplicates=0.05, delay_s=1.5),
            after=Weather(loss=0.01, delay_s=0.05),
            load_failures=0.1,
            unseen=0.3,
            start_within_s=3.0,
            defects=True,
            scars=True,
            contacts_only=0.2,
        ),
    )
}


def varied(profile: Profile, random: Random) -> Profile:
    """The harsh office is not always harsh in the same way: now the network, now the PCs, now neither."""
    if profile.name != "harsh":
        return profile
    weather = Weather(
        loss=random.choice((0.0, 0.05, 0.2, 0.3)),
        duplicates=random.choice((0.0, 0.05, 0.2)),
        delay_s=random.choice((0.0, 0.1, 0.5, 1.5)),
    )
    return replace(
        profile,
        weather=weather,
        every_s=random.choice((0.5, 1.0, 2.0, 5.0)),
        latency_s=random.choice((0.0005, 0.002, 0.02)),
        load_failures=random.choice((0.0, 0.0, 0.1, 0.3)),
    )
