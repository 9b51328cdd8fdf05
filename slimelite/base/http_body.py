"""Bodies of requests as pydantic models: they are checked once, an error names the place, and they make the schema.

Null is no value anywhere: a field that is null is one that was not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from slimelite import __version__
from slimelite.base.files import is_text
from slimelite.base.http_server import RequestError, read_json

# types of pydantic's errors -> what the value must be; numbers are `ctx` of the error
WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_unicode": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "union_tag_not_found": "an object with {discriminator}",
    "too_short": "a list of at least {min_length}",
    "must": "{wanted}",
}
# those that say that a value is of another type: of a value that may have several, all are named
TYPES = {"int_type", "float_type", "string_type", "bool_type", "list_type", "dict_type"}


class Body(BaseModel):
    """What a request may say, or a part of it; a field that no class has is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if type(body) is dict else body


class Shape(Body):
    """A part of a body whose other fields change nothing."""

    model_config = ConfigDict(extra="ignore")


B = TypeVar("B", bound=Body)


class Like:
    """For an object that is passed on as it came, once it is found to be one of this ``shape``."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        def check(value: object, inner: Callable[[object], object]) -> object:
            inner(value)
            return value

        return core_schema.no_info_wrap_validator_function(check, handler.generate_schema(self.shape))


def must(wanted: str) -> WrapValidator:
    """For a value of which its type does not say enough: what it must be, in words."""

    def check(value: object, inner: Callable[[object], object]) -> object:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("must", "", {"wanted": wanted}) from None

    return WrapValidator(check)


def _only(sent: object, *, value: object) -> object:
    if sent != value:
        raise PydanticCustomError("unsupported", "")
    return sent


def _encodable(text: str) -> str:
    if not is_text(text):
        raise PydanticCustomError("string_type", "")
    return text


# text that UTF-8 can encode: see `is_text`
Text = Annotated[str, AfterValidator(_encodable)]
L = TypeVar("L")
# a list whose first wrong entry is the error: a million of them would take seconds to list
FirstError = Annotated[L, Field(fail_fast=True)]
Ids = FirstError[list[int]]


def with_fields(fields: Mapping[str, tuple[Any, Any]]) -> Callable[[type[B]], type[B]]:
    """A decorator: the body has these fields too, name -> (type, default), where it has none of that name."""

    def decorated(body: type[B]) -> type[B]:
        new: dict[str, Any] = {name: kind for name, kind in fields.items() if name not in body.model_fields}
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **new)

    return decorated


def unread(*names: str, **only: object) -> Mapping[str, tuple[Any, Any]]:
    """Fields that nobody reads, for `with_fields`: with any value, or with the one that asks for nothing."""
    fields: dict[str, tuple[Any, Any]] = dict.fromkeys(names, (Any, None))
    for name, value in only.items():
        check = AfterValidator(partial(_only, value=value))
        fields[name] = Annotated[Any, check, WithJsonSchema({"enum": [value, None]})], None
    return fields


async def read_body(http: web.Request, kind: type[B]) -> B:
    """The body of a request; raises as `checked` and `read_json` do."""
    return checked(kind, await read_json(http))


def checked(kind: type[B], body: Any) -> B:
    """``body``, which JSON gave, as its kind.

    Raises:
        RequestError: it is none; the message names the place and what should be there.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # of a value that may have several types, the error of the type that goes deepest says what is wrong
        first = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
        deepest = max(first, key=lambda each: len(each["loc"]))
        place = _place(deepest, body)
        types = [WANTED[each["type"]] for each in first if each["type"] in TYPES and _place(each, body) == place]
        raise _refusal(deepest, body, " or ".join(dict.fromkeys(types)) if deepest["type"] in TYPES else "") from None


def _refusal(error: ErrorDetails, body: object, wanted: str) -> RequestError:
    kind, value, place = error["type"], error["input"], _place(error, body)
    if kind == "extra_forbidden":
        message = f"unknown parameter {place}: leave it out; /openapi.json has those that are read"
        return RequestError(message, param=place, code="unknown_parameter")
    if kind == "unsupported":
        message = f"{place}={value!r:.60} is not supported: leave it out"
        return RequestError(message, param=place, code="unsupported_parameter")
    if kind == "missing":
        return RequestError(f"{place} is required", param=place)
    if kind == "union_tag_invalid":
        of = error["ctx"]
        message = f"{place} is of {of['discriminator'].strip(chr(39))} {of['tag']!r:.60}, not {of['expected_tags']}"
        return RequestError(message, param=place)
    wanted = wanted or (WANTED[kind].format_map(error.get("ctx", {})) if kind in WANTED else error["msg"])
    return RequestError(f"{place} must be {wanted}, not {value!r:.60}", param=place)


def _place(error: ErrorDetails, body: Any) -> str:
    """Where in the body an error is: ``messages[1].content``. Steps that name one of several types are left out."""
    place = ""
    for number, step in enumerate(error["loc"], 1):
        if isinstance(step, int):
            place, body = f"{place}[{step}]", body[step] if isinstance(body, list) else None
        elif isinstance(body, dict) and (step in body or (error["type"] == "missing" and number == len(error["loc"]))):
            place, body = f"{place}.{step}", body.get(step)
    return place.removeprefix(".")


def document(bodies: Mapping[str, type[Body]]) -> dict[str, Any]:
    """The OpenAPI document of a server whose POST endpoints take these ``bodies``, by path."""
    schemas, known = models_json_schema(
        [(body, "validation") for body in bodies.values()], ref_template="#/components/schemas/{model}"
    )
    error = {"description": "what is wrong with the request, in a sentence"}
    paths = {
        path: {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schemas[body, "validation"]}},
                },
                "responses": {"200": {"description": "the answer, or its server-sent events"}, "400": error},
            }
        }
        for path, body in bodies.items()
    }
    info = {"title": "slimelite", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": known["$defs"]}}
