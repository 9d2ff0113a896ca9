"""Text to ids and back.

tokenizer.py      Tokenizer, and Decoder for text that arrives token by token
chat_template.py  renders a conversation (chat.jinja is the default template)
chat_parser.py    splits an answer into text, reasoning and tool calls
"""
