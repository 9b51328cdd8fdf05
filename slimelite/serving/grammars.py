"""The grammars of a request, under the names of OpenAI, vLLM, SGLang and Anthropic."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from pydantic import Field

from slimelite.base.http_body import FirstError, Shape, Text
from slimelite.base.http_server import RequestError
from slimelite.engines.http_front import SampledBody

# the JSON schema of any object
OBJECT = '{"type": "object"}'
Choices = FirstError[list[Text]]


class Schema(Shape):
    value: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Shape):
    """The form that the reply must have. In OpenAI's format, ``json_schema`` contains the schema. In Anthropic's
    format, the schema is a field next to the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: Schema | None = None
    value: dict[str, Any] | None = Field(default=None, alias="schema")

    def schema_text(self) -> str | None:
        """The JSON schema that the reply must fit; None: any reply is allowed.

        Raises:
            ValueError: the type needs a schema, but the body has none.
        """
        if self.type != "json_schema":
            return OBJECT if self.type == "json_object" else None
        value = self.json_schema.value if self.json_schema is not None else self.value
        if value is None:
            raise ValueError("a response format of type json_schema needs a schema")
        return json.dumps(value)


class StructuredOutputs(Shape):
    """The field that replaces ``guided_*`` in newer versions of vLLM."""

    json_: Text | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: Text | None = None


class HeldBody(SampledBody):
    """The body of a request that may contain a grammar. Such a body accepts more names for grammars than
    `SamplingParams`."""

    guided_json: Text | dict[str, Any] | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()

    def grammars(self) -> list[tuple[str, str, str]]:
        """See `SampledBody.grammars`."""
        one = self.structured_outputs
        spellings = [
            ("response_format", "json_schema", self.response_schema()),
            ("guided_json", "json_schema", _json(self.guided_json)),
            ("guided_choice", "regex", _choice(self.guided_choice)),
            ("structured_outputs.json", "json_schema", _json(one.json_)),
            ("structured_outputs.json_object", "json_schema", OBJECT if one.json_object else None),
            ("structured_outputs.regex", "regex", one.regex),
            ("structured_outputs.choice", "regex", _choice(one.choice)),
            ("structured_outputs.grammar", "ebnf", one.grammar),
            ("structured_outputs.structural_tag", "structural_tag", one.structural_tag),
        ]
        return [(name, kind, text) for name, kind, text in spellings if text is not None]

    def response_schema(self) -> str | None:
        """The JSON schema in the dialect's own field."""
        return None


def named_schema(form: ResponseFormat, place: str) -> str | None:
    """The schema of the response format ``form``. ``place``: the field of the request that has this format, for error
    messages."""
    try:
        return form.schema_text()
    except ValueError as error:
        raise RequestError(f"{place}: {error}", param=place) from None


def _json(schema: str | dict[str, Any] | None) -> str | None:
    return json.dumps(schema) if isinstance(schema, dict) else schema


def _choice(choices: list[str] | None) -> str | None:
    """A regular expression that matches exactly one of the given texts."""
    if choices is not None and not all(choices):
        raise RequestError("guided_choice: each choice must be a text that is not empty", param="guided_choice")
    return "|".join(f"({re.escape(choice)})" for choice in choices) if choices else None
