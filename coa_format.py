"""The Chain-of-Agents language: who speaks, in which tags, and who wrote which character.

One model plays every agent of a multi-agent system in one text (arXiv 2508.13167, section 3.1, eq. 4: S_t = f(S_{t-1}, phi_{t-1}, o_{t-1})).
The role phi_t is a tag, the state S_t is the text so far, the observation o_t is a block that the environment writes into it:

    <think>I look for the country first.</think>
    <wiki_search>Kathmandu country</wiki_search>
    <observation>
    Doc 1 (Title: "Kathmandu") Kathmandu is the capital of Nepal.
    </observation>

    <think>Now I know it.</think>
    <answer>Nepal</answer>

Everything else in the project reads and writes this text through the functions here, because one rule decides what is trained:
**a token is trained if the model wrote it** (eq. 7), found by reading the text and never by searching for token patterns.

Layout. Blocks stand on lines of their own, joined by one newline. An observation is newline, `<observation>`, newline, text, newline,
`</observation>`, two newlines, and the environment writes all of it. A turn of the model ends with the closing tag of a call, so all white space
(space, tab, CR, LF) between that tag and the observation, and all that follows the observation, is the environment's, be it no newline or
three (AFM's data has every variant). In a rollout the model's last token may hold more than the tag (`>\\n` is one token in real vocabularies): those
ids stay the model's, and the environment leaves out the newline that is already there. Rollouts are trained on their ids; nobody reads them again.

Reading (`parse`), for any string at all, in one pass:
 * A tag is `<name>` or `</name>` in lower case with a known name, nothing else: `<Think>`, `<think >` and `<foo>` are text.
 * The first opening tag outside a block opens one. Inside it, a closing tag pairs with the *nearest* opening tag of its own name; if that is not
   the tag that opened the block, the block ends there unclosed: `<web_search>a <web_search>b</web_search>` calls "b",
   `<think>so <answer>4</answer>` answers "4". An opening tag that never meets its closing tag, or a closing tag that never had an opening one, is
   text: a "mention" inside a block, a "stray" outside.
 * `code` and `answer` hold programs: no other tag counts inside them, and inside a ``` fence not even their own, unless it begins a line
   (a forgotten closing fence) or follows a ```: `print("</code>")` is code.
 * `<observation>` always opens, even in an unclosed block, and ends at the first `</observation>`; only inside `code` and `answer` must it begin a
   line. Unclosed, it reaches to the end of the text. A training row with an observation tag anywhere else is refused (`reject_reason`).
 * White space between blocks belongs to the block before it, or to an observation after it. Spans cover the text exactly once.

Left out: tag attributes and agents inside agents, which the paper does not have; few-shot examples in prompts.

    python coa_format.py                         show the first rows of the built-in demo's SFT data
    python coa_format.py FILE.jsonl --row 3      any SFT file (`output`) or trace file (`text`): what is trained, what is not, what is wrong
"""
import argparse
import os
import re
import signal
import sys
from dataclasses import dataclass

from hf import InputError, exit_on_input_error, read_rows

PROMPT, SAMPLED, ENVIRONMENT = 0, 1, 2        # who wrote a token: the `source` of an episode or a training row
WHITE = " \t\r\n"

# ---------------------------------------------------------------------------------------------------------------------
# Agents. A tag is an agent; its line here is what the full prompt says about it.

ROLES = {
    "think": "You weigh what is known and decide which agent acts next, and why.",
    "plan": "Splits the task into a short ordered list of steps, each small enough for one agent.",
    "reflection": "Looks back at the last steps: what was found, what contradicts it, what is still missing.",
    "suggested_answer": "A first complete answer, offered for checking.",
    "double_check": "Judges how well the suggested answer fits the task and ends with a line `The score is N.`: "
                    "4 correct, 3 small flaws, 2 mostly wrong, 1 wrong.",
}
FINAL = {"answer": "The final answer, short and definite. Several parts are separated by `|`."}
TOOLS = {
    "wiki_search": "Finds encyclopedia passages. Write one plain query.",
    "web_search": "Searches the web; returns titles, addresses and snippets. Write one plain query.",
    "crawl_page": "Opens web pages. Write one address, or several separated by `|`.",
    "code": "Runs a Python program and returns what it prints. Write one fenced block labelled `py`; a second one labelled `sh` may hold its standard input.",
    "visual_inspector": "Looks at an image. Write a fenced `json` block with `file_path` and, if you like, `question`.",
}
CRITERIA = ("information_conflict", "tool_effectiveness", "trajectory_monitoring")    # a reflection grades each good, average or poor
VERBATIM = ("code", "answer", "observation")                                          # other tags are text in these
OWN_LINES = ("code", "observation")                                                   # their text stands on lines of its own


@dataclass(frozen=True)
class Profile:
    """The agents that a prompt declares, in its order, and how they follow each other.

    `follow`: agent -> agents that may come next, think and observations left out; "tool" is any tool of the profile, "" the start of the chain.
    `bare`: agents that need no think just before them. `first`: the agent that must open the chain. `task`: a line for the full prompt."""
    name: str
    agents: tuple
    follow: dict
    task: str = "Answer the question with facts that you looked up."
    bare: tuple = ("reflection",)
    first: str = ""

    @property
    def tools(self):
        return tuple(agent for agent in self.agents if agent in TOOLS)


MHQA = {"": "plan tool", "plan": "tool answer", "tool": "plan tool reflection answer", "reflection": "plan tool answer"}
WEB = {"": "plan", "plan": "tool suggested_answer", "tool": "tool reflection suggested_answer", "reflection": "plan tool suggested_answer",
       "suggested_answer": "double_check", "double_check": "plan tool answer"}
PROGRAM = {"": "plan", "plan": "tool answer", "tool": "reflection", "reflection": "tool answer"}     # plan, (code, reflection) x N, answer
ALL = {"": "plan tool", "plan": "tool suggested_answer answer", "tool": "plan tool reflection suggested_answer answer",
       "reflection": "plan tool suggested_answer answer", "suggested_answer": "double_check", "double_check": "plan tool answer"}

PROFILES = {profile.name: profile for profile in (
    Profile("mhqa", ("think", "plan", "wiki_search", "reflection", "answer"), MHQA),
    Profile("web", ("think", "plan", "web_search", "crawl_page", "reflection", "suggested_answer", "double_check", "answer"), WEB),
    Profile("code", ("plan", "think", "code", "reflection", "answer"), PROGRAM,
            "Write a Python program that solves the task and answer with it in one fenced `py` block.", ("plan", "reflection"), "plan"),
    Profile("math", ("plan", "think", "code", "reflection", "answer"), PROGRAM,
            "Solve the problem and answer with the result as \\boxed{...}.", ("plan", "reflection"), "plan"),
    Profile("all", ("think", "plan", "wiki_search", "web_search", "crawl_page", "code", "visual_inspector", "reflection", "suggested_answer",
                    "double_check", "answer"), ALL, "Solve the task with whatever agents it needs.", ("plan", "reflection")),
)}


def find_profile(name):
    """The profile of that name; InputError names those that exist."""
    if name not in PROFILES:
        raise InputError(f"agent profile {name!r}: expected one of {', '.join(PROFILES)}")
    return PROFILES[name]


def register_tool(name, description):
    """Make `<name>` the tag of a tool of your own; `description` (one line) goes into the full prompt. A profile declares it:

        register_tool("price", "Looks up a product's price. Write the product's name.")
        PROFILES["shop"] = Profile("shop", ("think", "plan", "price", "answer"), MHQA)"""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name) or name in {*ROLES, *FINAL, "observation"}:
        raise InputError(f"tool name {name!r}: expected lower-case letters, digits and _, no agent's name")
    TOOLS[name] = description


# ---------------------------------------------------------------------------------------------------------------------
# Reading and writing chains

@dataclass(slots=True)
class Segment:
    """One block of a chain.

    `tag`: None for free text. `text`: the inner text, exact; of code and observation without one newline at either end; of free text and unclosed
    blocks without white space at the end. `start:end`: its characters, with tags and the white space that belongs to it. `source`: "model" or
    "environment". `problem`: None, "unclosed", "mention" (a tag inside the text), "stray" (a closing tag in free text)."""
    tag: str | None
    text: str
    start: int = 0
    end: int = 0
    source: str = ""
    problem: str | None = None

    def __post_init__(self):
        self.source = self.source or ("environment" if self.tag == "observation" else "model")


@dataclass(slots=True)
class Call:
    """A complete block that the model wrote; `argument` is stripped and may be empty; `start:end` are its tags exactly."""
    tag: str
    argument: str
    start: int
    end: int


# a tag, or a line that opens or closes a ``` fence (also right behind <code> and <answer>)
TOKEN = re.compile(r"<(/?)([a-z][a-z0-9_]{0,40})>|(?:^|(?<=<code>)|(?<=<answer>))[ \t]*```[ \t]*(?:(\w+)[ \t]*)?(?=[\r\n<]|\Z)", re.M)


def find_blocks(text):
    """One pass over any text -> (blocks, strays): [(tag, start, inner start, inner end, end, problem)], in order and apart, and the positions of
    closing tags outside them. `start` and `end` are those of the tags."""
    known = {*ROLES, *TOOLS, *FINAL, "observation"}
    blocks, strays = [], []
    tag, marks, mentions, fence = None, {}, [], False       # the open block; the nearest opening tag in it by name; tags in it that are text

    def close(name, start, inner, inner_end, end, problem=None):
        if not problem and name not in VERBATIM and any(inner <= position < inner_end for position in mentions):
            problem = "mention"
        blocks.append((name, start, inner, inner_end, end, problem))

    def cut(end):       # the open block ends unclosed
        start, inner = marks["open"]
        if tag != "observation":
            end = inner + len(text[inner:end].rstrip(WHITE))
        close(tag, start, inner, end, end, "unclosed")

    for match in TOKEN.finditer(text):
        (start, end), closing, name = match.span(), match[1], match[2]
        if name is None:
            fence = tag in VERBATIM and (bool(match[3]) if fence else text[end:end + 1] != "<")
            continue
        if name not in known:
            continue
        begins_line = start == 0 or text[start - 1] == "\n" or start == marks.get("open", (0, 0))[1]
        if name == "observation" and not closing and tag != name and (begins_line or tag not in VERBATIM):
            if tag:
                cut(start)
            tag = None
        elif tag in VERBATIM:
            held = tag != "observation" and fence and not (closing and (begins_line or text.endswith("```", 0, start)))
            if name != tag or held or tag == "observation" and not closing:
                continue
        if tag is None and closing:
            strays.append(start)
        elif tag is None:
            tag, marks, mentions, fence = name, {"open": (start, end), name: (start, end)}, [], False
        elif closing and name in marks:
            if marks[name] != marks["open"]:
                cut(marks[name][0])
            close(name, *marks[name], start, end)
            tag = None
        else:
            mentions.append(start)
            if not closing:
                marks[name] = (start, end)
    if tag:
        cut(len(text))
    return blocks, strays


def parse(text):
    """Read any string as a chain, as the top of this file defines -> [Segment], whose spans cover `text` exactly once. Never raises; linear time."""
    blocks, strays = find_blocks(text)
    items, position, passed = [], 0, 0                      # blocks and the free text between them, with exact ends
    for block in [*blocks, (None, len(text), 0, 0, len(text), None)]:
        gap, first = text[position:block[1]], passed
        while passed < len(strays) and strays[passed] < block[1]:
            passed += 1
        if gap.strip(WHITE):
            start, end = position + len(gap) - len(gap.lstrip(WHITE)), position + len(gap.rstrip(WHITE))
            items.append((None, start, start, end, end, "stray" if passed > first else None))
        if block[0]:
            items.append(block)
        position = block[4]
    segments = []
    for item, after in zip(items, [*items[1:], ("", len(text))]):
        tag, _, inner, inner_end, end, problem = item
        if tag in OWN_LINES:
            inner += text.startswith("\n", inner, inner_end)
            inner_end -= problem != "unclosed" and text.endswith("\n", inner, inner_end)
        if tag == "observation" or after[0] != "observation":
            end = after[1]                                  # the white space up to the next block
        segments.append(Segment(tag, text[inner:inner_end], segments[-1].end if segments else 0, end, problem=problem))
    return segments or ([Segment(None, "", 0, len(text))] if text else [])


def render(segments):
    """Segments -> canonical text. The text of an observation is written as it is: make it inert first."""
    out, after_model = [], False
    for segment in segments:
        tag, inner, closed = segment.tag, segment.text, segment.problem != "unclosed"
        if tag in OWN_LINES:
            inner = f"\n{inner}\n" if closed else f"\n{inner}"
        block = inner if tag is None else f"<{tag}>{inner}</{tag}>" if closed else f"<{tag}>{inner}"
        if tag == "observation":
            block = f"\n{block}\n\n" if closed else f"\n{block}"
        out.append("\n" + block if after_model and tag != "observation" else block)
        after_model = tag != "observation"
    return "".join(out)


# ---------------------------------------------------------------------------------------------------------------------
# Tool output is data

MARK = "¦"           # stands behind the first character of whatever must not be read as a tag; a mark in the data is written twice


def inert(text, specials=()):
    """Tool output that can neither close its block, nor call, answer or turn into a control token, still readable: `<¦answer>`, `<¦|im_end|>`.
    CoA tags in any case and spacing and `<|` always, the tokenizer's `specials` (of two or more characters) when given."""
    names = "|".join([*ROLES, *TOOLS, *FINAL, "observation"])
    exact = "".join(f"|{re.escape(special)}" for special in specials if len(special) > 1)
    pattern = rf"(?=<\s{{0,9}}(?:/\s{{0,9}})?(?i:{names})\b|<[|｜]{exact})(.)"
    return re.sub(pattern, rf"\1{MARK}", text.replace(MARK, MARK + MARK), flags=re.S)


def observation(text, specials=()):
    """The environment's whole block, canonical and inert: newline, tag, newline, text, newline, tag, two newlines."""
    return render([Segment("observation", inert(text, specials))])


def reveal(text):
    """Inverse of `observation` (a whole block) and of `inert` (its text): the tool's own words."""
    if text.startswith("\n<observation>\n") and text.endswith("\n</observation>\n\n"):
        text = text[len("\n<observation>\n"):-len("\n</observation>\n\n")]
    return re.sub(f"{MARK}({MARK}?)", r"\1", text)


# ---------------------------------------------------------------------------------------------------------------------
# What the model said

def model_blocks(text):
    """Every complete block that the model wrote, in order -> [Call]."""
    return [Call(tag, text[inner:inner_end].strip(), start, end)
            for tag, start, inner, inner_end, end, problem in find_blocks(text)[0] if tag != "observation" and problem != "unclosed"]


def find_calls(text):
    """Complete tool calls that the model wrote, in order -> [Call]. An empty call has argument "", an unclosed one is no call."""
    return [block for block in model_blocks(text) if block.tag in TOOLS]


def find_answer(text):
    """The last complete answer that the model wrote, stripped, its parts unsplit; None if there is none."""
    return next((block.argument for block in reversed(model_blocks(text)) if block.tag == "answer"), None)


FENCE = re.compile(r"^[ \t]*```[ \t]*(?:(\w+)[ \t]*)?\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.M | re.S)


def code_blocks(argument):
    """A code call's argument -> (code, stdin). Fences labelled py or python are the code (several are joined), sh or bash the standard input;
    without a py fence an unlabelled one is the code, and without any the bare text."""
    argument = argument.replace("\r\n", "\n")
    fences = FENCE.findall(argument)

    def join(*labels):
        return "\n\n".join(body.rstrip("\n").removesuffix("```") for label, body in fences if label.lower() in labels)

    return join("py", "python") or join("") or FENCE.sub("", argument).strip(), join("sh", "bash")


def reflection_scores(text):
    """Grades in a reflection -> {criterion: "good" | "average" | "poor"} ("fair" is average, the last one counts), {} where it gives none.
    The criteria have the official names or, with a colon behind them, those of our own teacher: conflict, tools, progress."""
    found = re.findall(r"(?i)\b(?:(information|tool|trajectory)[ _-](?:conflict|effectiveness|monitoring)\W{1,8}"
                       r"|(conflict|tools|progress)\W{0,3}:\W{0,4})(good|average|fair|poor)\b", text)
    names = dict(zip(("information", "tool", "trajectory", "conflict", "tools", "progress"), CRITERIA * 2))
    return {names[(official or own).lower()]: grade.lower().replace("fair", "average") for official, own, grade in found}


def double_check_score(text):
    """The score 1..4 of a double check: the last number after the word score, or a text that is nothing but the number; None otherwise."""
    found = re.findall(r"(?i)\bscore\b[^\d\n]{0,20}(\d+)", text) or re.findall(r"\A\s*(\d+)\s*\.?\s*\Z", text)
    return int(found[-1]) if found and found[-1] in ("1", "2", "3", "4") else None


# ---------------------------------------------------------------------------------------------------------------------
# Grammar

@dataclass(slots=True)
class Violation:
    """A broken rule: its name, the character where it was broken, and a line about it."""
    rule: str
    position: int
    message: str


def check(segments, profile):
    """The grammar of a profile (by name) -> [Violation], empty for a good chain. Official prompts state these rules (their code enforces none)."""
    rules, found = find_profile(profile), []
    before, action, must_plan = "", "", False               # the block before, and the one that acted last (not think, not observation)

    def wrong(rule, segment, message):
        found.append(Violation(rule, segment.start, message))

    for segment in segments:
        tag, kind = segment.tag, "tool" if segment.tag in TOOLS else segment.tag
        if segment.problem:
            wrong(segment.problem, segment, f"{tag or 'text'}: {segment.problem} tag")
        if action == "answer":
            wrong("after_answer", segment, f"{tag or 'text'} after the answer")
        if before in TOOLS and tag not in (None, "observation"):
            wrong("no_observation", segment, f"{before} has no observation")
        if tag is None and segment.text:
            wrong("free_text", segment, "text outside any tag")
        elif tag == "observation" and before not in TOOLS:
            wrong("unasked_observation", segment, f"observation after {before or 'the start'}")
        elif tag in (None, "observation"):
            pass
        elif tag not in rules.agents:
            wrong("unknown_agent", segment, f"{tag} is no agent of {profile}")
        else:
            if not segment.text.strip(WHITE):
                wrong("empty", segment, f"{tag} is empty")
            if rules.first and not before and tag != rules.first:
                wrong("opening", segment, f"a {profile} chain opens with {rules.first}")
            if tag != "think":
                follow = rules.follow.get("tool" if action in TOOLS else action, "").split()
                if before != "think" and tag not in rules.bare:
                    wrong("no_think", segment, f"{tag} without a think just before it")
                if kind not in follow:
                    wrong("transition", segment, f"{tag} after {action or 'the start'}")
                elif must_plan and tag != "plan":
                    wrong("replan", segment, f"{tag} where a new plan is due: a grade was poor or a score below 3")
                score = double_check_score(segment.text) if tag == "double_check" else 4
                if score is None:
                    wrong("no_score", segment, "double_check without a score from 1 to 4")
                poor = tag == "reflection" and "poor" in reflection_scores(segment.text).values()
                must_plan = (score or 4) < 3 or poor and "plan" in rules.follow.get(tag, "").split()
                action = tag
        before = tag or before
    if action != "answer":
        found.append(Violation("no_answer", segments[-1].end if segments else 0, "the chain has no answer"))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Prompts. The full form is for real models, the brief one (tens of tokens) for tiny ones; a data row that carries its own prompt keeps it.

def prompt(profile, question, brief=False):
    """The user turn of a profile (by name): which agents there are, how they take turns and, at the end, the question as it is."""
    rules = find_profile(profile)
    if brief:
        return f"Agents: {''.join(f'<{agent}>' for agent in rules.agents)}\nQuestion: {question}"
    lines = ["Write each agent's words between its tags, as in <think>...</think>, and nothing outside tags. Never name a tag inside a text.",
             f"After a call ({', '.join(rules.tools)}) stop: the result arrives in <observation>...</observation>, which you never write yourself."]
    if rules.first:
        lines += ["Open with the one and only plan. Then think, call code, read the observation and reflect, as often as it takes.",
                  "At the end think once more and answer."]
    else:
        lines += [f"Think before every other agent{' but the opening plan' if 'plan' in rules.bare else ''}. Open with a plan.",
                  "After an observation call again, reflect, or go on to the answer. Never repeat a call word for word.",
                  "After a reflection plan anew or call again unless all is certain."]
    if "double_check" in rules.agents:
        lines += ["A reflection grades three things, a line each, good, average or poor: information_conflict (do the findings agree), "
                  "tool_effectiveness (did the calls help), trajectory_monitoring (is there progress). After any poor, plan anew.",
                  "After a suggested_answer comes its double_check, nothing else. With a score of 3 or 4 answer. With 1 or 2 plan anew, carry the "
                  "plan out and suggest again."]
    agents = "\n".join(f"<{agent}> {(ROLES | TOOLS | FINAL)[agent]}" for agent in rules.agents)
    rule_text = "\n".join(f"- {line}" for line in [*lines, "Always commit to an answer."])
    return (f"You are a team of agents who share one text and speak in turns. {rules.task}\n\n"
            f"Agents:\n{agents}\n\nRules:\n{rule_text}\n\nQuestion: {question}")


# ---------------------------------------------------------------------------------------------------------------------
# Ids

@dataclass(slots=True)
class Encoded:
    """Token ids of a response with, in parallel, who wrote each (SAMPLED or ENVIRONMENT) and whether it is trained (bool)."""
    ids: list
    source: list
    loss_mask: list


def encode_text(text, tokenizer):
    """Plain text -> ids. Nothing is added, and special tokens in the text are ordinary characters. Lone surrogates become U+FFFD."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] if text else []


def eos_id(tokenizer):
    """The id that ends a training row; InputError if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise InputError("tokenizer: expected an eos_token")
    return tokenizer.eos_token_id


def encode(text, tokenizer, eos=True):
    """A response -> Encoded, one piece for each stretch that one side wrote, so that its ids are those of a rollout. White space at the very end is
    dropped; with `eos` one trained EOS follows a response that ends in the model's words."""
    pieces = []
    for segment in parse(text):
        source = ENVIRONMENT if segment.source == "environment" else SAMPLED
        if not pieces or pieces[-1][0] != source:
            pieces.append([source, ""])
        pieces[-1][1] += text[segment.start:segment.end]
    ends_in_model = bool(pieces) and pieces[-1][0] == SAMPLED
    if ends_in_model:
        pieces[-1][1] = pieces[-1][1].rstrip(WHITE)
    ids, source = [], []
    for writer, piece in pieces:
        new = encode_text(piece, tokenizer)
        ids += new
        source += [writer] * len(new)
    if eos and ends_in_model and ids:
        ids.append(eos_id(tokenizer))
        source.append(SAMPLED)
    return Encoded(ids, source, [writer == SAMPLED for writer in source])


def prompt_ids(text, tokenizer):
    """A prompt -> ids: the chat template with one user turn and the assistant's header, or without a template `text` and a newline.
    Only the template's own text can become control tokens; `text` is data."""
    if not tokenizer.chat_template:
        start = tokenizer("")["input_ids"][:1]              # a base model's BOS, if it has one
        return (start if start == [tokenizer.bos_token_id] else []) + encode_text(text + "\n", tokenizer)
    hole = "coa-user-turn"
    frame = tokenizer.apply_chat_template([{"role": "user", "content": hole}], add_generation_prompt=True, tokenize=False)
    if frame.count(hole) != 1:
        raise InputError("tokenizer: expected a chat template that writes the user's text once")
    head, tail = (tokenizer(part, add_special_tokens=False, split_special_tokens=False)["input_ids"] for part in frame.split(hole))
    return head + encode_text(text, tokenizer) + tail


def truncate(encoded, max_len, prompt_len):
    """Cut a response at the end so that it fits into `max_len` ids with a prompt of `prompt_len` -> (Encoded, report). The prompt is never cut, since
    what is trained needs its context; no observation is left at the end, whole or half. Report: {"cut_tokens", "cut_trained_tokens"}."""
    end = max(0, min(len(encoded.ids), max_len - prompt_len))
    while 0 < end < len(encoded.ids) and encoded.source[end - 1] == ENVIRONMENT:
        end -= 1
    return (Encoded(encoded.ids[:end], encoded.source[:end], encoded.loss_mask[:end]),
            {"cut_tokens": len(encoded.ids) - end, "cut_trained_tokens": sum(encoded.loss_mask[end:])})


def reject_reason(text, encoded, prompt_len):
    """Why a training example (response text, its Encoded, ids in the prompt before it) must not be trained on; None if it may."""
    for segment in parse(text):
        if segment.tag == "observation" and segment.problem:
            return "unclosed observation"
        if "<observation>" in segment.text or "</observation>" in segment.text:
            return "observation tag out of place"
    trained = sum(encoded.loss_mask)
    return "no trained token" if not trained else "every token trained" if trained == prompt_len + len(encoded.ids) else None


# ---------------------------------------------------------------------------------------------------------------------
# The printer

PAINT = {"P": "90", "M": "32", "E": "36", "!": "1;31"}        # who wrote a line: prompt, model (trained), environment; ! is a violation
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(path):
    """The rows of a file of SFT rows (`output`) or traces (`text`); InputError names file, line and field."""
    rows = read_rows(path)
    for place, row in rows:
        if not isinstance(row.get("output", row.get("text")), str):
            raise InputError(f"{place}: expected an object with a text field 'output' (SFT row) or 'text' (trace)")
    return [row for _, row in rows]


def show(row, colour):
    """A row as text: in the margin who wrote it (P, M, E), violations (!) after the block in which they happened."""
    text, profile, lines = row.get("output", row.get("text")), row.get("agent") or row.get("profile"), []
    profile = profile if profile in PROFILES else "all"
    segments = parse(text)
    violations, at = check(segments, profile), {}
    for violation in violations:
        at.setdefault(violation.position, []).append(f"{violation.rule}: {violation.message}")

    def add(margin, words):
        for line in words.split("\n"):
            line = f"{margin} | " + CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
            lines.append(f"\x1b[{PAINT[margin]}m{line}\x1b[0m" if colour else line)

    add("P", "\n".join(filter(None, (row.get("instruction") or row.get("question") or "(the file has no prompt)", row.get("input")))))
    for segment in segments or [Segment(None, "")]:
        add("M" if segment.source == "model" else "E", text[segment.start:segment.end].strip("\n"))
        for words in at.pop(segment.start, []):
            add("!", words)
    for words in at.pop(len(text), []):
        add("!", words)
    trained = sum(segment.end - segment.start for segment in segments if segment.source == "model")
    return "\n".join(lines + [f"profile {profile}: {len(segments)} blocks, {trained} of {len(text)} characters trained (M), "
                              f"{len(violations)} violations (!)"])


if __name__ == "__main__":
    exit_on_input_error()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)           # `| head` is no error
    # -------------------------------------------------------------------------
    # options
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="runs/demo/distill/sft.jsonl", help="JSONL with `output` or `text` (default: the demo's SFT rows)")
    parser.add_argument("--row", type=int, help="show this row only, counted from 0 (default: the first 3)")
    args = parser.parse_args()
    # -------------------------------------------------------------------------
    # rows
    if args.file == parser.get_default("file") and not os.path.exists(args.file):
        raise InputError(f"{args.file}: not there yet; `python distill.py` makes it")
    rows = printable(args.file)
    if args.row is not None and not 0 <= args.row < len(rows):
        raise InputError(f"{args.file}: --row {args.row}: expected 0 to {len(rows) - 1}")
    for row in rows[:3] if args.row is None else [rows[args.row]]:
        print(show(row, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ), end="\n\n")
