"""Pattern compilers: turn the patterns of a request into token automata, in this process or in a helper process.

    Pattern -> DFA -> TokenAutomaton
            -> PrefixGrammar, where no automaton expresses it: such an answer is written from left to right

A command or a Python program compiles its own patterns with `LocalCompiler`. A server compiles patterns of strangers with
`CompilerProcess`: a client that leaves stops the work, and the engine's thread does not wait for the interpreter's lock.
All patterns of one request share one budget.
"""

import io
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from redraft.constraints.budget import Budget
from redraft.constraints.compiled_files import CompiledFiles
from redraft.constraints.dfa import DFA, minimize
from redraft.constraints.errors import BudgetError, PatternError, UnboundedError, shorten
from redraft.constraints.json_schema import SchemaReader
from redraft.constraints.nfa import NFA, determinize
from redraft.constraints.prefix_grammar import GrammarVocabulary, PrefixGrammar, to_grammar
from redraft.constraints.regex_dfa import compile_dfa, to_explicit_regex
from redraft.constraints.schema_nfa import compile_schema
from redraft.constraints.structure import add_structure, to_lark
from redraft.constraints.token_automaton import AutomatonCompiler, TokenAutomaton
from redraft.tokenizer.helper_process import HelperMemoryError, HelperProcess, HelperTimeoutError, answer_calls

MODULE = "redraft.constraints.pattern_compiler"  # what the helper process runs
COMPILE_SECONDS = 10.0
ERRORS: dict[str, type[PatternError]] = {kind.__name__: kind for kind in (PatternError, BudgetError, UnboundedError)}


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What a whole answer must match: a regular expression, a JSON schema (or its JSON text), choices, a structure."""

    regex: str | None = None
    schema: Any = None
    choices: Sequence[str] | None = None
    structure: Mapping[str, Any] | None = None  # a tree of texts, patterns and schemas, see structure.py

    @property
    def name(self) -> str:
        """What error messages call it: its text, or the beginning of what was given."""
        given = next(each for each in (self.regex, self.schema, self.choices, self.structure) if each is not None)
        return given if isinstance(given, str) else shorten(given)

    def compile(self, budget: Budget) -> DFA | str:
        """The automaton of its texts. Where there is none, or a large one only: the text of a prefix grammar."""
        try:
            return self._compile_finite(budget)
        except (UnboundedError, BudgetError) as error:
            if self.choices is not None:
                raise
            try:
                return self.write_grammar()
            except PatternError as second:
                raise (second if isinstance(error, UnboundedError) else error) from None

    def _compile_finite(self, budget: Budget) -> DFA:
        if self.regex is not None:
            return compile_dfa(self.regex, budget)
        if self.schema is not None:
            return compile_schema(self.schema, budget, self.name)
        nfa = NFA(self.name, budget)
        start = nfa.add_state()
        if self.structure is not None:
            end = add_structure(nfa, start, self.structure)
        else:
            budget.check_length(sum(map(len, self.choices or ())), "the list of choices")
            end = nfa.add_state()
            for choice in self.choices or ():
                nfa.link(nfa.add_text(start, choice.encode("utf-8", "surrogatepass")), end)
        return minimize(determinize(nfa, start, end), budget)

    def write_grammar(self) -> str:
        """The text of the prefix grammar."""
        budget = Budget()
        if self.regex is not None:
            return json.dumps({"lark": f"start: /{to_explicit_regex(self.regex, budget)}/\n", "distinct": False})
        if self.schema is not None:
            return to_grammar(SchemaReader(self.schema, budget))
        lark, has_distinct = to_lark(self.structure, budget)
        return json.dumps({"lark": lark, "distinct": has_distinct})


Compiled = TokenAutomaton | PrefixGrammar


class PatternCompiler(Protocol):
    """Compiles patterns over one vocabulary."""

    def compile(self, patterns: Sequence[Pattern], stop: threading.Event | None = None) -> list[Compiled]:
        """The automata or grammars of a request's patterns. Setting `stop` may end it early, with HelperStoppedError."""


class LocalCompiler:
    """Compiles in this process. `make_automata` is called when a pattern is first compiled."""

    def __init__(self, make_automata: Callable[[], AutomatonCompiler]) -> None:
        self.make_automata = make_automata

    def compile(self, patterns: Sequence[Pattern], stop: threading.Event | None = None) -> list[Compiled]:
        """The automata or grammars of a request's patterns. Only their budget ends the work early."""
        budget = Budget()
        automata = self.make_automata()
        return [compile_one(automata, pattern, budget) for pattern in patterns]


def compile_one(automata: AutomatonCompiler, pattern: Pattern, budget: Budget) -> Compiled:
    """The automaton of a pattern, or its grammar where an automaton would have too many states."""
    key = pack_patterns([pattern])
    compiled = automata.compiled.get(key)
    if compiled is None:
        text = pattern.compile(budget)
        if isinstance(text, DFA):
            try:
                compiled = automata.compile_tokens(pattern.name, text, budget)
            except BudgetError:
                if pattern.choices is not None:
                    raise
                text = pattern.write_grammar()
        if isinstance(text, str):
            compiled = PrefixGrammar(pattern.name, text, automata.grammar_vocabulary)
        assert compiled is not None
        automata.compiled.put(key, compiled)
    return compiled


class CompilerProcess:
    """Compiles in a helper process, one request at a time."""

    def __init__(
        self,
        token_bytes: Sequence[bytes | None],
        stops: Sequence[int],
        seconds: float = COMPILE_SECONDS,
        folder: Path | None = None,
    ) -> None:
        self.vocabulary = GrammarVocabulary(token_bytes, stops)
        self.seconds = seconds
        setup = pack_vocabulary(token_bytes, stops)
        self.process = HelperProcess(MODULE, seconds=seconds, setup=setup)
        self.kept = CompiledFiles(folder, setup) if folder is not None else None

    def compile(self, patterns: Sequence[Pattern], stop: threading.Event | None = None) -> list[Compiled]:
        """The automata or grammars of a request's patterns. The process is killed once `stop` is set."""
        message = pack_patterns(patterns)
        if self.kept is not None and (kept := self.kept.read(message)) is not None:
            return unpack_compiled(kept, self.vocabulary)
        try:
            answer = self.process.call(message.encode(), stop)
        except HelperTimeoutError:
            raise BudgetError(
                f"the pattern takes longer to compile than the {self.seconds:g} s that one request may use: make it simpler"
            ) from None
        except HelperMemoryError:
            raise BudgetError("the pattern needs more memory than one request may use: make it simpler") from None
        compiled = unpack_compiled(answer, self.vocabulary)
        if self.kept is not None:
            self.kept.write(message, answer)
        return compiled

    def close(self) -> None:
        """Ends the process."""
        self.process.close()


# Messages between the two processes: NumPy's archives, without pickle.


def pack_patterns(patterns: Sequence[Pattern]) -> str:
    """The patterns of one request, as JSON."""
    for pattern in patterns:
        if pattern.regex is not None and not isinstance(pattern.regex, str):
            raise PatternError(f"a pattern is a text, got {shorten(pattern.regex)}")
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


def pack_compiled(compiled: Sequence[Compiled]) -> bytes:
    """The answer of a helper process."""
    arrays: dict[str, np.ndarray] = {}
    for number, each in enumerate(compiled):
        found = each.to_arrays() if isinstance(each, TokenAutomaton) else {"grammar": _text_array(each.grammar)}
        arrays |= {f"{number}.{name}": array for name, array in found.items()}
    return _pack({**arrays, "patterns": _text_array([each.pattern for each in compiled])})


def unpack_compiled(answer: bytes, vocabulary: GrammarVocabulary) -> list[Compiled]:
    """The automata and grammars of an answer. Raises the error that it holds instead."""
    arrays = _unpack(answer)
    if "error" in arrays:
        kind, message = json.loads(arrays["error"].tobytes())
        raise ERRORS[kind](message)
    compiled: list[Compiled] = []
    for number, pattern in enumerate(json.loads(arrays["patterns"].tobytes())):
        prefix = f"{number}."
        own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        if "grammar" in own:
            compiled.append(PrefixGrammar(pattern, json.loads(own["grammar"].tobytes()), vocabulary))
        else:
            compiled.append(TokenAutomaton.from_arrays(pattern, vocabulary.stops, own))
    return compiled


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
            return pack_compiled(self.compiler.compile([Pattern(**fields) for fields in json.loads(message)]))
        except PatternError as reason:
            return _pack({"error": _text_array([type(reason).__name__, str(reason)])})


if __name__ == "__main__":
    handler = CallHandler()
    answer_calls(handler.answer, handler.set_up)
