"""Request bodies as pydantic models. The models check a body once, name the place of the mistake in an error, and give
the OpenAPI schema.

A field that is null counts as a field that was not sent.
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
    create_model,
    model_validator,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from slimelite import __version__
from slimelite.base.http_server import RequestError, read_json

# types of pydantic's errors -> OpenAI's code
CODES = {"extra_forbidden": "unknown_parameter", "unsupported": "unsupported_parameter"}


class Body(BaseModel):
    """A request body or a part of it. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if type(body) is dict else body


class Shape(Body):
    """A part of a body whose unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


B = TypeVar("B", bound=Body)


class Like:
    """An annotation for a value that is checked against ``shape`` and then passed on unchanged."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        def check(value: object, inner: Callable[[object], object]) -> object:
            inner(value)
            return value

        return core_schema.no_info_wrap_validator_function(check, handler.generate_schema(self.shape))


def _only(sent: object, *, value: object) -> object:
    if sent != value:
        raise PydanticCustomError("unsupported", "Input should be {value} or left out", {"value": repr(value)})
    return sent


# text that UTF-8 can encode; JSON text may have half a surrogate pair, which UTF-8 cannot encode
Text = Annotated[str, AfterValidator(lambda text: text.encode().decode())]
L = TypeVar("L")
# a list for which only the first wrong entry is reported: a list of a million errors would take seconds
FirstError = Annotated[L, Field(fail_fast=True)]
Ids = FirstError[list[int]]


def with_fields(fields: Mapping[str, tuple[Any, Any]]) -> Callable[[type[B]], type[B]]:
    """A decorator that adds ``fields``, name -> (type, default), to a body. A field that the body already has stays
    unchanged."""

    def decorated(body: type[B]) -> type[B]:
        new: dict[str, Any] = {name: kind for name, kind in fields.items() if name not in body.model_fields}
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **new)

    return decorated


def unread(*names: str, **only: object) -> Mapping[str, tuple[Any, Any]]:
    """Ignored fields, for `with_fields`. Fields in ``names`` may have any value. ``only``: name -> the only value that
    the field may have, a value without effect."""
    fields: dict[str, tuple[Any, Any]] = dict.fromkeys(names, (Any, None))
    for name, value in only.items():
        check = AfterValidator(partial(_only, value=value))
        fields[name] = Annotated[Any, check, WithJsonSchema({"enum": [value, None]})], None
    return fields


async def read_body(http: web.Request, kind: type[B]) -> B:
    """The body of a request. `read_body` raises the same errors as `checked` and `read_json`."""
    return checked(kind, await read_json(http))


def checked(kind: type[B], body: Any) -> B:
    """``body``, parsed from JSON, as an object of ``kind``.

    Raises:
        RequestError: the body is not a valid ``kind``. The message names the place of the mistake and the expected
            value.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # if a value may have several types, the error that is deepest in the body is the relevant one
        first = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
        deepest = max(first, key=lambda each: len(each["loc"]))
        place, reason = _place(deepest, body), deepest["type"]
        wanted = " or ".join(dict.fromkeys(each["msg"] for each in first if _place(each, body) == place))
        if reason == "extra_forbidden":
            wanted = "unknown parameter: leave it out"
        value = "" if reason in ("missing", "extra_forbidden") else f" (got {deepest['input']!r:.60})"
        raise RequestError(f"{place}: {wanted}{value}", param=place, code=CODES.get(reason)) from None


def _place(error: ErrorDetails, body: Any) -> str:
    """The place of an error in the body, such as ``messages[1].content``. Steps that only select one of several types
    are left out."""
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
    error = {"description": "a sentence about the fault of the request"}
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
