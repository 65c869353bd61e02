"""The tables of data/build_tasks.py: how facts are read, asked for and computed with. A table is data: no code here.

Of the seven phrasings in each list the first five are trained, the last two occur in the test alone."""

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

# Question frames. {n}: the relation's word, {x}: an entity or its description. Five are trained, the last two are for the test alone.
ONE = ["What is the {n} of {x}?", "Which {n} does {x} have?", "Find the {n} of {x}.", "Tell me the {n} of {x}.", "For {x}, what is the {n}?",
       "I am looking for the {n} of {x}. What is it?", "Can you say which {n} belongs to {x}?"]
# Descriptions of an entity by another one, same order.
BY = {
    "city": ["the country where {x} lies", "the country of {x}", "the country to which {x} belongs", "the country with the city {x}", "the country that {x} is in",
             "the nation around {x}", "the land in which one finds {x}"],
    "currency": ["the country that uses the {x}", "the country of the {x}", "the country with the currency {x}", "the country that pays in {x}",
                 "the country whose currency is the {x}", "the nation with the {x} in its wallets", "the land where prices are in {x}"],
    "county": ["the state where {x} lies", "the state of {x}", "the state to which {x} belongs", "the US state with {x}", "the state that {x} is in",
               "the American state around {x}", "the part of the USA that holds {x}"],
    "atomic number": ["the element with atomic number {x}", "the element of atomic number {x}", "element number {x}",
                      "the element whose atomic number is {x}", "the substance with atomic number {x}",
                      "the element that has {x} as its atomic number", "the one element of the table at atomic number {x}"],
    "symbol": ["the element with symbol {x}", "the element of symbol {x}", "the chemical element {x}", "the element whose symbol is {x}", "the element written {x}",
               "the element that chemists write as {x}", "the one element of the table marked {x}"],
}
BY |= {
    "calling code": ["the country with calling code {x}", "the country of calling code {x}", "the country whose calling code is {x}", "the country that has calling code {x}",
                     "the country that uses calling code {x}", "the nation one rings with calling code {x}", "the land behind calling code {x}"],
    "FIPS code": ["the state with FIPS code {x}", "the state of FIPS code {x}", "the state whose FIPS code is {x}", "the state that has FIPS code {x}", "the US state of FIPS code {x}",
                  "the part of the USA listed under FIPS code {x}", "the American state filed as FIPS code {x}"],
    "protons": ["the element with {x} protons", "the element whose atoms have {x} protons", "the element of {x} protons", "the chemical element with {x} protons",
                "the element that has {x} protons", "the substance with {x} protons in its core", "the one element of the table that counts {x} protons"],
    "phone prefix": ["the country with phone prefix {x}", "the country of phone prefix {x}", "the country whose phone prefix is {x}", "the country that has phone prefix {x}",
                     "the country that uses phone prefix {x}", "the nation one rings with phone prefix {x}", "the land behind phone prefix {x}"],
    "federal number": ["the state with federal number {x}", "the state of federal number {x}", "the state whose federal number is {x}", "the state that has federal number {x}",
                       "the US state of federal number {x}", "the part of the USA listed under federal number {x}", "the American state filed as federal number {x}"],
}
COMPARE = {
    ("population", "max"): ["Which has more people, {x} or {y}?", "Which country has the larger population, {x} or {y}?", "Is the population of {x} or of {y} larger?",
                            "{x} or {y}: which has the larger population?", "Which of {x} and {y} has more people?",
                            "Of the countries {x} and {y}, which one is home to more people?", "Do more people live in {x} or in {y}?"],
    ("area", "max"): ["Which is larger in area, {x} or {y}?", "Which country has the larger area, {x} or {y}?", "Is the area of {x} or of {y} larger?",
                      "{x} or {y}: which covers the larger area?", "Which of {x} and {y} has the larger area?",
                      "Of the countries {x} and {y}, which one covers more land?", "Does {x} or {y} take up more room on the map?"],
    ("inhabitants", "max"): ["Which has more inhabitants, {x} or {y}?", "Which place is larger by inhabitants, {x} or {y}?", "Are there more inhabitants in {x} or in {y}?",
                             "{x} or {y}: which has more inhabitants?", "Which of {x} and {y} has more inhabitants?",
                             "Of the places {x} and {y}, which one is home to more people?", "Do more people live in {x} or in {y}, the two places?"],
    ("discovery year", "min"): ["Which was discovered earlier, {x} or {y}?", "Which element was found first, {x} or {y}?", "Was {x} or {y} discovered first?",
                                "{x} or {y}: which was discovered earlier?", "Which of {x} and {y} was discovered first?",
                                "Of the elements {x} and {y}, which one has been known for longer?", "Did chemists know {x} or {y} first?"],
}
# Computing with looked-up numbers: (relation, expression of the numbers a and b, word for the result, phrasings)
LOOKED_UP = {
    "people_difference": ("inhabitants", "{a}-{b}", "difference", [
        "How many more inhabitants does {x} have than {y}?", "By how many inhabitants is {x} larger than {y}?", "What is the difference in inhabitants between {x} and {y}?",
        "{x} has how many inhabitants more than {y}?", "Take the inhabitants of {y} from those of {x}. What is left?",
        "How far is {x} ahead of {y} in inhabitants?", "If {y} had to catch up with {x}, how many inhabitants would it need?"]),
    "people_sum": ("inhabitants", "{a}+{b}", "sum", [
        "How many inhabitants do {x} and {y} have together?", "What is the sum of the inhabitants of {x} and {y}?", "Add the inhabitants of {x} and {y}.",
        "{x} and {y}: how many inhabitants in all?", "What is the total of inhabitants in {x} and {y}?",
        "If {x} and {y} merged, how many inhabitants would they have?", "Count everyone in {x} and in {y}. How many is that?"]),
    "area_difference": ("area", "{a}-{b}", "difference", [
        "How many square km larger is {x} than {y}?", "By how many square km does the area of {x} exceed that of {y}?",
        "What is the difference in area between {x} and {y}?", "{x} has how many square km more than {y}?", "Take the area of {y} from that of {x}. What is left?",
        "How much more land does {x} cover than {y}, in square km?", "If {y} lay inside {x}, how many square km would be left over?"]),
    "area_sum": ("area", "{a}+{b}", "sum", [
        "What is the area of {x} and {y} together?", "What is the sum of the areas of {x} and {y}?", "Add the areas of {x} and {y}.",
        "{x} and {y}: how many square km in all?", "What is the total area of {x} and {y}?",
        "If {x} and {y} merged, how many square km would they cover?", "Put {x} and {y} side by side: how many square km is that?"]),
    "density": ("population area", "round({a}/{b})", "density", [
        "How many people per square km does {x} have, rounded?", "What is the population of {x} divided by its area, rounded?",
        "Divide the population of {x} by its area and round.", "What is the rounded population density of {x}?", "{x}: how many people live on a square km, rounded?",
        "On one square km of {x}, how many people live on average, rounded?", "How crowded is {x}, in people per square km, rounded?"]),
    "year_difference": ("discovery year", "{a}-{b}", "difference", [
        "How many years after {y} was {x} discovered?", "How many years lie between the discoveries of {y} and {x}?", "{x} was discovered how many years after {y}?",
        "By how many years did the discovery of {y} precede that of {x}?", "What is the difference between the discovery years of {x} and {y}?",
        "After {y} was found, how many years did it take until {x} was?", "How long did chemists know {y} but not {x}, in years?"]),
    "number_sum": ("atomic number", "{a}+{b}", "sum", [
        "What is the sum of the atomic numbers of {x} and {y}?", "Add the atomic numbers of {x} and {y}.", "What do the atomic numbers of {x} and {y} add up to?",
        "{x} and {y}: what is the total of their atomic numbers?", "What is the atomic number of {x} plus that of {y}?",
        "How many protons do one atom of {x} and one of {y} have together?", "Which number results if the atomic numbers of {x} and {y} are put together?"]),
    "number_product": ("atomic number", "{a}*{b}", "product", [
        "What is the product of the atomic numbers of {x} and {y}?", "Multiply the atomic numbers of {x} and {y}.", "What is the atomic number of {x} times that of {y}?",
        "{x} and {y}: what is the product of their atomic numbers?", "What do you get when you multiply the atomic numbers of {x} and {y}?",
        "Times one another, what do the atomic numbers of {x} and {y} give?", "Which number is the atomic number of {x} taken as often as that of {y} says?"]),
    "melting_difference": ("melting point", "round({a}-{b},1)", "difference", [
        "How many kelvin higher does {x} melt than {y}?", "What is the difference between the melting points of {x} and {y}?",
        "By how many kelvin is the melting point of {x} above that of {y}?", "{x} melts how many kelvin above {y}?", "Take the melting point of {y} from that of {x}.",
        "After {y} has melted, how many kelvin are missing until {x} does?", "How far apart, in kelvin, do {x} and {y} turn liquid?"]),
    "county_sum": ("counties", "{a}+{b}", "sum", [
        "How many counties do {x} and {y} have together?", "What is the sum of the counties of {x} and {y}?", "Add the numbers of counties of {x} and {y}.",
        "{x} and {y}: how many counties in all?", "What is the total of counties in {x} and {y}?",
        "If {x} and {y} merged, how many counties would the new state have?", "Count every county of {x} and of {y}. How many is that?"]),
    "weight_multiple": ("atomic weight", "round({a}*{k},2)", "product", [
        "What is {k} times the atomic weight of {x}, to 2 decimals?", "Multiply the atomic weight of {x} by {k}, to 2 decimals.",
        "How heavy are {k} atoms of {x}, in atomic weights, to 2 decimals?", "{k} times the atomic weight of {x}, rounded to 2 decimals, is what?",
        "What do {k} atoms of {x} weigh in atomic weights, to 2 decimals?",
        "Take the atomic weight of {x} and make it {k}-fold. To 2 decimals?", "A molecule holds {k} atoms of {x}. Their weight, to 2 decimals?"]),
    "people_multiple": ("inhabitants", "{a}*{k}", "product", [
        "Each inhabitant of {x} pays {k} coins. How many coins is that?", "What is {k} times the number of inhabitants of {x}?",
        "Multiply the inhabitants of {x} by {k}.", "Everyone in {x} gets {k} apples. How many apples are needed?", "{k} times the inhabitants of {x} is how many?",
        "If {x} had {k} times its inhabitants, how many would live there?", "All inhabitants of {x} plant {k} trees each. How many trees grow?"]),
}

# Word problems: name -> (work steps as (word for the result, expression; {r} is the previous result), phrasings).
# {n} a person, {t} things; the letters are numbers drawn in build_tasks.draw.
STORIES = {
    "change": ([("cost", "{a}*{b}"), ("change", "{c}-{r}")], [
        "{n} buys {a} {t} at {b} coins each and pays with {c} coins. How much change is due?", "{a} {t} cost {b} coins each. {n} had {c} coins and buys them all. What is left?",
        "With {c} coins {n} buys {a} {t} for {b} coins apiece. How many coins remain?", "One of the {t} costs {b} coins. {n} takes {a} and pays {c} coins. What is the change?",
        "{n} owns {c} coins and spends {b} coins on each of {a} {t}. How many coins are left?",
        "A shop hands {n} {a} {t} priced {b} coins per piece. {c} coins go over the counter. What comes back?", "Out of a purse of {c} coins, {n} pays for {a} {t} at {b} coins. What stays in it?"]),
    "boxes": ([("packed", "{a}*{b}"), ("rest", "{r}-{c}")], [
        "{n} has {a} boxes with {b} {t} each and sells {c} of them. How many {t} are left?", "There are {a} boxes of {b} {t}. {n} gives away {c}. How many {t} remain?",
        "{a} boxes hold {b} {t} each. {c} {t} break. How many are whole?", "{n} packs {b} {t} into each of {a} boxes, then takes out {c}. How many stay packed?",
        "A store gets {a} boxes of {b} {t} and sells {c} {t}. How many does it still have?",
        "Of {a} full boxes, {b} {t} in every one, {n} loses {c} {t}. What is the stock now?", "{c} {t} go missing from {a} boxes that held {b} each. How many are there still?"]),
    "share": ([("all", "{a}+{b}"), ("share", "{r}//{c}")], [
        "{n} puts {a} and {b} {t} together and shares them among {c} children. How many does each get?", "{a} {t} and {b} more are shared equally by {c} people. How many each?",
        "{c} friends share {a} {t} and another {b} equally. How many {t} does one get?", "{n} has {a} {t}, finds {b} and deals all out to {c} people. How many for each?",
        "Two piles of {a} and {b} {t} are split evenly over {c} bags. How many go in a bag?",
        "{n} merges {a} with {b} {t}; {c} neighbours each take the same part. How large is one part?", "From {a} plus {b} {t}, {c} equal heaps are made. What does a heap hold?"]),
    "trip": ([("way out", "{a}*{b}"), ("whole way", "{r}+{c}")], [
        "{n} drives {a} km a day for {b} days and then {c} km more. How many km is that?", "On each of {b} days {n} rides {a} km, and {c} km on the last. How far in all?",
        "{n} walks {a} km daily for {b} days, then another {c} km. What is the total in km?", "A trip has {b} days of {a} km and one of {c} km. How long is it in km?",
        "For {b} days {n} sails {a} km a day; then {c} km are left. How long is the route in km?",
        "{n} covers {a} km between dawn and dusk, {b} times, and adds {c} km. Which distance is that?", "{b} stages of {a} km, a final one of {c} km: how many km does {n} travel?"]),
    "wages": ([("first pay", "{a}*{b}"), ("all pay", "{r}+{c}*{d}")], [
        "{n} works {a} hours at {b} coins and {c} hours at {d} coins. What is the pay?", "For {a} hours {n} earns {b} coins an hour, for {c} hours {d} coins. How much in all?",
        "{n} gets {b} coins an hour for {a} hours, then {d} coins for {c} hours. What is the sum?", "{a} hours at {b} coins and {c} hours at {d} coins: what does {n} earn?",
        "{n} is paid {b} coins for each of {a} hours and {d} for each of {c}. What is the total?",
        "An hour brings {n} {b} coins on {a} occasions, {d} coins on {c} others. What comes together?", "{n} counts the wage: {a} hours of {b} coins each, {c} more of {d} coins. The result?"]),
    "fence": ([("length", "2*({a}+{b})"), ("price", "{r}*{c}")], [
        "A field is {a} m by {b} m. A metre of fence costs {c} coins. What does the fence around it cost?", "{n} fences a garden of {a} m by {b} m at {c} coins a metre. What is the price?",
        "What does a fence around {a} m by {b} m cost if a metre costs {c} coins?", "The sides of a yard are {a} m and {b} m. Its fence costs {c} coins a metre. What is due?",
        "{n} buys fence for a plot of {a} m by {b} m, {c} coins per metre. How many coins is that?",
        "All around a meadow, {a} m long and {b} m wide, runs a fence of {c} coins a metre. Its price?", "{n} encloses {a} m times {b} m of land. Each metre takes {c} coins. What is the bill?"]),
    "discount": ([("discount", "{a}*{b}//100"), ("price", "{a}-{r}")], [
        "The price of {t} is {a} coins, less {b} percent. What is to be paid?", "{n} buys {t} for {a} coins with {b} percent off. What does {n} pay?",
        "{t} cost {a} coins. They get {b} percent cheaper. What is the new price?", "A bill of {a} coins for {t} is cut by {b} percent. How much is left to pay?",
        "With a discount of {b} percent, what do {t} for {a} coins cost?",
        "{n} haggles {b} percent off {t} marked {a} coins. What changes hands?", "Marked at {a} coins, the {t} go for {b} percent under that. For how much?"]),
    "average": ([("sum", "{a}+{b}+{c}+{d}"), ("average", "{r}/4")], [
        "{n} counts {a}, {b}, {c} and {d} {t} on four days. What is the average?", "What is the average of {a}, {b}, {c} and {d} {t}?",
        "Four bags hold {a}, {b}, {c} and {d} {t}. How many is that on average?", "{n} sold {a}, {b}, {c} and {d} {t} in four weeks. What is the mean per week?",
        "On four days {n} picks {a}, {b}, {c} and {d} {t}. What is the daily average?",
        "Evened out over four days, how many {t} are {a}, {b}, {c} and {d} per day?", "{n} levels four heaps of {a}, {b}, {c} and {d} {t}. How high is each then?"]),
    "tank": ([("loss", "{b}*{c}"), ("rest", "{a}-{r}+{d}")], [
        "A tank holds {a} litres, loses {b} litres an hour for {c} hours and gets {d} back. How many litres now?", "From {a} litres, {b} leak each hour for {c} hours; {d} are added. What is left?",
        "{n} has {a} litres of water, uses {b} a day for {c} days and adds {d}. How many litres are there?", "{a} litres lose {b} litres {c} times and gain {d} once. What is the amount?",
        "A pool of {a} litres loses {b} litres a day. After {c} days {n} pours in {d}. How many litres?",
        "Every hour {b} of {a} litres drain away. {c} hours on, {d} litres flow in. What is the level?", "{c} times {n} draws {b} litres from {a}, then tops up {d}. What does the barrel hold?"]),
    "savings": ([("saved", "{b}*{c}"), ("left", "{a}+{r}-{d}")], [
        "{n} has {a} coins, saves {b} a week for {c} weeks and then spends {d}. How many coins are left?", "To {a} coins {n} adds {b} coins in each of {c} weeks, then pays {d}. What is left?",
        "{n} starts with {a} coins, earns {b} a week for {c} weeks and buys {t} for {d}. What remains?", "After saving {b} coins for {c} weeks on top of {a}, {n} spends {d}. What is left?",
        "{n} owns {a} coins, puts by {b} a week. After {c} weeks {t} cost {d} coins. What is left?",
        "A jar of {a} coins grows by {b} on {c} Sundays; {n} takes out {d}. How full is it?", "{n}: {a} coins at first, {c} deposits of {b}, one withdrawal of {d}. The balance?"]),
    "seats": ([("seats", "{a}*{b}*{c}"), ("free seats", "{r}-{d}")], [
        "A hall has {a} blocks of {b} rows with {c} seats. {d} seats are taken. How many are free?", "{a} blocks, {b} rows in each, {c} seats in a row; {d} are sold. How many are left?",
        "In {a} blocks of {b} rows with {c} seats each, {d} seats are broken. How many are good?", "{n} counts {a} blocks of {b} rows of {c} seats, {d} of them full. How many are empty?",
        "How many seats are free in {a} blocks of {b} rows with {c} seats if {d} people sit?",
        "{d} guests enter a stadium: {a} blocks, each {b} rows, each {c} seats. How many stay unused?", "{a} times {b} rows hold {c} seats apiece. {d} tickets are gone. What can still be sold?"]),
    "minutes": ([("minutes", "{a}*60+{b}"), ("rest", "{r}-{c}")], [
        "A film lasts {a} hours and {b} minutes. {n} has seen {c} minutes. How many minutes are left?", "Of {a} hours and {b} minutes, {c} minutes are over. How many minutes remain?",
        "{n} must work {a} hours and {b} minutes and has done {c} minutes. How many are left?", "A trip takes {a} hours {b} minutes. After {c} minutes, how many minutes are left?",
        "{n} practises {a} hours and {b} minutes, but {c} minutes were breaks. How many minutes count?",
        "After {c} minutes of {a} hours and {b} minutes {n} stops. How many minutes are unused?", "{a} hours plus {b} minutes are planned, {c} minutes gone. What is still ahead, in minutes?"]),
    "recipe": ([("for one", "{b}//{a}"), ("needed", "{r}*{c}")], [
        "{a} cakes need {b} g of sugar. How many g do {c} cakes need?", "For {a} loaves {n} takes {b} g of flour. How many g are needed for {c}?",
        "{n} uses {b} g of butter for {a} pies. How many g go into {c} pies?", "{b} g of rice feed {a} people. How many g feed {c} people?",
        "If {a} pots take {b} g of soil, how many g do {c} pots take?",
        "{n} mixes {b} g for {a} portions. {c} portions are ordered. How many g is that?", "A recipe says {b} g, enough for {a}. {c} will come. Which weight in g is right?"]),
    "two_shops": ([("first cost", "{a}*{b}"), ("difference", "{r}-{c}*{d}")], [
        "{n} buys {a} {t} at {b} coins; a friend buys {c} at {d} coins. How much more does {n} pay?", "{a} {t} at {b} coins or {c} at {d} coins: how many coins more is the first?",
        "One shop asks {b} coins for each of {a} {t}, another {d} for each of {c}. What is the difference?", "How much more are {a} {t} at {b} coins than {c} {t} at {d} coins?",
        "{n} sells {a} {t} for {b} coins each and had bought {c} for {d} each. What is the gain?",
        "Set {a} {t} of {b} coins against {c} of {d} coins. By how much is the first dearer?", "{n} takes in {b} coins {a} times, pays out {d} coins {c} times. What stays?"]),
    "doubling": ([("grown", "{a}*2**{b}"), ("left", "{r}-{c}")], [
        "{a} {t} double every day for {b} days, then {c} are lost. How many are left?", "{n} has {a} {t}. They double {b} times, then {c} go. How many remain?",
        "A stock of {a} {t} doubles {b} times and {c} are sold. How many are left?", "{a} cells double each hour. After {b} hours {c} die. How many live?",
        "{n} doubles {a} coins {b} times and spends {c}. How many coins are left?",
        "Twice as many each week: {a} {t} at first, {b} weeks, then minus {c}. How many?", "{b} doublings turn {a} {t} into a crowd, of which {c} leave. What stays?"]),
    "speed": ([("all km", "{a}+{b}"), ("speed", "round({r}/{c},1)")], [
        "{n} rides {a} km and {b} km in {c} hours. What is the speed in km per hour, to 1 decimal?", "{a} km and then {b} km take {c} hours. How many km per hour is that, to 1 decimal?",
        "In {c} hours {n} drives {a} km and {b} km. What is the mean speed, to 1 decimal?", "A train makes {a} and {b} km in {c} hours. What is its speed, to 1 decimal?",
        "{n} needs {c} hours for {a} km and {b} km. How fast is that in km an hour, to 1 decimal?",
        "{c} hours see {n} travel {a} km, then {b}. Per hour, how many km, to 1 decimal?", "How many km go into one hour, to 1 decimal, if {a} and {b} km fill {c} hours?"]),
}
NAMES = "Mia Ben Lea Tom Eva Max Ida Leo Ana Jan Ivy Sam Zoe Kai Amy Rob Uma Ned Joy Pat Liv Gus Fay Hal Kim Ron Peg Abe Dot Vic Nan Lou Bea Roy Sue Ted Ada Jim May Lee".split()
THINGS = """apples pens books cups plates stamps shells nuts beads cards pears eggs lamps keys hats bricks ropes coats masks dolls drums flags kites locks maps
medals nets pans pots rings rugs seeds socks spoons tents tiles tools toys vases wheels""".split()
