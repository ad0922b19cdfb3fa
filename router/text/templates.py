"""A model's chat template: messages to one prompt string, in jinja2's sandbox, without transformers (which imports
torch).

The environment equals the one that transformers renders with: trimmed blocks, loop controls, `raise_exception`,
`tojson` that keeps characters, `strftime_now`, and a `generation` block that changes nothing.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class TemplateRefused(ValueError):
    """The template cannot render these messages; the text says why, in the template's own words."""


class _GenerationBlock(jinja2.ext.Extension):  # type: ignore[misc]  # jinja2 is not followed by mypy
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        scope: jinja2.nodes.Node = jinja2.nodes.Scope(body).set_lineno(line)
        return scope


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)


class ChatTemplate:
    """A compiled template. `render` may be called from any thread. Raises ValueError when the source does not
    compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: line {error.lineno}: {error.message}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to and including the assistant's opening. Raises `TemplateRefused`."""
        try:
            text: str = self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, tools=None, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise TemplateRefused(error.message or type(error).__name__) from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise TemplateRefused(f"rendering failed ({type(error).__name__})") from None
        return text
