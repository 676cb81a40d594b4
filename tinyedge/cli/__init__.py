"""The command line: ``tinyedge COMMAND ...``, one module for each command.

A command's module has `HELP`, `arguments(parser)` and `run(arguments) -> int`, and imports what is
heavy inside of `run`. Exit codes: 0 done; 1 it failed (numbers differ, a node can't be compiled, a
device refuses); 2 the command line or a file that it names is wrong. An error is one sentence on
stderr; with --debug (or TINYEDGE_DEBUG=1) a traceback comes before it.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from .. import __version__
from ..errors import InputError, ModelError, PlanError, ShapeError, TinyedgeError

COMMANDS = ("compile", "export", "run", "bench", "verify", "check", "inspect", "devices")
FAILED, WRONG = 1, 2


class Parser(argparse.ArgumentParser):
    """Raises InputError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    """The parser of every command."""
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                        help="show a traceback with an error")
    top = Parser(prog="tinyedge", parents=[common], description="A compact tensor compiler and "
                 "runtime: one plan file from an ONNX model.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"tinyedge {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f".{name}", __name__)
        one = commands.add_parser(name, parents=[common], help=module.HELP, allow_abbrev=False,
                                  description=module.HELP[0].upper() + module.HELP[1:] + ".")
        module.arguments(one)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: the process's) and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or os.environ.get("TINYEDGE_DEBUG", "0") not in ("", "0")
    warnings.showwarning = _warn
    try:
        arguments = parser().parse_args(words)
        code: int = import_module(f".{arguments.command}", __name__).run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # --help and --version
        return end.code if isinstance(end.code, int) else 0
    except BrokenPipeError:
        # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _say("stopped", 130, debug)
    except (InputError, ModelError, PlanError, ShapeError) as error:
        return _say(str(error), WRONG, debug)
    except TinyedgeError as error:
        return _say(str(error), FAILED, debug)
    except MemoryError:
        return _say("there is not enough memory", FAILED, debug)
    except OSError as error:
        return _say(f"{error.filename or 'a file'}: {error.strerror or error}", FAILED, debug)
    except Exception as error:  # a fault of ours: still one line, not a page
        text = str(error).splitlines()
        return _say(f"internal error, {type(error).__name__}: {text[0] if text else ''}; please "
                    "report it with what --debug shows", FAILED, debug)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"tinyedge: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _say(sentence: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"tinyedge: {' '.join(sentence.split())}", file=sys.stderr)
    return code


__all__ = ["main"]
