"""The tables of data/build_tasks.py: how facts are read, asked for and computed with. A table is data: no code here.

Of the seven phrasings in each list SFT tasks show the first two, RL and dev tasks the first five; the last two, made of the same words, occur in the test alone."""

# relation -> (pattern of the sentence that holds it, subject first; word that finds it; words that a question may use, the first being the encyclopedia's own)
RELATIONS = {
    "country": (r"^(.+?) (?:is the capital of|lies in|is the currency of) (?:the )?([^,]+?)(?: and has|\.$)", "", ["country"]),
    "capital": (r"^(.+?) is a country .* Its capital is (.+?)\. ?(?:Its|$)", "capital", ["capital", "seat of government"]),
    "currency": (r"^(.+?) is a country .* Its currency is the (.+?)\.$", "currency", ["currency", "money"]),
    "calling code": (r"^(.+?) has .*?the calling code (\d+)", "calling code", ["calling code", "phone prefix"]),
    "internet domain": (r"^(.+?) has .*?the internet domain (\.\w+)", "internet domain", ["internet domain", "web suffix"]),
    "ISO code": (r"^(.+?) has .*?the ISO code (\w+)", "ISO code", ["ISO code", "three-letter code"]),
    "area": (r"^(.+?) has an area of (\d+)", "area", ["area", "size in square km"]),
    "population": (r"^(.+?) has .*?a population of (\d+)", "population", ["population", "number of people"]),
    "main language": (r"^(.+?) has .*?the main language (.+?)(?: and|\.$)", "main language", ["main language", "usual tongue"]),
    "demonym": (r"^(.+?) has .*?the demonym (.+?)\.$", "demonym", ["demonym", "name for its people"]),
    "inhabitants": (r"^(.+?) (?:is the capital of|lies in) .* has (\d+) inhabitants", "inhabitants", ["number of inhabitants", "headcount"]),
    "time zone": (r"^(.+?) has the time zone (\S+?),", "time zone", ["time zone", "clock zone"]),
    "latitude": (r"^(.+?) has .*?the latitude ([\d.]+ [NS])", "latitude", ["latitude"]),
    "longitude": (r"^(.+?) has .*?the longitude ([\d.]+ [EW])", "longitude", ["longitude"]),
    "state": (r"^(.+?) (?:lies|is a county) in ([^,]+), United States", "", ["state"]),
    "postal code": (r"^(.+?) is a state .*? postal code (\w+)", "postal code", ["postal code", "mail abbreviation"]),
    "counties": (r"^(.+?) has (\d+) counties", "counties", ["number of counties", "count of districts"]),
    "FIPS code": (r"^(.+?) has .*?FIPS code (\d+)", "FIPS code", ["FIPS code", "federal area number"]),
    "largest city": (r"^(.+?) has the largest city (.+?)\.$", "largest city", ["largest city", "most populous town"]),
    "currency code": (r"^(.+?) has the currency code (\w+)", "currency code", ["currency code", "bank abbreviation"]),
    "numeric code": (r"^(.+?) has .*?the numeric code (\d+)", "numeric code", ["numeric code"]),
    "symbol": (r"^(.+?) is the chemical element with the symbol (\w+)", "symbol", ["symbol", "abbreviation"]),
    "atomic number": (r"^(.+?) is the chemical element .*? atomic number (\d+)", "atomic number", ["atomic number", "number of protons"]),
    "discovery year": (r"^(.+?) was discovered in (\d+)", "discovered", ["discovery year", "year of its finding"]),
    "discovery place": (r"^(.+?) was discovered in \d+ in (?:the )?([A-Z].+?)(?: by|\.$)", "discovered", ["discovery place", "place of its finding"]),
    "discoverer": (r"^(.+?) was discovered .*? by (.+)\.$", "discovered", ["discoverer", "first finder"]),
    "melting point": (r"^(.+?) has .*?the melting point ([\d.]+)", "melting point", ["melting point", "fusion temperature"]),
    "density": (r"^(.+?) has .*?the density ([\d.]+)", "density", ["density", "mass per volume"]),
    "atomic weight": (r"^(.+?) has the atomic weight ([\d.]+)", "atomic weight", ["atomic weight", "mass of an atom"]),
}
UNIT = {"area": "square km", "melting point": "K", "density": "g/cm3"}
COUNTRY = ["calling code", "internet domain", "ISO code", "main language", "demonym"]
STATE = ["largest city", "counties", "FIPS code"]
ELEMENT = ["discovery year", "discoverer", "melting point", "density", "discovery place", "atomic weight"]
ABROAD = ["internet domain", "ISO code", "main language", "demonym"]
CITY = ["time zone", "latitude", "longitude"]
# Entities found by a number or symbol: kind -> (noun, relation, the question's own words for it where they are not the encyclopedia's).
KEYED = {"atomic number": ("element", "atomic number", None), "symbol": ("element", "symbol", None), "calling code": ("country", "calling code", None),
         "FIPS code": ("state", "FIPS code", None), "protons": ("element", "atomic number", "{x} protons"),
         "phone prefix": ("country", "calling code", "phone prefix {x}"), "federal number": ("state", "FIPS code", "federal number {x}")}
# Chains of look-ups: (weight, kind of the first page, relations on the way, relations of which one is asked)
CHAINS = {
    "mhqa": [(9, "country", [], COUNTRY + ["capital", "currency", "area", "population"]), (6, "element", [], ELEMENT + ["symbol", "atomic number"]),
             (18, "city", ["country"], COUNTRY + ["capital", "currency"]), (8, "currency", ["country"], COUNTRY + ["capital"]),
             (6, "us city", ["state"], STATE + ["postal code"]), (6, "county", ["state"], STATE + ["postal code"]),
             (6, "atomic number", [], ELEMENT + ["symbol"]), (6, "symbol", [], ELEMENT + ["atomic number"]),
             (5, "calling code", [], ABROAD + ["capital", "currency", "area", "population"]), (2, "FIPS code", [], ["postal code", "largest city", "counties"]),
             (9, "city", ["country", "capital"], CITY + ["inhabitants"]), (6, "currency", ["country", "capital"], CITY + ["inhabitants"]),
             (6, "city", ["country", "currency"], ["currency code", "numeric code"]), (4, "county", ["state", "largest city"], CITY + ["inhabitants"])],
    "web": [(8, "country", [], COUNTRY + ["area", "population"]), (8, "city", [], CITY), (4, "us city", [], CITY), (3, "state", [], STATE),
            (4, "currency", [], ["currency code", "numeric code"]), (4, "county", [], ["FIPS code"]), (5, "element", [], ELEMENT),
            (16, "city", ["country"], COUNTRY + ["area", "population"]), (7, "currency", ["country"], COUNTRY + ["area", "population"]),
            (7, "us city", ["state"], STATE), (6, "county", ["state"], STATE), (9, "atomic number", [], ELEMENT), (9, "symbol", [], ELEMENT),
            (5, "calling code", [], ABROAD + ["area", "population"]), (2, "FIPS code", [], ["largest city", "counties"]),
            (5, "city", ["country", "capital"], CITY), (3, "currency", ["country", "capital"], CITY), (2, "city", ["country", "currency"], ["currency code"])],
}
# Chains whose first query fails in the question's own words.
ODD_CHAINS = [(4, "protons", [], ELEMENT + ["symbol"]), (3, "phone prefix", [], ABROAD + ["area", "population"]), (2, "federal number", [], ["largest city", "counties"])]

# Question frames. {n}: the relation's word, {x}: an entity or its description. Two are for all, three for RL and later, the last two for the test alone.
ONE = ["What is the {n} of {x}?", "Which {n} does {x} have?", "Find the {n} of {x}.", "Tell me the {n} of {x}.", "For {x}, what is the {n}?",
       "Tell me which {n} {x} has.", "Of {x}, find the {n}."]
# Descriptions of an entity by another one, same order.
BY = {
    "city": ["the country where {x} lies", "the country of {x}", "the country to which {x} belongs", "the country with the city {x}", "the country that {x} is in",
             "the country in which {x} lies", "the country that has the city {x}"],
    "currency": ["the country that uses the {x}", "the country of the {x}", "the country with the currency {x}", "the country that pays in {x}",
                 "the country whose currency is the {x}", "the country that has the currency {x}", "the country which pays with the {x}"],
    "county": ["the state where {x} lies", "the state of {x}", "the state to which {x} belongs", "the US state with {x}", "the state that {x} is in",
               "the state in which {x} lies", "the US state that has {x}"],
    "atomic number": ["the element with atomic number {x}", "the element of atomic number {x}", "element number {x}",
                      "the element whose atomic number is {x}", "the substance with atomic number {x}",
                      "the element that has atomic number {x}", "the element which has {x} as its atomic number"],
    "symbol": ["the element with symbol {x}", "the element of symbol {x}", "the chemical element {x}", "the element whose symbol is {x}", "the element written {x}",
               "the element that has the symbol {x}", "the chemical element written {x}"],
}
BY |= {
    "calling code": ["the country with calling code {x}", "the country of calling code {x}", "the country whose calling code is {x}", "the country that has calling code {x}",
                     "the country that uses calling code {x}", "the country which has {x} as its calling code", "the country where the calling code is {x}"],
    "FIPS code": ["the state with FIPS code {x}", "the state of FIPS code {x}", "the state whose FIPS code is {x}", "the state that has FIPS code {x}", "the US state of FIPS code {x}",
                  "the US state with FIPS code {x}", "the state where the FIPS code is {x}"],
    "protons": ["the element with {x} protons", "the element whose atoms have {x} protons", "the element of {x} protons", "the chemical element with {x} protons",
                "the element that has {x} protons", "the chemical element that has {x} protons", "the element with atoms of {x} protons"],
    "phone prefix": ["the country with phone prefix {x}", "the country of phone prefix {x}", "the country whose phone prefix is {x}", "the country that has phone prefix {x}",
                     "the country that uses phone prefix {x}", "the country which has {x} as its phone prefix", "the country where the phone prefix is {x}"],
    "federal number": ["the state with federal number {x}", "the state of federal number {x}", "the state whose federal number is {x}", "the state that has federal number {x}",
                       "the US state of federal number {x}", "the state which has {x} as its federal number", "the state where the federal number is {x}"],
}
COMPARE = {
    ("population", "max"): ["Which has more people, {x} or {y}?", "Which country has the larger population, {x} or {y}?", "Is the population of {x} or of {y} larger?",
                            "{x} or {y}: which has the larger population?", "Which of {x} and {y} has more people?",
                            "Find which has the larger population, {x} or {y}.", "Of {x} and {y}, which country has more people?"],
    ("area", "max"): ["Which is larger in area, {x} or {y}?", "Which country has the larger area, {x} or {y}?", "Is the area of {x} or of {y} larger?",
                      "{x} or {y}: which covers the larger area?", "Which of {x} and {y} has the larger area?",
                      "Find which has the larger area, {x} or {y}.", "Of {x} and {y}, which country is larger in area?"],
    ("inhabitants", "max"): ["Which has more inhabitants, {x} or {y}?", "Which place is larger by inhabitants, {x} or {y}?", "Are there more inhabitants in {x} or in {y}?",
                             "{x} or {y}: which has more inhabitants?", "Which of {x} and {y} has more inhabitants?",
                             "Find which has more inhabitants, {x} or {y}.", "Of {x} and {y}, which place has more inhabitants?"],
    ("discovery year", "min"): ["Which was discovered earlier, {x} or {y}?", "Which element was found first, {x} or {y}?", "Was {x} or {y} discovered first?",
                                "{x} or {y}: which was discovered earlier?", "Which of {x} and {y} was discovered first?",
                                "Find which was discovered earlier, {x} or {y}.", "Of {x} and {y}, which element was discovered first?"],
}
# Computing with looked-up numbers: (relation, expression of the numbers a and b, word for the result, phrasings)
LOOKED_UP = {
    "people_difference": ("inhabitants", "{a}-{b}", "difference", [
        "How many more inhabitants does {x} have than {y}?", "By how many inhabitants is {x} larger than {y}?", "What is the difference in inhabitants between {x} and {y}?",
        "{x} has how many inhabitants more than {y}?", "Take the inhabitants of {y} from those of {x}. What is left?",
        "Find how many inhabitants more {x} has than {y}.", "From the inhabitants of {x} take those of {y}. How many are left?"]),
    "people_sum": ("inhabitants", "{a}+{b}", "sum", [
        "How many inhabitants do {x} and {y} have together?", "What is the sum of the inhabitants of {x} and {y}?", "Add the inhabitants of {x} and {y}.",
        "{x} and {y}: how many inhabitants in all?", "What is the total of inhabitants in {x} and {y}?",
        "Find the sum of the inhabitants that {x} and {y} have.", "{x} and {y} together have how many inhabitants?"]),
    "area_difference": ("area", "{a}-{b}", "difference", [
        "How many square km larger is {x} than {y}?", "By how many square km does the area of {x} exceed that of {y}?",
        "What is the difference in area between {x} and {y}?", "{x} has how many square km more than {y}?", "Take the area of {y} from that of {x}. What is left?",
        "Find by how many square km {x} is larger than {y}.", "From the area of {x} take that of {y}. How many square km are left?"]),
    "area_sum": ("area", "{a}+{b}", "sum", [
        "What is the area of {x} and {y} together?", "What is the sum of the areas of {x} and {y}?", "Add the areas of {x} and {y}.",
        "{x} and {y}: how many square km in all?", "What is the total area of {x} and {y}?",
        "Find the sum of the areas that {x} and {y} have.", "{x} and {y} together have how many square km?"]),
    "density": ("population area", "round({a}/{b})", "density", [
        "How many people per square km does {x} have, rounded?", "What is the population of {x} divided by its area, rounded?",
        "Divide the population of {x} by its area and round.", "What is the rounded population density of {x}?", "{x}: how many people live on a square km, rounded?",
        "Find the population density of {x}, rounded.", "Of {x}, what is the population divided by the area, rounded?"]),
    "year_difference": ("discovery year", "{a}-{b}", "difference", [
        "How many years after {y} was {x} discovered?", "How many years lie between the discoveries of {y} and {x}?", "{x} was discovered how many years after {y}?",
        "By how many years did the discovery of {y} precede that of {x}?", "What is the difference between the discovery years of {x} and {y}?",
        "Find how many years after {y} the discovery of {x} was.", "Between the discoveries of {y} and {x}, how many years are there?"]),
    "number_sum": ("atomic number", "{a}+{b}", "sum", [
        "What is the sum of the atomic numbers of {x} and {y}?", "Add the atomic numbers of {x} and {y}.", "What do the atomic numbers of {x} and {y} add up to?",
        "{x} and {y}: what is the total of their atomic numbers?", "What is the atomic number of {x} plus that of {y}?",
        "Find the sum of the atomic numbers that {x} and {y} have.", "{x} and {y} together have atomic numbers of what total?"]),
    "number_product": ("atomic number", "{a}*{b}", "product", [
        "What is the product of the atomic numbers of {x} and {y}?", "Multiply the atomic numbers of {x} and {y}.", "What is the atomic number of {x} times that of {y}?",
        "{x} and {y}: what is the product of their atomic numbers?", "What do you get when you multiply the atomic numbers of {x} and {y}?",
        "Find the product of the atomic numbers that {x} and {y} have.", "What is the product if you multiply the atomic numbers of {x} and {y}?"]),
    "melting_difference": ("melting point", "round({a}-{b},1)", "difference", [
        "How many kelvin higher does {x} melt than {y}?", "What is the difference between the melting points of {x} and {y}?",
        "By how many kelvin is the melting point of {x} above that of {y}?", "{x} melts how many kelvin above {y}?", "Take the melting point of {y} from that of {x}.",
        "Find how many kelvin the melting point of {x} is above that of {y}.", "From the melting point of {x} take that of {y}. How many kelvin are left?"]),
    "county_sum": ("counties", "{a}+{b}", "sum", [
        "How many counties do {x} and {y} have together?", "What is the sum of the counties of {x} and {y}?", "Add the numbers of counties of {x} and {y}.",
        "{x} and {y}: how many counties in all?", "What is the total of counties in {x} and {y}?",
        "Find the sum of the counties that {x} and {y} have.", "{x} and {y} together have how many counties?"]),
    "weight_multiple": ("atomic weight", "round({a}*{k},2)", "product", [
        "What is {k} times the atomic weight of {x}, to 2 decimals?", "Multiply the atomic weight of {x} by {k}, to 2 decimals.",
        "How heavy are {k} atoms of {x}, in atomic weights, to 2 decimals?", "{k} times the atomic weight of {x}, rounded to 2 decimals, is what?",
        "What do {k} atoms of {x} weigh in atomic weights, to 2 decimals?",
        "Find {k} times the atomic weight of {x}, to 2 decimals.", "To 2 decimals, what is the atomic weight of {x} times {k}?"]),
    "people_multiple": ("inhabitants", "{a}*{k}", "product", [
        "Each inhabitant of {x} pays {k} coins. How many coins is that?", "What is {k} times the number of inhabitants of {x}?",
        "Multiply the inhabitants of {x} by {k}.", "Everyone in {x} gets {k} apples. How many apples are needed?", "{k} times the inhabitants of {x} is how many?",
        "Find {k} times the number of inhabitants of {x}.", "Each inhabitant of {x} gets {k} coins. How many coins are needed?"]),
}

# Word problems: name -> (work steps as (word for the result, expression; {r} is the previous result), phrasings).
# {n} a person, {t} things; the letters are numbers drawn in build_tasks.draw.
STORIES = {
    "change": ([("cost", "{a}*{b}"), ("change", "{c}-{r}")], [
        "{n} buys {a} {t} at {b} coins each and pays with {c} coins. How much change is due?", "{a} {t} cost {b} coins each. {n} had {c} coins and buys them all. What is left?",
        "With {c} coins {n} buys {a} {t} for {b} coins apiece. How many coins remain?", "One of the {t} costs {b} coins. {n} takes {a} and pays {c} coins. What is the change?",
        "{n} owns {c} coins and spends {b} coins on each of {a} {t}. How many coins are left?",
        "{n} takes {a} {t} for {b} coins each and pays {c} coins. How many coins are left?", "Each of the {t} costs {b} coins. {n} buys {a} with {c} coins. How much change is that?"]),
    "boxes": ([("packed", "{a}*{b}"), ("rest", "{r}-{c}")], [
        "{n} has {a} boxes with {b} {t} each and sells {c} of them. How many {t} are left?", "There are {a} boxes of {b} {t}. {n} gives away {c}. How many {t} remain?",
        "{a} boxes hold {b} {t} each. {c} {t} break. How many are whole?", "{n} packs {b} {t} into each of {a} boxes, then takes out {c}. How many stay packed?",
        "A store gets {a} boxes of {b} {t} and sells {c} {t}. How many does it still have?",
        "{n} packs {a} boxes with {b} {t} each. {c} {t} break. How many {t} does {n} still have?", "A store has {a} boxes of {b} {t} and gives away {c} {t}. How many remain?"]),
    "share": ([("all", "{a}+{b}"), ("share", "{r}//{c}")], [
        "{n} puts {a} and {b} {t} together and shares them among {c} children. How many does each get?", "{a} {t} and {b} more are shared equally by {c} people. How many each?",
        "{c} friends share {a} {t} and another {b} equally. How many {t} does one get?", "{n} has {a} {t}, finds {b} and deals all out to {c} people. How many for each?",
        "Two piles of {a} and {b} {t} are split evenly over {c} bags. How many go in a bag?",
        "{n} shares {a} {t} and {b} more among {c} friends. How many {t} does each get?", "{a} and {b} {t} are put together and split by {c} children. How many for each?"]),
    "trip": ([("way out", "{a}*{b}"), ("whole way", "{r}+{c}")], [
        "{n} drives {a} km a day for {b} days and then {c} km more. How many km is that?", "On each of {b} days {n} rides {a} km, and {c} km on the last. How far in all?",
        "{n} walks {a} km daily for {b} days, then another {c} km. What is the total in km?", "A trip has {b} days of {a} km and one of {c} km. How long is it in km?",
        "For {b} days {n} sails {a} km a day; then {c} km are left. How long is the route in km?",
        "{n} rides {a} km a day. After {b} days {c} km are left. How many km is the trip in all?", "A route has {b} days of {a} km and then {c} km more. What is the total in km?"]),
    "wages": ([("first pay", "{a}*{b}"), ("all pay", "{r}+{c}*{d}")], [
        "{n} works {a} hours at {b} coins and {c} hours at {d} coins. What is the pay?", "For {a} hours {n} earns {b} coins an hour, for {c} hours {d} coins. How much in all?",
        "{n} gets {b} coins an hour for {a} hours, then {d} coins for {c} hours. What is the sum?", "{a} hours at {b} coins and {c} hours at {d} coins: what does {n} earn?",
        "{n} is paid {b} coins for each of {a} hours and {d} for each of {c}. What is the total?",
        "{n} earns {b} coins an hour for {a} hours and {d} coins for {c} hours. What is the total pay?", "What does {n} get for {a} hours at {b} coins an hour and {c} hours at {d} coins?"]),
    "fence": ([("length", "2*({a}+{b})"), ("price", "{r}*{c}")], [
        "A field is {a} m by {b} m. A metre of fence costs {c} coins. What does the fence around it cost?", "{n} fences a garden of {a} m by {b} m at {c} coins a metre. What is the price?",
        "What does a fence around {a} m by {b} m cost if a metre costs {c} coins?", "The sides of a yard are {a} m and {b} m. Its fence costs {c} coins a metre. What is due?",
        "{n} buys fence for a plot of {a} m by {b} m, {c} coins per metre. How many coins is that?",
        "A garden of {a} m by {b} m gets a fence at {c} coins per metre. What does {n} pay?", "A metre of fence costs {c} coins. What is the price of the fence around a plot of {a} m by {b} m?"]),
    "discount": ([("discount", "{a}*{b}//100"), ("price", "{a}-{r}")], [
        "The price of {t} is {a} coins, less {b} percent. What is to be paid?", "{n} buys {t} for {a} coins with {b} percent off. What does {n} pay?",
        "{t} cost {a} coins. They get {b} percent cheaper. What is the new price?", "A bill of {a} coins for {t} is cut by {b} percent. How much is left to pay?",
        "With a discount of {b} percent, what do {t} for {a} coins cost?",
        "{t} cost {a} coins, with {b} percent off. How much does {n} pay?", "A price of {a} coins for {t} gets {b} percent cheaper. What is to be paid?"]),
    "average": ([("sum", "{a}+{b}+{c}+{d}"), ("average", "{r}/4")], [
        "{n} counts {a}, {b}, {c} and {d} {t} on four days. What is the average?", "What is the average of {a}, {b}, {c} and {d} {t}?",
        "Four bags hold {a}, {b}, {c} and {d} {t}. How many is that on average?", "{n} sold {a}, {b}, {c} and {d} {t} in four weeks. What is the mean per week?",
        "On four days {n} picks {a}, {b}, {c} and {d} {t}. What is the daily average?",
        "On four days {n} sold {a}, {b}, {c} and {d} {t}. What is the mean?", "What is the average if four bags hold {a}, {b}, {c} and {d} {t}?"]),
    "tank": ([("loss", "{b}*{c}"), ("rest", "{a}-{r}+{d}")], [
        "A tank holds {a} litres, loses {b} litres an hour for {c} hours and gets {d} back. How many litres now?", "From {a} litres, {b} leak each hour for {c} hours; {d} are added. What is left?",
        "{n} has {a} litres of water, uses {b} a day for {c} days and adds {d}. How many litres are there?", "{a} litres lose {b} litres {c} times and gain {d} once. What is the amount?",
        "A pool of {a} litres loses {b} litres a day. After {c} days {n} pours in {d}. How many litres?",
        "A pool holds {a} litres, loses {b} litres a day for {c} days and gets {d}. What is left?", "{n} has {a} litres, loses {b} each hour for {c} hours and adds {d}. How many litres are left?"]),
    "savings": ([("saved", "{b}*{c}"), ("left", "{a}+{r}-{d}")], [
        "{n} has {a} coins, saves {b} a week for {c} weeks and then spends {d}. How many coins are left?", "To {a} coins {n} adds {b} coins in each of {c} weeks, then pays {d}. What is left?",
        "{n} starts with {a} coins, earns {b} a week for {c} weeks and buys {t} for {d}. What remains?", "After saving {b} coins for {c} weeks on top of {a}, {n} spends {d}. What is left?",
        "{n} owns {a} coins, puts by {b} a week. After {c} weeks {t} cost {d} coins. What is left?",
        "{n} has {a} coins and earns {b} a week. After {c} weeks {n} spends {d}. What remains?", "{n} starts with {a} coins, adds {b} coins a week for {c} weeks, then pays {d}. How many coins are left?"]),
    "seats": ([("seats", "{a}*{b}*{c}"), ("free seats", "{r}-{d}")], [
        "A hall has {a} blocks of {b} rows with {c} seats. {d} seats are taken. How many are free?", "{a} blocks, {b} rows in each, {c} seats in a row; {d} are sold. How many are left?",
        "In {a} blocks of {b} rows with {c} seats each, {d} seats are broken. How many are good?", "{n} counts {a} blocks of {b} rows of {c} seats, {d} of them full. How many are empty?",
        "How many seats are free in {a} blocks of {b} rows with {c} seats if {d} people sit?",
        "Of {a} blocks of {b} rows with {c} seats, {d} seats are sold. How many seats are left?", "{n} has {a} blocks with {b} rows of {c} seats; {d} are taken. How many are free?"]),
    "minutes": ([("minutes", "{a}*60+{b}"), ("rest", "{r}-{c}")], [
        "A film lasts {a} hours and {b} minutes. {n} has seen {c} minutes. How many minutes are left?", "Of {a} hours and {b} minutes, {c} minutes are over. How many minutes remain?",
        "{n} must work {a} hours and {b} minutes and has done {c} minutes. How many are left?", "A trip takes {a} hours {b} minutes. After {c} minutes, how many minutes are left?",
        "{n} practises {a} hours and {b} minutes, but {c} minutes were breaks. How many minutes count?",
        "{n} has {a} hours and {b} minutes. {c} minutes are over. How many minutes are left?", "A trip lasts {a} hours {b} minutes. {n} has done {c} minutes. How many minutes remain?"]),
    "recipe": ([("for one", "{b}//{a}"), ("needed", "{r}*{c}")], [
        "{a} cakes need {b} g of sugar. How many g do {c} cakes need?", "For {a} loaves {n} takes {b} g of flour. How many g are needed for {c}?",
        "{n} uses {b} g of butter for {a} pies. How many g go into {c} pies?", "{b} g of rice feed {a} people. How many g feed {c} people?",
        "If {a} pots take {b} g of soil, how many g do {c} pots take?",
        "{n} takes {b} g of flour for {a} cakes. How many g do {c} cakes need?", "{a} pies need {b} g of butter. How many g are needed for {c} pies?"]),
    "two_shops": ([("first cost", "{a}*{b}"), ("difference", "{r}-{c}*{d}")], [
        "{n} buys {a} {t} at {b} coins; a friend buys {c} at {d} coins. How much more does {n} pay?", "{a} {t} at {b} coins or {c} at {d} coins: how many coins more is the first?",
        "One shop asks {b} coins for each of {a} {t}, another {d} for each of {c}. What is the difference?", "How much more are {a} {t} at {b} coins than {c} {t} at {d} coins?",
        "{n} sells {a} {t} for {b} coins each and had bought {c} for {d} each. What is the gain?",
        "{n} buys {a} {t} at {b} coins and sells {c} at {d} coins. What is the difference?", "How many coins more are {a} {t} for {b} coins each than {c} for {d} each?"]),
    "doubling": ([("grown", "{a}*2**{b}"), ("left", "{r}-{c}")], [
        "{a} {t} double every day for {b} days, then {c} are lost. How many are left?", "{n} has {a} {t}. They double {b} times, then {c} go. How many remain?",
        "A stock of {a} {t} doubles {b} times and {c} are sold. How many are left?", "{a} cells double each hour. After {b} hours {c} die. How many live?",
        "{n} doubles {a} coins {b} times and spends {c}. How many coins are left?",
        "{n} has {a} cells. They double {b} times and {c} die. How many are left?", "{a} {t} double {b} times, then {n} spends {c}. How many remain?"]),
    "speed": ([("all km", "{a}+{b}"), ("speed", "round({r}/{c},1)")], [
        "{n} rides {a} km and {b} km in {c} hours. What is the speed in km per hour, to 1 decimal?", "{a} km and then {b} km take {c} hours. How many km per hour is that, to 1 decimal?",
        "In {c} hours {n} drives {a} km and {b} km. What is the mean speed, to 1 decimal?", "A train makes {a} and {b} km in {c} hours. What is its speed, to 1 decimal?",
        "{n} needs {c} hours for {a} km and {b} km. How fast is that in km an hour, to 1 decimal?",
        "{n} makes {a} km and {b} km in {c} hours. How many km per hour is that, to 1 decimal?", "A train needs {c} hours for {a} km and then {b} km. What is the speed, to 1 decimal?"]),
}
NAMES = "Mia Ben Lea Tom Eva Max Ida Leo Ana Jan Ivy Sam Zoe Kai Amy Rob Uma Ned Joy Pat Liv Gus Fay Hal Kim Ron Peg Abe Dot Vic Nan Lou Bea Roy Sue Ted Ada Jim May Lee".split()
THINGS = """apples pens books cups plates stamps shells nuts beads cards pears eggs lamps keys hats bricks ropes coats masks dolls drums flags kites locks maps
medals nets pans pots rings rugs seeds socks spoons tents tiles tools toys vases wheels""".split()
