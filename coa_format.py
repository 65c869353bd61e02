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

Layout. Blocks stand on lines of their own, joined by one newline. An observation is newline, `<observation>`, newline, text, newline, `</observation>`,
two newlines, and the environment writes all of it. A turn of the model ends with the closing tag of a call, so *all* white space (space, tab, CR, LF)
between that tag and the observation, and all that follows the observation, is the environment's, be it zero newlines or three (AFM's data holds every
variant). In a rollout the model's last token may hold more than the tag (`>\\n` is one token in real vocabularies): those ids stay the model's, and the
environment leaves out the newline that is already there. Rollouts are trained on their ids, so no text is ever read again to find out.

Reading (`parse`), for any string at all, in one pass:
 * A tag is `<name>` or `</name>` in lower case with a known name, nothing else: `<Think>`, `<think >` and `<foo>` are text.
 * The first opening tag outside a block opens one. Inside it, a closing tag pairs with the *nearest* opening tag of its own name; if that is not the tag
   that opened the block, the block ends there unclosed: `<web_search>a <web_search>b</web_search>` calls "b", `<think>so <answer>4</answer>` answers "4".
   Opening tags that never meet their closing tag, and closing tags that never had an opening one, are text ("mention", or "stray" outside a block).
 * `code` and `answer` hold programs: no other tag counts inside them, and inside a ``` fence not even their own, unless it begins a line
   (a forgotten closing fence) or follows a ```: `print("</code>")` is code.
 * `<observation>` always opens, even in an unclosed block, and ends at the first `</observation>`; only inside `code` and `answer` must it begin a line.
   Unclosed, it reaches to the end of the text. An observation tag anywhere else is a problem for which a training example is refused.
 * White space between blocks belongs to the block before it, or to an observation after it. Spans cover the text exactly once.

Left out: nested agents and tag attributes, which the paper does not have; a think block per agent in the prompt (few-shot examples).

    python coa_format.py                         show the first rows of the built-in demo's SFT data
    python coa_format.py FILE.jsonl --row 3      any SFT file (`output`) or trace file (`text`): what is trained, what is not, what is wrong
"""
import argparse
import json
import os
import re
import sys
from dataclasses import dataclass, field

from model import InputError, exit_on_input_error

PROMPT, SAMPLED, ENVIRONMENT = 0, 1, 2        # who wrote a token: the `source` of an episode or a training row
WHITE = " \t\r\n"

# ---------------------------------------------------------------------------------------------------------------------
# Agents. A tag is an agent; its line here is what the full prompt says about it. `register_tool` adds to TOOLS.

ROLES = {
    "think": "You weigh what is known and decide which agent acts next, and why. Every other agent waits for you.",
    "plan": "Splits the task into a short ordered list of steps, each small enough for one agent. Called again when the old plan has failed.",
    "reflection": "Looks back at the last steps: what was found, what contradicts it, what is still missing.",
    "suggested_answer": "A first complete answer, offered for checking.",
    "double_check": "Judges how well the suggested answer fits the task. Ends with one line `The score is N.`, N from 1 to 4: "
                    "4 correct, 3 small flaws, 2 mostly wrong, 1 wrong.",
}
TOOLS = {
    "wiki_search": "Finds encyclopedia passages. Content: one plain query.",
    "web_search": "Searches the web and returns titles, addresses and snippets. Content: one plain query.",
    "crawl_page": "Opens web pages. Content: one address, or several separated by `|`.",
    "code": "Runs a Python program and returns what it prints. Content: one fenced block labelled `py`; "
            "a second one labelled `sh` may hold the standard input.",
    "visual_inspector": "Looks at an image. Content: a fenced `json` block with `file_path` and, if you like, `question`.",
}
CRITERIA = ("information_conflict", "tool_effectiveness", "trajectory_monitoring")     # what a reflection grades: good, average or poor
VERBATIM = ("code", "answer", "observation")                                          # blocks in which other tags are text
BLOCK_LAYOUT = ("code", "observation")                                                # blocks whose text stands on lines of its own


def tags():
    """All tags in force: roles, tools (with those registered by the user), `observation`, `answer`."""
    return {*ROLES, *TOOLS, "observation", "answer"}


def register_tool(name, description):
    """Make `<name>` a tool tag. `description` (one line) goes into the full prompt. Name a profile that has it with `search_profile`."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name):
        raise InputError(f"tool name {name!r}: expected lower-case letters, digits and _, at most 41")
    if name in tags() and TOOLS.get(name) != description:
        raise InputError(f"tool name {name!r} is already a tag")
    TOOLS[name] = description


@dataclass(frozen=True)
class Profile:
    """Which agents a prompt declares and how they may follow each other.

    `agents`: tags in prompt order. `follow`: agent -> agents that may come next, think and observations left out ("" is the start of the chain).
    `bare`: agents that need no think just before them. `first`: the tag that must open the chain, if any. `task`: one line for the prompt."""
    name: str
    agents: tuple
    follow: dict = field(hash=False)
    bare: tuple = ("reflection",)
    first: str = ""
    task: str = "Answer the question."

    @property
    def tools(self):
        return tuple(agent for agent in self.agents if agent in TOOLS)


def search_profile(name, tools, verify=False, bare=("reflection",), task="Answer the question with facts that you looked up."):
    """A profile in which agents look things up with `tools`; `verify` adds suggested_answer -> double_check -> answer (AFM's web agent)."""
    tools = tuple(tools)
    end = ("suggested_answer",) if verify else ("answer",)
    follow = {"": ("plan",) if verify else ("plan", *tools), "plan": (*tools, *end), "reflection": ("plan", *tools, *end),
              **{tool: (*tools, "reflection", *end, *(() if verify else ("plan",))) for tool in tools}}
    if verify:
        follow |= {"suggested_answer": ("double_check",), "double_check": ("plan", *tools, "answer")}
    roles = ("reflection", "suggested_answer", "double_check") if verify else ("reflection",)
    return Profile(name, ("think", "plan", *tools, *roles, "answer"), follow, bare, task=task)


def program_profile(name, task):
    """AFM's code and math agents: plan once and first, then (think, code, reflection) any number of times, then think, answer."""
    follow = {"": ("plan",), "plan": ("code", "answer"), "code": ("reflection",), "reflection": ("code", "answer")}
    return Profile(name, ("plan", "think", "code", "reflection", "answer"), follow, bare=("plan", "reflection"), first="plan", task=task)


def union_profile(name, tools):
    """All agents at once: any tool after any tool, and the answer with or without a suggested answer before it."""
    profile = search_profile(name, tools, verify=True, bare=("plan", "reflection"), task="Solve the task with whatever agents it needs.")
    follow = {agent: (*after, "answer") if agent in (*tools, "plan", "reflection") else after for agent, after in profile.follow.items()}
    return Profile(name, profile.agents, follow | {tool: (*follow[tool], "plan") for tool in tools} | {"": ("plan", *tools)}, profile.bare, task=profile.task)


PROFILES = {profile.name: profile for profile in (
    search_profile("mhqa", ("wiki_search",)),
    search_profile("web", ("web_search", "crawl_page"), verify=True),
    program_profile("code", "Write a Python program that solves the task; give it as one fenced `py` block."),
    program_profile("math", "Solve the problem; write the result as \\boxed{...}."),
    union_profile("all", ("wiki_search", "web_search", "crawl_page", "code", "visual_inspector")),
)}


def find_profile(name):
    """The profile of that name; InputError names those that exist."""
    if name not in PROFILES:
        raise InputError(f"agent profile {name!r}: expected one of {', '.join(PROFILES)}")
    return PROFILES[name]


# ---------------------------------------------------------------------------------------------------------------------
# Reading and writing chains

@dataclass(slots=True)
class Segment:
    """One block. `tag` None is free text. `text`: inner text, exact; of code and observation without the newline at either end; free text and unclosed
    blocks without the white space at the end. `start:end`: characters with tags and the white space that belongs to the block.
    `problem`: None, or "unclosed", "mention" (a tag in the text), "stray" (a closing tag in free text), "observation tag" (one out of place)."""
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
    """A complete call in model-written text; `argument` is stripped and may be empty; `start:end` are the tags exactly."""
    tag: str
    argument: str
    start: int
    end: int


# a tag, or a line that opens or closes a ``` fence (also right behind <code> and <answer>)
TOKEN = re.compile(r"<(/?)([a-z][a-z0-9_]{0,40})>|(?:^|(?<=<code>)|(?<=<answer>))[ \t]*```[ \t]*(?:(\w+)[ \t]*)?(?=[\r\n<]|\Z)", re.M)


def find_blocks(text):
    """-> [(tag, start, inner start, inner end, end, problem)] of the tagged blocks, in order, and the (position, name) of tags outside them."""
    known, blocks, outside = tags(), [], []
    tag, marks, ignored, fence = None, {}, [], False       # the open block, its opening tags by name, its tags that do not count

    def close(name, begin, inner, inner_end, end, closed):
        names = {other for position, other in ignored if inner <= position < inner_end}
        problem = ("unclosed" if not closed else "observation tag" if "observation" in names else "mention" if names and name not in VERBATIM else None)
        blocks.append((name, begin, inner, inner_end, end, problem))

    def cut(stop):
        begin, inner = marks[None]
        stop = stop if tag == "observation" else max(inner, len(text[inner:stop].rstrip(WHITE)) + inner)
        close(tag, begin, inner, stop, stop, closed=False)

    for match in TOKEN.finditer(text):
        (start, end), closing, name = match.span(), match[1], match[2]
        if name is None:                                                      # a fence line
            fence = tag in VERBATIM and (bool(match[3]) if fence else text[end:end + 1] != "<")
            continue
        if name not in known:
            continue
        begins_line = text.startswith("\n", start - 1) if start else True
        opens_observation = name == "observation" and not closing and tag != "observation" and (tag not in VERBATIM or begins_line)
        if tag in VERBATIM and not opens_observation:
            own = name == tag and (tag != "observation" or closing)
            if not own or fence and tag != "observation" and not (closing and (begins_line or text.endswith("```", 0, start))):
                ignored.append((start, name))
                continue
        if opens_observation and tag:
            cut(start)
            tag = None
        if tag is None:
            if closing:
                outside.append((start, name))
            else:
                tag, marks, ignored, fence = name, {None: (start, end), name: (start, end)}, [], False
        elif not closing:
            ignored.append((start, name))
            marks[name], fence = (start, end), False
        elif name not in marks:
            ignored.append((start, name))
        else:
            begin, inner = marks[name]
            if begin != marks[None][0]:
                cut(begin)
            close(name, begin, inner, start, end, closed=True)
            tag = None
    if tag:
        cut(len(text))
    return blocks, outside


def parse(text):
    """Read any string as a chain (see the top of this file) -> [Segment] whose spans cover `text` exactly once. Never raises, linear in len(text)."""
    blocks, outside = find_blocks(text)
    items, position, strays = [], 0, iter([*outside, (len(text) + 1, "")])
    stray = next(strays)
    for block in [*blocks, (None, len(text), 0, 0, len(text), None)]:
        gap, names = text[position:block[1]], set()
        while stray[0] < block[1]:
            names.add(stray[1])
            stray = next(strays)
        if gap.strip(WHITE):
            start = position + len(gap) - len(gap.lstrip(WHITE))
            end = position + len(gap.rstrip(WHITE))
            items.append((None, start, start, end, end, "observation tag" if "observation" in names else "stray" if names else None))
        if block[0]:
            items.append(block)
        position = block[4]
    segments = []
    for index, (tag, _, inner, inner_end, end, problem) in enumerate(items):
        if tag in BLOCK_LAYOUT:
            inner += text.startswith("\n", inner, inner_end)
            inner_end -= problem != "unclosed" and text.endswith("\n", inner, inner_end)
        after = items[index + 1] if index + 1 < len(items) else None
        if after is None:
            end = len(text)
        elif tag == "observation" or after[0] != "observation":
            end = after[1]
        segments.append(Segment(tag, text[inner:inner_end], segments[-1].end if segments else 0, end, problem=problem))
    if text and not segments:
        segments.append(Segment(None, "", 0, len(text)))
    return segments


def render(segments):
    """Segments -> canonical text. Observation text is written as it is: make it inert first (`inert`)."""
    out, after_model = [], False
    for segment in segments:
        tag, inner = segment.tag, segment.text
        if tag in BLOCK_LAYOUT:
            inner = f"\n{inner}" if segment.problem == "unclosed" else f"\n{inner}\n"
        block = inner if tag is None else f"<{tag}>{inner}" if segment.problem == "unclosed" else f"<{tag}>{inner}</{tag}>"
        if tag == "observation":
            out.append(f"\n{block}" if segment.problem == "unclosed" else f"\n{block}\n\n")
        else:
            out.append(f"\n{block}" if after_model else block)
        after_model = tag != "observation"
    return "".join(out)


# ---------------------------------------------------------------------------------------------------------------------
# Tool output is data

MARK = "¦"           # stands behind the first character of whatever must not be read as a tag; a mark in the data is written twice


def inert(text, specials=()):
    """Tool output that can neither close its block, nor call, answer or turn into a control token, still readable: `<¦answer>`, `<¦|im_end|>`.
    CoA tags (any case and inner spaces) and `<|` always, the tokenizer's `specials` (strings of two or more characters) when given."""
    names = "|".join(sorted(map(re.escape, tags())))
    exact = "".join(f"|{re.escape(special)}" for special in specials if len(special) > 1)
    return re.sub(rf"(?=<\s*/?\s*(?i:{names})\b|<[|｜]{exact})(.)", rf"\1{MARK}", text.replace(MARK, MARK + MARK), flags=re.S)


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

def find_calls(text):
    """Complete tool calls that the model wrote, in order -> [Call]. An empty call is one with argument ""; an unclosed one is none."""
    return [call for call in closed_blocks(text) if call.tag in TOOLS]


def find_answer(text):
    """The last complete answer that the model wrote, stripped, parts unsplit; None if there is none."""
    return next((call.argument for call in reversed(closed_blocks(text)) if call.tag == "answer"), None)


def closed_blocks(text):
    """Every complete block that the model wrote, as a Call."""
    return [Call(tag, text[inner:inner_end].strip(), start, end)
            for tag, start, inner, inner_end, end, problem in find_blocks(text)[0] if tag != "observation" and problem != "unclosed"]


def turn_end(text):
    """What ends the model's turn, given what it wrote since the last observation -> the first Call, answer (tag "answer") or forged observation
    (tag "observation") in it, else None. Once found it stays, whatever is written after it."""
    for tag, start, inner, inner_end, end, problem in find_blocks(text)[0]:
        if tag == "observation":
            return Call(tag, "", start, inner)
        if problem != "unclosed" and (tag in TOOLS or tag == "answer"):
            return Call(tag, text[inner:inner_end].strip(), start, end)
    return None


FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[ \t]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.M | re.S)


def code_blocks(argument):
    """A code call's argument -> (code, stdin). Fences labelled py or python are the code (several are joined), sh or bash the standard input;
    without a py fence an unlabelled one is the code, and without any the bare text."""
    argument = argument.replace("\r\n", "\n")
    fences = FENCE.findall(argument)

    def join(*labels):
        return "\n\n".join(body.rstrip("\n").removesuffix("```") for label, body in fences if label.lower() in labels)

    code = join("py", "python") or join("") or FENCE.sub("", argument).strip()
    return code, join("sh", "bash")


def code_text(code, stdin=""):
    """Inverse of `code_blocks`: the text of a canonical code segment."""
    return f"```py\n{code}\n```" + (f"\n```sh\n{stdin}\n```" if stdin else "")


def answer_parts(answer):
    """An answer's parts, separated by `|`, stripped, without empty ones."""
    return [part.strip() for part in answer.split("|") if part.strip()]


def boxed(answer):
    """What stands in the last balanced \\boxed{...} of an answer; None without one."""
    start = answer.rfind("\\boxed{")
    depth = 0
    for position in range(start + len("\\boxed"), len(answer)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(answer[position], 0)
        if depth == 0:
            return answer[start + len("\\boxed{"):position].strip()
    return None


def reflection_scores(text):
    """Grades in a reflection -> {criterion: "good" | "average" | "poor"} ("fair" is average), {} where it gives none. The last one counts."""
    found = re.findall(r"(?i)\b(information|tool|trajectory)[ _-](?:conflict|effectiveness|monitoring)\W{1,8}(good|average|fair|poor)\b", text)
    names = dict(zip(("information", "tool", "trajectory"), CRITERIA))
    return {names[name.lower()]: grade.lower().replace("fair", "average") for name, grade in found}


def double_check_score(text):
    """The score 1..4 of a double check: the last number after the word score, or a text that is nothing but the number; None otherwise."""
    found = re.findall(r"(?i)\bscore\b[^\d\n]{0,20}(\d+)", text) or re.findall(r"\A\s*(\d+)\s*\.?\s*\Z", text)
    return int(found[-1]) if found and found[-1] in ("1", "2", "3", "4") else None


# ---------------------------------------------------------------------------------------------------------------------
# Grammar

@dataclass(slots=True)
class Violation:
    """A broken rule: its name, the character where it happened, and one line that says so."""
    rule: str
    position: int
    message: str


def check(segments, profile):
    """Grammar of a chain under a profile's name -> [Violation], empty when all is well. Reads segments only, once."""
    rules, found = find_profile(profile), []
    before, action, answered, must_plan, score = "", "", False, False, None        # previous segment; previous one but think and observation

    def wrong(rule, segment, message):
        found.append(Violation(rule, segment.start, message))

    if rules.first and segments and segments[0].tag != rules.first:
        wrong("opening", segments[0], f"a {profile} chain opens with {rules.first}")
    for segment in segments:
        tag = segment.tag
        if segment.problem:
            wrong(segment.problem.replace(" ", "_"), segment, f"{tag or 'free text'}: {segment.problem}")
        if answered:
            wrong("after_answer", segment, f"{tag or 'text'} after the answer")
        if before in TOOLS and tag != "observation":
            wrong("no_observation", segment, f"{before} has no observation")
        if tag is None:
            if segment.text:
                wrong("free_text", segment, "text outside any tag")
            continue
        if tag == "observation":
            if before not in TOOLS:
                wrong("unasked_observation", segment, f"observation after {before or 'the start'}")
        elif tag not in rules.agents:
            wrong("unknown_agent", segment, f"{tag} is not an agent of {profile}")
        elif not segment.text.strip(WHITE):
            wrong("empty", segment, f"{tag} is empty")
        if tag in rules.agents and tag != "think":
            if before != "think" and tag not in rules.bare:
                wrong("no_think", segment, f"{tag} without a think just before it")
            if tag not in rules.follow.get(action, ()):
                wrong("transition", segment, f"{tag} after {action or 'the start'}")
            elif must_plan and tag != "plan":
                wrong("replan", segment, f"{tag} where a new plan is due (a grade was poor or a score below 3)")
            must_plan = False
        if tag == "reflection" and "plan" in rules.follow.get("reflection", ()):
            must_plan = "poor" in reflection_scores(segment.text).values()
        if tag == "double_check":
            score = double_check_score(segment.text)
            must_plan = score is not None and score < 3
            if score is None:
                wrong("no_score", segment, "double_check without a score from 1 to 4")
        answered = answered or tag == "answer"
        before = tag
        if tag not in ("think", "observation"):
            action = tag
    if not answered:
        found.append(Violation("no_answer", segments[-1].end if segments else 0, "the chain has no answer"))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Prompts. `full` is for real models, `brief` (tens of tokens) for tiny ones; a data row that carries its own prompt keeps it.

def prompt(profile, question, brief=False):
    """The user turn for a profile's name: which agents there are, how they take turns, and the question (data, kept as it is) at the end."""
    rules = find_profile(profile)
    if brief:
        return f"Agents: {''.join(f'<{agent}>' for agent in rules.agents)}\nQuestion: {question}"
    agents = "\n".join(f"<{agent}> {(ROLES | TOOLS).get(agent, 'The final answer, short and definite; several parts are separated by `|`.')}"
                       for agent in rules.agents)
    lines = ["Write each agent's words between its tags, as in <think>...</think>, and nothing outside tags. Never name a tag inside a text.",
             "After a call (" + ", ".join(rules.tools) + ") stop: its result arrives in <observation>...</observation>, which you never write."]
    if rules.first:
        lines.append("Open with one plan, and never plan again. Then think, call code, read the observation and reflect, as often as needed; "
                     "then think once more and answer.")
    else:
        lines.append("Think before every other agent" + (" but the opening plan." if "plan" in rules.bare else "."))
        lines.append("Open with a plan. After an observation call again, reflect or go on to the answer; do not repeat a call word for word.")
    if "double_check" in rules.agents:
        lines.append("A suggested_answer is followed by a double_check and nothing else. With a score of 3 or 4 answer; with 1 or 2 plan again, "
                     "carry the new plan out and suggest again.")
        lines.append("A reflection grades three things, a line each, with good, average or poor: information_conflict (do the findings agree), "
                     "tool_effectiveness (did the calls help), trajectory_monitoring (is there progress). After any poor, plan again.")
    elif not rules.first:
        lines.append("Reflect when findings disagree or a search was no use, then plan anew or search on unless the answer is certain.")
    lines.append("Always commit to an answer.")
    rule_text = "\n".join(f"- {line}" for line in lines)
    return (f"You are a team of agents that share one text and speak in turns. {rules.task}\n\nAgents:\n{agents}\n\nRules:\n{rule_text}"
            f"\n\nQuestion: {question}")


# ---------------------------------------------------------------------------------------------------------------------
# Ids

@dataclass(slots=True)
class Encoded:
    """Token ids with, in parallel, who wrote each (PROMPT, SAMPLED, ENVIRONMENT) and whether it is trained."""
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
    """A response -> Encoded, a piece for each stretch that one side wrote, as a rollout would have it. White space at the very end is dropped;
    with `eos` one trained EOS closes a response that ends in the model's words."""
    pieces = []
    for segment in parse(text):
        source = ENVIRONMENT if segment.source == "environment" else SAMPLED
        piece = text[segment.start:segment.end]
        if pieces and pieces[-1][0] == source:
            pieces[-1][1] += piece
        else:
            pieces.append([source, piece])
    if pieces and pieces[-1][0] == SAMPLED:
        pieces[-1][1] = pieces[-1][1].rstrip(WHITE)
    encoded = Encoded([], [], [])
    for source, piece in pieces:
        ids = encode_text(piece, tokenizer)
        encoded.ids += ids
        encoded.source += [source] * len(ids)
    if eos and encoded.ids and encoded.source[-1] == SAMPLED:
        encoded.ids.append(eos_id(tokenizer))
        encoded.source.append(SAMPLED)
    encoded.loss_mask = [source == SAMPLED for source in encoded.source]
    return encoded


def prompt_ids(text, tokenizer):
    """A prompt -> ids: the chat template with one user turn and the assistant's header, or `text` + newline without a template.
    Only the template's own text may become control tokens; `text` is data."""
    if not tokenizer.chat_template:
        start = tokenizer("")["input_ids"][:1]                          # a base model's BOS, if it has one
        return (start if start == [tokenizer.bos_token_id] else []) + encode_text(text + "\n", tokenizer)
    hole = "coa-user-turn"
    frame = tokenizer.apply_chat_template([{"role": "user", "content": hole}], add_generation_prompt=True, tokenize=False)
    if frame.count(hole) != 1:
        raise InputError("tokenizer: expected a chat template that writes the user's text once")
    head, tail = (tokenizer(part, add_special_tokens=False, split_special_tokens=False)["input_ids"] for part in frame.split(hole))
    return head + encode_text(text, tokenizer) + tail


def with_prompt(prompt_ids, encoded):
    """Put a prompt's ids before a response -> the Encoded training example."""
    n = len(prompt_ids)
    return Encoded(list(prompt_ids) + encoded.ids, [PROMPT] * n + encoded.source, [False] * n + encoded.loss_mask)


def truncate(encoded, max_len, prompt_len):
    """Cut an example (prompt + response) at the end to at most `max_len` ids -> (Encoded, report). The prompt is never cut, since what is trained needs
    its context, and no observation is left at the end, whole or half. Report: {"cut_tokens", "cut_trained_tokens"}."""
    end = min(len(encoded.ids), max(max_len, 0))
    if end < len(encoded.ids):
        while end > prompt_len and encoded.source[end - 1] == ENVIRONMENT:
            end -= 1
        end = end if end > prompt_len else 0
    return (Encoded(encoded.ids[:end], encoded.source[:end], encoded.loss_mask[:end]),
            {"cut_tokens": len(encoded.ids) - end, "cut_trained_tokens": sum(encoded.loss_mask[end:])})


def reject_reason(text, encoded):
    """Why a training example (response text; `encoded` with its prompt, after truncation) must not be trained on; None if it may."""
    for segment in parse(text):
        if segment.tag == "observation" and segment.problem == "unclosed":
            return "unclosed observation"
        if segment.problem == "observation tag":
            return "observation tag out of place"
    trained = sum(encoded.loss_mask)
    return "no trained token" if trained == 0 else "every token trained" if trained == len(encoded.ids) else None


# ---------------------------------------------------------------------------------------------------------------------
# The printer

def read_rows(path):
    """[(response, prompt, profile)] of a JSONL (or JSON list) file of SFT rows (`output`) or traces (`text`)."""
    try:
        content = open(path, encoding="utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None
    rows = []
    for number, line in enumerate([content] if content.lstrip().startswith("[") else content.splitlines(), 1):
        try:
            found = json.loads(line) if line.strip() else []
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from None
        rows += found if isinstance(found, list) else [found]
    for number, row in enumerate(rows, 1):
        response = (row.get("output") or row.get("text")) if isinstance(row, dict) else None
        if not isinstance(response, str):
            raise InputError(f"{path}: row {number}: expected a field 'output' (SFT row) or 'text' (trace)")
        row["response"] = response
    return rows


def show(row, colour):
    """One row as lines: who wrote it in the margin (P prompt, M model, E environment), violations (!) where they happen."""
    profile = row.get("agent") if row.get("agent") in PROFILES else "all"
    segments = parse(row["response"])
    wrong = check(segments, profile)
    paint = {"P": "90", "M": "32", "E": "36", "!": "1;31"}
    lines = []

    def add(margin, text):
        for line in text.splitlines() or [""]:
            line = f"{margin} | " + re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]",
                                           lambda match: f"\\u{ord(match[0]):04x}", line)
            lines.append(f"\x1b[{paint[margin]}m{line}\x1b[0m" if colour else line)

    add("P", row.get("instruction") or row.get("question") or "(no prompt in this file)")
    for segment in segments:
        add("M" if segment.source == "model" else "E", row["response"][segment.start:segment.end].strip("\n"))
        for violation in wrong:
            if segment.start <= violation.position < segment.end:
                add("!", f"{violation.rule}: {violation.message}")
    for violation in wrong:
        if not segments or violation.position >= segments[-1].end:
            add("!", f"{violation.rule}: {violation.message}")
    model = sum(segment.end - segment.start for segment in segments if segment.source == "model")
    lines.append(f"profile {profile}: {len(segments)} blocks, {model} of {len(row['response'])} characters trained (M), {len(wrong)} violations (!)")
    return "\n".join(lines)


if __name__ == "__main__":
    exit_on_input_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="runs/demo/distill/sft.jsonl", help="JSONL with `output` or `text` (default: the demo's SFT rows)")
    parser.add_argument("--row", type=int, help="show this row only, counted from 0 (default: the first 3)")
    args = parser.parse_args()
    if not os.path.exists(args.file) and args.file == parser.get_default("file"):
        raise InputError(f"{args.file} is not there: `python distill.py` makes it")
    rows = read_rows(args.file)
    if args.row is not None and not 0 <= args.row < len(rows):
        raise InputError(f"{args.file}: --row {args.row}: expected 0 to {len(rows) - 1}")
    for row in rows[:3] if args.row is None else [rows[args.row]]:
        print(show(row, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
        print()
