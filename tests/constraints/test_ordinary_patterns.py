r"""Ordinary regular expressions: each compiles over the vocabulary of the model that ships, and its answers match.

A pattern has texts that match and texts that do not, which its DFA tells apart as `re.fullmatch` does.
"""

import re
from functools import cache
from typing import Any

import pytest

import redraft
from redraft.constraints.budget import Budget
from redraft.constraints.pattern_compiler import Pattern, compile_one
from redraft.constraints.prefix_grammar import BYTES, PrefixGrammar
from redraft.constraints.token_automaton import TokenAutomaton
from redraft.diffusion.generate import step_cost

# Patterns with more states than an automaton may have, or more sums than a step of this model: written from left to right.
LEFT_TO_RIGHT = {
    "two words", "text of up to 200", "e-mail of a few domains", "e-mail with words", "URL", "hashtags", "mention",
    "function call",
}  # fmt: skip
# An answer takes up to two seconds of processor time: `make test` generates these, `make soak` the others.
SOON = {
    "words in a row", "text of 10 to 40", "sentence", "yes or no, then why", "quoted text", "date", "e-mail", "IPv4", "UUID",
    "accents", "CSV line", "Markdown list",
}  # fmt: skip
CANVAS = 256  # positions: the longest canvas of the model

E_MAIL = r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}"
URL = r"https?://[\w.-]+(?:/[\w./?%&=-]*)?"
BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
PATTERNS: dict[str, tuple[str, list[str], list[str]]] = {  # name -> pattern, texts that match, texts that do not
    "word": (r"\w+", ["abc", "été", "a_1"], ["", "a b", "a-b"]),
    "digits": (r"\d+", ["1", "2026"], ["", "a", "1.5"]),
    "capitalized word": (r"[A-Z][a-z]+", ["Tom", "Rome"], ["tom", "T", "TOM"]),
    "two words": (r"\w+ \w+", ["a b", "New York"], ["a", "a  b"]),
    "words and spaces": (r"[\w\s]+", ["a b", "a\nb"], ["", "a, b"]),
    "words in a row": (r"\w+(?: \w+)*", ["a", "a b c"], ["", "a ", " a"]),
    "text of up to 200": (r"[\w\s,.!?]{1,200}", ["Hello, Tom!", "a\nb"], ["", "a;b", "a" * 201]),
    "text of 10 to 40": (r"[a-zA-Z ,.]{10,40}", ["Once upon a time."], ["short", "a" * 41, "Once upon 1 time"]),
    "any line": (r".+", ["a", "é; ü"], ["", "a\nb"]),
    "any text": (r"(?s).*", ["", "a\nb"], []),
    "sentence": (r"[A-Z][^.!?]*[.!?]", ["He ran.", "A?"], ["he ran.", "He ran"]),
    "two sentences": (r"(?:[A-Z][a-z ,]+\. ?){2}", ["He ran. She sat.", "Ab.Cd."], ["He ran.", "he. she."]),
    "yes or no": (r"(?i)yes|no", ["yes", "NO"], ["maybe", ""]),
    "yes or no, then why": (r"(?:Yes|No), because [a-z ,]+\.", ["No, because it rained."], ["No.", "Maybe, because a."]),
    "quoted text": (r'"[^"]*"', ['""', '"a b"'], ['"', "a", '"a"b"']),
    "in brackets": (r"\([^()]*\)", ["()", "(a b)"], ["(", "((a))"]),
    "number": (r"[+-]?\d+(?:\.\d+)?", ["-1", "3.14", "+7"], ["1.", ".5", "a"]),
    "number with an exponent": (r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", ["1e9", "-1.5E-3"], ["e9", "1e"]),
    "number with thousands": (r"\d{1,3}(?:,\d{3})*", ["1", "12,345", "1,000,000"], ["1234", "1,00"]),
    "percentage": (r"(?:100|[1-9]?\d)%", ["0%", "42%", "100%"], ["101%", "042%", "42"]),
    "currency amount": (r"[$€£]\d{1,3}(?:,\d{3})*(?:\.\d{2})?", ["$1", "€1,234.50"], ["1$", "$1.5"]),
    "Roman numeral": (r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})", ["XIV", "MMXXVI"], ["IIII", "A"]),
    "hex number": (r"0x[0-9a-fA-F]+", ["0xff", "0x0"], ["ff", "0x", "0xg"]),
    "binary number": (r"0b[01]{1,16}", ["0b101"], ["0b2", "0b"]),
    "date": (r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])", ["2026-11-19"], ["2026-13-01", "26-1-1"]),
    "American date": (r"\d{1,2}/\d{1,2}/\d{4}", ["1/2/2026", "11/19/2026"], ["1/2/26", "1-2-2026"]),
    "date in words": (r"\d{1,2} (?:January|March|May|July) \d{4}", ["9 May 2026"], ["May 9", "9 June 2026"]),
    "time": (r"(?:[01]\d|2[0-3]):[0-5]\d", ["09:30", "23:59"], ["24:00", "9:30"]),
    "ISO time": (r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(?:\.\d+)?(?:Z|[+-]\d{2}:\d{2})",
                 ["2026-11-19T09:30:00Z", "2026-11-19T09:30:00.5+01:00"], ["2026-11-19", "2026-11-19T09:30:00"]),
    "duration": (r"(?:\d+h)?(?:\d+m)?(?:\d+s)?", ["1h30m", "5s", ""], ["1d", "30m1h"]),
    "phone": (r"\+?\d{1,3}[ -]?\(?\d{2,4}\)?[ -]?\d{3,4}[ -]?\d{3,4}", ["+31 (20) 123-4567"], ["12", "abc"]),
    "American phone": (r"\(\d{3}\) \d{3}-\d{4}", ["(555) 123-4567"], ["555-123-4567"]),
    "e-mail": (E_MAIL, ["tom@home.org", "a.b+c@d-e.co.uk"], ["tom@home", "@home.org", "a b@c.de"]),
    "e-mail of a few domains": (r"(\w+@\w+\.(com|org))", ["tom@home.org"], ["tom@home.net", "t.m@home.org"]),
    "e-mail with words": (r"\w+(?:\.\w+)*@\w+(?:\.\w+)+", ["t.m@home.co.uk"], ["tom@home", "t@.a"]),
    "several e-mails": (rf"{E_MAIL}(?:, {E_MAIL})*", ["a@b.cd", "a@b.cd, e@f.gh"], ["a@b.cd,e@f.gh", "a@b"]),
    "URL": (URL, ["https://a.org", "http://a.org/b?c=d"], ["ftp://a.org", "a.org"]),
    "host name": (r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,63}", ["www.a-b.org"], ["-a.org", "org"]),
    "IPv4": (rf"(?:{BYTE}\.){{3}}{BYTE}", ["192.168.0.1", "255.0.0.9"], ["256.1.1.1", "1.2.3"]),
    "IPv6": (r"(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}", ["2001:db8:0:0:0:0:0:1"], ["::1", "2001:db8"]),
    "MAC address": (r"(?:[0-9A-F]{2}:){5}[0-9A-F]{2}", ["00:1A:2B:3C:4D:5E"], ["00:1A", "00:1a:2b:3c:4d:5e"]),
    "UUID": (r"[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
             ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "123e4567-e89b-62d3-a456-426614174000"]),
    "version": (r"v?\d+\.\d+\.\d+(?:-[0-9A-Za-z.-]+)?(?:\+[0-9A-Za-z.-]+)?", ["1.2.3", "v1.0.0-rc.1+b5"], ["1.2", "1.2.x"]),
    "hex color": (r"#(?:[0-9a-fA-F]{3}){1,2}", ["#fff", "#00FF7f"], ["#ff", "fff", "#ggg"]),
    "commit": (r"[0-9a-f]{7,40}", ["c7f2561", "a" * 40], ["c7f256", "xyz1234"]),
    "base64": (r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?", ["", "e30=", "abcd"], ["e30", "e==="]),
    "accents": (r"[A-ZÀ-Ý][a-zà-ÿ]+(?:[ '-][A-ZÀ-Ý][a-zà-ÿ]+)*", ["Zoë", "Jean-Émile"], ["zoë", "Zoë "]),
    "name and title": (r"(?:Mr|Mrs|Ms|Dr)\. [A-Z][a-z]+", ["Dr. Who"], ["Dr Who", "Prof. X"]),
    "Greek or Cyrillic": (r"[α-ωА-я]+", ["αβγ", "Привет"], ["abc", ""]),
    "no ASCII letters": (r"[^a-zA-Z]+", ["123 é", "!"], ["a", "1a"]),
    "hashtags": (r"#\w+(?: #\w+){0,4}", ["#tag", "#a #é"], ["tag", "#", "#a#b"]),
    "mention": (r"@[A-Za-z_]\w{0,14}", ["@tom_1"], ["@1", "tom", "@" + "a" * 16]),
    "Python identifier": (r"[^\W\d]\w*", ["_a1", "été"], ["1a", "a-b", ""]),
    "Python assignment": (r"[a-z_]\w* = (?:\d+|'[^'\n]*'|True|False|None)", ["x = 1", "a_b = 'c d'"], ["x=1", "X = 1"]),
    "function call": (r"\w+\((?:\w+(?:, \w+)*)?\)", ["f()", "add(a, b)"], ["f(", "f(a,b)"]),
    "environment variable": (r"[A-Z][A-Z0-9_]*=\S*", ["HOME=/a", "A="], ["home=/a", "A=b c"]),
    "file path": (r"(?:/[\w.-]+)+/?", ["/a/b.txt", "/usr/"], ["a/b", "//"]),
    "Windows path": (r"[A-Z]:\\(?:[\w .-]+\\)*[\w .-]*", ["C:\\a\\b c.txt", "D:\\"], ["C:/a", "a\\b"]),
    "HTML tag": (r"<([a-z][a-z0-9]*)(?: [a-z-]+=\"[^\"]*\")*>[^<]*</[a-z][a-z0-9]*>", ['<a href="x">y</a>'], ["<a>", "a"]),
    "CSV line": (r"[^,\n]*(?:,[^,\n]*){2}", ["a,b,c", ",,", "é b,1,"], ["a,b", "a,b,c,d", "a,b\n,c"]),
    "key and value": (r"\w+: .+", ["name: Tom", "a: b: c"], ["name", "name:Tom", "a: b\nc"]),
    "Markdown list": (r"(?:- .+\n){2,5}", ["- a\n- b\n", "- a b\n- c\n- d\n"], ["- a\n", "* a\n* b\n"]),
    "numbered list": (r"1\. .+\n2\. .+\n3\. .+", ["1. a\n2. b\n3. c"], ["1. a\n2. b", "1 a\n2 b\n3 c"]),
    "Markdown heading": (r"#{1,6} [^\n]+", ["# A", "###### é b"], ["#A", "####### A"]),
    "lines of words": (r"(?:[A-Za-z ]+\n){1,4}", ["a\n", "a b\nc\n"], ["a", "a\n\n"]),
    "think, then answer": (r"<think>[^<]*</think>\nAnswer: [A-D]", ["<think>a\nb</think>\nAnswer: C"], ["Answer: C"]),
    "multiple choice": (r"\(?[A-D]\)?", ["A", "(B)"], ["E", "AB"]),
    "chess move": (r"[KQRBN]?[a-h]?[1-8]?x?[a-h][1-8](?:=[QRBN])?[+#]?|O-O(?:-O)?", ["e4", "Nxf7+", "O-O"], ["e9", "0-0"]),
    "score": (r"\d{1,2}/10(?:\.5)?|\d\.\d", ["7/10", "4.5"], ["7 / 10", "45"]),
    "DNA": (r"[ACGT]{3,60}", ["ACG", "A" * 60], ["AC", "ACGU"]),
    "postcode": (r"[A-Z]{1,2}\d[A-Z\d]? \d[A-Z]{2}", ["SW1A 1AA", "M1 1AE"], ["SW1A1AA", "1 1AA"]),
}  # fmt: skip


@cache
def load_writer() -> redraft.Writer:
    return redraft.load("tiny", device="cpu")


def accepts(pattern: str, text: str) -> bool:
    compiled = Pattern(regex=pattern).compile(Budget())
    if isinstance(compiled, str):
        return PrefixGrammar(pattern, compiled, BYTES).accepts_text(text.encode())
    return compiled.accepts(text.encode())


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_tells_texts_apart_as_python_does(name):
    pattern, matching, others = PATTERNS[name]
    assert all(re.fullmatch(pattern, text) for text in matching)
    assert not any(re.fullmatch(pattern, text) for text in others)
    assert [text for text in (*matching, *others) if accepts(pattern, text)] == matching


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_runs_on_a_whole_canvas_unless_it_costs_too_much(name):
    writer = load_writer()
    cfg = writer.sampler.changed(max_new_tokens=CANVAS, canvas_length=CANVAS)
    compiled = compile_one(writer.automaton_compiler, Pattern(regex=PATTERNS[name][0]), Budget())
    fits = isinstance(compiled, TokenAutomaton) and step_cost(writer.model, cfg).allows(compiled, CANVAS)
    assert fits == (name not in LEFT_TO_RIGHT)


def names_to_answer() -> list[Any]:
    return [name if name in SOON else pytest.param(name, marks=pytest.mark.soak) for name in PATTERNS]


@pytest.mark.parametrize("name", names_to_answer())
def test_an_answer_matches(name):
    pattern = PATTERNS[name][0]
    answer = load_writer().write("Once", regex=pattern, max_tokens=24, max_steps=2, seed=1)
    assert re.fullmatch(pattern, answer.text), answer.text


def test_every_name_is_that_of_a_pattern():
    assert set(PATTERNS) >= LEFT_TO_RIGHT | SOON
