"""What editors put into a prompt: text before and after a hole between sentinels, or a region to edit between tags.

<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>   and the like, in either order; what stands before the first is context
<|code_to_edit|>R<|/code_to_edit|>             with its file and what was edited lately around it
"""

import re
from dataclasses import dataclass

# By family: what opens the prefix, the suffix and the middle. The middle may be missing (codestral).
SENTINELS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
MARKS = re.compile("|".join(re.escape(mark) for family in SENTINELS for mark in family))
FILES = re.compile(r"<\|(?:file_sep|repo_name|endoftext)\|>|<(?:file_sep|filename|reponame)>")
NOTHING = ("<|endoftext|>",)  # what a client sends as a suffix when there is none


@dataclass(frozen=True)
class Hole:
    """A place to write in."""

    before: str
    after: str
    context: str = ""  # read first, no part of the answer


@dataclass(frozen=True)
class Region:
    """A part of a file that is to be written anew."""

    text: str
    before: str
    after: str
    context: str


def find_hole(prompt: str, suffix: str | None = None) -> Hole | None:
    """The hole before a suffix, or the one that a prompt's sentinels mark; None where there is neither."""
    if suffix and suffix not in NOTHING:
        return Hole(prompt, suffix)
    for family in SENTINELS:
        prefix, suffix, _ = family
        if prefix in prompt and suffix in prompt:
            parts = re.split("|".join(re.escape(mark) for mark in family), prompt)
            order = [mark for mark in re.findall("|".join(re.escape(mark) for mark in family), prompt) if mark != family[2]]
            first, second = parts[1], parts[2]
            before, after = (first, second) if order[0] == prefix else (second, first)
            late = "".join(parts[3:])  # where the middle's mark comes early, the prefix stands behind it
            if prefix == "<PRE>":  # written with a space on either side
                before, after, late = (
                    before.removeprefix(" ").removesuffix(" "),
                    after.removesuffix(" "),
                    late.removeprefix(" "),
                )
            before += late
            return Hole(_bare(before), _bare(after), _context(parts[0]))
    return None


def _context(text: str) -> str:
    text = FILES.sub("\n", text)
    return _bare(text).strip("\n") + "\n" if text.strip() else ""


def _bare(text: str) -> str:
    """Without sentinels: those of others must not come back to an editor."""
    return MARKS.sub("", text)


def find_region(prompt: str) -> Region | None:
    """The region between tags, and the file around it, whichever comes first."""
    region = _between(prompt, "code_to_edit")
    if region is None:
        return None
    file = _between(prompt, "current_file_content") or ""
    before, tag, after = file.partition("<|code_to_edit|>")
    if tag:
        after = after.partition("<|/code_to_edit|>")[2]
    else:  # the region stands behind the file: the file is what surrounds it
        file = file.replace("<|cursor|>", "")
        found = re.search(rf"^{re.escape(_line(region))}$", file, re.MULTILINE)
        before, after = (file[: found.start()], file[found.end() :]) if found else (file, "")
    before = re.sub(r"\A\s*current_file_path:[^\n]*\n", "", before)
    told = (_between(prompt, "recently_viewed_code_snippets"), _between(prompt, "edit_diff_history"))
    context = "\n".join(re.sub(r"<\|/?[a-z_]+\|>", "", one).strip() for one in told if one and one.strip())
    return Region(_line(region), before.lstrip("\n"), after, context + "\n" if context else "")


def _between(text: str, tag: str) -> str | None:
    begin = text.find(f"<|{tag}|>")
    end = text.find(f"<|/{tag}|>", begin)
    return text[begin + len(tag) + 4 : end] if 0 <= begin < end else None


def _line(region: str) -> str:
    """Without the cursor, and without the line breaks that only set the tags apart."""
    return region.replace("<|cursor|>", "").removeprefix("\n").removesuffix("\n")
