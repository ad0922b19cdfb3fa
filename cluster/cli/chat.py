"""`baton chat`: a conversation in the terminal. Ctrl-C stops the answer, a second one at the prompt leaves."""

import argparse
import json
from collections.abc import Iterator

import httpx

from cluster import env
from cluster.cli.client import ServerUnreachable, add_url, ask, connect, find_url, read_error
from cluster.cli.progress import Terminal

EXAMPLES = """examples:
  baton chat                                     talk to the server of this machine
  baton chat --system "You answer in rhyme."     with a system message
  baton chat --temperature 0                     always the same answer

in the chat: /exit leaves, /new forgets the conversation, Ctrl-C stops an answer
"""
COMMANDS = "/exit leaves, /new starts over, Ctrl-C stops an answer"
Message = dict[str, str]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat", help="talk to the running server", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", default=None, metavar="TEXT", help="a system message before the conversation")
    parser.add_argument(
        "--temperature", type=float, default=None, help="0 is always the same answer (default: the model's own)"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer in tokens (default: 512)")
    add_url(parser)
    parser.set_defaults(run=lambda options: chat(options))


def chat(options: argparse.Namespace) -> int:
    terminal = Terminal()
    with connect(find_url(options.url)) as client:
        model = ask(client, "GET", "/v1/models")["data"][0]["id"]
        terminal.line(f"{model} at {client.base_url}  ({COMMANDS})")
        is_well = _Conversation(client, model, options, terminal).run()
    return 0 if is_well or terminal.is_tty else 1


class _Conversation:
    def __init__(self, client: httpx.Client, model: str, options: argparse.Namespace, terminal: Terminal) -> None:
        self._client, self._terminal = client, terminal
        self._settings: dict[str, object] = {"model": model, "max_tokens": options.max_tokens, "stream": True}
        if options.temperature is not None:
            self._settings["temperature"] = options.temperature
        self._opening: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
        self._history = list(self._opening)
        self._prompt = make_prompt(terminal.is_tty and env.is_colour_wanted())
        self._has_failed = False

    def run(self) -> bool:
        """Returns when the user leaves: whether every answer came."""
        _load_line_editing()
        while (said := self._listen()) is not None:
            if said == "/new":
                self._history = list(self._opening)
                self._terminal.line("(forgotten)")
            elif said.startswith("/"):
                self._terminal.line(COMMANDS)
            elif said:
                self._answer(said)
        return not self._has_failed

    def _listen(self) -> str | None:
        try:
            said = input(self._prompt).strip()
        except (EOFError, KeyboardInterrupt):
            self._terminal.line()
            return None
        return None if said in ("/exit", "/quit") else said

    def _answer(self, said: str) -> None:
        """Streams the answer; what was said of it before Ctrl-C or an error stays in the history."""
        messages = [*self._history, {"role": "user", "content": said}]
        spoken: list[str] = []
        try:
            for piece in stream_chat(self._client, {**self._settings, "messages": messages}):
                spoken.append(piece)
                self._terminal.write(piece)
        except KeyboardInterrupt:
            self._terminal.write(" (stopped)")
        except (httpx.HTTPError, ServerUnreachable) as error:
            self._terminal.write(f"(error: {error}; /new starts over)")
            self._has_failed = True
        self._terminal.line()
        if spoken:
            self._history = [*messages, {"role": "assistant", "content": "".join(spoken)}]


def make_prompt(is_coloured: bool) -> str:
    """The prompt; escapes stand between \\x01 and \\x02, so that line editing does not count them as columns."""
    bold, plain = ("\x01\x1b[1m\x02", "\x01\x1b[0m\x02") if is_coloured else ("", "")
    return f"{bold}you>{plain} "


def stream_chat(client: httpx.Client, body: dict[str, object]) -> Iterator[str]:
    """The pieces of an answer as they arrive. Raises `ServerUnreachable` for an error or an error event."""
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if not answer.is_success:
            answer.read()
            raise ServerUnreachable(read_error(answer))
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerUnreachable(str(event["error"].get("message")))
            for choice in event.get("choices", []):
                if piece := choice["delta"].get("content"):
                    yield piece


def _load_line_editing() -> None:
    """Arrow keys and history at the prompt, where Python has them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
