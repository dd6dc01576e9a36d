"""The command line: every verb is one library call; this package only reads options and prints.

``--json`` prints one object on stdout and nothing else; all else goes to stderr.
Exit status: 0 done (``check``: holds), 1 the transfer or run failed, 2 bad input,
3 ``check``: does not hold, 4 ``check``: unknown. A bad input is one line on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata

import cyclopts
from cyclopts import App

from kvferry.cli.streams import discard_stdout, prepare_streams, say
from kvferry.errors import InputError, KVFerryError, did_you_mean

__all__ = ["VERBS", "app", "main", "run"]

FOUR_QUESTIONS = """\
kvferry moves a request's KV cache and execution state from a prefill worker to a decode worker.

  How big is it?           kvferry size MODEL --tokens N
  How fast is the way?     kvferry agent on each node; kvferry probe A B C --out links.json
  Does the move pay?       kvferry check MODEL --link links.json --prompt-tokens N --ttft T ...
  Where, how many?         kvferry plan cluster.toml; kvferry simulate cluster.toml
  See it move              kvferry demo; kvferry serve --kv tcp://127.0.0.1:0
  Look at all of it        kvferry report links.json check.json plan.json --out report.html
  Look on while it runs    kvferry agent --listen tcp://127.0.0.1:7400 --web 127.0.0.1:7480
  Encrypt it               kvferry certs init FOLDER; kvferry certs issue FOLDER NAME --host ADDRESS

`kvferry VERB --help` says the rest; `kvferry --install-completion` lets the Tab key fill in."""

# One module a verb, named like it, with a function of that name. They are imported only
# when their verb (or the list of verbs) is asked for, so `kvferry --version` stays fast.
VERBS = (
    "size",
    "doctor",
    "agent",
    "probe",
    "link",
    "check",
    "plan",
    "simulate",
    "interference",
    "serve",
    "proxy",
    "demo",
    "certs",
    "report",
)

app = App(
    name="kvferry",
    help="Size, measure, plan and make the move of KV cache and execution state between LLM workers.",
    version=lambda: f"kvferry {metadata.version('kvferry')}",
    help_format="plaintext",
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # main says so
)


for _verb in VERBS:
    app.command(f"kvferry.cli.{_verb}:{_verb}", name=_verb)

app.register_install_completion_command(
    help="Install completion for this shell (bash, zsh, fish), and have it loaded by new ones."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line and leave the process with its exit status."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status. Errors are one line on stderr.

    A verb returns None (status 0) or the status itself.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not prepare_streams():
        return _say("stdout: is closed, there is nowhere to print to", 1)
    if arguments[:1] in (["--help"], ["-h"]):
        for verb in VERBS:
            app[verb]  # imports it: a verb that was never looked at has no line of help
    try:
        status = (
            app(arguments, exit_on_error=False, print_error=False) if arguments else print(FOUR_QUESTIONS)
        )
        sys.stdout.flush()
    except InputError as error:
        failure = str(error), 2
    except KVFerryError as error:
        failure = str(error), 1
    except cyclopts.CycloptsError as error:
        failure = _usage(error), 2
    except BrokenPipeError:
        discard_stdout()  # the reader went away (`| head`)
        return 1
    except OSError as error:
        discard_stdout()
        failure = f"{error.filename or 'stdout'}: {error.strerror or error}", 1
    except KeyboardInterrupt:
        failure = "interrupted", 130
    else:
        return status if isinstance(status, int) else 0
    return _say(*failure)


def _say(message: str, status: int) -> int:
    say(message)
    return status


def _usage(error: cyclopts.CycloptsError) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, cyclopts.UnknownCommandError):
        word = (error.unused_tokens or [""])[0]
        if word == "help":
            return "help: is an option, `kvferry --help` or `kvferry VERB --help`"
        if word.startswith("-"):
            options = ("--version", "--help", "--install-completion")
            return (
                f"{word}: not an option of kvferry itself{did_you_mean(word, options)}; see `kvferry --help`"
            )
        return said
    # One that is needed and mistyped is both: said as the word that is there, not as the one that is not.
    if not isinstance(error, cyclopts.MissingArgumentError) or "Did you mean" in said:
        return said
    name = error.keyword or (error.argument.name if error.argument is not None else "an argument")
    if name.removeprefix("--").isupper():  # one that has a place, not a name
        name = name.removeprefix("--")
    command = " ".join(("kvferry", *(error.command_chain or ())))
    return f"{name}: needed, with a value; see `{command} --help`"
