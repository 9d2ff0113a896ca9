"""Constraints: pinned and banned tokens, regular expressions, JSON schemas (structured output).

regex_dfa.py        compiles a regular expression to a DFA over bytes
json_schema.py      compiles a JSON schema to a regular expression
token_automaton.py  turns the DFA into an automaton over tokens; forward-backward and Viterbi on a canvas of logits
constraints.py      Constraints of a request, and CanvasConstraints of one canvas as tensors
"""
