"""Fill-in-the-middle prompts: finds the prefix and suffix of a gap, or the region to edit, in what an editor sent.

<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>   and similar sentinels, in either order; text before the first is context
<|code_to_edit|>R<|/code_to_edit|>             with the file and the recent edits around it

The routes search in a thread: eight megabytes take a part of a second.
"""

import re
from dataclasses import dataclass
from itertools import chain

# Per model family: the sentinels of prefix, suffix and middle. The middle may be missing (codestral).
SENTINELS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
FILE_SEPARATOR = re.compile(r"<\|(?:file_sep|repo_name|endoftext)\|>|<(?:file_sep|filename|reponame)>")
EMPTY_SUFFIXES = ("<|endoftext|>",)  # clients send this when there is no suffix


@dataclass(frozen=True)
class Gap:
    """The text on both sides of a gap to infill."""

    prefix: str
    suffix: str
    context: str = ""  # prefilled before the prefix; not part of the result


@dataclass(frozen=True)
class Region:
    """A region of a file to rewrite, and the file around it."""

    text: str
    prefix: str
    suffix: str
    context: str


def find_gap(prompt: str, suffix: str | None = None) -> Gap | None:
    """Returns the gap before a suffix, or the one that sentinels in the prompt mark; None if there is neither."""
    if suffix and suffix not in EMPTY_SUFFIXES:
        return Gap(prompt, suffix)
    for family in SENTINELS:
        if family[0] in prompt and family[1] in prompt:
            return _split_at_sentinels(prompt, family)
    return None


def _split_at_sentinels(prompt: str, family: tuple[str, str, str]) -> Gap:
    prefix_sentinel, _, middle_sentinel = family
    any_of_family = "|".join(re.escape(sentinel) for sentinel in family)
    parts = re.split(any_of_family, prompt)
    order = [sentinel for sentinel in re.findall(any_of_family, prompt) if sentinel != middle_sentinel]
    prefix, suffix = (parts[1], parts[2]) if order[0] == prefix_sentinel else (parts[2], parts[1])
    late_prefix = "".join(parts[3:])  # if the middle's sentinel comes early, the prefix stands behind it
    if prefix_sentinel == "<PRE>":  # written with a space on either side
        prefix = prefix.removeprefix(" ").removesuffix(" ")
        suffix = suffix.removesuffix(" ")
        late_prefix = late_prefix.removeprefix(" ")
    return Gap(_without_sentinels(prefix + late_prefix), _without_sentinels(suffix), _context(parts[0]))


def _context(text: str) -> str:
    text = FILE_SEPARATOR.sub("\n", text)
    return _without_sentinels(text).strip("\n") + "\n" if text.strip() else ""


def _without_sentinels(text: str) -> str:
    """Removes sentinels of all families: an editor must not get them back.

    One after the other: a pattern of all of them takes five times as long, and holds the interpreter's lock meanwhile.
    """
    for sentinel in chain.from_iterable(SENTINELS):
        text = text.replace(sentinel, "")
    return text


def find_region(prompt: str) -> Region | None:
    """Returns the region between <|code_to_edit|> tags and the file around it; None if there are no tags."""
    region = _between_tags(prompt, "code_to_edit")
    if region is None:
        return None
    region = _strip_cursor_and_tag_lines(region)
    file = _between_tags(prompt, "current_file_content") or ""
    prefix, tag, suffix = file.partition("<|code_to_edit|>")
    if tag:
        suffix = suffix.partition("<|/code_to_edit|>")[2]
    else:  # the region comes after the file: search for it in the file
        file = file.replace("<|cursor|>", "")
        begin = f"\n{file}\n".find(f"\n{region}\n")  # whole lines; `find` takes linear time, a regular expression may not
        prefix, suffix = (file[:begin], file[begin + len(region) :]) if begin >= 0 else (file, "")
    prefix = re.sub(r"\A\s*current_file_path:[^\n]*\n", "", prefix)
    sections = (_between_tags(prompt, "recently_viewed_code_snippets"), _between_tags(prompt, "edit_diff_history"))
    texts = [re.sub(r"<\|/?[a-z_]+\|>", "", section).strip() for section in sections if section and section.strip()]
    context = "\n".join(texts)
    return Region(region, prefix.lstrip("\n"), suffix, context + "\n" if context else "")


def _between_tags(text: str, tag: str) -> str | None:
    begin = text.find(f"<|{tag}|>")
    end = text.find(f"<|/{tag}|>", begin)
    return text[begin + len(tag) + 4 : end] if 0 <= begin < end else None


def _strip_cursor_and_tag_lines(region: str) -> str:
    """Removes the cursor marker, and the line breaks that only set the tags apart."""
    return region.replace("<|cursor|>", "").removeprefix("\n").removesuffix("\n")
