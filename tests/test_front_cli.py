"""What a person types gets an answer, or one sentence and the right exit code, at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_agent import SmallAgent

import meshinfer
from meshinfer.agent.files import HomeLock
from meshinfer.errors import RouteError
from meshinfer.front import cli, client, defects, progress, render
from meshinfer.front.http import LocalApi
from meshinfer.trust.token import read_token

TREE = Path(meshinfer.__file__).parent.parent
HEAVY = (
    "aiohttp",
    "openvino",
    "openvino_genai",
    "zmq",
    "zeroconf",
    "numpy",
    "rich",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "cryptography",
    "psutil",
    "asyncio",
)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "meshinfer", *arguments]


def run(home: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command as a person runs it: a process of its own."""
    return subprocess.run(
        command(*arguments),
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment(home),
        timeout=60,
        check=False,
    )


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"MESHINFER_HOME": str(home), "PYTHONPATH": str(TREE)}


class Running:
    """A small agent behind the real interface, in a thread's loop, on a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lock = HomeLock(home)
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.agent = SmallAgent()
        self.loop = asyncio.get_running_loop()
        self.stop = asyncio.Event()
        api = LocalApi(self.agent, self.home, self.stop.set)
        await api.start()
        self.ready.set()
        await self.stop.wait()
        await api.stop()
        self.lock.release()

    def __enter__(self) -> Running:
        self.lock.acquire()
        self.thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        # The loop has ended already where the test has stopped the agent.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path) as served:
        yield served


# ── at once ─────────────────────────────────────────────────────────────────────────────────────


def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, meshinfer.front.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TREE, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & set(HEAVY)


def test_help_answers_at_once(tmp_path: Path) -> None:
    """Under 0.3 s on an idle PC; the best of a few, as this one may be busy."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert run(tmp_path, "--help").returncode == 0
        times.append(time.perf_counter() - began)
    assert min(times) < 0.3


def test_every_command_has_help(tmp_path: Path) -> None:
    listed = run(tmp_path, "--help").stdout
    for name in ("start", "stop", "status", "peers", "plan", "models", "pull", "verify", "ask", "mesh"):
        assert f"  {name} " in listed
        done = run(tmp_path, name, "--help")
        assert done.returncode == 0
        assert "Usage: meshinfer" in done.stdout


# ── mistakes ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nonsense"], 2, "nonsense"),
        (["ask"], 2, "QUESTION"),
        (["ask", " "], 2, "empty"),
        (["ask", "-"], 2, "empty"),
        (["ask", "hi"], 2, "meshinfer pull smollm2"),
        (["ask", "hi", "--temperature", "hot"], 2, "temperature"),
        (["status"], 1, "meshinfer start"),
        (["peers"], 1, "meshinfer start"),
        (["plan"], 1, "meshinfer start"),
        (["verify", "nothing"], 2, "meshinfer pull"),
        (["start", "--memory", "lots"], 2, "2 GiB"),
        (["start", "--port", "70000"], 2, "65535"),
        (["mesh", "token"], 2, "mesh create"),
        (["mesh", "join", "rubbish"], 2, "token"),
        (["mesh", "join", "meshinfer1-rubbish"], 2, "token"),
    ],
)
def test_a_mistake_gets_one_sentence(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == code
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["ask", "hi", "--json"], ["status", "--json"], ["--json"], ["mesh", "join", "x", "--json"]]
)
def test_programs_get_errors_as_json(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode in (1, 2)
    assert set(json.loads(done.stdout)) == {"error"}
    assert done.stderr == ""


def test_a_wrong_setting_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[network]\nprot = 1\n")
    done = run(tmp_path, "start")
    assert done.returncode == 2
    assert "did you mean [network] port?" in done.stderr


def test_a_home_that_is_a_file_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(tmp_path, "models", "--home", str(tmp_path / "file"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_defect_tells_where_its_log_is_and_logs_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_path: Path) -> None:
        raise KeyError(" ".join(("my", "".join(("sec", "ret")), "question")))

    monkeypatch.setattr(client, "need", broken)
    assert cli.run(["status", "--home", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    log = tmp_path / defects.ERROR_LOG
    assert str(log) in shown
    assert "defect" in shown
    assert "secret" not in shown
    assert "KeyError" in log.read_text(encoding="utf-8")
    assert "agent_commands.py" in log.read_text(encoding="utf-8")
    assert "secret" not in log.read_text(encoding="utf-8")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("--help"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path)
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        complaint = process.stderr.read()
    assert b"Traceback" not in complaint
    assert b"Exception" not in complaint


# ── with an agent ───────────────────────────────────────────────────────────────────────────────


def test_an_answer_is_printed_with_its_figures(running: Running) -> None:
    done = run(
        running.home, "ask", "Grüße 🐈 und mehr", "--stats", "--seed", "5", "--stop", "x", "--stop", "y"
    )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "Grüße 🐈 und mehr "
    assert "tokens/s" in done.stdout
    assert [cell.strip() for cell in lines[-1].split("  ") if cell.strip()] == [
        "office-1",
        "CPU",
        "0-14",
        "4.0",
        "0.1",
        "0.3",
    ]
    (asked,) = running.agent.asked
    assert asked.sampling.seed == 5
    assert asked.stop == ("x", "y")


def test_a_program_gets_the_answer_as_json(running: Running) -> None:
    done = run(running.home, "ask", "-", "--json", "--system", "Be brief.", stdin="from a pipe\n")
    value = json.loads(done.stdout)
    assert value["text"] == "from a pipe "
    assert value["finish"] == "stop"
    assert value["stats"]["tokens"] == 2
    assert [message.role for message in running.agent.asked[0].messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--temperature", "-1"], 2, "temperature"),
        (["--temperature", "nan"], 2, "temperature"),
        (["--max-tokens", "0"], 2, "max_tokens"),
        (["--model", "gpt-9"], 2, "smollm2"),
    ],
)
def test_the_agent_s_refusal_is_passed_on(
    running: Running, arguments: list[str], code: int, says: str
) -> None:
    done = run(running.home, "ask", "hi", *arguments)
    assert done.returncode == code
    assert says in done.stderr


def test_a_failure_within_an_answer_is_told(running: Running) -> None:
    running.agent.fail_after = 1
    done = run(running.home, "ask", "one two")
    assert done.returncode == 1
    assert done.stdout == "one \n"
    assert "layers 3-5 are missing" in done.stderr


def test_without_a_route_it_says_what_is_missing(running: Running) -> None:
    running.agent.ready = False
    done = run(running.home, "ask", "hi", "--wait", "0.3")
    assert done.returncode == 1
    assert "layers 3-5 are missing" in done.stderr


def test_a_refusal_before_the_answer_is_told(running: Running) -> None:
    running.agent.error = RouteError("layer 7 is missing")
    done = run(running.home, "ask", "hi", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"error": "layer 7 is missing"}


@pytest.mark.skipif(os.name != "posix", reason="a signal to one process; on Windows Ctrl-C goes to a console")
def test_ctrl_c_ends_the_answer(running: Running) -> None:
    running.agent.endless = True
    with subprocess.Popen(
        command("ask", "hello there"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(running.home),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"hello"
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=10)
    assert process.returncode == cli.INTERRUPTED
    assert b"Traceback" not in complaint
    asyncio.run_coroutine_threadsafe(asyncio.wait_for(running.agent.closed.wait(), 1), running.loop).result()
    assert running.agent.running == 0


def test_status_for_people_and_programs(running: Running) -> None:
    (loaded,) = json.loads(run(running.home, "status", "--json").stdout)["spans"]
    assert (loaded["first"], loaded["last"]) == (0, 15)
    shown = run(running.home, "status").stdout
    assert "büro" in shown
    assert "0-14" in shown
    assert "layers 0-14: 310 µs (lately 450) a token, 40 µs one of a prompt" in shown
    assert "plan       ffffffffffff failed: the disk is full" in shown
    assert json.loads(run(running.home, "peers", "--json").stdout) == {"peers": []}
    assert "no plan: no model" in run(running.home, "plan").stdout


def test_stop_waits_for_the_end(running: Running) -> None:
    done = run(running.home, "stop", "--json")
    assert json.loads(done.stdout) == {"stopped": True, "pid": os.getpid()}
    again = run(running.home, "stop", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["stopped"] is False


def test_a_home_in_use_is_not_started_twice(running: Running) -> None:
    done = run(running.home, "start")
    assert done.returncode == 2
    assert f"process {os.getpid()}" in done.stderr


def test_a_note_that_a_killed_agent_left_misleads_nobody(tmp_path: Path) -> None:
    (tmp_path / "api.json").write_text('{"port": 9, "token": "x", "pid": 1}')
    assert client.find(tmp_path) is None
    with HomeLock(tmp_path):
        for damaged in ('{"port": "x"}', "[", "5", ""):
            (tmp_path / "api.json").write_text(damaged)
            assert client.find(tmp_path) is None


# ── a mesh ──────────────────────────────────────────────────────────────────────────────────────


def test_a_mesh_is_created_and_joined(tmp_path: Path) -> None:
    first, second = tmp_path / "büro", tmp_path / "zuhause"
    made = json.loads(run(first, "mesh", "create", "--json").stdout)
    invited = json.loads(run(first, "mesh", "token", "--json").stdout)
    joined = json.loads(run(second, "mesh", "join", "-", "--json", stdin=invited["token"] + "\n").stdout)
    assert joined["mesh"] == made["mesh"]
    assert joined["peer"] != made["peer"]
    assert joined["restart"] is False
    assert invited["expires"] > time.time()
    shown = json.loads(run(second, "mesh", "show", "--json").stdout)
    assert (shown["mesh"], shown["may_invite"]) == (made["mesh"], False)
    assert json.loads(run(first, "mesh", "show", "--json").stdout)["may_invite"] is True


def test_a_mesh_is_not_left_by_accident(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for home in (first, second):
        run(home, "mesh", "create")
    token = run(first, "mesh", "token").stdout
    refused = run(second, "mesh", "join", token)
    assert refused.returncode == 2
    assert "--replace" in refused.stderr
    assert run(second, "mesh", "create").returncode == 2
    assert run(second, "mesh", "join", token, "--replace").returncode == 0
    # The key of the mesh that was left is still there.
    assert (second / "mesh.key").exists()


def test_a_running_agent_is_told_to_restart_and_named_in_tokens(running: Running) -> None:
    assert json.loads(run(running.home, "mesh", "create", "--json").stdout)["restart"] is True
    done = run(running.home, "mesh", "token", "--address", "door.example:7000")
    doors = ("door.example:7000", "10.0.0.5:29470", "[fd00::5]:29470")
    assert read_token(done.stdout).addresses == doors


@pytest.mark.skipif(os.name != "posix", reason="mode bits are POSIX's")
def test_keys_are_private(tmp_path: Path) -> None:
    run(tmp_path / "home", "mesh", "create")
    for name in ("identity.key", "mesh.key", "membership"):
        assert (tmp_path / "home" / name).stat().st_mode & 0o077 == 0


# ── how it looks ────────────────────────────────────────────────────────────────────────────────


def test_text_cannot_rule_the_terminal() -> None:
    assert render.safe("a\x1b[31mb\r\x07\u202ec\n\t👩‍👩‍👧") == "a[31mbc\n\t👩‍👩‍👧"


def test_tables_are_straight_in_any_script() -> None:
    shown = render.table(("name", "tokens"), [("田中", 5), ("a", 1000)]).splitlines()
    assert shown == ["NAME  TOKENS", "田中       5", "a       1000"]


def test_amounts() -> None:
    assert [render.amount(size) for size in (0, 1023, 1536, 98_362_432, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "93.8 MiB",
        "3.0 GiB",
    ]


def test_progress_tells_bytes_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.figures(5, 36) == "5 of 36"
    assert progress.figures(1 << 20, 1 << 21) == "1.0 MiB of 2.0 MiB"
    assert progress.figures(1 << 20, 0) == "1.0 MiB"
    with progress.shown() as shown:
        for done in range(100):
            shown.update("hashing", done, 100)
        shown.update("verify", 1, 36)
    assert capsys.readouterr().err.splitlines() == ["hashing", "verify"]


def test_bars_are_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.shown() as shown:
        assert isinstance(shown, progress.Bars)
        shown.update("hashing", 1, 0)
        shown.update("hashing", 1 << 20, 1 << 21)
