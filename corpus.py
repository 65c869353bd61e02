"""The embedded corpus: pages and passages in one SQLite file, found by BM25.

`wiki_search`, `web_search` and `crawl_page` need something to search that works offline, starts at once and gives every run the
same answers. SQLite's FTS5 does: built once from a JSONL file, then opened read-only by any number of threads and processes. It
holds millions of passages (bench/bench_tools.py measures one million). For dense retrieval over all of Wikipedia use a Search-R1
retriever server instead (`--retriever URL`, tools.py).

Four choices matter. Very common words are left out of the query: they say little and cost most of the time, which stays bounded. A match in the title weighs ten times. And a page whose whole title stands in the query counts double: "Nepal
money" means Nepal, not "Bharatpur (Nepal)", and with 500 towns called "... (Nepal)" BM25 alone would drown it. And a passage
counts by the share of the query's words that it holds. Left out: stemming, phrases, updates.

    python corpus.py data/encyclopedia.jsonl "Nepal currency"
"""
import argparse
import fcntl
import gzip
import hashlib
import os
import re
import sqlite3
import threading
import unicodedata
import zlib
from pathlib import Path

from hf import InputError, exit_on_input_error, json_object, parse_json

STOP_WORDS = set("""a about after all also an and any are as at be been before but by can could did do does for from had has have he her
    him his how i if in into is it its me my no not of on or our she so than that the their them then there these they this those to
    under up was we were what when where which who whom whose why will with would you your""".split())
MOST_MATCHES = 50_000                                     # a query's words, rarest first, are used while they stand in fewer passages
COMMON = 0.1                                              # share of the passages beyond which a word says little and costs much


class Store:
    """A corpus, searchable. corpus: JSONL (or .gz) with rows {"id", "title", "url", "text"}, or Search-R1's {"id", "contents"}
    (first line: title). Built on first use under index_dir as <stem>-<fingerprint>.sqlite, atomically; opened at once after that.
    Raises InputError for a bad row."""

    def __init__(self, corpus, index_dir="runs/index"):
        self.corpus = Path(corpus)
        if not self.corpus.is_file():
            raise InputError(f"{corpus}: no such corpus file; expected JSONL rows with title, url, text")
        try:
            self.path = Path(index_dir) / f"{self.corpus.name.split('.')[0]}-{content_hash(self.corpus)}.sqlite"
        except OSError as error:
            raise InputError(f"{corpus}: cannot be read: {error}") from None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            with open(self.path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)          # of several processes one builds
                if not self.path.exists():
                    build_index(self.corpus, self.path)
        self.connections, self.lock, self.local = [], threading.Lock(), threading.local()
        self.passages = self.db().execute("SELECT count(*) FROM passages").fetchone()[0]

    def db(self) -> sqlite3.Connection:
        """This thread's connection; read-only and immutable, so readers never wait for each other."""
        if getattr(self.local, "db", None) is None:
            self.local.db = sqlite3.connect(f"file:{self.path}?mode=ro&immutable=1", uri=True, check_same_thread=False)
            self.local.db.execute("PRAGMA mmap_size = 1073741824")
            with self.lock:
                self.connections.append(self.local.db)
        return self.local.db

    def telling_words(self, query: str) -> list:
        """The words of any text that are worth searching: in the corpus, not very common there, and no stop words unless there is
        nothing else. Query text is data: only letters and digits survive, so no operator of FTS5 can."""
        words = list(dict.fromkeys(split_words(query)))[:64]
        counts = {w: row[0] for w in words if (row := self.db().execute("SELECT doc FROM words WHERE term = ?", (w,)).fetchone())}
        counts = {w: n for w, n in counts.items() if w not in STOP_WORDS} or counts
        telling, cost = [], 0
        for word in sorted(counts, key=counts.get):
            cost += counts[word]
            if telling and (counts[word] > max(1000, COMMON * self.passages) or cost > MOST_MATCHES):
                break
            telling.append(word)
        return telling

    def search(self, query: str, topk: int) -> list:
        """The best topk passages: [(title, url, passage, page id)]. BM25 finds candidates; each then counts by the share of the
        telling words that it holds."""
        telling, words = self.telling_words(query), split_words(query)[:64]
        if not telling:
            return []
        match = " OR ".join(f'"{word}"' for word in telling)
        found = "SELECT rowid, rank FROM passage_index WHERE passage_index MATCH ?"
        ranked = dict(self.db().execute(f"{found} ORDER BY rank LIMIT ?", (match, 4 * topk + 16)))
        spans = list({" ".join(words[i:i + n]) for n in range(1, 9) for i in range(len(words) - n + 1)})
        named = f"SELECT first, last FROM pages WHERE title_key IN ({','.join('?' * len(spans))}) LIMIT 64"
        for first, last in self.db().execute(named, spans).fetchall():
            for number, rank in self.db().execute(f"{found} AND rowid BETWEEN ? AND ?", (match, first, last)):
                ranked[number] = 2 * rank                 # rank is negative: the lower the better
        hits = []
        for number, rank in ranked.items():
            hit = self.db().execute("""SELECT p.title, p.url, s.body, p.id FROM passages AS s JOIN pages AS p ON p.id = s.page
                                       WHERE s.id = ?""", (number,)).fetchone()
            held = len(set(telling) & set(split_words(f"{hit[0]} {hit[2]}")))
            hits.append((rank * held / len(telling), number, hit))
        return [hit for _, _, hit in sorted(hits)[:topk]]

    def page(self, url: str):
        """(title, text) of the page at url, or None."""
        row = self.db().execute("SELECT title, first, last FROM pages WHERE url_key = ?", (url_key(url),)).fetchone()
        if row is None:
            return None
        passages = self.db().execute("SELECT body FROM passages WHERE id BETWEEN ? AND ? ORDER BY id", row[1:])
        return row[0], "\n\n".join(body for body, in passages)

    def close(self):
        with self.lock:
            for db in self.connections:
                db.close()
            self.connections, self.local = [], threading.local()


def split_words(text: str) -> list:
    """Words in lower case without accents, as FTS5's unicode61 tokenizer with remove_diacritics cuts them."""
    return re.findall(r"[^\W_]+", "".join(c for c in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(c)))


def content_hash(path: Path) -> str:
    """A fingerprint of a file that costs milliseconds: its size and up to 64 samples of 64 KB (all of it below 4 MB), beyond that
    also its time of change."""
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(repr((3, size, path.stat().st_mtime_ns if size > 1 << 22 else 0)).encode())      # 3: version of the index layout
    with open(path, "rb") as f:
        for i in range(64):
            f.seek(i * max(1 << 16, size // 64))
            digest.update(f.read(1 << 16))
    return digest.hexdigest()[:12]


def url_key(url: str) -> str:
    """What two spellings of one address share: no scheme, no www., no fragment, no trailing slash."""
    return re.sub(r"^(https?://)?(www\.)?", "", url.strip(), flags=re.I).split("#")[0].rstrip("/").casefold()


def corpus_lines(corpus: Path):
    """Yields (number, line as bytes); InputError where the file cannot be read or unpacked."""
    try:
        with (gzip.open if corpus.suffix == ".gz" else open)(corpus, "rb") as f:
            yield from enumerate(f, 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{corpus}: cannot be read: {error}") from None


def corpus_rows(corpus: Path):
    """Yields (title, url, passages) for each row; InputError names file, line and field."""
    for number, line in corpus_lines(corpus):
        if not line.strip():
            continue
        row = json_object(parse_json(line, f"{corpus}:{number}", "JSON (one object a line, in UTF-8)"), f"{corpus}:{number}")
        row["url"] = row.get("url") or f"https://corpus.local/{row.get('id', number)}"
        for field in ("contents", "url") if "contents" in row else ("title", "text", "url"):
            try:
                row[field].encode()                        # fails for half a surrogate pair, which SQLite cannot hold
            except (KeyError, AttributeError, UnicodeEncodeError):
                raise InputError(f"{corpus}:{number}: field '{field}': expected a text, found {row.get(field)!r:.40}") from None
        if "contents" in row:
            title, _, text = row["contents"].partition("\n")
            yield title, row["url"], [text]
        else:
            yield row["title"], row["url"], split_passages(row["text"])


def split_passages(text: str, words: int = 100) -> list:
    """Paragraphs (blank line between), those of more than `words` words cut in pieces of that length."""
    passages = []
    for paragraph in filter(None, (p.strip() for p in text.split("\n\n"))):
        tokens = paragraph.split(" ")
        step = words if len(tokens) > 1.5 * words else len(tokens)
        passages += [" ".join(tokens[i:i + step]) for i in range(0, len(tokens), step)]
    return passages or [text]


def build_index(corpus: Path, path: Path):
    """Writes the SQLite file under a name of its own, then moves it to path."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    db = sqlite3.connect(temporary)
    db.executescript("""PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA page_size = 8192;
        CREATE TABLE pages (id INTEGER PRIMARY KEY, title TEXT, url TEXT, title_key TEXT, url_key TEXT, first INTEGER, last INTEGER);
        CREATE TABLE passages (id INTEGER PRIMARY KEY, page INTEGER, body TEXT);
        CREATE VIRTUAL TABLE passage_index USING fts5(title, body, content='', tokenize="unicode61 remove_diacritics 2");
        INSERT INTO passage_index(passage_index, rank) VALUES ('rank', 'bm25(10.0, 1.0)'), ('hashsize', 67108864);
        CREATE VIRTUAL TABLE words USING fts5vocab(passage_index, row);""")
    try:
        number = 0
        for page, (title, url, passages) in enumerate(corpus_rows(corpus), 1):
            db.execute("INSERT INTO pages VALUES (?, ?, ?, ?, ?, ?, ?)",
                       (page, title, url, " ".join(split_words(title)), url_key(url), number + 1, number + len(passages)))
            for body in passages:
                number += 1
                db.execute("INSERT INTO passages VALUES (?, ?, ?)", (number, page, body))
                db.execute("INSERT INTO passage_index(rowid, title, body) VALUES (?, ?, ?)", (number, title, body))
        if not number:
            raise InputError(f"{corpus}: no pages in this file")
        db.execute("INSERT INTO passage_index(passage_index) VALUES ('optimize')")
        db.executescript("CREATE INDEX by_url ON pages (url_key); CREATE INDEX by_title ON pages (title_key)")
        db.commit()
        db.close()
        os.replace(temporary, path)
    finally:
        db.close()
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    # ----------------------------------------------------------------------------------------------------------------------------
    # one query
    exit_on_input_error()
    parser = argparse.ArgumentParser(description="Index a corpus (if it is not yet) and print the best five passages for a query.")
    parser.add_argument("corpus", help="JSONL, a page a line: title, text, url")
    parser.add_argument("query")
    args = parser.parse_args()
    store = Store(args.corpus)
    print(f"{store.passages} passages in {store.path}; telling words: {store.telling_words(args.query)}")
    for title, url, passage, _ in store.search(args.query, 5):
        print(f"{title} ({url}): {passage[:120]}")
