"""The `baton` command: parses, runs one subcommand, turns errors the user can act on into one plain message."""

import argparse
import io
import sys
from collections.abc import Callable, Sequence

from cluster.cli import chat, explain, fetch, scale, serve, settings, status
from cluster.cli.client import ServerUnreachable
from cluster.hub import ModelUnavailable
from cluster.local_ray import DeploymentFailed
from cluster.ports import PortTaken
from cluster.yaml_source import ConfigError
from workers.errors import ModelDamaged, ModelRefused

DESCRIPTION = """Baton serves a language model from prefill workers, which compute the KV cache of prompts, and
decode workers, which generate tokens; the KV cache is the baton that passes between them."""

EXAMPLES = """examples:
  baton serve                               start the cluster on this machine
  baton chat                                talk to it, from another terminal
  baton explain "Why is the sky blue?"      follow one request through every stage
  baton scale decode 3                      three decode workers instead of one
  baton config                              every setting and why

Each command has its own help: baton COMMAND --help
"""

USER_ERRORS = (
    ConfigError,
    PortTaken,
    ModelUnavailable,
    ModelRefused,
    ModelDamaged,
    ServerUnreachable,
    DeploymentFailed,
    OSError,
)
INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve.add_parser(commands)
    chat.add_parser(commands)
    explain.add_parser(commands)
    settings.add_config_parser(commands)
    settings.add_validate_parser(commands)
    status.add_parser(commands)
    scale.add_parser(commands)
    fetch.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for an error that is told, 2 for wrong usage, 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    options = make_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return 1
    except USER_ERRORS as error:
        print(f"baton: error: {error}", file=sys.stderr)
        return 1
