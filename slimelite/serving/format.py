"""Converts messages to tokens and back, with the tokenizer's chat template and the family's format of tool calls.

A conversation continues *from the tokens that were sampled*: `ChatFormat.continuation` gives only the tokens that the
template puts after a reply. These tokens are correct only if the template changes no text before them. `continuation`
checks this by rendering the conversation: the new text must begin with the prompt, and the rendered reply must equal
the sampled reply. For example, Qwen3's template removes the thinking from a reply after the user has answered, and
keeps the thinking while tools answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, takewhile
from typing import TYPE_CHECKING, Any

from slimelite.data.messages import Message, Messages, read_messages, render
from slimelite.data.replies import PROBE
from slimelite.data.tokenizer import encode_text
from slimelite.engines.params import SamplingParams
from slimelite.serving.calls import ToolCall, short
from slimelite.serving.tools import TOOL_FORMATS, ToolFormat, read_reasoning, read_tools, reasoning_format, tool_format

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Reply:
    """The content of a reply, read from its tokens. ``malformed``: one sentence for each call that cannot be read.

    The text of a call that cannot be read stays in ``content``.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()

    def message(self) -> Message:
        """The reply as an assistant's message in OpenAI's form."""
        message: Message = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


def content_text(content: object, name: str = "content") -> str:
    """The content of a message as one text. Null counts as an empty text, and parts of text are joined. ``name``: the
    content's name in the error message.

    Raises:
        ValueError: the content has something other than text, such as an image.
    """
    if isinstance(content, list):
        for place, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"{name}[{place}] is of type {kind!r:.60}, but only parts of type text are supported")
        return "".join(part["text"] for part in content)
    if content is None or isinstance(content, str):
        return content or ""
    raise ValueError(f"{name} must be text or parts of type text, not {content!r:.60}")


def before_stop(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the first of ``stops``. A stop string is in the tokens, but not in the text that clients get."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]


def comparable(message: Message) -> tuple[object, ...]:
    """The part of a message that must be equal in equivalent messages: role, name, text, and calls with parsed
    arguments.

    Clients may change the rest: they send other ids, other white space in JSON, or null for missing values.
    """
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    content, reply = content_text(message.get("content")), message.get("role") == "assistant"
    written = [(call.get("name"), _value(call.get("arguments"))) for call in calls]
    return message.get("role"), message.get("name"), content.strip() if reply else content, written


def _value(arguments: object) -> object:
    try:
        return json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


# LONG_TEXT: if a text has more characters per token of the context, its length is checked before it is encoded. SLICE:
# the number of characters that this check encodes at a time
LONG_TEXT, SLICE = 8, 1 << 16
Tools = Sequence[Mapping[str, Any]] | None
# fields in which chat templates look for the thinking of a message; the first field that occurs in the template is used
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# the variable that turns thinking on or off in the templates of Qwen3, GLM and others
SWITCH_NAME = "enable_thinking"
# efforts that templates do not support -> the nearest effort that GPT-OSS supports
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
# the beginning of an answer of GPT-OSS and similar models, after other channels
FINAL = "<|channel|>final<|message|>"
# arguments of a test call; the template must show them, and the format must read them back
PROBED = {"text": 'say "it\'s"\nso', "count": 3, "list": ["a", 2]}


class ChatFormat:
    """How a model reads conversations and writes replies.

    Args:
        template_kwargs: variables for the chat template. The variables of a request override these variables.
        tool_parser, reasoning_parser: names in `TOOL_FORMATS` and `REASONING_FORMATS`; None: chosen by the chat
            template.
        end_ids: tokens that end a reply, in addition to the end tokens of the tokenizer and the chat template.

    Raises:
        ValueError: no parser has this name.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, object] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        end_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        template = str(tokenizer.chat_template or "")
        self._thought = next((name for name in THOUGHTS if re.search(rf"\b{name}\b", template)), THOUGHTS[0])
        self.tools = tool_format(template, tool_parser)
        self._reads_always = tool_parser is not None
        self.reasoning = reasoning_format(template, reasoning_parser)
        self._given_ends = frozenset(end_ids)

    def prompt(self, messages: Sequence[Message], tools: Tools = None, /, **template_kwargs: object) -> list[int]:
        """Token ids of the conversation with the generation prompt.

        Raises:
            ValueError: see `render`.
        """
        return self.encode(self.render(messages, tools, **template_kwargs))

    def render(self, messages: Sequence[Message], tools: Tools = None, /, **template_kwargs: object) -> str:
        """The text of the conversation with the generation prompt.

        Raises:
            ValueError: there is no chat template, tools cannot be used with it, a message is not text, or the template
                refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; put a chat_template.jinja into the model's folder")
        if tools and self._toolless is not None:
            raise ValueError(self._toolless)
        return self._apply(messages, tools, template_kwargs)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with nothing added. Half of a surrogate pair, which JSON may contain, becomes ``?``."""
        text = text.encode(errors="replace").decode()
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text without chat template. They begin with the tokens that it adds to each text."""
        return encode_text(self.tokenizer, [text.encode(errors="replace").decode()])[0]

    def excess(self, text: str, most: int) -> int:
        """The approximate number of tokens of ``text`` if there are certainly more than ``most``, else 0.

        A text may have many million characters, and encoding all of them would take minutes. So the text is encoded in
        slices, until the slices have more than twice ``most`` tokens. The factor is two, because the cuts between
        slices may add tokens.
        """
        count = 0
        for at in range(0, len(text) if len(text) > LONG_TEXT * most else 0, SLICE):
            count += len(self.encode(text[at : at + SLICE]))
            if count > 2 * most:
                return count * len(text) // min(at + SLICE, len(text))
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        settings = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **settings))

    def reply(self, ids: Sequence[int], tools: Tools = None, *, opened: bool = False, salt: str = "") -> Reply:
        """Read a reply from its tokens. The end token of the reply is left out. The method accepts any tokens without
        an error.

        ``opened``: whether the prompt ends inside the thinking, see `opens_thinking`. ``salt``: a part of the calls'
        ids.
        """
        return self._read(self.decode(self.without_end(ids)), tools, opened, salt)

    def opens_thinking(self, rendered: str) -> bool:
        """Whether a prompt ends with the start of the thinking, as DeepSeek R1's prompts do."""
        return self.reasoning is not None and rendered.rstrip().endswith(self.reasoning.start)

    def calls(self, tools: Tools) -> ToolFormat | None:
        """The format of calls in a reply; None: the reply has no calls. If a request has no tools, JSON in the reply is
        not a call.

        If the user named a parser, this parser reads every reply, because a system prompt may describe the tools.
        """
        return self.tools if tools or self._reads_always else None

    def continuation(
        self,
        rendered: str,
        text: str,
        output_ids: Sequence[int],
        messages: Sequence[Message],
        at: int,
        tools: Tools = None,
        /,
        **template_kwargs: object,
    ) -> list[int] | None:
        """The tokens that follow the sampled reply ``messages[at]``. Returns None if the template changes earlier text.

        ``rendered``: the text of the prompt that ``output_ids`` answered. ``messages``: the whole conversation.
        ``text``: the rendered text of the conversation. If the reply was cut off, the model did not write its end mark.
        The result then begins with this mark.
        """
        if not text.startswith(rendered):
            return None
        for probe in _probes(messages[at]):
            try:
                changed = self._apply([*messages[:at], probe, *messages[at + 1 :]], tools, template_kwargs)
            except ValueError:
                continue  # some templates require a call before a tool's answer; the next probe has a call
            before, mark, after = changed.partition(PROBE)
            if "tool_calls" in probe:  # some templates show the tool's name with its answer
                named = messages[at]["tool_calls"][0]
                after = self._from_end(after).replace(PROBE, named.get("function", named)["name"])
            if mark and before.startswith(rendered) and PROBE not in after and text.endswith(after):
                break
        else:
            return None
        shown = text[len(rendered) : len(text) - len(after)]
        if not self._says(shown, output_ids, tools, self.opens_thinking(rendered)):
            return None
        ids = self.encode(after)
        # GLM ends a reply with the mark of the next speaker; this mark is left out only if it equals the sampled mark
        ended = len(output_ids) and output_ids[-1] in self.end_ids and ids[:1] == list(output_ids[-1:])
        if not ended and len(output_ids) and output_ids[-1] == self._last_end:
            return None  # GPT-OSS ends the last reply with a mark that the template replaces later
        return ids[1:] if ended else ids

    def opening(
        self, messages: Sequence[Message], rendered: str, names: Sequence[str], tools: Tools = None, /, **kwargs: object
    ) -> list[int]:
        """The tokens with which every call of one of the tools ``names`` begins, after the prompt ``rendered``.

        A call may have no arguments, or begin with any parameter. The result is the common beginning of all these
        calls. For Qwen, it extends up to the arguments if there is one tool, and up to the tool's name if there are
        several.

        Raises:
            ValueError: the format of the model's calls is unknown; the possible calls have no common first token; or
                the prompt opens the thinking, but the template shows calls without thinking.
        """
        calls = []
        for arguments in ({}, {PROBE * 2: ""}):
            call = {"role": "assistant", "content": "", "tool_calls": [_called(PROBE, arguments)]}
            text = self._apply([*messages, call], tools, kwargs)
            if self.tools is None or PROBE not in text or not text.startswith(rendered):
                raise ValueError("tool_choice: the chat template cannot continue the prompt with a call; use auto")
            text = text[len(rendered) :]
            for name in names:
                for parameter in schemas(tools).get(name) or ("x",):
                    calls.append(self.encode(text.replace(PROBE * 2, parameter).replace(PROBE, name)))
        unknown = self.tokenizer.unk_token_id  # calls cannot be forced with an unknown token
        columns = takewhile(lambda column: {*column} == {column[0]} - {unknown}, zip(*calls, strict=False))
        if not (opening := [column[0] for column in columns]):
            named = " and ".join(names)
            raise ValueError(f"tool_choice: calls of {named} begin with different tokens; choose one function")
        return opening

    def begun(
        self, messages: Sequence[Message], reply: Message, rendered: str, tools: Tools = None, /, **kwargs: object
    ) -> list[int]:
        """The tokens of a ``reply`` that the model will continue. These tokens follow the prompt ``rendered`` of the
        ``messages``.

        Raises:
            ValueError: the reply has no text; the reply has tool calls; the template leaves out the reply's text; or
                the template changes the prompt.
        """
        content = content_text(reply.get("content"))
        if not content or reply.get("tool_calls"):
            raise ValueError("continue_final_message: the last message must have text and no tool calls")
        text, mark, _ = self._apply([*messages, {**reply, "content": content + PROBE}], tools, kwargs).partition(PROBE)
        if not mark or not text.startswith(rendered):
            raise ValueError("continue_final_message: the chat template cannot continue the prompt with a reply")
        return self.encode(text[len(rendered) :])

    def effort_kwargs(self, effort: str | None) -> dict[str, object]:
        """The template variables for a reasoning effort of OpenAI or Anthropic. The result is empty if the chat
        template has no efforts and no switch for thinking."""
        template = str(self.tokenizer.chat_template or "")
        if effort is not None and "reasoning_effort" in template:
            return {"reasoning_effort": EFFORTS.get(effort, effort)}
        return {SWITCH_NAME: False} if effort == "none" and SWITCH_NAME in template else {}

    def call_ends(self, tools: Tools) -> tuple[str, ...]:
        """The text after which a reply must end, so that the reply has only one call. The result is empty if the reply
        cannot contain a call.

        Raises:
            ValueError: calls of the model's format have no closing text.
        """
        if self.tools is None or not tools:
            return ()
        if self.tools.closes is None:
            raise ValueError(
                f"parallel_tool_calls: a call in the {self.tools.name} format has no closing mark, so a reply cannot "
                "end after one call; leave parallel_tool_calls out"
            )
        return (self.tools.closes,)

    def guided(self, params: SamplingParams, rendered: str, tools: Tools, given_ids: Sequence[int]) -> SamplingParams:
        """``params``, with the data that an engine needs to enforce a grammar in a reply to the prompt ``rendered``.

        The grammar applies after the thinking. Even if there is a schema, the reply may call ``tools`` instead. The
        arguments of strict tools fit the tools' schemas, but only if the model writes arguments as JSON.

        Raises:
            ValueError: the request has a schema and tools, but the grammar of calls in the model's format is unknown.
        """
        functions = [tool.get("function", tool) for tool in tools or ()]
        strict = any(function.get("strict") is True for function in functions)
        if not params.guided and not strict:
            return params
        channels = self.reasoning is not None and self.reasoning.channels
        after = self.reasoning.end if self.reasoning is not None and self.opens_thinking(rendered) else ""
        calls = None
        if functions and not channels:
            if self._call_form is not None:
                begin, end = self._call_form
                calls = structural_tag(functions, begin, end)
            elif params.guided:
                raise ValueError(
                    "a reply that follows a schema cannot call tools in this model's format; leave out the schema or "
                    "the tools"
                )
        begun = self.decode(given_ids) if given_ids else ""
        return replace(params, calls=calls, grammar_after=FINAL if channels else after, begun=begun)

    @cached_property
    def _call_form(self) -> tuple[str, str] | None:
        """The text of a call before and after its arguments, with `PROBE` as its name. None: the arguments are not
        JSON."""
        if self.tools is None or self.tools.closes is None:
            return None
        question, call = [{"role": "user", "content": "x"}], _called(PROBE, {PROBE * 2: ""})
        try:
            whole = self._apply([*question, {"role": "assistant", "content": "", "tool_calls": [call]}], None, {})
        except ValueError:
            return None
        parts = re.split(rf'\{{\s*"{PROBE * 2}":\s*""\s*\}}', whole)
        before, closed, _ = parts[-1].partition(self.tools.closes)
        starts = [at for mark in self.tools.begins if (at := parts[0].rfind(mark)) >= 0]
        begin = parts[0][min(starts, default=0) :]
        if len(parts) != 2 or not starts or not closed or PROBE not in begin:
            return None
        _, calls, malformed = read_tools(f"{begin}{{}}{before}{closed}", self.tools, {}, "")
        return (begin, before + closed) if [call.name for call in calls] == [PROBE] and not malformed else None

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a reply: the tokenizer's end token, the tokens ``end_ids`` of the constructor, and the tokens
        that the template puts after a reply."""
        ends = {*self._given_ends, self.tokenizer.eos_token_id}
        user, tool = ({"role": role, "content": "x"} for role in ("user", "tool"))
        for probe, follower in product(_probes({"tool_calls": [_called(PROBE, {})]}), (user, tool)):
            try:
                ends.add(self._end_of(probe, [user], [follower]))
            except ValueError:
                continue  # not every template has tools
        return frozenset(i for i in ends if i is not None)

    @cached_property
    def _last_end(self) -> int | None:
        """The token that ends the last reply of a conversation. None: there is no such token."""
        try:
            return self._end_of({"role": "assistant", "content": PROBE}, [{"role": "user", "content": "x"}], [])
        except ValueError:
            return None

    def _end_of(self, probe: Message, before: Sequence[Message], after: Sequence[Message]) -> int | None:
        """The id of the first special token that the template writes after the reply ``probe``. The text of this reply
        is `PROBE`, or the reply calls the tool `PROBE`. None: there is no special token after the reply.

        Raises:
            ValueError: the template refuses the messages.
        """
        text = self._apply([*before, probe, *after], None, {"add_generation_prompt": bool(after)})
        start, calls = text.find(PROBE) + len(PROBE), "tool_calls" in probe and self.tools is not None
        reply = self._reply_in(text, before) if calls else ""
        special = {i: token.content for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        for token in self.encode(text[start:]) if start >= len(PROBE) else ():
            place = text.find(special[token], start) if token in special else -1
            # marks inside the call are special tokens too, and so is the token for unknown characters
            if place >= 0 and (not calls or self._calls_probe(reply[: place - len(text)])):
                return token
            start = max(start, place + 1)
        return None

    def _reply_in(self, text: str, before: Sequence[Message], tools: Tools = None) -> str:
        """The part of ``text`` after the messages ``before``, starting at the end of the generation prompt."""
        prompt = self._apply(before, tools, {})
        same = next((i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(prompt))
        return text[len(re.sub(r"<[^<>]*\Z", "", text[:same])) :]  # two marks may begin with the same letters

    def _calls_probe(self, text: str) -> bool:
        _, calls, malformed = read_tools(self._spoken(text), self.tools, {}, "")
        return [call.name for call in calls] == [PROBE] and not malformed

    def _spoken(self, text: str) -> str:
        return read_reasoning(text, self.reasoning, opened=False)[1]

    @cached_property
    def _toolless(self) -> str | None:
        """The reason why tools cannot be used with this chat template; None if they can.

        The template must show tools, and must write calls that the parser can read. If the user named a parser, calls
        are not checked, because the system prompt may describe their format.
        """
        texts = {name: {"type": "string", "description": "x"} for name in ("text", PROBE)}
        parameters = {"type": "object", "properties": texts, "required": ["text"]}
        tools = [{"type": "function", "function": {"name": PROBE, "description": "x", "parameters": parameters}}]
        question = [{"role": "user", "content": "x"}]
        call = {"role": "assistant", "content": "", "tool_calls": [_called(PROBE, PROBED)]}
        try:
            shown = PROBE in self._apply(question, tools, {})
        except ValueError:
            # the template refuses this test conversation. It may still accept a real conversation
            return None
        if not shown:
            return "the chat template shows the model no tools; use a template that uses `tools`"
        if self._reads_always:
            return None
        try:
            text = self._reply_in(
                self._apply([*question, call], tools, {"add_generation_prompt": False}), question, tools
            )
        except ValueError as error:
            return f"tools cannot be used with this chat template; a message with a tool call fails: {error}"
        if PROBE not in text:
            return "the chat template shows tools, but no calls of the model; use a template that uses `tool_calls`"
        written = f"the chat template writes a call of f as {short(text.replace(PROBE, 'f'))}"
        known = f"Set --tool-call-parser to one of {', '.join(TOOL_FORMATS)}"
        if self.tools is None:
            return f"the format of the model's tool calls is unknown: {written}. {known}"
        spoken = self._spoken(text[: len(text) - len(self._from_end(text.partition(PROBE)[2]))])
        _, calls, malformed = read_tools(spoken, self.tools, schemas(tools), "")
        if [(call.name, json.loads(call.arguments)) for call in calls] != [(PROBE, PROBED)]:
            read = " ".join(malformed) or f"The format {self.tools.name} finds {len(calls)} calls in it."
            return f"tool calls of this model cannot be read: {written}. {read} {known}"
        return None

    def _from_end(self, text: str) -> str:
        """``text`` from the first token that ends a reply; "" if there is none."""
        places = [text.find(self.decode([i])) for i in self.end_ids]
        return text[min((place for place in places if place >= 0), default=len(text)) :]

    def without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """``ids`` without the last token, if this token ends a reply."""
        return ids[:-1] if len(ids) and ids[-1] in self.end_ids else ids

    def _read(self, text: str, tools: Tools, opened: bool, salt: str = "") -> Reply:
        reasoning, text = read_reasoning(text, self.reasoning, opened=opened)
        content, calls, malformed = read_tools(text, self.calls(tools), schemas(tools), salt)
        return Reply(content, reasoning, calls, malformed)

    def _says(self, shown: str, output_ids: Sequence[int], tools: Tools, opened: bool) -> bool:
        """Whether a rendered reply equals the sampled reply, apart from white space and the form of its JSON."""
        sampled = self.decode(self.without_end(output_ids))
        if shown.strip() == sampled.strip():
            return True
        one, other = self._read(shown, tools, opened), self._read(sampled, tools, opened)
        reasoning = [(r.reasoning or "").strip() for r in (one, other)]
        return reasoning[0] == reasoning[1] and comparable(one.message()) == comparable(other.message())

    def _apply(self, messages: Sequence[Message], tools: Tools, template_kwargs: Mapping[str, object]) -> str:
        plain = read_messages(list(messages))
        for message in plain:
            text = content_text(message["content"])
            if self._written is not None and (calls := message.pop("tool_calls", None)):
                text += self._written([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
            message["content"] = self._content(text)
            message["role"] = "system" if message["role"] == "developer" else message["role"]
            if THOUGHTS[0] in message:
                message[self._thought] = message.pop(THOUGHTS[0])
        try:
            return self._rendered(plain, tools, template_kwargs)
        except ValueError:  # GPT-OSS's template refuses a message with thinking, a call and other text
            loud = [m for m in plain if m.get("tool_calls") and m["content"] and m.pop(self._thought, None)]
            if not loud:
                raise
            return self._rendered(plain, tools, template_kwargs)

    def _rendered(self, messages: Messages, tools: Tools, template_kwargs: Mapping[str, object]) -> str:
        settings = {"add_generation_prompt": True, **self._kwargs, **template_kwargs}
        try:
            return render(self.tokenizer, messages, [_shown(tool) for tool in tools or ()] or None, settings)
        except Exception as error:  # a template may raise any error
            what = str(error) or type(error).__name__
            raise ValueError(f"the chat template refuses these messages ({what})") from error

    @cached_property
    def _written(self) -> Callable[[Sequence[tuple[str, dict[str, Any]]]], str] | None:
        """The function that writes the calls of a message, if the chat template does not write them."""
        if self.tools is None or self.tools.write is None:
            return None
        call = {"role": "assistant", "content": "x", "tool_calls": [_called(PROBE, {})]}
        shown = PROBE in self._rendered([{"role": "user", "content": "x"}, call], None, {})
        return None if shown else self.tools.write

    @cached_property
    def _content(self) -> Callable[[str], object]:
        """Converts text to the form that the template shows. Most templates take a text, and some take a list of
        parts."""
        try:
            shown = PROBE in self._rendered([{"role": "user", "content": PROBE}], None, {})
        except ValueError:  # the template refuses a single question in any form
            shown = True
        return (lambda text: text) if shown else (lambda text: [{"type": "text", "text": text}])


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form that the model sees. The field ``strict`` is left out, because it concerns only the client and
    the engine."""
    if not isinstance(function := tool.get("function"), dict) or "strict" not in function:
        return dict(tool)
    return {**tool, "function": {name: value for name, value in function.items() if name != "strict"}}


def _called(name: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """A tool call. Mistral's templates need an id of nine characters."""
    return {"id": "0" * 9, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def structural_tag(functions: Sequence[Mapping[str, Any]], begin: str, end: str) -> str:
    """The structural tag, as JSON, for calls of ``functions``. ``begin``, ``end``: see `ChatFormat._call_form`."""
    trigger = begin[: begin.index(PROBE)]
    structures = [
        {
            "begin": begin.replace(PROBE, str(function["name"])),
            "schema": (function.get("parameters") if function.get("strict") is True else None) or {"type": "object"},
            "end": end,
        }
        for function in functions
    ]
    # the trigger is only the first mark of a call, because a model may write other white space after it
    mark = re.match(r"\S+?>|\S+", trigger)
    return json.dumps({"structures": structures, "triggers": [mark[0] if mark else trigger]})


def _probes(reply: Message) -> Iterator[Message]:
    """Test replies in place of ``reply``: a reply with the text `PROBE`, and a reply with a call of `PROBE`.

    Both test replies have the thinking of ``reply``, because a reply without thinking cannot follow a prompt that opens
    the thinking.
    """
    own = {"role": "assistant", **{name: reply[name] for name in THOUGHTS[:1] if name in reply}}
    yield {**own, "content": PROBE}
    if calls := reply.get("tool_calls"):
        called = calls[0].get("function", calls[0])
        renamed = {**called, "name": PROBE}
        first = {**calls[0], "function": renamed} if "function" in calls[0] else renamed
        yield {**own, "content": "", "tool_calls": [first, *calls[1:]]}


def schemas(tools: Tools) -> dict[str, dict[str, object]]:
    """Function name -> parameter -> the parameter's schema. Tools without parameters are left out."""
    by_name: dict[str, dict[str, object]] = {}
    for tool in tools or ():
        called = tool.get("function", tool)
        parameters = called.get("parameters") if isinstance(called, Mapping) else None
        known = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(known, Mapping):
            by_name[str(called.get("name"))] = {k: v for k, v in known.items() if isinstance(v, Mapping)}
    return by_name
