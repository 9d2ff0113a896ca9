"""Pattern compilers: turn the patterns of a request into token automata, in this process or in a helper process.

    Pattern -> [regular expression] -> [DFA] -> TokenAutomaton

A command or a Python program compiles its own patterns with `LocalCompiler`. A server compiles patterns of strangers with
`CompilerProcess`: a client that leaves stops the work, and the engine's thread does not wait for the interpreter's lock.
All patterns of one request share one budget.
"""

import io
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from redraft.constraints import json_schema, structure
from redraft.constraints.budget import Budget
from redraft.constraints.errors import BudgetError, PatternError, shorten
from redraft.constraints.token_automaton import AutomatonCompiler, TokenAutomaton
from redraft.tokenizer.helper_process import HelperMemoryError, HelperProcess, HelperTimeoutError, answer_calls

MODULE = "redraft.constraints.pattern_compiler"  # what the helper process runs
COMPILE_SECONDS = 10.0
ERRORS: dict[str, type[PatternError]] = {"PatternError": PatternError, "BudgetError": BudgetError}


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What a whole answer must match: a regular expression, a JSON schema (or its JSON text), choices, a structure."""

    regex: str | None = None
    schema: Any = None
    choices: Sequence[str] | None = None
    structure: Mapping[str, Any] | None = None  # a tree of texts, patterns and schemas, see structure.py

    def build_regex(self, budget: Budget) -> str:
        """The regular expression of the pattern."""
        if self.schema is not None:
            return json_schema.build_regex(self.schema, budget)
        if self.choices is not None:
            budget.check_length(sum(map(len, self.choices)) + len(self.choices) - 1, "the list of choices")
            return "|".join(re.escape(choice) for choice in self.choices)
        if self.structure is not None:
            return structure.build_regex(self.structure, budget)
        if not isinstance(self.regex, str):
            raise PatternError(f"a pattern is a text, got {shorten(self.regex)}")
        return self.regex


class PatternCompiler(Protocol):
    """Compiles patterns over one vocabulary."""

    def compile(self, patterns: Sequence[Pattern], stop: threading.Event | None = None) -> list[TokenAutomaton]:
        """The automata of a request's patterns. Setting `stop` may end the work early, with HelperStoppedError."""


class LocalCompiler:
    """Compiles in this process. `make_automata` is called when a pattern is first compiled."""

    def __init__(self, make_automata: Callable[[], AutomatonCompiler]) -> None:
        self.make_automata = make_automata

    def compile(self, patterns: Sequence[Pattern], stop: threading.Event | None = None) -> list[TokenAutomaton]:
        """The automata of a request's patterns. Only their budget ends the work early."""
        budget = Budget()
        automata = self.make_automata()
        return [automata.compile(pattern.build_regex(budget), budget) for pattern in patterns]


class CompilerProcess:
    """Compiles in a helper process, one request at a time."""

    def __init__(self, token_bytes: Sequence[bytes | None], stops: Sequence[int], seconds: float = COMPILE_SECONDS) -> None:
        self.stops = tuple(stops)
        self.seconds = seconds
        self.process = HelperProcess(MODULE, seconds=seconds, setup=pack_vocabulary(token_bytes, stops))

    def compile(self, patterns: Sequence[Pattern], stop: threading.Event | None = None) -> list[TokenAutomaton]:
        """The automata of a request's patterns. The process is killed once `stop` is set."""
        message = pack_patterns(patterns)
        try:
            answer = self.process.call(message.encode(), stop)
        except HelperTimeoutError:
            raise BudgetError(
                f"the pattern takes longer to compile than the {self.seconds:g} s that one request may use: make it simpler"
            ) from None
        except HelperMemoryError:
            raise BudgetError("the pattern needs more memory than one request may use: make it simpler") from None
        return unpack_automata(answer, self.stops)

    def close(self) -> None:
        """Ends the process."""
        self.process.close()


# Messages between the two processes: NumPy's archives, without pickle.


def pack_patterns(patterns: Sequence[Pattern]) -> str:
    """The patterns of one request, as JSON."""
    try:
        return json.dumps([asdict(pattern) for pattern in patterns])
    except (TypeError, ValueError, RecursionError) as error:
        raise PatternError(f"a schema is a JSON object: {error}") from None


def pack_vocabulary(token_bytes: Sequence[bytes | None], stops: Sequence[int]) -> bytes:
    """The vocabulary of a helper process. A length of -1 marks a token without bytes."""
    lengths = [-1 if text is None else len(text) for text in token_bytes]
    texts = np.frombuffer(b"".join(text for text in token_bytes if text), dtype=np.uint8)
    return _pack({"lengths": np.array(lengths), "texts": texts, "stops": np.array(stops)})


def unpack_vocabulary(message: bytes) -> AutomatonCompiler:
    """The compiler over the vocabulary of `pack_vocabulary`."""
    arrays = _unpack(message)
    texts = arrays["texts"].tobytes()
    token_bytes: list[bytes | None] = []
    start = 0
    for length in arrays["lengths"].tolist():
        token_bytes.append(texts[start : start + length] if length >= 0 else None)
        start += max(0, length)
    return AutomatonCompiler(token_bytes, arrays["stops"].tolist())


def pack_automata(automata: Sequence[TokenAutomaton]) -> bytes:
    """The answer of a helper process."""
    arrays = {f"{n}.{name}": array for n, automaton in enumerate(automata) for name, array in automaton.to_arrays().items()}
    return _pack({**arrays, "patterns": _text_array([automaton.pattern for automaton in automata])})


def unpack_automata(answer: bytes, stops: Sequence[int]) -> list[TokenAutomaton]:
    """The automata of an answer. Raises the error that it holds instead."""
    arrays = _unpack(answer)
    if "error" in arrays:
        kind, message = json.loads(arrays["error"].tobytes())
        raise ERRORS[kind](message)
    automata = []
    for number, pattern in enumerate(json.loads(arrays["patterns"].tobytes())):
        prefix = f"{number}."
        own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        automata.append(TokenAutomaton.from_arrays(pattern, stops, own))
    return automata


def _pack(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _unpack(message: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(message), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _text_array(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


# In the helper process


class CallHandler:
    """Compiles the patterns of one call after another."""

    def __init__(self) -> None:
        self.compiler: LocalCompiler | None = None

    def set_up(self, message: bytes) -> None:
        """Receives the vocabulary."""
        automata = unpack_vocabulary(message)
        automata.compiled.max_bytes = 0  # the parent has a cache
        self.compiler = LocalCompiler(lambda: automata)

    def answer(self, message: bytes) -> bytes:
        """Compiles the patterns of one request."""
        assert self.compiler is not None
        try:
            return pack_automata(self.compiler.compile([Pattern(**fields) for fields in json.loads(message)]))
        except PatternError as reason:
            return _pack({"error": _text_array([type(reason).__name__, str(reason)])})


if __name__ == "__main__":
    handler = CallHandler()
    answer_calls(handler.answer, handler.set_up)
