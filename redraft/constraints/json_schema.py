"""Reads JSON schemas: from keywords to shapes, as the specification says (2020-12 and earlier drafts).

Annotations and unknown keywords restrict nothing. Keywords beside `$ref`, `anyOf`, `allOf` and `oneOf` apply with them.
A keyword that restricts a value is read, or the schema is refused by its path: none is ignored silently.
Two rules make answers what programs expect: properties come in the schema's order, and an object that names properties has
no others, unless `additionalProperties` has a schema or a name matches `patternProperties`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import Any

from redraft.config import JSONDepthError, parse_json
from redraft.constraints.budget import Budget
from redraft.constraints.errors import MAX_SHOWN, BudgetError, PatternError, shorten
from redraft.constraints.formats import FORMATS
from redraft.constraints.number_range import MAX_BOUND_DIGITS, NumberRange, read_bound
from redraft.constraints.regex_dfa import compile_dfa, compile_string_dfa
from redraft.constraints.schema_references import References, name_path
from redraft.constraints.schema_shapes import (
    ANY_SHAPES,
    CONSTANTS,
    FREE_STRING,
    ArrayShape,
    Literal,
    Node,
    NumberShape,
    ObjectShape,
    Shape,
    Side,
    StringShape,
    Subschema,
    are_equal,
    exclude_literal,
    intersect_shapes,
    is_number,
)

MAX_COUNT = 10**9  # `minLength`, `maxLength`, `minItems`, `maxItems`, `minProperties`, `maxProperties`
LARGEST = 10 ** (MAX_BOUND_DIGITS - 1)
MAX_SCHEMA_CHARACTERS = 1_000_000  # of JSON text
MAX_DEPTH = 100  # of subschemas and references inside one another; see config/json_text.py for the reason
MAX_PATH = 120  # characters of a path in an error message
MAX_SHAPES = 256  # alternatives of one value
MAX_ONE_OF = 12  # branches of a `oneOf` that may overlap

# Units of the budget (see budget.py for the unit) for each ...
NODE_WORK = 200  # subschema
KEYWORD_WORK = 10  # keyword of a subschema, part of a reference
VALUE_WORK = 60  # value of an enum, name of a property
ESCAPE_WORK = 1  # character of them
SHAPE_WORK = 40  # pair of shapes that is compared

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ARRAY_KEYWORDS = (
    "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
    "maxContains",
)  # fmt: skip
OBJECT_KEYWORDS = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties",
    "unevaluatedProperties",
)  # fmt: skip
NOT_PATTERN: Any = object()
FRACTION: Any = object()
NOT_VALUES: Any = object()  # keywords of schemas that negation makes; no JSON has them
TRUE, FALSE = True, False


def parse_schema(text: str) -> Any:
    """A schema that was given as JSON text."""
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise BudgetError(f"the schema has {len(text):,} characters, at most {MAX_SCHEMA_CHARACTERS:,} are supported")
    try:
        return parse_json(text)
    except JSONDepthError:
        raise PatternError("the schema is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise PatternError(f"the schema is not JSON: {error}") from None
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise PatternError("the schema has an integer with thousands of digits: make it smaller") from None


class SchemaReader:
    """Reads one schema, every node once."""

    def __init__(self, schema: Any, budget: Budget) -> None:
        self.root = parse_schema(schema) if isinstance(schema, str) else schema
        self.budget = budget
        self._shapes: dict[frozenset[int], tuple[Shape, ...]] = {}
        self._unfinished: list[frozenset[int]] = []
        self._kept: list[Any] = []  # schemas that were made, so that their ids stay theirs
        self.references = References(self.root, budget)

    @property
    def root_node(self) -> Node:
        """The whole schema."""
        return self.node(self.root, "")

    def node(self, schema: Any, path: str) -> Node:
        """The values that a subschema allows."""
        if schema is True or (isinstance(schema, Mapping) and not schema):
            return Node()
        if schema is not False and not isinstance(schema, Mapping):
            raise PatternError(f"{name_path(path)} must be an object, true or false, got {shorten(schema)}")
        return Node((Subschema(schema, path if len(path) <= MAX_PATH else f"...{path[-MAX_PATH:]}"),))

    def made_node(self, schema: Any, path: str) -> Node:
        """The values that a schema allows which this reader has made."""
        self._kept.append(schema)
        return self.node(schema, path)

    def shapes(self, node: Node) -> tuple[Shape, ...]:
        """The shapes of the values that obey a node; none if nothing does."""
        key = node.key
        if key not in self._shapes:
            if key in self._unfinished:
                raise PatternError(f"{name_path(node.path)} refers to itself without a value in between")
            if len(self._unfinished) >= MAX_DEPTH:
                raise PatternError(f"the schema is nested too deeply: at most {MAX_DEPTH} levels")
            self._unfinished.append(key)
            shapes = ANY_SHAPES
            for part in node.parts:
                shapes = self._intersect(shapes, self._read(part.value, part.path), part.path)
            self._unfinished.pop()
            self._shapes[key] = shapes
        return self._shapes[key]

    def contains(self, node: Node, value: Any) -> bool:
        """Whether a value obeys a node."""
        return any(self._shape_contains(shape, value) for shape in self.shapes(node))

    # 1. Sets of shapes

    def _intersect(self, ones: Sequence[Shape], twos: Sequence[Shape], path: str) -> tuple[Shape, ...]:
        """What one of the first and one of the second shapes allow."""
        if ones is ANY_SHAPES:
            return tuple(twos)
        if twos is ANY_SHAPES:
            return tuple(ones)
        self.budget.spend(SHAPE_WORK * len(ones) * len(twos), name_path(path))
        found: list[Shape] = []
        for one in ones:
            for two in twos:
                both: Shape | None
                if isinstance(one, Literal):
                    both = one if self._shape_contains(two, one.value) else None
                elif isinstance(two, Literal):
                    both = two if self._shape_contains(one, two.value) else None
                else:
                    both = intersect_shapes(one, two)
                if both is not None:
                    found.append(both)
        return self._unite(found, path)

    def _unite(self, shapes: Sequence[Shape], path: str) -> tuple[Shape, ...]:
        """Different shapes, each once."""
        different = tuple(dict.fromkeys(shapes))
        if len(different) > MAX_SHAPES and any(not isinstance(shape, Literal) for shape in different):
            raise BudgetError(f"{name_path(path)} has more than {MAX_SHAPES} alternatives: make it simpler")
        return different

    def _shape_contains(self, shape: Shape, value: Any) -> bool:
        match shape:
            case Literal():
                return are_equal(shape.value, value)
            case NumberShape():
                return (
                    is_number(value)
                    and shape.range.contains(value)
                    and not (shape.is_fraction and value % 1 == 0)
                    and not any(are_equal(json.loads(text), value) for text in shape.excluded)
                )
            case StringShape():
                return isinstance(value, str) and self._string_contains(shape, value)
            case ArrayShape():
                return isinstance(value, list) and self._array_contains(shape, value)
            case ObjectShape():
                return isinstance(value, Mapping) and self._object_contains(shape, value)

    def _string_contains(self, shape: StringShape, value: str) -> bool:
        text = json.dumps(value, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")
        self.budget.spend(len(text), "a value of the schema")
        return (
            shape.least <= len(value) <= (shape.most if shape.most is not None else len(value))
            and value not in shape.excluded
            and all(compile_string_dfa(pattern, self.budget).accepts(text) for pattern in shape.patterns)
            and not any(compile_string_dfa(pattern, self.budget).accepts(text) for pattern in shape.excluded_patterns)
            and all(compile_dfa(FORMATS[name], self.budget).accepts(text) for name in shape.formats)
        )

    def _array_contains(self, shape: ArrayShape, value: Sequence[Any]) -> bool:
        if not shape.least <= len(value) <= (shape.most if shape.most is not None else len(value)):
            return False
        if shape.unique and any(are_equal(one, two) for one, two in combinations(value, 2)):
            return False
        for node, least, most in shape.contains:
            count = sum(self.contains(node, item) for item in value)
            if count < least or (most is not None and count > most):
                return False
        return all(self.contains(shape.item(index), item) for index, item in enumerate(value))

    def _object_contains(self, shape: ObjectShape, value: Mapping[str, Any]) -> bool:
        return (
            all(name in value for name in shape.required)
            and shape.least <= len(value) <= (shape.most if shape.most is not None else len(value))
            and all(self.contains(node, name) for node in shape.names for name in value)
            and all(self.contains(self.property_node(shape, name), item) for name, item in value.items())
        )

    def property_node(self, shape: ObjectShape, name: str) -> Node:
        """What the value of a property obeys."""
        text = json.dumps(name, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")
        node = Node()
        for side in shape.sides:
            matching = [value for pattern, value in side.patterns if compile_string_dfa(pattern, self.budget).accepts(text)]
            own = side.properties.get(name)
            for part in matching if own is None else [own, *matching]:
                node &= part
            if own is None and not matching:
                node &= side.additional
        return node

    # 2. Keywords

    def _read(self, schema: Any, path: str) -> tuple[Shape, ...]:
        """The shapes of one subschema."""
        where = name_path(path)
        if isinstance(schema, bool):
            return ANY_SHAPES if schema else ()
        self.budget.spend(NODE_WORK + KEYWORD_WORK * len(schema), where)
        shapes = self._read_types(schema, path)
        if any(keyword in schema for keyword in (*NUMBER_KEYWORDS, FRACTION)):
            shapes = self._intersect(shapes, self._others("number", self._read_number(schema, path)), path)
        if any(keyword in schema for keyword in (*STRING_KEYWORDS, NOT_PATTERN)):
            shapes = self._intersect(shapes, self._others("string", [self._read_string(schema, path)]), path)
        if any(keyword in schema for keyword in ARRAY_KEYWORDS):
            shapes = self._intersect(shapes, self._others("array", [self._read_array(schema, path)]), path)
        order = list(schema)  # properties come in the order of the schema, also those of references and branches
        objects = [order.index(keyword) for keyword in OBJECT_KEYWORDS if keyword in schema]
        combining = sorted((keyword for keyword in self._combining if keyword in schema), key=order.index)
        behind = [keyword for keyword in combining if objects and order.index(keyword) > min(objects)]
        for keyword in combining[: len(combining) - len(behind)]:
            shapes = self._intersect(shapes, self._combining[keyword](self, schema, path), f"{path}/{keyword}")
        if objects:
            shapes = self._intersect(shapes, self._others("object", [self._read_object(schema, path)]), path)
        for keyword in behind:
            shapes = self._intersect(shapes, self._combining[keyword](self, schema, path), f"{path}/{keyword}")
        for value in schema.get(NOT_VALUES, ()):
            literal = self._literal(value, path)
            if isinstance(value, list | dict) and any(isinstance(shape, ArrayShape | ObjectShape) for shape in shapes):
                raise PatternError(f"{where} forbids {shorten(value)}, which is not supported")
            shapes = self._unite([left for shape in shapes for left in exclude_literal(shape, literal)], path)
        for keyword in ("const", "enum"):
            if keyword in schema:
                values = [schema["const"]] if keyword == "const" else check_list(schema["enum"], f"{path}/enum")
                literals = [self._literal(value, f"{path}/{keyword}") for value in values]
                shapes = self._intersect(self._unite(literals, path), shapes, path)
        return shapes

    def _literal(self, value: Any, path: str) -> Literal:
        try:
            literal = Literal.of(value)
        except (TypeError, ValueError, RecursionError):  # NaN, thousands of digits, an object in itself
            raise PatternError(f"{name_path(path)} has {shorten(value)}, which JSON cannot express") from None
        self.budget.check_length(len(literal.text), name_path(path))
        self.budget.spend(VALUE_WORK + len(literal.text) * ESCAPE_WORK, name_path(path))
        return literal

    def _others(self, kind: str, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """These shapes of one type, and all values of the other types."""
        classes = {"number": NumberShape, "string": StringShape, "array": ArrayShape, "object": ObjectShape}
        return (*(shape for shape in ANY_SHAPES if not isinstance(shape, classes[kind])), *shapes)

    def _type_names(self, schema: Mapping[str, Any], path: str) -> list[str]:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        self.budget.spend(KEYWORD_WORK * len(types), name_path(path))
        if not types or not all(isinstance(name, str) and name in TYPES for name in types):
            known = ", ".join(TYPES)
            raise PatternError(f"{name_path(path)} has the type {shorten(schema['type'])}; known are {known}")
        return list(dict.fromkeys(types))

    def _read_types(self, schema: Mapping[str, Any], path: str) -> tuple[Shape, ...]:
        if "type" not in schema:
            return ANY_SHAPES
        types = self._type_names(schema, path)
        shapes: list[Shape] = []
        for name in types:
            of_type: dict[str, list[Shape]] = {
                "null": [CONSTANTS[0]],
                "boolean": list(CONSTANTS[1:]),
                "integer": [] if "number" in types else [NumberShape(NumberRange(is_integer=True))],
                "number": [NumberShape()],
                "string": [FREE_STRING],
                "array": [ArrayShape()],
                "object": [ObjectShape()],
            }
            shapes += of_type[name]
        return tuple(dict.fromkeys(shapes))

    def _read_number(self, schema: Mapping[str, Any], path: str) -> list[Shape]:
        bounds: dict[str, Any] = {}
        for name, exclusive, bound in (("low", "exclusiveMinimum", "minimum"), ("high", "exclusiveMaximum", "maximum")):
            value = _read_limit(schema[bound], name, f"{path}/{bound}") if bound in schema else None
            excludes = schema.get(exclusive) is True  # draft 4
            if exclusive in schema and not isinstance(schema[exclusive], bool):
                own = _read_limit(schema[exclusive], name, f"{path}/{exclusive}")
                if value is None or (own >= value if name == "low" else own <= value):
                    value, excludes = own, True
            bounds |= {name: value, f"excludes_{name}": excludes and value is not None}
        low, high = bounds["low"], bounds["high"]
        is_point_excluded = low == high and (bounds["excludes_low"] or bounds["excludes_high"])
        if low is not None and high is not None and (low > high or is_point_excluded):
            return []
        if "multipleOf" in schema:
            multiple = read_bound(schema["multipleOf"], f"{path}/multipleOf")
            if multiple <= 0:
                raise PatternError(f"{path}/multipleOf must be above 0, got {shorten(schema['multipleOf'])}")
            bounds["multiples"] = (multiple,)
        return [NumberShape(NumberRange(**bounds), is_fraction=FRACTION in schema)]

    def _read_string(self, schema: Mapping[str, Any], path: str) -> StringShape:
        least, most = _read_bounds(schema, "minLength", "maxLength", path)
        if most is not None and least > most:
            raise PatternError(f"{name_path(path)}: minLength is {least}, maxLength is {most}")
        pattern = schema.get("pattern")
        if "pattern" in schema and not isinstance(pattern, str):
            raise PatternError(f"{path}/pattern must be a text, got {shorten(pattern)}")
        form = schema.get("format")
        not_pattern = schema.get(NOT_PATTERN)
        return StringShape(
            least,
            most,
            (pattern,) if pattern is not None else (),
            (form,) if isinstance(form, str) and form in FORMATS else (),
            (not_pattern,) if not_pattern is not None else (),
        )

    def _read_array(self, schema: Mapping[str, Any], path: str) -> ArrayShape:
        least, most = _read_bounds(schema, "minItems", "maxItems", path)
        if most is not None and least > most:
            raise PatternError(f"{name_path(path)}: minItems is {least}, maxItems is {most}")
        items = schema.get("items", True)
        first_key, rest_key = ("items", "additionalItems") if isinstance(items, list) else ("prefixItems", "items")
        first = schema.get(first_key, [])
        if not isinstance(first, list):
            raise PatternError(f"{path}/{first_key} must be a list of schemas, got {shorten(first)}")
        contains: tuple[tuple[Node, int, int | None], ...] = ()
        if "contains" in schema:
            low, high = _read_bounds(schema, "minContains", "maxContains", path)
            low = low if "minContains" in schema else 1
            contains = ((self.node(schema["contains"], f"{path}/contains"), low, high),) if low or high is not None else ()
        return ArrayShape(
            tuple(self.node(item, f"{path}/{first_key}/{number}") for number, item in enumerate(first)),
            self.node(schema.get(rest_key, True), f"{path}/{rest_key}"),
            least,
            most,
            contains,
            schema.get("uniqueItems") is True,
        )

    def _read_object(self, schema: Mapping[str, Any], path: str) -> ObjectShape:
        where = name_path(path)
        properties = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        required = schema.get("required", [])
        if isinstance(required, bool):  # draft 3: of a property, not of its own properties
            required = []
        if not isinstance(properties, Mapping) or not isinstance(patterns, Mapping) or not isinstance(required, list):
            raise PatternError(f"{where}: properties and patternProperties must be objects, required a list")
        self.budget.spend(VALUE_WORK * (len(properties) + len(required) + len(patterns)), where)
        if not all(isinstance(name, str) for name in (*required, *properties, *patterns)):
            wrong = next(name for name in (*required, *properties, *patterns) if not isinstance(name, str))
            raise PatternError(f"{where} must name its properties by texts, got {shorten(wrong)}")
        required = [*required, *(name for name, value in properties.items() if _is_required(value))]
        least, most = _read_bounds(schema, "minProperties", "maxProperties", path)
        if most is not None and least > most:
            raise PatternError(f"{where}: minProperties is {least}, maxProperties is {most}")
        additional = schema.get("additionalProperties", True)
        values = {name: self.node(value, f"{path}/properties/{name[:MAX_SHOWN]}") for name, value in properties.items()}
        matched = tuple((pattern, self.node(value, f"{path}/patternProperties")) for pattern, value in patterns.items())
        if schema.get("unevaluatedProperties", True) is not True and "additionalProperties" not in schema:
            names, others = self._find_evaluated(schema, path, set())
            if "*" not in others:
                additional = schema["unevaluatedProperties"]
                values = {**dict.fromkeys(names, Node()), **values}
                matched = (*matched, *((pattern, Node()) for pattern in others if pattern not in patterns))
        is_open = additional is True or additional == {}
        side = Side(values, matched, self.node(additional, f"{path}/additionalProperties"), is_open)
        of_names = (self.node(schema["propertyNames"], f"{path}/propertyNames"),) if "propertyNames" in schema else ()
        return ObjectShape((side,), tuple(dict.fromkeys(required)), least, most, of_names)

    def _find_evaluated(self, schema: Any, path: str, seen: set[int]) -> tuple[list[str], list[str]]:
        """The properties that `unevaluatedProperties` beside this schema leaves alone: names and patterns; "*" is all."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return [], []
        seen.add(id(schema))
        self.budget.spend(NODE_WORK, name_path(path))
        conditional = ("anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
        if other := [keyword for keyword in conditional if keyword in schema]:
            raise PatternError(f"{path}/unevaluatedProperties is not supported beside {other[0]}: use additionalProperties")
        if not all(isinstance(schema.get(keyword, {}), Mapping) for keyword in ("properties", "patternProperties")):
            raise PatternError(f"{name_path(path)}: properties and patternProperties must be objects")
        names = list(schema.get("properties", {}))
        patterns = [*schema.get("patternProperties", {}), *(["*"] if "additionalProperties" in schema else [])]
        if seen != {id(schema)} and "unevaluatedProperties" in schema:
            patterns.append("*")
        inner = [self.references.find(schema["$ref"], path)] if "$ref" in schema else []
        branches = check_list(schema["allOf"], f"{path}/allOf") if "allOf" in schema else []
        for part in [*inner, *branches]:
            more_names, more_patterns = self._find_evaluated(part, path, seen)
            names += more_names
            patterns += more_patterns
        return names, patterns

    # 3. Keywords that combine schemas

    def _read_reference(self, schema: Mapping[str, Any], path: str) -> tuple[Shape, ...]:
        keyword = next(name for name in ("$ref", "$dynamicRef", "$recursiveRef") if name in schema)
        target = self.references.find(schema[keyword], path)
        return self.shapes(self.node(target, schema[keyword][:MAX_SHOWN]))

    def _read_all_of(self, schema: Mapping[str, Any], path: str) -> tuple[Shape, ...]:
        shapes = ANY_SHAPES
        for number, branch in enumerate(check_list(schema["allOf"], f"{path}/allOf")):
            shapes = self._intersect(shapes, self.shapes(self.node(branch, f"{path}/allOf/{number}")), path)
        return shapes

    def _read_any_of(self, schema: Mapping[str, Any], path: str) -> tuple[Shape, ...]:
        branches = check_list(schema["anyOf"], f"{path}/anyOf")
        self.budget.spend(KEYWORD_WORK * len(branches), path)
        nodes = [self.node(branch, f"{path}/anyOf/{number}") for number, branch in enumerate(branches)]
        return self._unite_nodes(nodes, path)

    def _unite_nodes(self, nodes: Sequence[Node], path: str) -> tuple[Shape, ...]:
        sets = [self.shapes(node) for node in nodes]
        return ANY_SHAPES if ANY_SHAPES in sets else self._unite([shape for shapes in sets for shape in shapes], path)

    def _read_one_of(self, schema: Mapping[str, Any], path: str) -> tuple[Shape, ...]:
        """A branch that may overlap with others becomes the branch without the others."""
        branches = check_list(schema["oneOf"], f"{path}/oneOf")
        nodes = [self.node(branch, f"{path}/oneOf/{number}") for number, branch in enumerate(branches)]
        self.budget.spend(SHAPE_WORK * len(nodes) ** 2, name_path(path))
        rivals: dict[int, list[int]] = {}
        for one, two in combinations(range(len(nodes)), 2):
            if self._may_overlap(nodes[one], nodes[two], 3):
                rivals.setdefault(one, []).append(two)
                rivals.setdefault(two, []).append(one)
        if len(rivals) > MAX_ONE_OF:
            raise BudgetError(
                f"{path}/oneOf has {len(rivals)} branches that may overlap, at most {MAX_ONE_OF} are supported"
            )
        for number, others in rivals.items():
            exclusive = {"allOf": [branches[number], *({"not": branches[other]} for other in others)]}
            nodes[number] = self.made_node(exclusive, f"{path}/oneOf/{number}")
        return self._unite_nodes(nodes, path)

    def _may_overlap(self, one: Node, two: Node, depth: int) -> bool:
        """Whether a value may obey both nodes. True where that is not certain."""
        for shape in self.shapes(one & two):
            if not isinstance(shape, ObjectShape) or not depth:
                return True
            needed = (self.property_node(shape, name) for name in shape.required)
            if all(self._may_exist(node, depth - 1) for node in needed):
                return True
        return False

    def _may_exist(self, node: Node, depth: int) -> bool:
        """Whether a value may obey a node."""
        return self._may_overlap(node, Node(), depth)

    def _read_not(self, schema: Mapping[str, Any], path: str) -> tuple[Shape, ...]:
        return self._negated(schema["not"], f"{path}/not")

    def _negated(self, schema: Any, path: str) -> tuple[Shape, ...]:
        if isinstance(schema, bool):
            return () if schema else ANY_SHAPES
        if not isinstance(schema, Mapping):
            raise PatternError(f"{name_path(path)} must be an object, true or false, got {shorten(schema)}")
        alternatives = list(self._negations(schema, path))
        if not alternatives:
            if not set(schema) & RESTRICTING:
                return ()
            raise PatternError(f"{name_path(path)} is not supported: it forbids more than single keywords say")
        return self._unite_nodes([self.made_node(each, path) for each in alternatives], path)

    def _negations(self, schema: Mapping[str, Any], path: str) -> Iterator[Any]:
        """Schemas of which a value obeys one if it breaks a keyword of this schema. Some keywords have none."""
        self.budget.spend(NODE_WORK * (1 + len(schema)), name_path(path))
        if "type" in schema:
            types = self._type_names(schema, path)
            left = [name for name in TYPES if name != "integer" and name not in types]
            if "number" in left and "integer" in types:
                left.remove("number")
                yield {"type": "number", FRACTION: True}
            if left:
                yield {"type": left}
        for keyword in ("enum", "const"):
            if keyword in schema:
                yield {NOT_VALUES: check_list(schema["enum"], f"{path}/enum") if keyword == "enum" else [schema["const"]]}
        numeric = {"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum", "exclusiveMinimum": "maximum",
                   "exclusiveMaximum": "minimum"}  # fmt: skip
        for keyword, opposite in numeric.items():
            if is_number(schema.get(keyword)):
                yield {"type": "number", opposite: schema[keyword]}
        for kind, low, high in (("string", "minLength", "maxLength"), ("array", "minItems", "maxItems"),
                                ("object", "minProperties", "maxProperties")):  # fmt: skip
            if isinstance(schema.get(low), int) and schema[low] > 0:
                yield {"type": kind, high: schema[low] - 1}
            if isinstance(schema.get(high), int):
                yield {"type": kind, low: schema[high] + 1}
        if isinstance(schema.get("pattern"), str):
            yield {"type": "string", NOT_PATTERN: schema["pattern"]}
        for name in schema["required"] if isinstance(schema.get("required"), list) else ():
            yield {"type": "object", "properties": {name: FALSE}}
        for name, value in schema["properties"].items() if isinstance(schema.get("properties"), Mapping) else ():
            if value is not True and value != {}:
                yield {"type": "object", "required": [name], "properties": {name: {"not": value}}}
        if isinstance(schema.get("items"), Mapping) and schema["items"] and "prefixItems" not in schema:
            yield {"type": "array", "contains": {"not": schema["items"]}}
        if "contains" in schema and not {"minContains", "maxContains"} & set(schema):
            yield {"type": "array", "items": {"not": schema["contains"]}}
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                yield {"not": self.references.find(schema[keyword], path)}
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield {"allOf": [{"not": branch} for branch in check_list(schema[keyword], f"{path}/{keyword}")]}
        if "oneOf" in schema:
            for one, two in combinations(check_list(schema["oneOf"], f"{path}/oneOf")[: MAX_ONE_OF + 1], 2):
                yield {"allOf": [one, two]}
        for branch in check_list(schema["allOf"], f"{path}/allOf") if "allOf" in schema else ():
            yield {"not": branch}
        if "not" in schema:
            yield schema["not"]
        if "if" in schema and ("then" in schema or "else" in schema):
            yield {"allOf": [schema["if"], {"not": schema.get("then", TRUE)}]}
            yield {"allOf": [{"not": schema["if"]}, {"not": schema.get("else", TRUE)}]}

    def _read_if(self, schema: Mapping[str, Any], path: str) -> tuple[Shape, ...]:
        if "then" not in schema and "else" not in schema:
            return ANY_SHAPES
        then = {"allOf": [schema["if"], schema.get("then", TRUE)]}
        otherwise = {"allOf": [{"not": schema["if"]}, schema.get("else", TRUE)]}
        return self._unite_nodes([self.made_node(then, f"{path}/then"), self.made_node(otherwise, f"{path}/else")], path)

    def _read_dependencies(self, schema: Mapping[str, Any], path: str) -> tuple[Shape, ...]:
        shapes = ANY_SHAPES
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            rules = schema.get(keyword, {})
            if not isinstance(rules, Mapping):
                raise PatternError(f"{path}/{keyword} must be an object, got {shorten(rules)}")
            for name, rule in rules.items():
                names = [rule] if isinstance(rule, str) else rule
                wanted = {"required": [name, *names]} if isinstance(names, list) else {"allOf": [{"required": [name]}, rule]}
                either = {"anyOf": [{"properties": {name: FALSE}}, wanted]}
                shapes = self._intersect(shapes, self.shapes(self.made_node(either, f"{path}/{keyword}")), path)
        return shapes

    def _refuse_items(self, schema: Mapping[str, Any], path: str) -> tuple[Shape, ...]:
        if schema["unevaluatedItems"] is not True:
            raise PatternError(f"{path}/unevaluatedItems is not supported: say it with items")
        return ANY_SHAPES

    _combining: dict[str, Callable[["SchemaReader", Mapping[str, Any], str], tuple[Shape, ...]]] = {  # noqa: RUF012
        "$ref": _read_reference,
        "$dynamicRef": _read_reference,
        "$recursiveRef": _read_reference,
        "allOf": _read_all_of,
        "anyOf": _read_any_of,
        "oneOf": _read_one_of,
        "not": _read_not,
        "if": _read_if,
        "dependencies": _read_dependencies,
        "dependentRequired": _read_dependencies,
        "dependentSchemas": _read_dependencies,
        "unevaluatedItems": _refuse_items,
    }


RESTRICTING = {
    "type", "enum", "const", *NUMBER_KEYWORDS, *STRING_KEYWORDS, *ARRAY_KEYWORDS, *OBJECT_KEYWORDS, *SchemaReader._combining,
    NOT_PATTERN, NOT_VALUES, FRACTION,
}  # fmt: skip


def check_list(value: Any, path: str) -> list:
    """Refuses anything but a list of at least one."""
    if not isinstance(value, list) or not value:
        raise PatternError(f"{path} must be a list of at least one")
    return value


def _is_required(schema: Any) -> bool:
    """Draft 3 says of a property itself that it is required."""
    return isinstance(schema, Mapping) and schema.get("required") is True


def _read_limit(value: Any, side: str, path: str) -> Decimal:
    """A bound of numbers. One beyond all that are written (1e300) is as good as the largest that is supported."""
    if is_number(value) and (value > LARGEST if side == "high" else value < -LARGEST):
        value = LARGEST if side == "high" else -LARGEST
    return read_bound(value, path)


def _read_bounds(schema: Mapping[str, Any], low: str, high: str, path: str) -> tuple[int, int | None]:
    least = schema.get(low, 0)
    most = schema.get(high)
    for name, value in ((low, least), (high, 0 if most is None else most)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1 != 0:
            raise PatternError(f"{path}/{name} must be a whole number, 0 or more, got {shorten(value)}")
        if value > MAX_COUNT:
            raise BudgetError(f"{path}/{name} is {shorten(value)}, at most {MAX_COUNT:,} is supported")
    return int(least), None if most is None else int(most)
