"""What the front publishes about its bodies, and what it says of a body that is none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from slimelite.base.http_body import checked
from slimelite.base.http_server import RequestError
from slimelite.engines.http_front import GenerateBody
from slimelite.engines.params import SamplingParams, names_at
from slimelite.serving.anthropic import CountBody, MessagesBody
from slimelite.serving.front import SAMPLING_ROUTES, SessionBody
from slimelite.serving.openai import ChatBody, CompletionBody
from slimelite.serving.responses import ResponsesBody
from tests.arguments.test_sampling import SET
from tests.serving.chat import build
from tests.serving.fronts import engine_front, run

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def made(schema: dict[str, Any], known: dict[str, Any]) -> Any:
    """A value of a schema, as a program makes one that knows nothing else."""
    if "$ref" in schema:
        return made(known[schema["$ref"].rpartition("/")[2]], known)
    for name in ("default", "const"):
        if schema.get(name) is not None:
            return schema[name]
    if "enum" in schema:
        return schema["enum"][0]
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return made(choices[0], known)
    kind = schema.get("type", "null")
    if kind == "object":
        return {name: made(schema["properties"][name], known) for name in schema.get("required", ())}
    if kind == "array":
        return [made(schema["items"], known) for _ in range(schema.get("minItems", 0))]
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    return {"string": "abc", "integer": least, "number": least, "boolean": False, "null": None}[kind]


def test_the_schema_is_published_and_a_body_made_from_it_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_front(build(tmp_path / "model"), key="admin") as (ask, _):
            status, document = await ask("/openapi.json", None, "GET")
            assert (status, document["openapi"][:2]) == (200, "3.")
            assert document["info"].keys() >= {"title", "version"}
            known = document["components"]["schemas"]
            for schema in known.values():
                jsonschema.Draft202012Validator.check_schema(schema)
            assert document["paths"].keys() == {*SAMPLING_ROUTES, "/generate", "/abort_request", "/sessions"}
            whole = {"components": document["components"]}
            for path, operations in document["paths"].items():
                assert operations["post"]["responses"]
                schema = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
                body = made(schema, known)
                if path.startswith("/v1/") and "count" not in path:
                    body |= {"max_output_tokens" if "responses" in path else "max_tokens": 2}
                extra = {"/generate": {"text": "abc"}, "/abort_request": {"abort_all": True}}.get(path, {})
                if "messages" in body:
                    body["messages"][0] |= {"content": "abc"}
                jsonschema.validate(body | extra, {**schema, **whole})
                status, said = await ask(path, body | extra)
                assert status == 200, (path, body, said)
                # what the schema refuses the front refuses
                for wrong in ({"sampling_params": 5}, {"n": 0}, {"temperature": "hot"}, {"messages": 5}):
                    (name,) = wrong
                    if name in known[schema["$ref"].rpartition("/")[2]]["properties"]:
                        with pytest.raises(jsonschema.ValidationError):
                            jsonschema.validate(body | extra | wrong, {**schema, **whole})
                        assert (await ask(path, body | extra | wrong))[0] == 400

    run(scenario())


DIALECTS: list[tuple[str, type, dict[str, Any]]] = [
    ("openai", ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
    ("openai", CompletionBody, {"prompt": "a"}),
    ("responses", ResponsesBody, {"input": "a"}),
    ("anthropic", MessagesBody, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
    ("openai", SessionBody, {}),
    ("responses", SessionBody, {}),
    ("anthropic", SessionBody, {}),
]


@pytest.mark.parametrize(("dialect", "kind", "rest"), DIALECTS)
def test_every_parameter_of_a_dialect_reaches_the_engine(dialect: Any, kind: Any, rest: dict[str, Any]) -> None:
    for field, names in names_at(dialect).items():
        for name in names:
            value = list(SET[field]) if isinstance(SET[field], tuple) else SET[field]
            found = checked(kind, {**rest, name: value}).params(SamplingParams(99))
            assert getattr(found, field) == SET[field], name
            if field == "stop":
                assert checked(kind, {**rest, name: "x"}).params(SamplingParams(99)).stop == ("x",)


def test_every_parameter_of_generate_reaches_the_engine() -> None:
    for field, (name,) in names_at("sglang").items():
        value = list(SET[field]) if isinstance(SET[field], tuple) else SET[field]
        body = checked(GenerateBody, {"input_ids": [1], "sampling_params": {name: value}})
        assert getattr(body.sampling_params.params(SamplingParams(99)), field) == SET[field]


WRONG: list[tuple[type, dict[str, Any], str]] = [
    (ChatBody, {"n": 0}, "n: Input should be greater than or equal to 1 (got 0)"),
    (ChatBody, {"n": True}, "n: Input should be a valid integer (got True)"),
    (ChatBody, {"temperature": "hot"}, "temperature: Input should be a valid number (got 'hot')"),
    (ChatBody, {"temperature": float("nan")}, "temperature: Input should be a finite number (got nan)"),
    (ChatBody, {"stop": ["a", 5]}, "stop[1]: Input should be a valid string (got 5)"),
    (ChatBody, {"stop": ["\ud800"]}, "stop[0]: Value error, 'utf-8' codec can't encode character '\\ud800'"),
    (ChatBody, {"stop_token_ids": [1, "a"]}, "stop_token_ids[1]: Input should be a valid integer (got 'a')"),
    (ChatBody, {"stream": "yes"}, "stream: Input should be a valid boolean (got 'yes')"),
    (ChatBody, {"top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20 (got 21)"),
    (ChatBody, {"messages": []}, "messages: List should have at least 1 item after validation, not 0 (got [])"),
    (ChatBody, {"messages": {}}, "messages: Input should be a valid list (got {})"),
    (ChatBody, {"messages": [{"role": "robot"}]}, "messages[0].role: Input should be 'system', 'developer', 'user',"),
    (ChatBody, {"messages": [{"role": "user", "tool_calls": [{}]}]},
     "messages[0].tool_calls[0].function: Field required"),
    (ChatBody, {"tools": [{"type": "web"}]}, "tools[0].type: Input should be 'function' (got 'web')"),
    (ChatBody, {"response_format": {"type": "json_schema", "json_schema": {}}},
     "response_format.json_schema.schema: Field required"),
    (ChatBody, {"frequency": 1}, "frequency: unknown parameter: leave it out"),
    (ChatBody, {"best_of": 2}, "best_of: Input should be 1 or left out (got 2)"),
    (CompletionBody, {"prompt": [[1], "a", 5]}, "prompt[2]: Input should be a valid list or Input should be a valid"),
    (MessagesBody, {"max_tokens": None}, "max_tokens: Field required"),
    (MessagesBody, {"output_config": {"task": 5}}, "output_config.task: unknown parameter: leave it out"),
    (MessagesBody, {"messages": [{"role": "robot"}]}, "messages[0]: Input tag 'robot' found using 'role'"),
    (MessagesBody, {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]},
     "messages[0].content[0]: Input tag 'tool_use' found using 'type'"),
    (MessagesBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
     "messages[0].content[0].text: Input should be a valid string (got 5)"),
    (MessagesBody, {"messages": [{"role": "user", "content": [5]}]},
     "messages[0].content[0]: Input should be a valid dictionary"),
    (MessagesBody, {"messages": [{"content": "a"}]}, "messages[0]: Unable to extract tag using discriminator 'role'"),
    (MessagesBody, {"messages": [{"role": "user", "content": {"a": 1}}]},
     "messages[0].content: Input should be a valid string or Input should be a valid list"),
    (CountBody, {"messages": [{"role": "user", "content": "a"}], "system": 5},
     "system: Input should be a valid string or Input should be a valid list"),
    (CountBody, {"messages": [{"role": "user", "content": "a"}], "system": [{"text": "a"}]},
     "system[0].type: Field required"),
    (CountBody, {"max_tokens": 5}, "max_tokens: unknown parameter: leave it out"),
    (CountBody, {"tools": [{"type": "web_search", "name": "a"}]}, "tools[0].type: Input should be 'custom'"),
    (GenerateBody, {"sampling_params": {"n": 4}}, "sampling_params.n: Input should be 1 or left out (got 4)"),
    (GenerateBody, {"sampling_params": {"top_p": 7}}, "sampling_params.top_p: Input should be less than"),
    (SessionBody, {"id": "a/b"}, "id: String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "said"), WRONG)
def test_a_wrong_body_is_refused_with_the_place_and_what_should_be_there(
    kind: Any, change: dict[str, Any], said: str
) -> None:
    user = [{"role": "user", "content": "a"}]
    right = {"max_tokens": 5} if kind is MessagesBody else {"prompt": "a"} if kind is CompletionBody else {}
    right |= {"messages": user} if kind in (ChatBody, MessagesBody, CountBody) else {}
    checked(kind, right)
    with pytest.raises(RequestError) as refused:
        checked(kind, right | change)
    assert str(refused.value).startswith(said)
    assert str(refused.value.param) in said


def test_what_is_passed_on_is_what_came() -> None:
    """Chat templates print tools with all their fields, in their order."""
    tool = {"strict": None, "function": {"parameters": {"b": 1, "a": None}, "name": "f"}, "type": "function"}
    message = {"content": None, "tool_calls": [CALL], "role": "assistant", "reasoning_content": "x"}
    body = checked(ChatBody, {"messages": [message], "tools": [tool]})
    assert (body.messages[0], body.tools[0]) == (message, tool)
    assert (list(body.messages[0]), list(body.tools[0]["function"])) == (list(message), ["parameters", "name"])


def test_help_and_a_loop_without_a_server_import_no_pydantic() -> None:
    """torch and transformers may; our own modules do not."""
    code = (
        "import sys, runpy\nsys.argv = ['train.py', '--help']\n"
        "try: runpy.run_path('train.py', run_name='__main__')\nexcept SystemExit: pass\n"
        "assert 'pydantic' not in sys.modules\nimport slimelite.rollout.manager\nassert 'pydantic' not in sys.modules\n"
        "import slimelite.engines.in_process\nassert 'slimelite.base.http_body' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        (ChatBody, {"messages": [{"role": "user", "content": "a"}], "tools": [{}] * 1000}, "tools[0].type: Field"),
        (MessagesBody, {"messages": [{"role": "robot"}] * 1000, "max_tokens": 9}, "messages[0]: Input tag 'robot'"),
    ],
)
def test_the_first_wrong_entry_of_a_list_ends_its_check(kind: Any, body: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError, match=re.escape(place)) as caught:
        checked(kind, body)
    cause = caught.value.__context__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() < 5
