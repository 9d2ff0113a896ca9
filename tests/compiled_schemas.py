"""Compiled schemas as tests and benchmarks see them: the one place that knows how redraft compiles a JSON schema."""

import random
from functools import cached_property
from typing import Any

import numpy as np

from redraft.constraints.budget import Budget
from redraft.constraints.dfa import DFA
from redraft.constraints.graph import distances_to
from redraft.constraints.pattern_compiler import Pattern, compile_one
from redraft.constraints.prefix_grammar import BYTES, PrefixGrammar
from redraft.constraints.token_automaton import AutomatonCompiler

CANVAS = "canvas"  # a finite automaton: it constrains positions that are denoised together
LEFT_TO_RIGHT = "left to right"  # a grammar of prefixes: it constrains one token after another
KINDS = (CANVAS, LEFT_TO_RIGHT)


class CompiledSchema:
    """What redraft made of a schema: the automaton of a canvas, or a grammar of prefixes."""

    def __init__(self, compiled: DFA | PrefixGrammar) -> None:
        self.kind = CANVAS if isinstance(compiled, DFA) else LEFT_TO_RIGHT
        self.compiled = compiled

    @cached_property
    def rows(self) -> list[list[int]]:
        """The next state for each state and byte."""
        assert isinstance(self.compiled, DFA)
        return self.compiled.transitions_Q256.tolist()

    def accepts(self, text: str) -> bool:
        """Whether the text is an answer that redraft could give."""
        if isinstance(self.compiled, PrefixGrammar):
            return self.compiled.accepts_text(text.encode())
        state = self.compiled.start
        for byte in text.encode():
            state = self.rows[state][byte]
        return bool(self.compiled.accepting_Q[state])

    def random_answers(self, rng: random.Random, count: int, longest: int = 600) -> list[str]:
        """Texts that redraft could give: random walks that turn to the nearest end when they become long."""
        if isinstance(self.compiled, PrefixGrammar):
            return []
        from_T, byte_T = np.nonzero(self.compiled.transitions_Q256)
        to_T = self.compiled.transitions_Q256[from_T, byte_T]
        distances = distances_to(self.compiled.accepting_Q, from_T, to_T).tolist()
        texts = []
        for _ in range(count if distances[self.compiled.start] < longest else 0):
            turn = rng.randrange(longest // 4)
            state = self.compiled.start
            text = bytearray()
            while not (self.compiled.accepting_Q[state] and (len(text) >= turn or rng.random() < 0.1)):
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
    pattern = Pattern(schema=schema)
    if automata is not None:
        over_tokens = compile_one(automata, pattern, Budget())
        if isinstance(over_tokens, PrefixGrammar):
            return CompiledSchema(over_tokens)
    compiled = pattern.compile(Budget())
    return CompiledSchema(PrefixGrammar(pattern.name, compiled, BYTES) if isinstance(compiled, str) else compiled)
