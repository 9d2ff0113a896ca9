"""Tokenizer, chat template, chat parser, and pictures.

messages.py       messages and tools: checked, and prepared for templates
chat_tokens.py    names of the special tokens of chats
tool_text.py      tools, calls and results as text, for templates that know no tools
tokenizer.py      Tokenizer: text to ids and back; Decoder: text of ids that arrive in pieces; check_same_vocabulary
helper_process.py a process for a stranger's work, with limits on time and memory
helper_pool.py    lends a few helper processes to many callers
chat_template.py  renders chat templates (chat.jinja is the default template)
image_decoder.py  decodes and resizes a picture, in the helper process
images.py         the file of a picture -> patches; image tokens of a prompt
chat_parser.py    ChatParser: splits an answer into text, reasoning and tool calls
"""
