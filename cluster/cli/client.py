"""Talks to a running server over HTTP for the commands that ask one: where it is, and plain errors when it is not."""

import argparse
from typing import Any
from urllib.parse import urlsplit

import httpx

from cluster import runtime

CONNECT_S = 3.0


class ServerUnreachable(Exception):
    """No server answers, or it answers with an error; the text says what to do."""


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default=None, help="address of the server (default: the one that runs on this machine)"
    )


def find_url(given: str | None) -> str:
    """The server to ask: the given one, the only one that this checkout runs, or the only one of this user.

    Raises `ServerUnreachable`.
    """
    if given is not None:
        return read_url(given)
    owners = [owner for _, owner in runtime.find_runs() if owner is not None and owner.is_alive]
    owners = [owner for owner in owners if owner.checkout == runtime.this_checkout()] or owners
    if len(owners) > 1:
        choices = "\n".join(f"  --url http://127.0.0.1:{o.port}  ({o.config}, from {o.checkout})" for o in owners)
        raise ServerUnreachable(f"several servers run here; choose one:\n{choices}")
    if not owners:
        raise ServerUnreachable(
            "no server runs on this machine; start one with `make serve` (or `baton serve`), or give --url"
        )
    return f"http://127.0.0.1:{owners[0].port}"


def read_url(given: str) -> str:
    """The base address: http:// where no scheme is given, no /v1 at the end. Raises `ServerUnreachable`."""
    text = given if "://" in given else f"http://{given}"
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ServerUnreachable(f"{given!r} is no address of a server; give one like http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


def connect(url: str, timeout_s: float | None = 120.0) -> httpx.Client:
    """A client of one server; proxies of the environment are left out, the server is on this machine."""
    return httpx.Client(base_url=url, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S), trust_env=False)


def ask(client: httpx.Client, method: str, path: str, body: object = None) -> Any:
    """The JSON answer of a request. Raises `ServerUnreachable` with the server's own words where it refuses."""
    try:
        answer = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise ServerUnreachable(
            f"{client.base_url} does not answer ({type(error).__name__}); is it still starting?"
        ) from None
    if answer.is_success:
        return answer.json()
    raise ServerUnreachable(f"{client.base_url.join(path)}: {answer.status_code} {read_error(answer)}")


def read_error(answer: httpx.Response) -> str:
    """The message of an OpenAI-shaped error, or the beginning of whatever came instead."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or answer.reason_phrase
