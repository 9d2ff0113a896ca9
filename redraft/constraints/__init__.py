"""Constraints: pinned and banned tokens, regular expressions, JSON schemas, structures (structured output).

errors.py            errors of patterns and schemas
budget.py            the work and memory that compiling one request's pattern may use
compiled_cache.py    the automata that were compiled last
compiled_files.py    the same on disk
graph.py             distances between the states of an automaton
characters.py        code points of a regular expression's characters, and their UTF-8 bytes
dfa.py               a DFA over bytes: minimization, intersection, difference
nfa.py               an NFA over bytes under construction, and the DFA that it becomes
regex_dfa.py         compiles a regular expression
number_range.py      numbers within bounds, and multiples, as DFAs
formats.py           the values of `format` that are enforced
schema_shapes.py     what a JSON schema allows, by type of value
schema_references.py  the subschemas that references name
json_schema.py       reads a JSON schema: from keywords to shapes
schema_nfa.py        compiles the shapes of a schema that is finite
token_trie.py        the bytes of a vocabulary's tokens as a trie
prefix_grammar.py    a schema that is not finite, as a grammar from left to right
structure.py         compiles a tree of texts, patterns and schemas
token_automaton.py   turns a DFA into an automaton over tokens
pattern_compiler.py  compiles the patterns of a request, in this process or in a helper process
canvas_automaton.py  forward-backward and Viterbi on a canvas of logits
constraints.py       Constraints of a request, and CanvasConstraints of one canvas as tensors
next_token.py        the same constraints for an answer that grows from left to right

Only the last three import PyTorch. A helper process of the server compiles patterns.
"""
