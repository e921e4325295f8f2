"""The command `meshinfer`: its group, and the one place where errors become a sentence and an exit code.

It answers at once: nothing heavy is imported here or by the modules of its commands, but inside the functions
that need it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from meshinfer import __version__
from meshinfer.errors import MeshinferError
from meshinfer.front import agent_commands, ask_command, mesh_commands, model_commands
from meshinfer.front.options import wants_json

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="meshinfer", message="%(prog)s %(version)s")
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where this agent keeps its models and keys [or MESHINFER_HOME].",
)
def cli(home: Path | None) -> None:
    """Runs a language model across the ordinary PCs of an office, a school or a home.

    \b
    meshinfer pull smollm2        gets a model
    meshinfer ask "…"             asks it
    meshinfer mesh create         begins a mesh; then on the other PCs: meshinfer mesh join TOKEN
    meshinfer start               lends this PC to its mesh
    """


for _command in (
    agent_commands.start,
    agent_commands.stop,
    agent_commands.status,
    agent_commands.peers,
    agent_commands.plan,
    model_commands.models,
    model_commands.pull,
    model_commands.verify,
    ask_command.ask,
    mesh_commands.mesh,
):
    cli.add_command(_command)


def main() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        # A pipe on Windows has the system's code page; text here is always UTF-8.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command. Exit codes: 2 for a person's mistake, 1 for a failure, 130 for Ctrl-C."""
    as_json = wants_json(arguments)
    try:
        result = cli.main(list(arguments), prog_name="meshinfer", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except MeshinferError as error:
        _report(str(error), as_json)
        return error.exit_code
    except click.ClickException as error:
        _report_usage(error, as_json)
        return error.exit_code
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except OSError as error:
        _report(_system_sentence(error), as_json)
        return 1
    except Exception as error:
        _report(_defect_sentence(error, arguments), as_json)
        return 1


def _report(sentence: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": sentence}, ensure_ascii=False))
    else:
        click.echo(f"meshinfer: {sentence}", err=True)


def _report_usage(error: click.ClickException, as_json: bool) -> None:
    if as_json:
        _report(error.format_message(), as_json)
    else:
        error.show()


def _system_sentence(error: OSError) -> str:
    what = error.strerror or type(error).__name__
    return f"{error.filename}: {what}" if error.filename else f"the system refused: {what}"


def _defect_sentence(error: Exception, arguments: Sequence[str]) -> str:
    from meshinfer.front import defects

    log = defects.record(_home_of(arguments), error)
    where = f"details are in {log}" if log else "its log could not be written"
    return f"this is a defect of the program ({type(error).__name__}); {where}"


def _home_of(arguments: Sequence[str]) -> Path:
    """The home that the arguments name, as well as can be told when they may not have been understood."""
    from meshinfer.agent.config import default_home

    for index, argument in enumerate(arguments):
        if argument.startswith("--home="):
            return Path(argument.partition("=")[2])
        if argument == "--home" and index + 1 < len(arguments):
            return Path(arguments[index + 1])
    return default_home()


def _forget_stdout() -> None:
    """Whoever read our output has gone (`… | head`): the flush at exit must not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
