"""`baton explain`: one real request, followed through the nine stages."""

import argparse


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("explain", help="follow one request through every stage")
    parser.set_defaults(run=lambda options: 0)
