"""traces.html in a real headless browser (Debian's chromium and chromium-driver, spoken to over WebDriver's HTTP): filters, keyboard, group view,
hostile text, size. Where no browser is found these tests skip and say so."""
import base64
import re
import shutil
import socket
import subprocess
import time

import pytest
import requests

import report

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium with chromedriver: apt-get install chromium chromium-driver")
CHAIN = ("<think>I look for the capital.</think>\n<plan>find the capital; find its currency</plan>\n<wiki_search>capital of {name}</wiki_search>\n<observation>\n"
         "Doc 1 (Title: \"{name}\") The capital is Tirana.\n</observation>\n\n<reflection>good</reflection>\n<answer>{name}</answer>")
HOSTILE = ("<think></script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\"> \u202egnp.exe <!-- </think>\n"
           "<code>\n```py\n" + "x" * 60_000 + "\n```\n</code>\n<observation>\n<svg onload=\"document.title='hacked'\"></svg>]]>\n</observation>\n\n<answer>&lt;b&gt;<b>no</b></answer>")


def chain(i, suite="mhqa", score=1.0, **columns):
    text = CHAIN.format(name=f"Land {i}")
    return {"id": f"t{i}", "suite": suite, "sample": 0, "question": f"What is the capital of Land {i}?", "gold": [f"Land {i}"], "answer": f"Land {i}", "score": score,
            "end_reason": "answered", "violations": 0, "turns": 2, "tools": {"wiki_search": 1}, "tokens_written": 80, "tokens_read": 40, "metric": "em", "text": text, **columns}


def runs():
    rows = [chain(i, ("mhqa", "web", "math")[i % 3], float(i % 4 == 0)) for i in range(90)]
    rows.append(chain(90, "web", 0.0, text=HOSTILE, question="</script><script>document.title='hacked'</script>", answer="<b>no</b>", end_reason="violation", violations=2,
                      tools={"code": 1}))
    groups = [chain(7, "mhqa", float(s < 3), sample=s, step=5, advantage=(0.7 if s < 3 else -1.2), tools={}) for s in range(4)]
    return {"sft": rows, "rl training": groups}


class Page:
    """The part of WebDriver that these tests need."""

    def __init__(self, dark=False):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.process = subprocess.Popen([DRIVER, f"--port={self.url.rpartition(':')[2]}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(100):
            try:
                requests.get(self.url + "/status", timeout=5)
                break
            except requests.ConnectionError:
                time.sleep(0.1)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,850", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
        options = {"binary": BROWSER, "args": flags}
        self.session = self.url + "/session/" + self.post("/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}},
                                                          root=self.url)["sessionId"]

    def post(self, path, body, root=None):
        reply = requests.post((root or self.session) + path, json=body, timeout=60).json()["value"]
        assert not (isinstance(reply, dict) and "error" in reply), reply
        return reply

    def open(self, file):
        self.post("/url", {"url": file.as_uri()})

    def run(self, script):
        return self.post("/execute/sync", {"script": script, "args": []})

    def keys(self, text):
        self.post("/actions", {"actions": [{"type": "key", "id": "k", "actions": [a for c in text for a in ({"type": "keyDown", "value": c}, {"type": "keyUp", "value": c})]}]})

    def choose(self, name, value):
        self.run(f"const s = document.getElementById('f-{name}'); s.value = {value!r}; s.dispatchEvent(new Event('change'))")

    def count(self):
        return int(self.run("return document.getElementById('count').textContent").split()[0])

    def screenshot(self, file):
        file.write_bytes(base64.b64decode(requests.get(self.session + "/screenshot", timeout=60).json()["value"]))

    def errors(self):
        return [entry for entry in self.post("/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]

    def close(self):
        requests.delete(self.session, timeout=20)
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    browser = Page()
    file = tmp_path_factory.mktemp("page") / "traces.html"
    file.write_text(report.trace_page(runs()), encoding="utf-8")
    browser.file = file
    yield browser
    browser.close()


@pytest.fixture
def opened(page):
    page.open(page.file)
    return page


def test_the_page_refers_to_nothing_outside_itself():
    html = report.trace_page(runs())
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//|@import|url\(""", html.split('id="data">')[0] + html.split("</script>")[1])
    assert html.count("<script") == html.count("</script>") == 2                    # trace text adds none


@pytest.mark.long
@needs_browser
def test_filters_narrow_the_list_and_combine(opened):
    assert opened.count() == 95
    opened.choose("suite", "web")
    assert opened.count() == 31
    opened.choose("result", "right")
    assert opened.count() == 8
    opened.choose("suite", "")
    opened.choose("result", "")
    opened.choose("violation", "some")
    assert opened.count() == 1
    opened.choose("violation", "")
    opened.choose("tool", "code")
    assert opened.count() == 1
    opened.choose("tool", "")
    opened.choose("end", "violation")
    assert opened.count() == 1
    opened.choose("end", "")
    opened.choose("run", "rl training")
    assert opened.count() == 4


@pytest.mark.long
@needs_browser
def test_a_chain_shows_roles_folded_calls_and_who_wrote_what(opened):
    kinds = opened.run("return [...document.querySelectorAll('#view .seg')].map(n => [n.tagName, n.className])")
    assert [k[1].split()[1] for k in kinds] == ["think", "plan", "tool", "observation", "reflection", "answer"]
    assert [k[0] for k in kinds] == ["DIV", "DIV", "DETAILS", "DETAILS", "DIV", "DIV"]
    assert [("untrained" in k[1]) for k in kinds] == [False, False, False, True, False, False]
    colours = opened.run("return [...document.querySelectorAll('#view .seg')].map(n => getComputedStyle(n).backgroundColor)")
    assert len(set(colours)) == 6
    opened.run("document.querySelector('#view details').open = true")
    assert "capital of Land 0" in opened.run("return new Promise(r => setTimeout(() => r(document.querySelector('#view details pre').textContent), 50))")


@pytest.mark.long
@needs_browser
def test_the_keyboard_alone_is_enough(opened):
    opened.keys("jj")
    assert opened.run("return document.querySelector('#view h2').textContent") == "What is the capital of Land 2?"
    opened.keys("k")
    opened.keys("\ue015")                                                            # arrow down
    assert opened.run("return document.querySelector('[aria-selected=true]').id") == "row-2"
    opened.keys("e")
    assert opened.run("return [...document.querySelectorAll('#view details')].every(d => d.open)")
    opened.keys("t")
    assert opened.run("return document.getElementById('shade').getAttribute('aria-pressed')") == "false"
    opened.keys("/Land 88")
    assert opened.count() == 1
    opened.keys("\ue00c")                                                            # escape
    assert opened.run("return document.activeElement.id") == "list"


@pytest.mark.long
@needs_browser
def test_group_view_puts_all_chains_of_a_prompt_side_by_side_with_advantages(opened):
    opened.choose("run", "rl training")
    opened.keys("g")
    sections = opened.run("return [...document.querySelectorAll('.group section')].map(s => s.textContent)")
    assert len(sections) == 4 and all("advantage 0.7" in s for s in sections[:3]) and "advantage -1.2" in sections[3]


@pytest.mark.long
@needs_browser
def test_hostile_trace_text_is_only_ever_text(opened):
    opened.choose("violation", "some")
    opened.keys("e")
    time.sleep(0.3)
    assert opened.run("return document.title") == "Chain-of-agents traces"
    assert opened.run("return document.querySelectorAll('#view img, #view svg, #view script, #view b:not(.facts b)').length") == 0
    text = opened.run("return document.querySelector('#view').textContent")
    assert "<script>document.title='hacked'</script>" in text and "⟨U+202E⟩" in text and "onerror" in text
    assert opened.run("return document.querySelector('#view').scrollWidth <= document.querySelector('#view').clientWidth")    # huge lines wrap
    assert opened.errors() == []


@pytest.mark.long
@needs_browser
def test_5000_traces_stay_below_20_megabytes_and_filter_within_300_ms(page, tmp_path):
    file = tmp_path / "many.html"
    rows = [chain(i, ("mhqa", "web", "math")[i % 3], float(i % 2), text=CHAIN.format(name=f"Land {i} " * 10) * 4) for i in range(5000)]
    file.write_text(report.trace_page({"sft": rows}), encoding="utf-8")
    assert file.stat().st_size < 20e6
    page.open(file)
    assert page.count() == 5000
    times = [page.run("""const s = document.getElementById('f-suite'), t = performance.now(); s.value = %r; s.dispatchEvent(new Event('change'));
                         document.body.offsetHeight; return performance.now() - t""" % value) for value in ("web", "", "math")]
    assert page.count() == 1666 and max(times) < 300, times


@pytest.mark.long
def test_an_oversized_page_is_cut_and_says_so():
    html = report.trace_page({"sft": [chain(i, text=CHAIN.format(name="y" * 30_000)) for i in range(250)]})
    assert len(html) < 20e6 and "characters, see traces.jsonl" in html
