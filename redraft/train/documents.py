"""Training documents: a record becomes pairs of prompt ids, which are given, and answer ids, which are learned.

    {"text"}                  -> BOS, or the token between documents   | the text, end
    {"prompt", "completion"}  -> BOS and the prompt                    | the completion, end
    {"messages"}              -> the conversation before the assistant | what it says, end       one for each of its turns
    {"ids"}                   -> BOS, or the token between documents   | the ids
    {"prompt_ids", "ids"}     -> the prompt's ids                      | the ids

The prompt of a turn is the one that generation would get, and the answer is what the model would have to generate there: a
reasoning channel, text, tool calls, and the token at which generation stops. The chat template says how they are written.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redraft.config import show_value
from redraft.tokenizer.chat_parser import CHANNEL_NAME
from redraft.tokenizer.chat_tokens import CALL_END, CHANNEL_END, CHANNEL_START
from redraft.tokenizer.messages import Message, check_messages, check_tools, prepare_messages
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.records import BadRecord, Record, Source

KINDS = {  # the kind of a record by the keys that it has
    frozenset({"text"}): "text",
    frozenset({"prompt", "completion"}): "completion",
    frozenset({"messages"}): "messages",
    frozenset({"ids"}): "ids",
    frozenset({"prompt_ids", "ids"}): "ids",
}
KEYS = frozenset().union(*KINDS)
MAX_REASON = 500  # characters of what is wrong with a record; it may quote the record
ASSISTANT_ROLES = ("assistant", "model")
REASONING_KEYS = ("reasoning_content", "reasoning")
TURN_END = "<turn|>"
RESPONSE_START = "<|tool_response>"  # generation stops here after a call, and the caller writes the response

# These stand for an answer's text and reasoning while the template writes the turn around them. They are private-use
# characters, which a template neither trims nor changes.
TEXT_MARK = "\ue000\ue001\ue002"
REASONING_MARK = "\ue000\ue002\ue001"


@dataclass(frozen=True)
class Document:
    """Token ids of a prompt, which is given, and of an answer, which is learned.

    The answer ends with a stop token unless a later piece continues it, or the model was cut off when it wrote it.
    """

    prompt: list[int]
    answer: list[int]
    own: bool = False  # the model itself wrote it
    where: str = ""  # the record that it comes from, "file:line"


# 1. Records


def move_text(record: Record | BadRecord, source: Source) -> Record | BadRecord:
    """Moves the text to the key "text"."""
    if isinstance(record, BadRecord) or source.text == "text" or source.text not in record:
        return record
    return {**record, "text": record[source.text]}


def crop_text(record: Record | BadRecord, source: Source, rng: random.Random) -> Record | BadRecord:
    """Moves the text to the key "text" and, with probability `mid_start`, starts it at a random line."""
    record = move_text(record, source)
    if isinstance(record, BadRecord):
        return record
    text = record.get("text")
    if isinstance(text, str) and rng.random() < source.mid_start:
        line_starts = [index + 1 for index, letter in enumerate(text) if letter == "\n"]
        record = {**record, "text": text[rng.choice([0, *line_starts]) :].lstrip("\n") or text}
    return record


def drop_prompt(record: Record | BadRecord, source: Source, rng: random.Random) -> Record | BadRecord:
    """Drops the `prompt_ids` of a record, with probability `drop_prompt_share`."""
    if not source.drop_prompt_share or isinstance(record, BadRecord) or "prompt_ids" not in record:
        return record
    if rng.random() >= source.drop_prompt_share:
        return record
    return {name: value for name, value in record.items() if name != "prompt_ids"}


def check_record(record: Record | BadRecord, where: str) -> str:
    """Returns the kind of a record. Raises BadRecord if its structure is wrong: this needs no tokenizer, and is fast."""
    if isinstance(record, BadRecord):
        raise record
    kind = KINDS.get(KEYS.intersection(record))
    if kind is None:
        kinds = "text, ids, prompt and completion, or messages with one of the assistant's"
        raise BadRecord(f"{where}: a record has {kinds}; this one has {show_value(sorted(record))}")
    try:
        if kind == "messages":
            check_messages(record["messages"])
            check_tools(record.get("tools"))
            prepare_messages(record["messages"])  # raises if the arguments of a call are not JSON
            _find_turns(record["messages"])
        elif kind == "ids":
            _require_tokens(record["ids"])
            _require_tokens(record.get("prompt_ids", record["ids"]))
        else:
            for name in KEYS.intersection(record) - {"prompt"}:
                if not isinstance(record[name], str) or not record[name]:
                    raise BadRecord(f"nothing to learn from {show_value(record[name])}")
            if not isinstance(record.get("prompt", ""), str):
                raise BadRecord(f"the prompt is not a text: {show_value(record['prompt'])}")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BadRecord(f"{where}: {str(error)[:MAX_REASON]}") from None
    return kind


def to_documents(record: Record | BadRecord, where: str, tokenizer: Tokenizer, stop: int) -> list[Document]:
    """Tokenizes a record: a document, or one for each turn of the assistant. Raises BadRecord if it cannot be used."""
    kind = check_record(record, where)
    assert not isinstance(record, BadRecord)
    start = tokenizer.start_ids  # as before a text that begins with a gap, or is edited
    try:
        if kind == "ids":
            prompt = _require_tokens(record["prompt_ids"], tokenizer.size) if "prompt_ids" in record else start
            pairs = [(prompt, _require_tokens(record["ids"], tokenizer.size))]
        elif kind == "text":
            pairs = [(start, [*tokenizer.encode(record["text"]), stop])]
        elif kind == "completion":
            pairs = [(tokenizer.encode_prompt(record["prompt"]), [*tokenizer.encode(record["completion"]), stop])]
        else:
            messages = record["messages"]
            turns = _find_turns(messages)
            pairs = [_encode_turn(messages[: index + 1], record.get("tools"), tokenizer, stop) for index in turns]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BadRecord(f"{where}: {str(error)[:MAX_REASON]}") from None
    return [Document(prompt, answer, where=where) for prompt, answer in pairs]


def _require_tokens(ids: Any, vocab_size: int | None = None) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRecord("ids must be a list of tokens")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise BadRecord(f"ids must be a list of tokens below {vocab_size}, got {max(ids)}")
    return ids


def move_start_to_prompt(document: Document, source: Source, rng: random.Random) -> Document:
    """Moves a random beginning of the answer to the prompt, with probability `prompt_share`: a canvas may start anywhere."""
    if rng.random() >= source.prompt_share:
        return document
    count = rng.randint(0, len(document.answer) // 4)
    return replace(document, prompt=document.prompt + document.answer[:count], answer=document.answer[count:])


# 2. Turns of a conversation


def _find_turns(messages: Sequence[Message]) -> list[int]:
    """The indices of the messages that are learned. Raises BadRecord if there are none, or if one of them is empty.

    An assistant's message with `weight` 0 is only history, and so is one that begins the conversation: generation always has
    something to answer.
    """
    turns = []
    for index, message in enumerate(messages):
        if message["role"] not in ASSISTANT_ROLES:
            continue
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise BadRecord(f"message {index} has the weight {show_value(weight)}; it is 0 (not learned) or 1")
        if weight == 0 or index == 0:
            continue
        _, text = _split_reasoning(message)
        if not text.strip() and not message.get("tool_calls"):
            raise BadRecord(f"message {index} ({message['role']}) is empty: nothing to learn from")
        turns.append(index)
    if not turns:
        raise BadRecord("no message of the assistant answers another one: nothing to learn from")
    return turns


def _split_reasoning(message: Message) -> tuple[str, str]:
    """The reasoning and the text of a message. A reasoning channel at the start of the text counts as reasoning too."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else content
    text = "".join(part if isinstance(part, str) else part["text"] for part in parts)
    for name in REASONING_KEYS:
        reasoning = message.get(name)
        if reasoning is not None and not isinstance(reasoning, str):
            raise BadRecord(f"{name} is not a text: {show_value(reasoning)}")
        if reasoning and reasoning.strip():
            return reasoning.strip(), text
    channel, end, rest = text.lstrip().partition(CHANNEL_END)
    if end and channel.startswith(CHANNEL_START):
        return channel.removeprefix(CHANNEL_START).removeprefix(CHANNEL_NAME).strip(), rest
    return "", text


def _encode_turn(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, tokenizer: Tokenizer, stop: int
) -> tuple[list[int], list[int]]:
    """Ids of the prompt before the last message, and of the answer that the last message is.

    The template writes the turn with marks for text and reasoning. This gives what stands before and behind them, so the
    text itself is learned as it is, even where a template would trim it.
    """
    *history, message = messages
    reasoning, text = _split_reasoning(message)
    has_calls = bool(message.get("tool_calls"))
    think = bool(reasoning)
    prompt = tokenizer.render(history, tools=tools, think=think)
    marked = {name: value for name, value in message.items() if name not in REASONING_KEYS}
    if reasoning:
        marked |= dict.fromkeys(REASONING_KEYS, REASONING_MARK)

    def render_turn(content: str) -> str:
        conversation = [*history, {**marked, "content": content}]
        return tokenizer.render(conversation, tools=tools, think=think, add_generation_prompt=False)

    head, mark, tail = render_turn(TEXT_MARK).rpartition(TEXT_MARK)
    if not mark:
        raise BadRecord("the chat template does not write what the assistant says, so it cannot be learned")
    if has_calls and not text:  # some templates write a line break between text and calls
        written = render_turn("")
        tail = written[len(head) :] if written.startswith(head) else tail
    for call in message.get("tool_calls") or []:
        name = call.get("function", call)["name"]
        if name not in tail:
            raise BadRecord(f"the chat template does not write the call to {show_value(name)}, so it cannot be learned")
    lead = _find_lead(prompt, head, reasoning, tokenizer)
    return tokenizer.encode(prompt), [*tokenizer.encode(lead + text), *_encode_tail(tail, has_calls, tokenizer, stop)]


def _find_lead(prompt: str, head: str, reasoning: str, tokenizer: Tokenizer) -> str:
    """What the model generates before its text: nothing, or its reasoning.

    `head` is the conversation up to the text, as a later prompt would show it. It continues the prompt of this turn, or the
    prompt continues it: ours asks for no reasoning with an empty channel, which no later prompt shows.
    """
    if reasoning and REASONING_MARK not in head:
        if not tokenizer.can_think:
            raise BadRecord("a message has reasoning, and this model's chat template does not know reasoning")
        head += f"{CHANNEL_START}{CHANNEL_NAME}\n{REASONING_MARK}{CHANNEL_END}"
    if head.startswith(prompt):
        return head[len(prompt) :].replace(REASONING_MARK, reasoning)
    if prompt.startswith(head):
        return ""
    raise BadRecord(
        "the chat template writes the assistant's turn in another way than the prompt of this turn begins it, "
        "so what the model would generate is not known"
    )


def _encode_tail(tail: str, has_calls: bool, tokenizer: Tokenizer, stop: int) -> list[int]:
    """Ids of what the model generates behind its text: calls, and the token at which generation stops."""
    names = (TURN_END, RESPONSE_START, CALL_END)
    token_of = {name: tokenizer.vocabulary.token_to_id(name) for name in names}  # even if they are not flagged as special
    special_tokens = {*tokenizer.special_tokens, *token_of.values()}
    ids = tokenizer.encode(tail.rstrip())
    if not has_calls:
        ends = [index for index, token in enumerate(ids) if token in special_tokens]
        return ids[: ends[0] + 1] if ends else [stop]
    if not ids or ids[-1] not in special_tokens:
        return [*ids, stop]
    if ids[-1] != token_of[CALL_END]:
        return ids
    ends = [token for token in (token_of[RESPONSE_START], token_of[TURN_END], stop) if token is not None]
    return [*ids, ends[0]]  # our template leaves a turn open behind a call
