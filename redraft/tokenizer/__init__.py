"""Tokenizer, chat template and chat parser.

tokenizer.py      Tokenizer: text to ids and back; Decoder: text of ids that arrive in pieces
chat_template.py  compiles chat templates (chat.jinja is the default template)
chat_parser.py    ChatParser: splits an answer into text, reasoning and tool calls
"""
