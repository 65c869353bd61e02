"""Reading the web safely: a hostile local server, and addresses that must never be reached."""
import gzip
import http.server
import os
import socket
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fetch
from fetch import FetchError, Web, is_public, page_text

ENDLESS = threading.Event()                               # ends the server's endless answers when the tests are over


class Hostile(http.server.BaseHTTPRequestHandler):
    """Each path misbehaves in its own way."""
    protocol_version = "HTTP/1.1"
    requests = []

    def log_message(self, *_):
        pass

    def answer(self, body=b"", status=200, kind="text/html; charset=utf-8", **headers):
        self.send_response(status)
        for name, value in {"Content_Type": kind, "Content_Length": str(len(body)), **headers}.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def drip(self, chunk, pause):
        while not ENDLESS.wait(pause):
            self.wfile.write(chunk)
            self.wfile.flush()

    def do_GET(self):
        self.requests.append(self.path)
        self.close_connection = True
        name, _, rest = self.path[1:].partition("?")
        try:
            getattr(self, "page_" + name, lambda rest: self.answer(b"gone", 404))(rest)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def page_good(self, rest):
        self.answer("<html><head><title> A  page </title><style>x{}</style></head><body><script>evil()</script><p>Hello <b>bold</b> wörld.</p><p>Second&nbsp;line</p>"
                    "<ul><li>one<li>two</ul><a href='/next'>Next page</a><a href='javascript:x'>no</a></body></html>".encode())

    def page_redirect(self, rest):
        self.answer(b"", 302, Location=rest)

    def page_nowhere(self, rest):
        self.answer(b"", 302, Location="http://[bad")

    def page_loop(self, rest):
        self.answer(b"", 302, Location="/loop?" + rest + "x")

    def page_endless(self, rest):
        self.answer(b"<p>start", Content_Length=None)
        self.drip(b"more " * 20_000, 0)

    def page_drip(self, rest):
        self.answer(b"<p>start", Content_Length="1000000")
        self.drip(b".", 0.05)

    def page_slowheader(self, rest):
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self.drip(b"X-Slow: 1\r\n", 0.05)

    def page_hang(self, rest):
        ENDLESS.wait(30)

    def page_wronglength(self, rest):
        self.answer(b"<p>shorter than said</p>", Content_Length="9999")

    def page_badchunks(self, rest):
        self.answer(b"7\r\n<p>part\r\nZZZ\r\n", Content_Length=None, Transfer_Encoding="chunked")

    def page_gzip(self, rest):
        self.answer(gzip.compress("<p>packed ünicode</p>".encode()), Content_Encoding="gzip")

    def page_bomb(self, rest):
        self.answer(gzip.compress(b"<p>" + b"A" * 50_000_000, 1), Content_Encoding="gzip")

    def page_notgzip(self, rest):
        self.answer(b"plain", Content_Encoding="gzip")

    def page_big(self, rest):
        self.answer(b"<p>" + b"word " * 10_000_000)

    def page_pdf(self, rest):
        self.answer(b"%PDF-1.7 ...", kind="application/pdf")

    def page_hiddenpdf(self, rest):
        self.answer(b"%PDF-1.7 ...")

    def page_latin(self, rest):
        self.answer("<p>Café Zürich</p>".encode("latin-1"), kind="text/html" + (f"; charset={rest}" if rest else ""))

    def page_meta(self, rest):
        self.answer("<html><head><meta charset='iso-8859-2'></head><p>Łódź</p>".encode("iso-8859-2"), kind="text/html")

    def page_xml(self, rest):
        self.answer("<?xml version='1.0' encoding='utf-8'?><html xmlns='http://www.w3.org/1999/xhtml'><body><p>Grüße</p></body></html>".encode(), kind="application/xhtml+xml")

    def page_empty(self, rest):
        self.answer(b"")

    def page_blank(self, rest):
        self.answer(b"<html><body><script>only()</script></body></html>")

    def page_json(self, rest):
        self.answer(b'{"a": 1}', kind="application/json")

    def page_garbage(self, rest):
        self.wfile.write(b"\x00\xff not http at all\r\n\r\n")

    def page_deep(self, rest):
        self.answer(b"<p>before</p>" + b"<div>" * 200_000 + b"deep")

    def page_host(self, rest):
        self.answer(self.headers["Host"].encode())

    def page_error(self, rest):
        self.answer(b"oops", 500)


@pytest.fixture(scope="module")
def port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    ENDLESS.set()
    server.shutdown()
    server.server_close()
    thread.join()


def read(port, path, seconds=5.0, web=None):
    """(title, text, links) of a local page."""
    url = f"http://127.0.0.1:{port}/{path}"
    return page_text(*fetch.fetch(url, web or Web(allowed=(f"127.0.0.1:{port}",)), time.monotonic() + seconds), url)


def test_page_becomes_title_lines_and_links(port):
    assert read(port, "good") == ("A page", "Hello bold wörld.\nSecond line\none\ntwo\nNext pageno", [("Next page", f"http://127.0.0.1:{port}/next")])


@pytest.mark.parametrize("path, text", [
    ("wronglength", "shorter than said"), ("badchunks", "part"), ("gzip", "packed ünicode"), ("latin", "Café Zürich"), ("latin?iso-8859-1", "Café Zürich"),
    ("latin?no-such-charset", "Caf\ufffd Z\ufffdrich"), ("meta", "Łódź"), ("xml", "Grüße"), ("json", '{"a": 1}'), ("redirect?/gzip", "packed ünicode"), ("deep", "before")])
def test_odd_but_readable_pages(port, path, text):
    assert read(port, path)[1].startswith(text)


@pytest.mark.parametrize("html, text", [
    (b"<div>one\x0c<p>two</div>", "one\ntwo"), (b"<p>\x1b[1mbold\x01<br>next", "[1mbold\nnext"), (b"<p>a&#1;<br>b", "a\nb"), ("<p>a\ufffe<br>b\uffff".encode(), "a\nb"),
    (b"<p>see <a href='http://[bad'>this</a> and <a href='/x'>that</a>", "see this and that"), (b"<meta charset=undefined><p>good", "good"),
    (b"<meta charset=idna><p>good", "good"), (b"<meta charset=utf-7><p>half a +2AA- pair<p>more", "half a pair\nmore"), (b"<meta charset=punycode><p>good-9a", "good-9a")])
def test_what_xml_cannot_hold_is_left_out_and_the_page_is_read(html, text):
    assert page_text(html, "text/html", None, "http://a.example/") == ("", text, [("that", "http://a.example/x")] if "href" in str(html) else [])


def test_what_the_parser_refuses_is_a_fetch_error():
    with pytest.raises(FetchError, match="cannot be read"):
        page_text(b"<?xml?><?xml version='1.0' encoding='utf-8'?><p>x", "text/html", None, "http://a.example/")


@pytest.mark.parametrize("path, message", [
    ("nowhere", "cannot be read"), ("pdf", "application/pdf cannot be read"), ("hiddenpdf", "application/pdf cannot be read"), ("empty", "the page is empty"), ("blank", "the page is empty"),
    ("missing", "HTTP 404"), ("error", "HTTP 500"), ("loop?", "too many redirects"), ("notgzip", "cannot be read"), ("garbage", "cannot be read")])
def test_unreadable_pages_have_their_words(port, path, message):
    with pytest.raises(FetchError, match=message):
        read(port, path)


@pytest.mark.parametrize("path", ["hang", "drip", "slowheader"])
def test_slow_server_is_cut_off_at_the_deadline(port, path):
    started = time.monotonic()
    with pytest.raises(FetchError, match="time out"):
        read(port, path, seconds=0.5)
    assert time.monotonic() - started < 1.5


def test_a_tag_of_many_attributes_costs_seconds_not_minutes():
    body = b"<p " + b" ".join(b"a%d=1" % i for i in range(200_000)) + b">x"             # libxml2 compares each with all before it
    started = time.thread_time()
    with pytest.raises(FetchError, match="empty"):                                      # cut off inside the tag
        fetch.page_text(body, "text/html", None, "http://a.example/")
    assert time.thread_time() - started < 3 * 6


@pytest.mark.parametrize("path", ["big", "endless", "bomb"])
def test_size_is_limited_before_and_after_unpacking(port, path):
    started = time.monotonic()
    text = read(port, path, seconds=10.0)[1]
    assert 100_000 < len(text) <= fetch.PAGE_BYTES and time.monotonic() - started < 10


def test_redirect_is_checked_like_a_first_address(port):
    Hostile.requests.clear()
    for target in (f"http://localhost:{port}/good", f"http://127.0.0.1:{port + 1}/", "http://169.254.169.254/latest/meta-data/", f"http://[::ffff:127.0.0.1]:{port}/good",
                   f"http://[::1]:{port}/good", f"http://0.0.0.0:{port}/good", f"http://2130706433:{port}/good", f"http://0x7f.1:{port}/good", "//10.0.0.1/x"):
        with pytest.raises(FetchError, match="not on the public internet|cannot be resolved|not a valid URL"):
            read(port, f"redirect?{target}")
    for target in ("file:///etc/passwd", "ftp://example.org/", "gopher://x/", "javascript:1"):
        with pytest.raises(FetchError, match="only http and https"):
            read(port, f"redirect?{target}")
    with pytest.raises(FetchError, match="blocked"):
        read(port, "redirect?https://datasets.huggingface.co/gaia")
    assert Hostile.requests and all(path.startswith("/redirect") for path in Hostile.requests)            # no target was ever asked


def test_private_server_needs_permission(port):
    with pytest.raises(FetchError, match="not on the public internet"):
        read(port, "good", web=Web())
    assert read(port, "good", web=Web(allowed=("127.0.0.1",)))[0] == "A page"
    with pytest.raises(FetchError, match="not on the public internet"):
        read(port, "good", web=Web(allowed=(f"127.0.0.1:{port + 1}",)))


def test_host_header_is_the_name_that_was_resolved(port, monkeypatch):
    resolve = socket.getaddrinfo
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda host, *args, **kwargs: resolve("127.0.0.1", *args, **kwargs))
    url, name = f"http://me@Пример.example.:{port}/host", f"xn--e1afmkfd.example:{port}"
    assert fetch.fetch(url, Web(allowed=(name,)), time.monotonic() + 5)[0] == name.encode()


def test_name_is_resolved_once_so_a_changing_answer_changes_nothing(port, monkeypatch):
    """DNS rebinding: public when it is checked, loopback when it is used."""
    answers, connected = ["93.184.215.14", "127.0.0.1", "127.0.0.1"], []

    def resolve(host, port, *_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

    def connect(address, timeout):
        connected.append(address[0])
        raise ConnectionRefusedError
    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(fetch.socket, "create_connection", connect)
    with pytest.raises(FetchError, match="cannot be read"):
        fetch.fetch(f"http://rebind.example:{port}/good", Web(), time.monotonic() + 2)
    assert connected == ["93.184.215.14"] and len(answers) == 2


def test_one_private_address_among_public_ones_refuses_the_host(monkeypatch):
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda host, port, **_: [(2, 1, 6, "", (a, port)) for a in ("93.184.215.14", "10.1.2.3")])
    with pytest.raises(FetchError, match="not on the public internet"):
        fetch.fetch("http://mixed.example/", Web(), time.monotonic() + 2)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200", "0.0.0.0", "224.0.0.1",
                                     "255.255.255.255", "192.0.0.192", "192.0.0.9", "192.0.2.1", "198.18.0.1", "240.0.0.1", "168.63.129.16", "::1", "::", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1",
                                     "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "2002:7f00:1::", "2002:0a00:0001::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
                                     "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1", "fec0::1"])
def test_address_that_must_not_be_reached(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "::ffff:93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::0101:0101"])
def test_public_address(address):
    assert is_public(address)


@pytest.mark.parametrize("url", ["http://", "http:///x", "https://[::1", "http://a:99999/", "http://a:b/", "http://" + "a" * 300 + ".com/", "http://\udc80/", "ht!tp://x", "",
                                 "http://user@huggingface.co/", "http://huggingface.co./x", "HTTP://HF.co/x"])
def test_odd_urls_are_refused(url):
    with pytest.raises(FetchError):
        fetch.fetch(url, Web(), time.monotonic() + 1)


@settings(max_examples=200, deadline=None)
@example(body=b"</\x01", kind="text/html", charset=None)
@given(st.binary(max_size=300), st.sampled_from(["text/html", "text/plain", "application/xhtml+xml"]),
       st.sampled_from([None, "utf-8", "utf-16", "utf-7", "base64", "x", "latin-1", "undefined", "idna", "punycode", "unicode_escape", "a\0b"]))
def test_any_bytes_become_text_or_a_fetch_error(body, kind, charset):
    try:
        title, text, links = page_text(body, kind, charset, "http://a.example/")
    except FetchError:
        return
    assert text and isinstance(title, str) and all(link.startswith("http") for _, link in links)
    (title + text).encode()


def test_nothing_leaks(port):
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for path in ("good", "pdf", "loop?", "missing", "redirect?http://10.0.0.1/"):
        try:
            read(port, path)
        except FetchError:
            pass
    time.sleep(0.2)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) <= (before[0] + 1, before[1] + 1)
