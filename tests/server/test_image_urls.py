"""Image URLs: only hosts that are named are asked, at the address that was checked, within limits of time and size."""

import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

import httpx
import pytest
import tiny
import vision_models
from serving import served
from typer.testing import CliRunner

import redraft
from redraft.cli.main import app
from redraft.engine import StopEvent, Stopped
from redraft.server import image_urls
from redraft.server.errors import BadRequestError
from redraft.server.image_urls import ImageFetcher, RemoteImage, check_url, is_public, is_url, parse_image_hosts

PICTURE = vision_models.FILES["landscape"]()


class Handler(BaseHTTPRequestHandler):
    """Answers as the path says."""

    def do_GET(self):
        server = self.server
        server.asked.append((self.headers["Host"], self.path))
        kind, _, rest = self.path.lstrip("/").partition("/")
        if kind == "to":
            self.answer(302, b"", Location=rest)
        elif kind == "again":
            self.answer(301, b"", Location=self.path)
        elif kind == "missing":
            self.answer(404, b"secret")
        elif kind == "huge":
            self.answer(200, b"", **{"Content-Length": "9999999999"})
        elif kind == "endless":
            self.answer(200, b"", **{"Content-Length": None})
            while not server.is_over.is_set():
                self.wfile.write(bytes(2**16))
        elif kind == "slow":
            server.is_over.wait(600)
        elif kind == "drip":  # a response that ends its connection, as most servers send it
            self.answer(200, b"", **{"Content-Length": "100000", "Connection": "close"})
            while not server.is_over.wait(0.05):
                self.wfile.write(b"x")
        elif kind == "noise":
            self.wfile.write(b"\x00\x01 not HTTP\r\n\r\n")
        else:
            self.answer(200, PICTURE)

    def answer(self, status, data, **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class CountingServer(ThreadingHTTPServer):
    """Counts connections, also those on which nothing is asked."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        self.asked = []
        self.is_over = threading.Event()

    def get_request(self):
        self.connections += 1
        return super().get_request()

    def handle_error(self, *_):
        pass  # the client has closed the connection


@contextmanager
def web():
    server = CountingServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server, server.server_address[1]
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join(600)


@pytest.fixture(name="site")
def _site():
    with web() as site:
        yield site


@pytest.fixture(name="names", autouse=True)
def _names(monkeypatch):
    """DNS: every name is an address that the test gives it; looking up another one fails."""
    names: dict[str, list[str]] = {"localhost": ["127.0.0.1"], "127.0.0.1": ["127.0.0.1"]}
    lookups = []
    ask = socket.getaddrinfo

    def look_up(host, port, *args, **keywords):
        if host not in names:
            raise socket.gaierror(-2, "Name or service not known")
        lookups.append(host)
        return [entry for address in names[host] for entry in ask(address, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    names["lookups"] = lookups
    return names


def refusal(url, hosts=(), **options) -> str:
    with pytest.raises(BadRequestError) as error:
        ImageFetcher(parse_image_hosts(hosts), **options).fetch(url)
    sentence = str(error.value)
    assert len(sentence) < 400
    assert "\n" not in sentence
    return sentence


def test_a_picture_is_fetched_from_a_host_that_is_named(site):
    server, port = site
    fetcher = ImageFetcher(parse_image_hosts([f"other.example,127.0.0.1:{port}"]))
    assert fetcher.fetch(f"http://127.0.0.1:{port}/a.png?size=1#part") == PICTURE
    assert server.asked == [(f"127.0.0.1:{port}", "/a.png?size=1")]
    assert fetcher.bytes_left == image_urls.MAX_FILE_BYTES - len(PICTURE)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([], "from which this server fetches nothing"),
        (["example.org"], "from which this server fetches nothing"),
        (["127.0.0.1"], "from which this server fetches nothing"),  # with the default port only
        (["127.0.0.1:{other}"], "from which this server fetches nothing"),
        (["localhost:{port}"], "from which this server fetches nothing"),  # another name of the same machine
    ],
)
def test_nothing_is_fetched_from_hosts_that_are_not_named(site, hosts, words, names):
    server, port = site
    named = [host.format(port=port, other=port % 60_000 + 1) for host in hosts]
    assert words in refusal(f"http://127.0.0.1:{port}/a.png", named)
    assert (server.connections, names["lookups"]) == (0, [])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:word@127.0.0.1:{port}/a.png", "a user name or a password"),
        ("http://127.0.0.1:{port}@evil.example/a.png", "a user name or a password"),
        ("http://evil.example#@127.0.0.1:{port}/", "evil.example"),
        ("ftp://127.0.0.1:{port}/a.png", "only data URLs and http"),
        ("file:///etc/passwd", "only data URLs and http"),
        ("http:///a.png", "only data URLs and http"),
        ("http://127.0.0.1:{port}/a b.png", "which is no URL"),
        ("http://127.0.0.1:{port}/a\r\nX: y", "which is no URL"),
        ("http://127.0.0.1:{port}\\@evil.example/", "which is no URL"),
        ("http://127.0.0.1:99999/a.png", "which is no URL"),
        ("http://[127.0.0.1/a.png", "which is no URL"),
        ("http://127.0.0.1:{port}/é", "which is no URL"),
        ("http://127.0.0.1:{port}/" + "a" * 5000, "which is no URL"),
        ("http://2130706433:{port}/", "from which this server fetches nothing"),
    ],
)
def test_odd_addresses_are_refused_before_anything_is_looked_up(site, url, words, names):
    server, port = site
    assert words in refusal(url.format(port=port), [f"127.0.0.1:{port}"])
    assert (server.connections, names["lookups"]) == (0, [])


def test_redirects_go_through_the_same_checks(site):
    server, port = site
    here = f"127.0.0.1:{port}"
    assert ImageFetcher((here,)).fetch(f"http://{here}/to//a.png") == PICTURE
    assert [path for _, path in server.asked] == ["/to//a.png", "/a.png"]
    with web() as (other, other_port):
        sentence = refusal(f"http://{here}/to/http://127.0.0.1:{other_port}/a.png", [here])
        assert f"127.0.0.1:{other_port}, from which this server fetches nothing" in sentence
        assert other.connections == 0
    assert "only data URLs and http" in refusal(f"http://{here}/to/file:///etc/passwd", [here])
    assert "more than 3 redirects" in refusal(f"http://{here}/again", [here])


def test_a_name_must_have_a_public_address(site, names):
    """DNS of a named host may lead into the local network: nothing is connected."""
    server, port = site
    names |= {"inside.example": ["127.0.0.1"], "both.example": ["10.0.0.1", "169.254.169.254", "::1"]}
    for host in ("inside.example", "both.example"):
        assert "whose address is not a public one" in refusal(f"http://{host}:{port}/", [f"*.example:{port}"])
    assert server.connections == 0
    assert "Name or service not known" in refusal("http://unknown.example/", ["unknown.example"])


def test_the_address_that_was_checked_is_the_one_that_is_connected(site, names, monkeypatch):
    """A name whose address changes after the check (DNS rebinding): there is one lookup."""
    _, port = site
    names["picture.example"] = ["127.0.0.1"]
    monkeypatch.setattr(image_urls, "is_public", lambda address: True)
    fetcher = ImageFetcher((f"picture.example:{port}",))
    assert fetcher.fetch(f"http://picture.example:{port}/a.png") == PICTURE
    assert [host for host in names["lookups"] if not host[0].isdigit()] == ["picture.example"]


def test_limits_of_size_and_time(site):
    _, port = site
    here = f"127.0.0.1:{port}"
    for path in ("huge", "endless"):
        assert "is too large" in refusal(f"http://{here}/{path}", [here], bytes_left=2**20)
    assert "did not come from its address within 0.2 s" in refusal(f"http://{here}/slow", [here], seconds=0.2)
    assert "answers 404" in (sentence := refusal(f"http://{here}/missing", [here]))
    assert "secret" not in sentence
    assert "cannot be fetched" in refusal(f"http://{here}/noise", [here])
    assert "cannot be fetched" in refusal(f"https://{here}/a.png", [here])  # no certificate
    stop = StopEvent("client")
    stop.set()
    with pytest.raises(Stopped):
        ImageFetcher((here,), stop).fetch(f"http://{here}/slow")


def test_a_transfer_for_which_nobody_waits_ends(site):
    """Else every slow host would leave a thread and a connection behind."""
    _, port = site
    here = f"127.0.0.1:{port}"
    assert "did not come from its address within 0.3 s" in refusal(f"http://{here}/drip", [here], seconds=0.3)
    assert tiny.wait_until(lambda: not any(thread.name == "redraft-image" for thread in threading.enumerate()))


def test_an_image_of_several_completions_is_fetched_once(site):
    server, port = site
    here = f"127.0.0.1:{port}"
    for path, words in (("a.png", None), ("missing", "answers 404")):
        image = RemoteImage(f"http://{here}/{path}")
        found = []

        def fetch(image=image, found=found):
            try:
                found.append(image.fetch(ImageFetcher((here,)), "the image"))
            except BadRequestError as error:
                found.append(str(error))

        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert len(found) == 4
        assert all(data == PICTURE if words is None else words in data for data in found)
        assert [asked for _, asked in server.asked].count(f"/{path}") == 1


def test_an_image_that_is_there_already_counts_toward_the_size_of_a_request(site):
    _, port = site
    here = f"127.0.0.1:{port}"
    image = RemoteImage(f"http://{here}/a.png")
    for _ in range(2):
        fetcher = ImageFetcher((here,))
        image.fetch(fetcher, "the image")
        assert fetcher.bytes_left == image_urls.MAX_FILE_BYTES - len(PICTURE)


def test_a_wildcard_names_no_address():
    with pytest.raises(BadRequestError, match="fetches nothing"):
        check_url("http://127.0.0.1/", parse_image_hosts(["*.0.0.1", "*.0.1"]))


def test_hosts_are_parsed():
    hosts = parse_image_hosts(["Example.org, *.images.example", "[::1]:8080", "10.0.0.1:81"])
    assert hosts == ("example.org", "*.images.example", "[::1]:8080", "10.0.0.1:81")
    for url in ("http://example.org/", "https://example.org:443/", "https://a.b.images.example/", "http://[::1]:8080/"):
        check_url(url, hosts)
    for url in ("http://a.example.org/", "http://images.example/", "http://xn--images.example/", "http://example.org:443/"):
        with pytest.raises(BadRequestError, match="fetches nothing"):
            check_url(url, hosts)
    error = CliRunner().invoke(app, ["serve", "--allow-image-urls", "http://a.example"]).exception
    assert str(error) == (
        "--allow-image-urls takes a host, HOST:PORT or *.HOST, without http:// and path, got 'http://a.example'"
    )
    for value in ("http://example.org", "example.org/a", "*", "", "a b", "example.org:0", "example.org:x", "::1", "*.*.org"):
        with pytest.raises(ValueError, match="--allow-image-urls takes a host"):
            parse_image_hosts([value])


def test_the_flag_reaches_one_server_and_replicas(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr("redraft.cli.serve.bind_address", lambda *_: [])
    monkeypatch.setattr("redraft.cli.serve.log_to", lambda _: None)  # its handler would stay
    monkeypatch.setattr("redraft.server.app.make_app", lambda _, config, __: found.append(config.image_hosts))
    monkeypatch.setattr("redraft.cli.serve.serve_replicas", lambda *_, **settings: found.append(settings["image_hosts"]))
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: None)
    folder = str(tiny.save_folder(tmp_path / "tiny"))
    flags = ["--allow-image-urls", "a.example,b.example", "--allow-image-urls", "c.example:8080"]
    for more in ([], ["--replicas", "1"]):
        result = CliRunner().invoke(app, ["serve", "-m", folder, "--device", "cpu", *flags, *more])
        assert result.exception is None, result.exception
    assert found == [("a.example", "b.example", "c.example:8080")] * 2


def test_only_public_addresses_are_public():
    public = "8.8.8.8 2001:4860:4860::8888 ::ffff:8.8.8.8".split()
    local = "127.0.0.1 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 192.0.0.8 224.0.0.1 240.0.0.1"
    local += " 255.255.255.255 ::1 :: fe80::1 fc00::1 fec0::1 ff02::1 ::ffff:127.0.0.1 64:ff9b::a00:1 2002:7f00:1::"
    assert [is_public(ip_address(each)) for each in public] == [True] * len(public)
    assert [each for each in local.split() if is_public(ip_address(each))] == []


def test_what_is_a_url():
    assert [is_url(text) for text in ("http:x", " HTTPS://a", "file:///a", "javascript:0")] == [True] * 4
    assert [is_url(text) for text in ("data:image/png;base64,", "DATA:,", "iVBORw0", "/9j/4AAQ", "")] == [False] * 5


def test_a_server_fetches_what_its_flag_names(site, tmp_path):
    server, port = site
    folder = vision_models.published(tmp_path / "eyes")
    here = f"http://127.0.0.1:{port}"

    def ask(url, image):
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}]}
        return httpx.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 8, "seed": 1}, timeout=600)

    with served(redraft.load(folder, device="cpu"), image_hosts=(f"127.0.0.1:{port}",)) as url:
        direct = ask(url, vision_models.data_url(PICTURE)).json()["choices"][0]["message"]["content"]
        assert ask(url, f"{here}/a.png").json()["choices"][0]["message"]["content"] == direct
        refused = ask(url, "http://169.254.169.254/latest/meta-data")
        assert (refused.status_code, server.connections) == (400, 1)
        system = {"role": "system", "content": [{"type": "image_url", "image_url": {"url": f"{here}/a.png"}}]}
        body = {"messages": [system], "max_tokens": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 400
        assert server.connections == 1  # refused before it is fetched
    with served(redraft.load(folder, device="cpu")) as url:
        assert "--allow-image-urls" in ask(url, f"{here}/a.png").text
        assert server.connections == 1
