"""How figures, tables and a model's text look in a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from meshinfer.limits import GIB, KIB, MIB

_HARMLESS: Final = "\n\t\u200c\u200d"
"""Line breaks, and the joiners that emoji and several scripts are written with."""


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their content; figures stand to the right."""
    lines = [[safe(str(cell)).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(headers, *lines, strict=True)]
    right = [bool(lines) and all(_is_figure(row[i]) for row in lines) for i in range(len(headers))]
    laid_out = [_line(row, widths, right) for row in [[header.upper() for header in headers], *lines]]
    return "\n".join(laid_out)


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = []
    for cell, width, to_right in zip(row, widths, right, strict=True):
        padding = " " * (width - _width(cell))
        cells.append(padding + cell if to_right else cell + padding)
    return "  ".join(cells).rstrip()


def _is_figure(cell: str) -> bool:
    return cell in ("", "-") or (cell[:1].isdigit() and not any(letter.isalpha() for letter in cell))


def _width(text: str) -> int:
    """Columns in a terminal: CJK letters and emoji take two, combining marks none (UAX #11)."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def safe(text: str) -> str:
    """Text from a model or a peer without control characters: an escape sequence could rule the terminal."""
    return "".join(
        letter
        for letter in text
        if letter in _HARMLESS or unicodedata.category(letter) not in ("Cc", "Cf", "Cs")
    )


def amount(size_bytes: int | None) -> str:
    """Bytes for a person: "1.5 GiB"."""
    if size_bytes is None:
        return "-"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def span(value: object) -> str:
    """`{"first", "last"}`, as JSON has it, in a person's words: here both ends belong to it."""
    if isinstance(value, Mapping) and isinstance(value.get("last"), int):
        return f"{value.get('first')}-{value['last'] - 1}"
    return "-"


def spans(values: object) -> str:
    return ", ".join(map(span, values)) or "-" if isinstance(values, list) else "-"


def statistics(stats: dict[str, Any]) -> str:
    """One line of figures, then the route: who ran which layers, on what, and how long a step took there."""
    figures = (
        f"{stats['tokens']} tokens after a prompt of {stats['prompt_tokens']}, "
        f"first after {stats['ttft_s']:.2f} s, {stats['tokens_per_s']:.1f} tokens/s"
    )
    rows = [
        (
            stage.get("name") or str(stage.get("peer", ""))[:8],
            stage.get("device", "-"),
            span(stage.get("span")),
            milliseconds(stage.get("step_ms_p50")),
            milliseconds(stage.get("queue_ms_p50")),
            milliseconds(stage.get("hop_ms_p50")),
        )
        for stage in stats.get("route", ())
    ]
    return f"{figures}\n{table(('peer', 'device', 'layers', 'step ms', 'queue ms', 'hop ms'), rows)}"
