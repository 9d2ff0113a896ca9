"""Prefix grammars: schemas that no finite automaton expresses, for an answer that grows from left to right.

    shapes -> [to_grammar] -> JSON schema of plain keywords -> [llguidance] -> the tokens that may come next

llguidance says which tokens may follow the tokens before. It knows no `uniqueItems`: `DistinctItems` adds that.
A grammar has no state of an answer: states are numbers, each of which stands for the tokens from the start to it.
Shapes: V vocabulary.
"""

import importlib
import json
from collections.abc import Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np

from redraft.constraints.errors import BudgetError, PatternError, UnboundedError, shorten
from redraft.constraints.json_schema import SchemaReader
from redraft.constraints.schema_references import name_path
from redraft.constraints.schema_shapes import (
    ANY_SHAPES,
    ArrayShape,
    Literal,
    Node,
    NumberShape,
    ObjectShape,
    Shape,
    StringShape,
)

MAX_DEFINITIONS = 2_000  # nodes of a schema
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
BITS = 32


# 1. From shapes to a schema of plain keywords


def to_grammar(reader: SchemaReader) -> str:
    """The grammar of a schema as text. Raises UnboundedError where llguidance cannot express it either."""
    writer = _GrammarWriter(reader)
    root = writer.write(reader.root_node)
    writer.remove_endless()
    if reader.root_node in writer.endless:
        raise PatternError("the schema allows no value that ends")
    text = {"x-guidance": SEPARATORS, "$defs": writer.definitions, **root}
    return json.dumps({"schema": text, "distinct": writer.has_distinct}, ensure_ascii=False)


class _GrammarWriter:
    """Writes each node once, as a definition that others refer to."""

    def __init__(self, reader: SchemaReader) -> None:
        self.reader = reader
        self.definitions: dict[str, Any] = {}
        self.has_distinct = False  # some array has only different items
        self.endless: set[Node] = set()  # nodes whose values would be nested without end
        self._names: dict[Node, str] = {}
        self._needs: dict[Node, list[list[Node]]] = {}  # the nodes that values of each shape contain

    def remove_endless(self) -> None:
        """Makes nodes impossible whose values contain themselves in any case."""
        self.endless = set(self._needs)
        while ends := [node for node in self.endless if any(self.endless.isdisjoint(needs) for needs in self._needs[node])]:
            self.endless.difference_update(ends)
        for node in self.endless:
            self.definitions[self._names[node]] = False

    def _needed(self, shape: Shape) -> list[Node]:
        if isinstance(shape, ArrayShape):
            return [shape.item(index) for index in range(min(shape.least, len(shape.first) + 1))]
        if isinstance(shape, ObjectShape):
            return [self.reader.property_node(shape, name) for name in shape.required]
        return []

    def write(self, node: Node) -> dict[str, Any]:
        """A reference to the definition of a node."""
        if self.reader.shapes(node) is ANY_SHAPES:
            return {}
        if node not in self._names:
            if len(self._names) >= MAX_DEFINITIONS:
                raise UnboundedError(f"the schema has more than {MAX_DEFINITIONS:,} different parts")
            name = self._names[node] = f"n{len(self._names)}"
            self.definitions[name] = None  # in the order of the schema
            shapes = self.reader.shapes(node)
            self._needs[node] = [self._needed(shape) for shape in shapes]
            literals = [shape.value for shape in shapes if isinstance(shape, Literal)]
            branches = [{"enum": literals}] if literals else []
            branches += [self._write_shape(shape, node) for shape in shapes if not isinstance(shape, Literal)]
            self.definitions[name] = branches[0] if len(branches) == 1 else {"anyOf": branches} if branches else False
        return {"$ref": f"#/$defs/{self._names[node]}"}

    def _write_shape(self, shape: Shape, node: Node) -> dict[str, Any]:
        where = name_path(node.path)
        match shape:
            case NumberShape():
                return self._write_number(shape, where)
            case StringShape():
                return self._write_string(shape, where)
            case ArrayShape():
                return self._write_array(shape, where)
            case ObjectShape():
                return self._write_object(shape, where)
        raise AssertionError

    def _write_number(self, shape: NumberShape, where: str) -> dict[str, Any]:
        numbers = shape.range
        if shape.excluded or shape.is_fraction or len(numbers.multiples) > 1:
            raise UnboundedError(f"{where} combines limits of numbers that are not supported together")
        schema: dict[str, Any] = {"type": "integer" if numbers.is_integer else "number"}
        if numbers.low is not None:
            schema["exclusiveMinimum" if numbers.excludes_low else "minimum"] = _to_number(numbers.low)
        if numbers.high is not None:
            schema["exclusiveMaximum" if numbers.excludes_high else "maximum"] = _to_number(numbers.high)
        if numbers.multiples:
            schema["multipleOf"] = _to_number(numbers.multiples[0])
        return schema

    def _write_string(self, shape: StringShape, where: str) -> dict[str, Any]:
        if shape.excluded or shape.excluded_patterns:
            raise UnboundedError(f"{where} forbids strings, which is not supported there")
        schema: dict[str, Any] = {"type": "string"}
        if shape.least:
            schema["minLength"] = shape.least
        if shape.most is not None:
            schema["maxLength"] = shape.most
        others = [{"type": "string", "pattern": pattern} for pattern in shape.patterns]
        others += [{"type": "string", "format": name} for name in shape.formats]
        return {"allOf": [schema, *others]} if others else schema

    def _write_array(self, shape: ArrayShape, where: str) -> dict[str, Any]:
        if shape.contains:
            raise UnboundedError(f"{where} has contains, which is not supported there")
        self.has_distinct |= shape.unique
        schema: dict[str, Any] = {"type": "array", "items": self.write(shape.rest)}
        if shape.first:
            schema["prefixItems"] = [self.write(node) for node in shape.first]
        if shape.least:
            schema["minItems"] = shape.least
        if shape.most is not None:
            schema["maxItems"] = shape.most
        return schema

    def _write_object(self, shape: ObjectShape, where: str) -> dict[str, Any]:
        reader = self.reader
        if shape.names:
            raise UnboundedError(f"{where} has propertyNames, which is not supported there")
        values = {name: reader.property_node(shape, name) for name in shape.named}
        forbidden = [name for name, value in values.items() if not reader.shapes(value)]
        known = {name: self.write(value) for name, value in values.items() if name not in forbidden}
        if any(name in forbidden for name in shape.required):
            return {"enum": []}
        sides = [side for side in shape.sides if side.patterns or not side.is_open]
        schema: dict[str, Any] = {"type": "object", "properties": {**known, **dict.fromkeys(forbidden, False)}}
        if shape.required:
            schema["required"] = list(shape.required)
        if not sides:
            schema["additionalProperties"] = not known
        elif len(sides) > 1:
            raise UnboundedError(f"{where} combines names that are not known, which is not supported there")
        else:
            (side,) = sides
            if side.patterns:
                schema["patternProperties"] = {pattern: self.write(value) for pattern, value in side.patterns}
            is_closed = side.is_open and bool(known or side.patterns)
            schema["additionalProperties"] = False if is_closed else self._write_or_false(side.additional)
        if shape.least > len(shape.required):
            schema["minProperties"] = shape.least
        if shape.most is not None:
            schema["maxProperties"] = shape.most
        return schema

    def _write_or_false(self, node: Node) -> Any:
        return self.write(node) if self.reader.shapes(node) else False


def _to_number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


# 2. Which tokens may come next


def import_llguidance() -> Any:
    """The library of grammars, which few requests need."""
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError:
        raise PatternError("the schema needs a grammar, and llguidance is not installed: pip install llguidance") from None


class GrammarVocabulary:
    """The tokens of a vocabulary, as llguidance reads them. Made once for all grammars of a model."""

    def __init__(self, token_bytes: Sequence[bytes | None], stops: Sequence[int]) -> None:
        self.token_bytes = token_bytes
        self.stops = tuple(stops)

    @cached_property
    def tokenizer(self) -> Any:
        """llguidance's own form."""
        llguidance = import_llguidance()
        return llguidance.LLTokenizer(_TokenList(self.token_bytes, self.stops), n_vocab=len(self.token_bytes))

    @cached_property
    def closing_tokens(self) -> np.ndarray:
        """Tokens that may end an item of an array."""
        return np.array([number for number, text in enumerate(self.token_bytes) if text and any(c in b'",]}' for c in text)])


class _TokenList:
    """What llguidance asks of a tokenizer. Special tokens begin with a byte that no text has."""

    is_tokenizer_wrapper = True

    def __init__(self, token_bytes: Sequence[bytes | None], stops: Sequence[int]) -> None:
        self.tokens = [text if text else b"\xff<%d>" % number for number, text in enumerate(token_bytes)]
        for stop in stops:
            self.tokens[stop] = b"\xff<%d>" % stop
        self.special_token_ids = [number for number, text in enumerate(self.tokens) if text.startswith(b"\xff<")]
        self.eos_token_id = stops[0] if stops else self.special_token_ids[0]
        self.bos_token_id = None
        self.number_of = {text: number for number, text in reversed(list(enumerate(self.tokens)))}
        self.longest = max(map(len, self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        """The longest tokens from the left. Any tokenization will do: an answer may use another one."""
        rest = text.encode() if isinstance(text, str) else bytes(text)
        ids = []
        while rest:
            length = next((n for n in range(min(self.longest, len(rest)), 0, -1) if rest[:n] in self.number_of), 0)
            if not length:  # a byte that no token has
                break
            ids.append(self.number_of[rest[:length]])
            rest = rest[length:]
        return ids


BYTES = GrammarVocabulary([*(bytes([byte]) for byte in range(256)), None], [256])  # a token for each byte


class PrefixGrammar:
    """The grammar of one pattern over one vocabulary."""

    def __init__(self, pattern: str, grammar: str, vocabulary: GrammarVocabulary) -> None:
        self.pattern = pattern
        self.grammar = grammar
        self.vocabulary = vocabulary
        self.stops = vocabulary.stops
        self.start = 0
        parsed = json.loads(grammar)
        self.is_distinct = parsed["distinct"]
        self.lark = parsed.get("lark")
        self.text = self.lark or json.dumps(parsed["schema"], ensure_ascii=False)
        self.matcher()  # refuses what llguidance does not know

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.vocabulary.token_bytes)

    def matcher(self) -> Any:
        """A new matcher of llguidance, at the start."""
        llguidance = import_llguidance()
        make = llguidance.LLMatcher.grammar_from_lark if self.lark else llguidance.LLMatcher.grammar_from_json_schema
        matcher = llguidance.LLMatcher(self.vocabulary.tokenizer, make(self.text))
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0].rstrip(". ")
            raise PatternError(f"the pattern is not supported: {shorten(reason)}")
        return matcher

    def new_cursor(self) -> "GrammarCursor":
        """Follows one answer."""
        return GrammarCursor(self)

    def accepts_text(self, text: bytes) -> bool:
        """Whether a whole text is a match."""
        return PrefixGrammar(self.pattern, self.grammar, BYTES).accepts(list(text))

    def accepts(self, ids: Sequence[int]) -> bool:
        """Whether these tokens are a whole match."""
        own = [token for token in ids if token not in self.stops]
        matcher = self.matcher()
        if any(token not in self.stops for token in ids[len(own) :]) or matcher.try_consume_tokens(own) < len(own):
            return False
        items = DistinctItems()
        is_distinct = all(items.read(self.vocabulary.token_bytes[token] or b"") for token in own) or not self.is_distinct
        return is_distinct and bool(matcher.is_accepting())

    @property
    def bytes(self) -> int:
        """About what it takes in memory."""
        return 4 * len(self.text)


class GrammarCursor:
    """States of one answer: state 0 is the start, every later one a token behind another state.

    The matcher stands at one state and moves to another by taking tokens back and consuming others.
    """

    def __init__(self, grammar: PrefixGrammar) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher()
        self.parents = [-1]
        self.tokens = [-1]
        self.children: dict[tuple[int, int], int] = {}
        self.at = 0

    def path_to(self, state: int) -> list[int]:
        """The states from the start to this one."""
        path = []
        while state > 0:
            path.append(state)
            state = self.parents[state]
        return path[::-1]

    def move_to(self, state: int) -> None:
        """Moves the matcher."""
        if state == self.at:
            return
        old = self.path_to(self.at)
        new = self.path_to(state)
        common = next(
            (index for index, (one, two) in enumerate(zip(old, new, strict=False)) if one != two), min(len(old), len(new))
        )
        if len(old) > common:
            self.matcher.rollback(len(old) - common)
        for each in new[common:]:
            self.matcher.consume_token(self.tokens[each])
        self.at = state

    def advance(self, state: int, token: int) -> int | None:
        """The state behind a token; None if the token does not fit."""
        if (state, token) in self.children:
            return self.children[state, token]
        if token in self.grammar.stops:
            return state if self.is_final(state) else None
        self.move_to(state)
        if self.grammar.is_distinct:
            if not self.allowed(state)[token]:
                return None
        elif not self.matcher.validate_tokens([token]):
            self._check()
            return None
        self.parents.append(state)
        self.tokens.append(token)
        self.children[state, token] = len(self.parents) - 1
        return len(self.parents) - 1

    def is_final(self, state: int) -> bool:
        """Whether the tokens up to a state are a whole match."""
        self.move_to(state)
        return bool(self.matcher.is_accepting())

    def allowed(self, state: int) -> np.ndarray:
        """The tokens that may follow, bool_V."""
        self.move_to(state)
        vocabulary = self.grammar.vocabulary
        size = len(vocabulary.token_bytes)
        words = np.zeros((size + BITS - 1) // BITS, dtype=np.int32)
        self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        allowed_V = np.unpackbits(words.view(np.uint8), bitorder="little")[:size].astype(bool)
        allowed_V[list(vocabulary.stops)] = self.matcher.is_accepting()
        if self.grammar.is_distinct:
            self._forbid_repeats(state, allowed_V)
        return allowed_V

    def _check(self) -> None:
        """Raises an error where llguidance has given up."""
        if self.matcher.is_error():
            raise BudgetError(f"the pattern {shorten(self.grammar.pattern)} takes too long to follow: make it simpler")

    def _forbid_repeats(self, state: int, allowed_V: np.ndarray) -> None:
        """Removes tokens that would end an item that its array has already."""
        token_bytes = self.grammar.vocabulary.token_bytes
        items = DistinctItems()
        for each in self.path_to(state):
            items.read(token_bytes[self.tokens[each]] or b"")
        if not items.has_items:
            return
        closing = self.grammar.vocabulary.closing_tokens
        for token in closing[allowed_V[closing]].tolist():
            allowed_V[token] = items.copy().read(token_bytes[token] or b"")


class DistinctItems:
    """Reads JSON byte by byte and finds an array that has an item twice."""

    def __init__(self) -> None:
        self.arrays: list[tuple[list[str], bytearray] | None] = []  # items and the one in work; None for an object
        self.in_string = False
        self.is_escaped = False

    @property
    def has_items(self) -> bool:
        """Some array that is not closed yet has an item."""
        return any(array is not None and array[0] for array in self.arrays)

    def copy(self) -> "DistinctItems":
        """The same state, on its own."""
        other = DistinctItems()
        other.arrays = [None if array is None else (list(array[0]), bytearray(array[1])) for array in self.arrays]
        other.in_string, other.is_escaped = self.in_string, self.is_escaped
        return other

    def read(self, text: bytes) -> bool:
        """Reads on. False if an item repeats an earlier one."""
        is_distinct = True
        for byte in text:
            character = chr(byte)
            if self.in_string:
                self.in_string = character != '"' or self.is_escaped
                self.is_escaped = character == "\\" and not self.is_escaped
            elif character == '"':
                self.in_string = True
            elif character in "[{":
                self._add(byte)
                self.arrays.append(([], bytearray()) if character == "[" else None)
                continue
            elif character in "]}":
                is_distinct &= self._end_item()
                if self.arrays:
                    self.arrays.pop()
            elif character == "," and self.arrays and self.arrays[-1] is not None:
                is_distinct &= self._end_item()
                for array in self.arrays[:-1]:
                    if array is not None:
                        array[1].append(byte)
                continue
            self._add(byte)
        return is_distinct

    def _add(self, byte: int) -> None:
        for array in self.arrays:
            if array is not None:
                array[1].append(byte)

    def _end_item(self) -> bool:
        array = self.arrays[-1] if self.arrays else None
        if array is None or not array[1].strip():
            return True
        items, current = array
        try:
            value = json.dumps(json.loads(bytes(current)), sort_keys=True)
        except ValueError:
            return True
        current.clear()
        is_new = value not in items
        items.append(value)
        return is_new
