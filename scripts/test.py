"""All checks and tests, in an environment of their own: `python scripts/test.py [-- pytest's arguments]`."""

from __future__ import annotations

import subprocess
import sys
import time

import environment


def main(arguments: list[str]) -> int:
    """0 if everything passes. A check that fails does not keep the others from running."""
    given = arguments[1:] if arguments[:1] == ["--"] else arguments
    try:
        python = str(environment.ensure("dev"))
    except environment.EnvironmentFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    steps = {
        "lint": [python, "-m", "ruff", "check", "."],
        "format": [python, "-m", "ruff", "format", "--check", "."],
        "types": [python, "-m", "mypy"],
        "imports": [str(environment.program("lint-imports"))],
        **_tests([python, "-m", "pytest"], given),
    }
    failed = [name for name, command in steps.items() if not _passes(name, command)]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall passed", flush=True)
    return 1 if failed else 0


def _tests(pytest: list[str], given: list[str]) -> dict[str, list[str]]:
    """Pure tests on all cores, then those with processes, ports and clocks one after the other; whoever gives arguments
    has them all in one run."""
    if given:
        return {"tests": [*pytest, *given]}
    return {
        "tests on all cores": [*pytest, "-q", "-n", "auto", "--dist", "worksteal", "-m", "pure"],
        "tests one by one": [*pytest, "-q", "-m", "not pure", "--durations", "25"],
    }


def _passes(name: str, command: list[str]) -> bool:
    print(f"\n── {name} ──", flush=True)
    began_s = time.monotonic()
    code = subprocess.run(command, cwd=environment.ROOT).returncode
    print(
        f"{name}: {'passed' if code == 0 else f'exit code {code}'} in {time.monotonic() - began_s:.0f} s",
        flush=True,
    )
    return code == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
