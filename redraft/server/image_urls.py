"""Image URLs: fetches pictures from the hosts that `redraft serve --allow-image-urls` names, and from no others.

    URL -> scheme, host and port are named? -> DNS -> a public address? -> connect to that address -> bytes

A client could otherwise have the server send requests into its own network (SSRF). So the address that was checked is the
one that is connected to, without a second DNS lookup; redirects go through the same checks; nothing is sent but a plain GET.
The standard library's `http.client` does the HTTP: it follows no redirects and no proxy settings by itself.
"""

import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

from redraft.config import ConfigError
from redraft.engine import Stopped
from redraft.server.errors import BadRequestError
from redraft.tokenizer.images import MAX_FILE_BYTES

PORTS = {"http": 80, "https": 443}
FETCH_SECONDS = 20.0  # for all images of a request
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
MAX_URL = 4096  # characters
PIECE = 64 * 2**10
POLL_SECONDS = 0.02
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "redraft", "Connection": "close"}
URL_START = re.compile(r"\s*[a-z][a-z0-9+.-]*:", re.IGNORECASE)
NAMED_HOST = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]", re.ASCII)
PROTOCOL_ASSIGNMENTS = ipaddress.ip_network("192.0.0.0/24")  # of which Python calls some global
WAY_OUT = "send the file as a data URL"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RemoteImage:
    """An image of a prompt that is at an address. Only URLs of clients become one: base64 never does.

    It is fetched once, also if several completions of a request have it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._data: bytes | None = None
        self._error: BadRequestError | None = None

    def fetch(self, fetcher: "ImageFetcher", name: str) -> bytes:
        """Its bytes. Raises BadRequestError if they cannot be fetched, and Stopped once the fetcher's `stop` is set."""
        while not self._lock.acquire(timeout=POLL_SECONDS):
            if fetcher.stop is not None and fetcher.stop.is_set():
                raise Stopped
        try:
            if self._error is not None:
                raise self._error
            if self._data is None:
                self._data = fetcher.fetch(self.url, name)
            else:
                fetcher.bytes_left -= len(self._data)
            return self._data
        except BadRequestError as error:
            self._error = error
            raise
        finally:
            self._lock.release()


def is_url(text: str) -> bool:
    """Whether a text begins with a scheme other than data:, and so is no base64."""
    start = text[:64]
    return URL_START.match(start) is not None and not start.lstrip().lower().startswith("data:")


def parse_image_hosts(values: Iterable[str], setting: str = "--allow-image-urls") -> tuple[str, ...]:
    """The hosts of a setting: HOST, HOST:PORT, *.HOST or an address, several with commas. Raises ConfigError."""
    hosts = []
    for value in (part for text in values for part in text.split(",")):
        name, port = split_port(value.strip().lower())
        if not NAMED_HOST.fullmatch(name) or (port is not None and not (port.isdigit() and 0 < int(port) < 65536)):
            way_out = "a host, HOST:PORT or *.HOST, without http:// and path"
            raise ConfigError(f"{setting} takes {way_out}, got {value.strip()[:100]!r}")
        hosts.append(value.strip().lower())
    return tuple(hosts)


def split_port(host: str) -> tuple[str, str | None]:
    """HOST:PORT as host and port; an IPv6 address is in brackets."""
    name, colon, port = host.rpartition(":")
    return (name, port) if colon and not host.endswith("]") else (host, None)


@dataclass
class ImageFetcher:
    """Fetches the images of one request, within one time limit and one size limit for all of them."""

    hosts: tuple[str, ...]  # as `parse_image_hosts` returns them
    stop: threading.Event | None = None
    seconds: float = FETCH_SECONDS
    bytes_left: int = MAX_FILE_BYTES
    _began: float = field(default_factory=time.monotonic, init=False)

    def fetch(self, url: str, name: str = "the image") -> bytes:
        """The bytes at an address. Raises BadRequestError if it is not allowed or fails, and Stopped once `stop` is set.

        A thread fetches, because a DNS lookup cannot be interrupted; this one waits for it, for the stop event, and for
        the end of the time.
        """
        check_url(url, self.hosts, name)  # before anything is looked up
        transfer = Transfer(url, self.hosts, name, self.bytes_left)
        thread = threading.Thread(target=transfer.run, name="redraft-image", daemon=True)
        thread.start()
        while not transfer.is_done.wait(POLL_SECONDS):
            if self.stop is not None and self.stop.is_set():
                transfer.cancel()
                raise Stopped
            if time.monotonic() > self._began + self.seconds:
                transfer.cancel()
                raise BadRequestError(f"{name} did not come from its address within {self.seconds:g} s: {WAY_OUT}")
        if transfer.error is not None:
            raise transfer.error
        self.bytes_left -= len(transfer.data)
        return transfer.data


class Transfer:
    """One image on its way, in a thread of its own."""

    def __init__(self, url: str, hosts: tuple[str, ...], name: str, limit: int) -> None:
        self.url = url
        self.hosts = hosts
        self.name = name
        self.limit = limit
        self.data = b""
        self.error: Exception | None = None
        self.is_done = threading.Event()
        self._is_cancelled = False
        self._connection: PinnedConnection | None = None

    def run(self) -> None:
        """Fetches; `data` or `error` has what came of it."""
        try:
            self.data = self._follow(self.url)
        except BadRequestError as error:
            self.error = error
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Exceptions of http.client quote what the other side has sent, which may not be meant for the client.
            reason = getattr(error, "strerror", None) or type(error).__name__
            self.error = BadRequestError(f"{self.name} cannot be fetched ({reason[:200]}): {WAY_OUT}")
        except BaseException as error:
            self.error = RuntimeError(f"fetching an image failed: {error!r}")
        finally:
            self.is_done.set()

    def cancel(self) -> None:
        """Ends the thread at its next step on the network."""
        self._is_cancelled = True
        connection = self._connection
        if connection is not None and connection.opened is not None:
            with suppress(OSError):
                connection.opened.shutdown(socket.SHUT_RDWR)

    def _follow(self, url: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            parts = check_url(url, self.hosts, self.name)
            response, location = self._get(parts)
            if location is None:
                return response
            url = urljoin(url, location)
        raise BadRequestError(f"{self.name} is behind more than {MAX_REDIRECTS} redirects: {WAY_OUT}")

    def _get(self, parts: SplitResult) -> tuple[bytes, str | None]:
        """The body at an address, or where it redirects to."""
        host = str(parts.hostname)
        port = parts.port or PORTS[parts.scheme]
        address = find_address(host, port, is_trusted=is_literal(host), name=self.name)
        connection = PinnedConnection(parts.scheme, host, port, address, FETCH_SECONDS)
        self._connection = connection
        try:
            connection.connect()
            if self._is_cancelled:
                raise OSError("the transfer was cancelled")
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers=HEADERS)
            with connection.getresponse() as response:
                if response.status in REDIRECTS and response.getheader("Location"):
                    return b"", response.getheader("Location")
                if response.status != 200:
                    raise BadRequestError(f"{self.name} cannot be fetched: {host} answers {response.status}: {WAY_OUT}")
                return self._read(response), None
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        if (response.length or 0) > self.limit:  # before a byte of it is read
            raise self._too_large()
        data = bytearray()
        while not self._is_cancelled and (piece := response.read1(PIECE)):
            data += piece
            if len(data) > self.limit:
                raise self._too_large()
        return bytes(data)

    def _too_large(self) -> BadRequestError:
        most = f"the images that a request names by their addresses may have {MAX_FILE_BYTES:,} bytes together"
        return BadRequestError(f"{self.name} is too large: {most}; make it smaller")


class PinnedConnection(http.client.HTTPConnection):
    """A connection to an address that was checked already; certificates are those of the host."""

    def __init__(self, scheme: str, host: str, port: int, address: str, seconds: float) -> None:
        super().__init__(host, port, timeout=seconds)
        self.default_port = PORTS[scheme]  # left out of the Host header
        self.scheme = scheme
        self.address = address
        self.opened: socket.socket | None = None  # `sock` is gone once a response that ends the connection has begun

    def connect(self) -> None:
        """Connects, without a DNS lookup."""
        self.sock = socket.create_connection((self.address, self.port), self.timeout)
        if self.scheme == "https":
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
        self.opened = self.sock


def check_url(url: str, hosts: tuple[str, ...], name: str = "the image") -> SplitResult:
    """Refuses an address that is not http or https, has credentials, or is of a host or port that is not named."""
    shown = repr(url[:100])
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        rule = f"an address has at most {MAX_URL:,} ASCII characters, and no spaces"
        raise BadRequestError(f"{name} is the address {shown}, which is no URL: {rule}; {WAY_OUT}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadRequestError(f"{name} is the address {shown}, which is no URL: {WAY_OUT}") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise BadRequestError(f"{name} is the address {shown}; only data URLs and http(s) are known: {WAY_OUT}")
    if "@" in parts.netloc:
        raise BadRequestError(f"{name} is an address with a user name or a password, which is not sent: {WAY_OUT}")
    if not is_named(parts.hostname, port, PORTS[parts.scheme], hosts):
        place = f"{parts.hostname}:{port}" if port not in (None, PORTS[parts.scheme]) else parts.hostname
        flag = "or name the host with redraft serve --allow-image-urls"
        raise BadRequestError(f"{name} is at {place[:100]}, from which this server fetches nothing: {WAY_OUT}, {flag}")
    return parts


def is_named(host: str, port: int | None, default_port: int, hosts: tuple[str, ...]) -> bool:
    """Whether --allow-image-urls names a host, with this port or, without one, with the default port of the scheme."""
    for named in hosts:
        name, named_port = split_port(named)
        name = name.strip("[]")
        is_host = host.endswith(name[1:]) and not is_literal(host) if name.startswith("*.") else host == name
        if is_host and (port or default_port) == int(named_port or default_port):
            return True
    return False


def is_literal(host: str) -> bool:
    """Whether a host is an address itself, or localhost: who names it means it, public or not."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def find_address(host: str, port: int, *, is_trusted: bool, name: str = "the image") -> str:
    """The first address of a host that the server may connect to. A host must be public unless it `is_trusted`."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if is_trusted or is_public(ipaddress.ip_address(address.partition("%")[0])):
            return address
    raise BadRequestError(f"{name} is at {host[:100]}, whose address is not a public one: {WAY_OUT}")


def is_public(address: Address) -> bool:
    """Whether an address is of the public Internet. Addresses that tunnel to another one are not."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None or address.teredo is not None or address.is_site_local:
            return False
    is_special = address.is_multicast or address.is_reserved or address.is_unspecified
    return address.is_global and not is_special and address not in PROTOCOL_ASSIGNMENTS
