"""What the user fixes: pins, bans, regular expressions, JSON schemas.

regex_dfa.py        a regular expression as a table of states over bytes
json_schema.py      a JSON schema as a regular expression
token_automaton.py  the table over tokens, and what it makes of a canvas of logits
constraints.py      Constraints of a request, and CanvasConstraints of one canvas
"""
