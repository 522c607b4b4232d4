"""What a client asks for in OpenAI's words, as a prompt and a `DecodeConfig`.

A field is honoured or refused by its name, and null is absent. What a request leaves out is as the
server's own settings have it: greedy, unless those say otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_lab.config import DecodeConfig

LENGTHS = ("max_tokens", "max_completion_tokens")  # two names of one thing
SETTINGS = {  # fields of a body, and those of DecodeConfig that they set
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop_strings",
    **dict.fromkeys(LENGTHS, "max_new_tokens"),
}
# Fields that ask for nothing at these values, and for what there is not at any other.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
LABELS = ("user", "metadata", "safety_identifier")  # for the books of a service: nothing to do
COMMON = (*SETTINGS, *NEUTRAL, *LABELS, "model", "stream", "stream_options")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
STOPS = 4  # as many as OpenAI takes


class BadRequest(ValueError):
    """A request that cannot be answered as it is; `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, read and checked."""

    prompt: Any  # chat messages, text or token ids
    chat: bool
    thinking: bool | None  # None leaves the chat template's switch alone
    config: DecodeConfig
    stream: bool
    usage: bool  # a last chunk of the stream tells it


def read_chat(raw: Any, base: DecodeConfig) -> Asked:
    """The body of /v1/chat/completions; `base` says what it leaves out. Raises BadRequest."""
    body = present(raw, ("messages", "chat_template_kwargs"))
    return Asked(
        prompt=messages_of(needed(body, "messages")),
        chat=True,
        thinking=thinking_of(body.get("chat_template_kwargs")),
        config=config_of(body, base),
        **streaming_of(body),
    )


def read_completion(raw: Any, base: DecodeConfig) -> Asked:
    """The body of /v1/completions; `base` says what it leaves out. Raises BadRequest."""
    body = present(raw, ("prompt",))
    return Asked(
        prompt=prompt_of(needed(body, "prompt")),
        chat=False,
        thinking=None,
        config=config_of(body, base),
        **streaming_of(body),
    )


def present(raw: Any, own: Collection[str]) -> dict[str, Any]:
    """The fields that are not null; BadRequest for one that is unknown or asks for too much."""
    if not isinstance(raw, dict):
        raise BadRequest(f"the body is {shortened(raw)}; expected a JSON object.")
    body = {name: value for name, value in raw.items() if value is not None}
    for name, value in body.items():
        if name not in COMMON and name not in own:
            known = ", ".join(sorted((*own, *COMMON)))
            raise BadRequest(f"{name} is not supported here. Known fields: {known}.", name)
        if name in NEUTRAL and not any(same(value, plain) for plain in NEUTRAL[name]):
            allowed = " or ".join(map(repr, NEUTRAL[name]))
            raise wrong(name, value, f"{allowed}; nothing else is supported", name)
    return body


def same(value: Any, plain: Any) -> bool:
    """Equal as JSON: 0 is 0.0, but not false."""
    return isinstance(value, bool) == isinstance(plain, bool) and value == plain


def needed(body: Mapping[str, Any], name: str) -> Any:
    if name not in body:
        raise BadRequest(f"{name} is missing; the request needs it.", name)
    return body[name]


def config_of(body: Mapping[str, Any], base: DecodeConfig) -> DecodeConfig:
    """The base with what the body sets; an error names the field of the body."""
    lengths = {body[name] for name in LENGTHS if isinstance(body.get(name), int)}
    if len(lengths) > 1:
        raise BadRequest(f"{' and '.join(LENGTHS)} differ; give one of them.", LENGTHS[1])
    config = base
    for name, setting in SETTINGS.items():
        if name not in body:
            continue
        value = stops_of(body[name]) if name == "stop" else body[name]
        try:
            config = replace(config, **{setting: value})
        except ValueError as error:
            raise BadRequest(str(error).replace(setting, name, 1), name) from error
    return config


def stops_of(value: Any) -> Any:
    """One stop string or a few of them, as a list."""
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list) and len(strings) > STOPS:
        raise wrong("stop", value, f"{STOPS} strings at most", "stop")
    return strings


def streaming_of(body: Mapping[str, Any]) -> dict[str, bool]:
    """Whether to stream, and whether to tell the usage at the end."""
    stream = flag(body.get("stream", False), "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise wrong("stream_options", options, "an object with include_usage", "stream_options")
    if options and not stream:
        raise BadRequest("stream_options is for streams; set stream, too.", "stream_options")
    usage = options.get("include_usage")
    usage = flag(False if usage is None else usage, "stream_options.include_usage")
    return {"stream": stream, "usage": usage}


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false", name)
    return value


def thinking_of(switches: Any) -> bool | None:
    """The one switch of the chat template that `encode` knows."""
    if switches is None:
        return None
    name = "chat_template_kwargs"
    if not isinstance(switches, dict) or set(switches) - {"enable_thinking"}:
        raise wrong(name, switches, "an object with enable_thinking", name)
    value = switches.get("enable_thinking")
    return None if value is None else flag(value, f"{name}.enable_thinking")


def messages_of(value: Any) -> list[dict[str, str]]:
    """Chat messages of a role and a text; `developer` is OpenAI's newer name for `system`."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a list of one message at least", "messages")
    return [message_of(message, f"messages[{place}]") for place, message in enumerate(value)]


def message_of(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with role and content", where)
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, [], {}, ""):
            raise BadRequest(f"{where}.{name} is not supported here.", f"{where}.{name}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}", f"{where}.role")
    return {"role": ROLES[role], "content": text_of(message.get("content"), f"{where}.content")}


def text_of(content: Any, where: str) -> str:
    """Text, or the texts of its parts put together as they are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong(where, content, "text, or a list of parts of the type text", where)
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            at = f"{where}[{place}]"
            raise wrong(at, part, 'a part such as {"type": "text", "text": "..."}', at)
    return "".join(part["text"] for part in content)


def prompt_of(value: Any) -> str | list[int]:
    """One prompt, text or token ids; a list of one prompt is that prompt."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise BadRequest(f"prompt holds {len(value)} prompts; send one a request.", "prompt")
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and all(map(is_id, value))):
        return value
    raise wrong("prompt", value, "text, or a list of token ids", "prompt")


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def wrong(name: str, value: Any, allowed: str, param: str) -> BadRequest:
    return BadRequest(f"{name} is {shortened(value)}; expected {allowed}.", param)


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
