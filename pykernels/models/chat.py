"""Chat messages to the text that a model was trained on, through the template that its file carries.

A template is a program from an untrusted file: it runs in jinja2's immutable sandbox, on plain data, with the few
helpers that Hugging Face templates expect.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A compiled chat template. Raises `ValueError`, one line, for a template that is not valid."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are visible to the template: bos_token, eos_token, ..."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid: {_one_line(error)}") from None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The text of a conversation; encode it with `add_special=False`: the template writes special tokens itself.

        Each message has a `role` ("system", "user", "assistant") and a `content`. `add_generation_prompt` ends the text
        where the assistant's answer begins; `options` are passed on to the template (`tools`, `enable_thinking`, ...).
        """
        _check_messages(messages)
        variables = {"tools": None, "documents": None, **self._special_tokens, **options}
        plain = json.loads(json.dumps(list(messages), ensure_ascii=False))  # the template sees data, never our objects
        try:
            return self._template.render(messages=plain, add_generation_prompt=add_generation_prompt, **variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {_one_line(error)}") from None


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise ValueError("messages is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] must be a mapping with a role, got {message!r}")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"messages[{i}] has no content")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
