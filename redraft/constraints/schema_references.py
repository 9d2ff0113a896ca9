"""References of a JSON schema: the subschemas that `$ref`, `$anchor` and `$id` name. Nothing is fetched."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from redraft.constraints.budget import Budget
from redraft.constraints.errors import PatternError, shorten

ANCHORS = ("$anchor", "$dynamicAnchor")
AMBIGUOUS = object()  # a name that several subschemas have
PART_WORK = 10  # units of the budget (see budget.py for the unit) for each part of a reference, and each value of the schema


class References:
    """Finds subschemas of one schema."""

    def __init__(self, root: Any, budget: Budget) -> None:
        self.root = root
        self.budget = budget
        self._anchors: dict[str, Any] | None = None

    def find(self, name: Any, path: str) -> Any:
        """The subschema that a reference names."""
        where = name_path(path)
        if not isinstance(name, str):
            raise PatternError(f"{where} refers to {shorten(name)}; a reference is a text")
        address, _, pointer = name.partition("#")
        target = self.root
        if address or (pointer and not pointer.startswith("/")):
            anchors = self._find_anchors()
            found = [anchors[key] for key in (name, f"#{pointer}", address) if key and key != "#" and key in anchors]
            if any(each is AMBIGUOUS for each in found):
                raise PatternError(f"{where} refers to {shorten(name)}, a name that the schema gives more than once")
            if not found:
                raise PatternError(
                    f"{where} refers to {shorten(name)}; only references inside the schema (#/...) are supported"
                )
            if address and pointer and f"#{pointer}" not in anchors and not pointer.startswith("/"):
                raise PatternError(f"{where} refers to {shorten(name)}, which is not there")
            target = found[0]
            if not pointer.startswith("/"):
                return target
        parts = pointer.removeprefix("/").split("/") if pointer else []
        self.budget.spend(PART_WORK * len(parts), where)
        for part in parts:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, Mapping) and key in target:
                target = target[key]
            else:
                raise PatternError(f"{where} refers to {shorten(name)}, which is not there")
        return target

    def _find_anchors(self) -> dict[str, Any]:
        """Subschemas by their `$id` and `$anchor`."""
        if self._anchors is None:
            self._anchors = {}
            waiting = [self.root]
            for value in waiting:  # grows
                self.budget.spend(PART_WORK, "the references of the schema")
                if isinstance(value, Mapping):
                    names = [
                        value[keyword].removesuffix("#") for keyword in ("$id", "id") if isinstance(value.get(keyword), str)
                    ]
                    names += [f"#{value[keyword]}" for keyword in ANCHORS if isinstance(value.get(keyword), str)]
                    for name in names:
                        self._anchors[name] = AMBIGUOUS if name in self._anchors else value
                    waiting += value.values()
                elif isinstance(value, list):
                    waiting += value
        return self._anchors


def name_path(path: str) -> str:
    """A path as error messages show it."""
    return path or "the schema"
