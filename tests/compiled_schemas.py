"""Compiled schemas as tests and benchmarks see them: the one place that knows how redraft compiles a JSON schema."""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from redraft.constraints import json_schema, regex_dfa
from redraft.constraints.budget import Budget
from redraft.constraints.dfa import DFA
from redraft.constraints.graph import distances_to
from redraft.constraints.token_automaton import AutomatonCompiler

CANVAS = "canvas"  # a finite automaton: it constrains positions that are denoised together
LEFT_TO_RIGHT = "left to right"  # a grammar of prefixes: it constrains one token after another
KINDS = (CANVAS, LEFT_TO_RIGHT)


@dataclass(frozen=True)
class CompiledSchema:
    """What redraft made of a schema."""

    kind: str  # one of KINDS
    dfa: DFA

    @cached_property
    def rows(self) -> list[list[int]]:
        """The next state for each state and byte."""
        return self.dfa.transitions_Q256.tolist()

    def accepts(self, text: str) -> bool:
        """Whether the text is an answer that redraft could give."""
        state = self.dfa.start
        for byte in text.encode():
            state = self.rows[state][byte]
        return bool(self.dfa.accepting_Q[state])

    def random_answers(self, rng: random.Random, count: int, longest: int = 600) -> list[str]:
        """Texts that redraft could give: random walks that turn to the nearest end when they become long."""
        from_T, byte_T = np.nonzero(self.dfa.transitions_Q256)
        to_T = self.dfa.transitions_Q256[from_T, byte_T]
        distances = distances_to(self.dfa.accepting_Q, from_T, to_T).tolist()
        texts = []
        for _ in range(count if distances[self.dfa.start] < longest else 0):
            turn = rng.randrange(longest // 4)
            state = self.dfa.start
            text = bytearray()
            while not (self.dfa.accepting_Q[state] and (len(text) >= turn or rng.random() < 0.1)):
                row = self.rows[state]
                targets = sorted({*row} - {0})  # all equally likely, however many bytes lead to each
                if not targets:
                    break
                if len(text) >= turn:
                    nearest = min(distances[target] for target in targets)
                    targets = [target for target in targets if distances[target] == nearest]
                state = rng.choice(targets)
                text.append(rng.choice([byte for byte in range(256) if row[byte] == state]))
            texts.append(text.decode())
        return texts


def compile_schema(schema: Any, automata: AutomatonCompiler | None = None) -> CompiledSchema:
    """Compiles a schema, also over a vocabulary if one is given. A schema that is refused raises PatternError."""
    budget = Budget()
    regex = json_schema.build_regex(schema, budget)
    if automata is not None:
        automata.compile(regex, budget)
    return CompiledSchema(CANVAS, regex_dfa.compile_dfa(regex, budget))
