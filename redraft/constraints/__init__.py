"""Constraints: pinned and banned tokens, regular expressions, JSON schemas, structures (structured output).

errors.py            errors of patterns and schemas
budget.py            the work and memory that compiling one request's pattern may use
compiled_cache.py    the automata that were compiled last
graph.py             distances between the states of an automaton
characters.py        code points of a regular expression's characters, and their UTF-8 bytes
dfa.py               a DFA over bytes, and its minimization
regex_dfa.py         compiles a regular expression to a DFA over bytes
json_schema.py       compiles a JSON schema to a regular expression
structure.py         compiles a tree of texts, patterns and schemas to a regular expression
token_trie.py        the bytes of a vocabulary's tokens as a trie
token_automaton.py   turns the DFA into an automaton over tokens
pattern_compiler.py  compiles the patterns of a request, in this process or in a helper process
canvas_automaton.py  forward-backward and Viterbi on a canvas of logits
constraints.py       Constraints of a request, and CanvasConstraints of one canvas as tensors
next_token.py        the same constraints for an answer that grows from left to right

Only the last three import PyTorch. A helper process of the server compiles patterns.
"""
