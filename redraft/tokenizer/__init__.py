"""Tokenizer, chat template and chat parser.

messages.py       messages and tools: checked, and prepared for templates
chat_tokens.py    names of the special tokens of chats
tokenizer.py      Tokenizer: text to ids and back; Decoder: text of ids that arrive in pieces; check_same_vocabulary
helper_process.py a process for a stranger's work, with limits on time and memory
chat_template.py  renders chat templates (chat.jinja is the default template)
chat_parser.py    ChatParser: splits an answer into text, reasoning and tool calls
"""
