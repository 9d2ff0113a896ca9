"""Names of the special tokens of chats: ends of turns and texts, reasoning channels, tool calls, images."""

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")  # of ChatML and of Llama 3
DOCUMENT_END = "<|endoftext|>"  # of GPT-2, SmolLM2 and Qwen, which have no BOS token
TEXT_ENDS = (DOCUMENT_END, "<|end_of_text|>")  # the latter of Llama 3

CHANNEL_START, CHANNEL_END = "<|channel>", "<channel|>"
THINK_START, THINK_END = "<think>", "</think>"
CHANNELS = {CHANNEL_START: CHANNEL_END, THINK_START: THINK_END}

CALL_START, CALL_END = "<|tool_call>", "<tool_call|>"
JSON_CALL_START, JSON_CALL_END = "<tool_call>", "</tool_call>"
MISTRAL_CALLS, MISTRAL_ARGUMENTS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CALLS = {CALL_START: CALL_END, JSON_CALL_START: JSON_CALL_END, MISTRAL_CALLS: ""}  # the latter end with the answer
CALL_WORDS = {CALL_START: "call:", JSON_CALL_START: '"arguments', MISTRAL_CALLS: ""}  # in a template with that notation
LLAMA_WORDS = ('{"name": ', '"parameters": ', "<|eot_id|>")  # in a template whose calls are those of Llama 3
QUOTE = '<|"|>'

IMAGE_START, IMAGE, IMAGE_END = "<|image>", "<|image|>", "<image|>"
