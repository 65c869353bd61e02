"""Reading pages of the real web, safely: `fetch` and `page_text`.

The URL was chosen by a model that read hostile pages, and it is opened from inside a training cluster: without guards
`http://169.254.169.254/` would hand the machine's cloud credentials to whoever writes web pages (server-side request forgery).
So: only http and https; the host name is resolved once, every address it has must be on the public internet, and the connection
goes to an address that was checked (a second resolution could answer differently: DNS rebinding); every redirect is checked again
from the start; size, time, redirects and content types are limited, before and after unpacking; hosts with benchmark answers are
blocked. Proxies of the environment are not used, since behind one nothing could be checked. Left out: JavaScript, PDF,
robots.txt, cookies.

    python fetch.py https://example.org/
"""
import argparse
import codecs
import http.client
import ipaddress
import re
import socket
import ssl
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

import lxml.etree
import lxml.html

# where the answers of benchmarks lie
BLOCKED = ("huggingface.co", "hf.co", "hf-mirror.com", "modelscope.cn", "modelscope.com", "paperswithcode.com", "kaggle.com")
REDIRECTS, PAGE_BYTES, HTML_CHARACTERS, READABLE = 5, 2_000_000, 500_000, re.compile(r"^(text/|application/(xhtml\+xml|xml|json|ld\+json))")
PAGE_SECONDS, URL_SAFE = 20.0, "/%:@!$&'()*+,;=~"
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; chain-of-agents)", "Accept": "text/html,*/*;q=0.5", "Accept-Encoding": "gzip",
           "Connection": "close"}


class FetchError(Exception):
    """Why a page cannot be read, in words for the model."""


@dataclass(frozen=True)
class Web:
    """Where fetching may go: blocked hosts (their subdomains too), and hosts of one's own that may be private. Both are "name" or
    "name:port", in lower case."""
    blocked: tuple = BLOCKED
    allowed: tuple = ()

    def check(self, url: str):
        """The parts of a URL whose scheme and host are permitted; FetchError otherwise."""
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode().rstrip(".")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise FetchError("not a valid URL") from None
        if parts.scheme not in ("http", "https") or not host:
            raise FetchError("only http and https URLs can be read")
        if any(name in (host, f"{host}:{port}") or host.endswith("." + name) for name in self.blocked):
            raise FetchError("this site is blocked")
        return parts, host, port

    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        """A connection to an address that has been checked: the name is resolved once, so a DNS answer that changes later changes
        nothing."""
        try:
            addresses = [entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError):
            raise FetchError("the host name cannot be resolved") from None
        if not {host, f"{host}:{port}"} & set(self.allowed) and not all(map(is_public, addresses)):
            raise FetchError("this address is not on the public internet")
        for number, address in enumerate(addresses, 1):
            try:
                sock = socket.create_connection((address, port), timeout / len(addresses))
                sock.settimeout(timeout)
                return sock
            except OSError:
                if number == len(addresses):
                    raise
        raise FetchError("the host name has no address")


def is_public(address: str) -> bool:
    """False for private, loopback, link-local, shared, multicast, reserved and cloud-metadata addresses, however IPv6 may wrap an
    IPv4 one."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if ip.version == 6:
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if inner is None and ip in ipaddress.ip_network("64:ff9b::/96"):                  # NAT64
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    special = ip.is_multicast or ip.is_reserved or ip.is_unspecified or getattr(ip, "is_site_local", False)
    metadata = str(ip) == "168.63.129.16" or ip in ipaddress.ip_network("192.0.0.0/24")  # Azure's; the block with Oracle's
    return ip.is_global and not special and not metadata


def fetch(url: str, web: Web, deadline: float, accept=READABLE, max_bytes: int = PAGE_BYTES):
    """(body cut to max_bytes, content type, charset or None) of a GET with at most REDIRECTS redirects, each checked anew, by
    deadline (time.monotonic()). FetchError."""
    for _ in range(REDIRECTS + 1):
        parts, host, port = web.check(url)
        try:
            answer = fetch_once(parts, host, port, web, deadline, accept, max_bytes)
            if isinstance(answer, tuple):
                return answer
            url = urljoin(url, answer)
        except (OSError, http.client.HTTPException, ValueError, zlib.error) as error:
            late = time.monotonic() >= deadline or isinstance(error, TimeoutError)
            raise FetchError("time out" if late else f"cannot be read ({type(error).__name__})") from None
    raise FetchError("too many redirects")


def fetch_once(parts, host: str, port: int, web: Web, deadline: float, accept, max_bytes: int):
    """One request: what fetch returns, or the address it is redirected to (str)."""
    seconds = max(0.05, deadline - time.monotonic())
    sock = web.connect(host, port, seconds)
    if parts.scheme == "https":
        sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    timer = threading.Timer(seconds, shut, [sock])        # however slowly the server drips: over at the deadline
    timer.daemon = True
    timer.start()
    try:
        if parts.scheme == "https":
            sock.do_handshake()
        connection = http.client.HTTPConnection(host, port)
        connection.sock = sock
        target = quote(parts.path or "/", safe=URL_SAFE) + ("?" + quote(parts.query, safe=URL_SAFE + "?") if parts.query else "")
        name = f"[{host}]" if ":" in host else host       # in ASCII, as it was resolved: a header cannot hold other letters
        connection.request("GET", target, headers={**HEADERS, "Host": f"{name}:{parts.port}" if parts.port else name})
        reply = connection.getresponse()
        if reply.status in (301, 302, 303, 307, 308) and reply.headers["Location"]:
            return reply.headers["Location"]
        if reply.status != 200:
            raise FetchError(f"HTTP {reply.status}")
        kind = reply.headers.get_content_type()
        if not accept.match(kind):
            raise FetchError(f"content of type {kind} cannot be read")
        body = read_body(reply, max_bytes)
        if time.monotonic() >= deadline:
            raise FetchError("time out")
        return body, kind, reply.headers.get_content_charset()
    finally:
        timer.cancel()
        sock.close()


def shut(sock: socket.socket):
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:                                       # closed already
        pass


def read_body(reply, max_bytes: int) -> bytes:
    """At most max_bytes, before and after unpacking. A body that ends early is what came of it."""
    body = bytearray()
    try:
        while len(body) < max_bytes and (chunk := reply.read1(65536)):
            body += chunk
    except http.client.IncompleteRead as error:
        body += error.partial
    if reply.headers.get("Content-Encoding", "identity") != "identity":
        return zlib.decompressobj(47).decompress(bytes(body), max_bytes)                  # 47: gzip or deflate
    return bytes(body[:max_bytes])


BLOCKS = ("address article aside blockquote br dd div dl dt figcaption figure footer form h1 h2 h3 h4 h5 h6 header hr li main nav ol "
          "p pre section table td th tr ul").split()
DROPPED = ("script", "style", "noscript", "template", "svg", "title", lxml.etree.Comment)
NOT_TEXT = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")       # what XML cannot hold; NUL is left out earlier


def page_text(body: bytes, kind: str, charset: str | None, url: str):
    """(title, text, links [(text, url)]) of a fetched page, whatever it holds; FetchError where it holds nothing to read."""
    declared = charset or next(iter(re.findall(rb"""charset=["']?([\w-]+)""", body[:2048])), b"").decode("ascii", "ignore")
    try:
        if declared and codecs.lookup(declared).name == "punycode":                       # no page's, and minutes of work for a long body
            raise LookupError
        text = body.decode(declared or "utf-8", "replace" if declared else "strict")
    except UnicodeDecodeError as error:                   # undeclared: UTF-8, perhaps cut inside a character, or the old default
        text = body.decode("utf-8", "replace") if error.start >= len(body) - 3 else body.decode("windows-1252", "replace")
    except (LookupError, ValueError):                     # no such charset, or one that is none ("undefined", "idna")
        text = body.decode("utf-8", "replace")
    if text.startswith("%PDF-"):
        raise FetchError("content of type application/pdf cannot be read")
    title, links, text = "", [], NOT_TEXT.sub(" ", text.replace("\0", ""))
    if "html" in kind:
        try:
            title, text, links = html_text(text, url)
        except ValueError as error:                       # lxml's word for what it does not take
            raise FetchError(f"cannot be read ({type(error).__name__})") from None
    text = "\n".join(line for line in (" ".join(line.split()) for line in text.splitlines()) if line)
    if not text:
        raise FetchError("the page is empty")
    return title, text, list(dict.fromkeys(link for link in links if link[0] and link[1].startswith("http")))


def html_text(text: str, url: str):
    """(title, text with a line for each block, links) of HTML. lxml because it parses a megabyte in 0.05 s without the GIL, where
    html.parser needs a second with it. It reads HTML_CHARACTERS: its time grows with the square of one tag's attributes."""
    text = re.sub(r"^\s*<\?xml[^>]*>", "", text[:HTML_CHARACTERS])
    if not text.strip():
        raise FetchError("the page is empty")
    try:
        root = lxml.html.document_fromstring(text)
    except lxml.etree.ParserError:                         # nothing but broken tags
        raise FetchError("the page is empty") from None
    title = " ".join((root.findtext(".//title") or "").split())
    lxml.etree.strip_elements(root, *DROPPED, with_tail=False)
    links = [(" ".join(a.text_content().split()), absolute(url, a.get("href"))) for a in root.iter("a") if a.get("href")]
    for element in root.iter(*BLOCKS):                     # cleaned once more: "&#1;" has become a control character
        element.text, element.tail = ("\n" + NOT_TEXT.sub(" ", part or "") for part in (element.text, element.tail))
    return title, root.text_content(), links


def absolute(url: str, link: str) -> str:
    """The address of a link on the page at url; "" for one that is none, such as http://[x."""
    try:
        return urljoin(url, link)
    except ValueError:
        return ""


if __name__ == "__main__":
    # ----------------------------------------------------------------------------------------------------------------------------
    # one page
    parser = argparse.ArgumentParser(description="Fetch one page under the rules of crawl_page and print its text.")
    parser.add_argument("url")
    url = parser.parse_args().url
    try:
        print(*page_text(*fetch(url, Web(), time.monotonic() + PAGE_SECONDS), url)[:2], sep="\n\n")
    except FetchError as error:
        sys.exit(f"error: {url}: {error}")
