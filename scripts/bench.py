"""Compares this mesh with OpenVINO GenAI in one process: same weights, same prompts, alternating runs.

    python scripts/bench.py [--home DIR] [--runs N] [--json]

The mesh is an asker and two owners, three processes on this PC, over encrypted sockets on loopback. GenAI is its
continuous-batching pipeline in one process. Prefix reuse is off in both, and both compute in the device's default
precision. The figure is tokens per second in all, the median over runs; the ratio is that of each pair of runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from meshinfer.agent.config import default_home
from meshinfer.model.manifest import GRAPH, TOKENIZER
from meshinfer.model.store import find
from meshinfer.model.tokenizer import Tokenizer
from meshinfer.model.weights import ModelFiles

HERE = Path(__file__).resolve().parent
SEED_TEXT = (
    "The harbour master kept a ledger of every boat that came in under the old bridge, and of every boat that did not. "
    "On calm evenings he read it aloud to the gulls, who listened for the names of fish. "
)


@dataclass(frozen=True)
class Task:
    """One line of the table: so many prompts of so many tokens at once, and the tokens that each is to get."""

    name: str
    sequences: int
    prompt_tokens: int
    tokens: int

    @property
    def counted(self) -> int:
        """Tokens that the figure counts: those made, or those of the prompt where that is the matter."""
        return self.sequences * (self.tokens if self.tokens > 1 else self.prompt_tokens)


TASKS = (
    Task("1", 1, 32, 64),
    Task("4", 4, 32, 64),
    Task("16", 16, 32, 64),
    Task("prefill_256", 1, 256, 1),
)


class Contestant:
    """A program that answers a line of JSON with a line of JSON."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=_environment(),
        )
        self.greeting = self._read()

    def run(self, prompts: list[Any], tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early (exit code {self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


def _environment() -> dict[str, str]:
    """Without settings of the person's own, which would make the runs incomparable."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MESHINFER_")}


def prompts_of(tokenizer: Tokenizer, task: Task) -> tuple[list[str], list[list[int]]]:
    """Different texts of exactly so many tokens, that survive being decoded and encoded."""
    texts: list[str] = []
    ids: list[list[int]] = []
    number = 0
    while len(texts) < task.sequences:
        number += 1
        tokens = tokenizer.encode(f"Entry {number}. " + SEED_TEXT * 12)[: task.prompt_tokens]
        text = tokenizer.decode(tokens)
        if tokenizer.encode_prompt(text) == tokens:
            texts.append(text)
            ids.append(tokens)
    return texts, ids


def as_openvino(files: ModelFiles, home: Path, directory: Path) -> Path:
    """The same weights as a directory that GenAI reads."""
    directory.mkdir()
    for ours, theirs in (("model.xml", "openvino_model.xml"), ("weights.bin", "openvino_model.bin")):
        try:
            os.link(files.directory / ours, directory / theirs)
        except OSError:
            (directory / theirs).write_bytes((files.directory / ours).read_bytes())
    return directory


def compare(
    mesh: Contestant, genai: Contestant, tokenizer: Tokenizer, runs: int, quiet: bool
) -> list[dict[str, Any]]:
    rows = []
    with Progress(console=Console(stderr=True), disable=quiet) as progress:
        bar = progress.add_task("comparing", total=len(TASKS) * (runs + 1))
        for task in TASKS:
            texts, ids = prompts_of(tokenizer, task)
            ours: list[dict[str, Any]] = []
            theirs: list[dict[str, Any]] = []
            for number in range(runs + 1):
                mine, other = mesh.run(texts, task.tokens), genai.run(ids, task.tokens)
                assert mine["tokens"] == other["tokens"] == task.sequences * task.tokens, (mine, other)
                if number:  # the first of each warms up
                    ours.append(mine)
                    theirs.append(other)
                progress.advance(bar)
            rows.append(row_of(task, ours, theirs))
    return rows


def row_of(task: Task, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    mesh = [task.counted / run["seconds"] for run in ours]
    genai = [task.counted / run["seconds"] for run in theirs]
    return {
        "task": task.name,
        "mesh_tokens_per_s": [round(value, 1) for value in mesh],
        "genai_tokens_per_s": [round(value, 1) for value in genai],
        "mesh": statistics.median(mesh),
        "genai": statistics.median(genai),
        "ratio": statistics.median(mesh) / statistics.median(genai),
        "ratio_paired": statistics.median(a / b for a, b in zip(mesh, genai, strict=True)),
        "where": ours[len(ours) // 2],
    }


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: version(name) for name in ("meshinfer", "openvino", "openvino-genai", "pyzmq")},
    }


def _cpu_name() -> str:
    import openvino as ov

    return str(ov.Core().get_property("CPU", "FULL_DEVICE_NAME"))


def show(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    console = Console()
    table = Table(title="tokens per second, medians")
    for heading in ("", "this mesh", "GenAI, one process", "ratio", "lowest to highest, this mesh"):
        table.add_column(heading, justify="right")
    for row in rows:
        spread = f"{min(row['mesh_tokens_per_s']):.0f} to {max(row['mesh_tokens_per_s']):.0f}"
        table.add_row(row["task"], f"{row['mesh']:.1f}", f"{row['genai']:.1f}", f"{row['ratio']:.2f}", spread)
    console.print(table)
    stages = Table(title="where one token's time goes (1 sequence), ms")
    for heading in ("owner", "layers", "compute", "queue", "hop"):
        stages.add_column(heading, justify="right")
    for stage in rows[0]["where"]["route"]:
        cells = (f"{stage[key]:.2f}" for key in ("step_ms", "queue_ms", "hop_ms"))
        stages.add_row(stage["name"], stage["layers"], *cells)
    console.print(stages)
    for name, microseconds in rows[0]["where"]["metrics"]["median_us"].items():
        console.print(f"{name}: {microseconds / 1000:.2f} ms")
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", type=Path, default=None, help="home of the agent whose models are used")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--precision", choices=("auto", "exact"), default="auto")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    store = (given.home or default_home()) / "models"
    files = find(store, given.model)
    tokenizer_json = files.read_file(TOKENIZER)
    assert files.read_file(GRAPH) is not None
    assert tokenizer_json is not None
    tokenizer = Tokenizer(tokenizer_json, files.manifest.config.eos, files.manifest.config.bos)
    with tempfile.TemporaryDirectory() as root:
        directory = as_openvino(files, store, Path(root) / "genai")
        genai = Contestant(
            "GenAI", [sys.executable, str(HERE / "bench_genai.py"), str(directory), given.precision]
        )
        mesh = Contestant(
            "the mesh", [sys.executable, str(HERE / "bench_mesh.py"), str(store), given.precision]
        )
        try:
            rows = compare(mesh, genai, tokenizer, given.runs, given.json)
        finally:
            mesh.close()
            genai.close()
    about = machine()
    if given.json:
        ratios = {row["task"]: round(row["ratio"], 3) for row in rows}
        print(json.dumps({"ratio_vs_genai": ratios, "rows": rows, "machine": about}, indent=1))
    else:
        show(rows, about)


if __name__ == "__main__":
    main()
