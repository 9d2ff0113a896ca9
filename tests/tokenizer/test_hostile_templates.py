"""Chat templates that want too much time, memory or output are refused; harmless ones go on working."""

import signal
import subprocess
import sys
import threading

import pytest
import tiny

from redraft.engine import StopEvent
from redraft.tokenizer import chat_template, helper_process
from redraft.tokenizer.helper_pool import HelperPool
from redraft.tokenizer.helper_process import HelperError, HelperProcess, HelperStoppedError, HelperTimeoutError
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError

HELLO = [{"role": "user", "content": "hello"}]
HARMLESS = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
BOMBS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested ranges with output": "{% for a in range(99999) %}{% for b in range(99999) %}ab{% endfor %}{% endfor %}",
    "lipsum": "{{ lipsum(10**8) }}",
    "a long text": "{{ 'a' * 10**9 }}",
    "a long list": "{{ [0] * 10**9 }}",
    "a power": "{{ (10**(10**9)) % 7 }}",
    "a wide field": "{{ 'a'|center(10**9) }}",
    "a format": "{{ '%01000000000d' % 1 }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
}


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(tiny.byte_tokenizer().vocabulary, template=template)


@pytest.fixture
def short_time(monkeypatch):
    """A time limit that a test can wait for."""
    helper = HelperProcess(chat_template.MODULE, seconds=1.0)
    pool = HelperPool(lambda: helper, 1)
    monkeypatch.setattr(chat_template, "_renderers", lambda: pool)
    yield helper
    helper.close()


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_and_the_next_conversation_is_rendered(template, short_time):
    with pytest.raises(TokenizerError, match="the chat template refuses this conversation: "):
        tokenizer(template).render(HELLO)
    assert tokenizer(HARMLESS).render(HELLO) == "<user>hello"


def test_the_limits_are_named(short_time):
    with pytest.raises(TokenizerError, match="it takes longer than"):
        tokenizer(BOMBS["nested ranges"]).render(HELLO)
    short_time.seconds = 60.0  # the others are not a matter of time, and a busy machine may need some
    with pytest.raises(TokenizerError, match="it writes more than 16,000,000 characters"):
        tokenizer("{% for a in range(99) %}{{ 'a' * 1000000 }}{% endfor %}").render(HELLO)
    with pytest.raises(TokenizerError, match="it needs more memory than a template may use"):
        tokenizer("{{ ('a' * 2000000000)|length }}").render(HELLO)


def test_one_process_renders_many_conversations(short_time):
    for text in ("hello", "\ud800 lone", 'quote " and \\ and \n'):
        assert tokenizer(HARMLESS).render([{"role": "user", "content": text}]) == f"<user>{text}"
    assert short_time.starts == 1


def test_a_template_gives_the_same_text_in_both_processes():
    source = "{{ messages|tojson }}{{ tools|tojson }}{{ enable_thinking }}{% generation %}x{% endgeneration %}"
    variables = {"messages": HELLO, "tools": None, "enable_thinking": True}
    assert chat_template.render_foreign(source, variables) == chat_template.render_own(source, variables)


def test_an_exception_of_the_template_is_told():
    with pytest.raises(TokenizerError, match="roles must alternate"):
        tokenizer("{{ raise_exception('roles must alternate') }}").render(HELLO)


def test_a_stopped_call_kills_its_process():
    helper = HelperProcess(chat_template.MODULE, seconds=600)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(HelperStoppedError):
        helper.call(b'{"source": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", '
                    b'"variables": {}}', stop)  # fmt: skip
    assert helper.call(b'{"source": "x", "variables": {}}') == b'{"text": "x"}'
    assert helper.starts == 2
    helper.close()


def test_a_fault_of_the_helpers_own_is_no_fault_of_the_template():
    helper = HelperProcess(chat_template.MODULE, seconds=60)
    with pytest.raises(HelperError, match="JSONDecodeError"):
        helper.call(b"this is not JSON")
    assert helper.call(b'{"source": "x", "variables": {}}') == b'{"text": "x"}'
    helper.close()


def test_a_process_that_was_killed_is_started_again():
    helper = HelperProcess(chat_template.MODULE, seconds=60)
    assert helper.call(b'{"source": "x", "variables": {}}') == b'{"text": "x"}'
    helper._process.kill()
    helper._process.wait()
    assert helper.call(b'{"source": "x", "variables": {}}') == b'{"text": "x"}'
    helper.close()


def test_a_process_ends_with_its_parent():
    code = (
        "import os, threading\n"
        "from redraft.tokenizer import chat_template\n"
        "bomb = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'\n"
        "chat_template.render_foreign('x', {})\n"
        "print(chat_template._renderers()._processes[0]._process.pid, flush=True)\n"
        "threading.Timer(0.5, os._exit, [0]).start()\n"
        "chat_template.render_foreign(bomb, {})\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    helper_pid = int(child.stdout)
    assert tiny.wait_until(lambda: tiny.has_ended(helper_pid))


def test_long_conversations_of_a_client_do_not_hold_up_another_one(monkeypatch):
    """However many a client has rendered: it has one helper process of two."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 600.0)
    chat_template._renderers.cache_clear()
    pool = chat_template._renderers()
    stops = [StopEvent("busy") for _ in range(6)]
    outcomes = []

    def render(stop):
        with pytest.raises(HelperStoppedError):
            tokenizer(BOMBS["nested ranges"]).render(HELLO, stop=stop)
        outcomes.append("busy")

    threads = [threading.Thread(target=render, args=(stop,)) for stop in stops]
    for thread in threads:
        thread.start()
    assert tiny.wait_until(lambda: len(pool._waiting) == 5)  # and one is rendered
    assert tokenizer(HARMLESS).render(HELLO, stop=StopEvent("other")) == "<user>hello"
    assert outcomes == []
    for stop in stops:
        stop.set()
    for thread in threads:
        thread.join()
    assert outcomes == ["busy"] * 6
    pool.close()
    chat_template._renderers.cache_clear()


def test_a_timeout_is_an_error_of_its_own(short_time):
    with pytest.raises(HelperTimeoutError):
        short_time.call(b'{"source": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", '
                        b'"variables": {}}')  # fmt: skip


@pytest.mark.skipif(not helper_process.COUNTS_PROCESSOR_TIME, reason="the clock limits a call here")
def test_a_process_that_gets_no_processor_time_may_take_longer():
    """As beside busy programs: it is stopped for a while. One that works all the time is ended at its limit."""
    helper = HelperProcess(chat_template.MODULE, seconds=0.5)
    process = helper._running_process(None)
    process.send_signal(signal.SIGSTOP)
    threading.Timer(2.0, process.send_signal, [signal.SIGCONT]).start()
    assert helper.call(b'{"source": "x", "variables": {}}') == b'{"text": "x"}'
    with pytest.raises(HelperTimeoutError):
        helper.call(b'{"source": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", '
                    b'"variables": {}}')  # fmt: skip
    helper.close()


def test_a_long_text_is_refused_before_all_of_it_is_tokenized(monkeypatch):
    words = tiny.byte_tokenizer()
    encoded = []
    real = words._encode_long
    monkeypatch.setattr(words, "_encode_long", lambda text: encoded.append(len(text)) or real(text))
    with pytest.raises(TokenizerError, match="8,000,000 characters has more than 4,096 tokens"):
        words.encode("a" * 8_000_000, 4096)
    assert sum(encoded) <= 20_000
    text = "short " * 5000
    assert words.encode(text, 100_000) == words.vocabulary.encode(text, add_special_tokens=False).ids


def test_files_in_the_working_directory_are_not_imported(tmp_path, monkeypatch):
    """A downloaded folder may hold a jinja2.py."""
    (tmp_path / "jinja2.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    helper = HelperProcess(chat_template.MODULE, seconds=60)
    assert helper.call(b'{"source": "x", "variables": {}}') == b'{"text": "x"}'
    helper.close()


def test_a_long_conversation_is_rendered_by_the_helper_and_gives_the_same_text(monkeypatch):
    words = tiny.byte_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<channel|>c" * 50}] * 30
    text = words.render([*messages, *HELLO])
    monkeypatch.setattr("redraft.tokenizer.tokenizer.MAX_OWN_VALUES", 10)
    monkeypatch.setattr(chat_template, "render_own", None)
    assert words.render([*messages, *HELLO]) == text


def test_rendering_can_be_stopped(short_time):
    stop = threading.Event()
    stop.set()
    with pytest.raises(HelperStoppedError):
        tokenizer(HARMLESS).render(HELLO, stop=stop)
