"""A person sees who runs which layers, what is missing, and whether the plan keeps its promise."""

from __future__ import annotations

from typing import Any

from meshinfer.front import tables


def span(first: int, last: int) -> dict[str, int]:
    """As JSON has it: `last` is the first layer that is not in it."""
    return {"first": first, "last": last}


def holder(name: str, first: int, last: int, **more: Any) -> dict[str, Any]:
    known = {"device": "CPU", "pool_tokens": 65536, "readiness": "ready"}
    return {"peer": name * 32, "name": name, "self": False, "span": span(first, last), **known, **more}


def whole_plan(**more: Any) -> dict[str, Any]:
    owners = [
        holder("a", 0, 20, self=True, predicted_us=8400, measured_us=9130, standbys=[]),
        holder(
            "b",
            20,
            30,
            predicted_us=4200,
            measured_us=None,
            readiness="loading",
            standbys=[holder("c", 20, 25), holder("a", 25, 30, readiness="loading", loaded_percent=40)],
        ),
    ]
    return {
        "plan": "f" * 64,
        "usable": True,
        "reason": None,
        "model_name": "smollm2",
        "predicted_us": 14_100,
        "planned_us": 13_000,
        "measured_us": 15_900,
        "measured_steps": 200,
        "head_us": 2500,
        "hops": {"count": 3, "predicted_us": 500, "measured_us": 700},
        "owners": owners,
        "fetching": {},
        "plans": [],
        **more,
    }


def shown(value: dict[str, Any]) -> str:
    return "\n".join(tables.plan(value))


def squeezed(text: str) -> list[str]:
    """Its lines, their columns one blank apart."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_what_was_predicted_stands_beside_what_is_measured() -> None:
    assert squeezed(shown(whole_plan())) == [
        "plan ffffffffffff for smollm2, in use",
        "PEER LAYERS DEVICE KV TOKENS STATE STANDBY PREDICTED MS MEASURED MS",
        "a (here) 0-19 CPU 65536 ready - 8.4 9.1",
        "b 20-29 CPU 65536 loading c 20-24 (ready), a 25-29 (loading 40 %) 4.2 -",
        "3 hops 1.5 2.1",
        "whole route 14.1 15.9",
        "measured over the last 200 tokens asked here; besides, the output head here takes 2.5 ms",
    ]


def test_until_speeds_are_known_the_plan_s_own_figure_is_shown() -> None:
    text = shown(whole_plan(predicted_us=None))
    assert squeezed(text)[-2] == "whole route as planned 13.0 15.9"


def test_nothing_measured_is_no_zero() -> None:
    text = shown(whole_plan(measured_us=None, measured_steps=0, hops={"count": 3, "predicted_us": None}))
    assert "measured over" not in text
    assert [
        line.split()[-2:] for line in text.splitlines() if line.startswith(("3 hops", "whole route"))
    ] == [
        ["-", "-"],
        ["14.1", "-"],
    ]


def test_what_is_missing_and_what_is_fetched_is_said() -> None:
    text = shown(
        whole_plan(
            usable=False,
            reason="waiting for b to load layers 20-29",
            fetching={"layers 0-19": {"done_bytes": 3 << 20, "total_bytes": 12 << 20}},
        )
    )
    assert "not ready yet" in text
    assert "waiting for b to load layers 20-29" in text
    assert "this PC fetches layers 0-19: 3.0 MiB of 12.0 MiB" in text


def test_without_a_plan_the_figures_say_why() -> None:
    text = shown(
        {
            "plan": None,
            "reason": "the model needs 9000 MiB",
            "by_peer": [{"peer": "ab" * 16, "name": "büro", "available_bytes": 1 << 30}],
        }
    )
    assert text.splitlines() == ["there is no plan: the model needs 9000 MiB", "  büro: 1.0 GiB"]
    assert "no model is known here" in shown({"plan": None, "reason": None})


def brief(number: int, owners: int = 2) -> dict[str, Any]:
    return {
        "plan": f"{number:064x}"[::-1],
        "model_name": "smollm2",
        "usable": True,
        "predicted_us": 20_000,
        "owners": [holder(chr(97 + n), n, n + 1) for n in range(owners)],
        "standbys": [],
    }


def test_the_whole_mesh_s_plans_are_listed_shortly() -> None:
    mine = {**brief(1), "plan": "f" * 64}
    assert "other plans" not in shown(whole_plan(plans=[mine])), "this one was shown already"
    text = shown(whole_plan(plans=[mine, *(brief(number, owners=9) for number in range(2, 40))]))
    assert "other plans of this mesh: 38" in text
    assert "a 0-0, b 1-1, c 2-2, d 3-3 and 5 more" in text
    assert text.endswith("… and 18 more")
    assert max(map(len, text.splitlines())) < 160


def test_a_plan_that_is_on_its_way_tells_how_far_it_is() -> None:
    owners = [holder("a", 0, 3), holder("b", 3, 6, readiness="loading")]
    assert "1 of 2 ready" in shown(whole_plan(plans=[{**brief(2), "usable": False, "owners": owners}]))


def test_links_are_shown_with_what_was_measured() -> None:
    text = tables.peers(
        [
            {
                "peer": "aa" * 16,
                "name": "a",
                "self": True,
                "device": "CPU",
                "memory_bytes": 1 << 30,
                "link": None,
            },
            {
                "peer": "bb" * 16,
                "name": "b",
                "device": "CPU",
                "memory_bytes": 1 << 30,
                "heard_s": 0.31,
                "spans": [span(0, 3), span(5, 6)],
                "link": {"up": True, "broken": False, "round_trip_us": 420, "kbit_s": 940_000},
            },
            {"peer": "cc" * 16, "name": "c", "link": {"up": False, "broken": True, "round_trip_us": None}},
        ]
    )
    assert squeezed(text) == [
        "NAME PEER DEVICE MEMORY LAYERS LINK ROUND TRIP MS MBIT/S HEARD S AGO",
        "a (here) aaaaaaaa CPU 1.0 GiB - - - - -",
        "b bbbbbbbb CPU 1.0 GiB 0-2, 5-5 up 0.4 940 0.3",
        "c cccccccc - - - broken - - -",
    ]


def test_a_peer_s_words_cannot_rule_the_terminal() -> None:
    owner = holder("\x1b[2J", 0, 30, standbys=[holder("\x1b]0;x\x07", 0, 30)])
    text = shown(
        whole_plan(
            owners=[owner], reason="\x1b[1m", model_name="\x1b[3m", plans=[{**brief(2), "owners": [owner]}]
        )
    )
    assert "\x1b" not in text
    assert "\x07" not in text
