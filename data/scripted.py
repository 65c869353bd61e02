"""The scripted teacher: all roles of the multi-agent system played offline from a task's solution graph.

A backend for distill.py, which knows it only as `chat(role, messages) -> text`. It alone reads `task.meta["solution"]`; every other part of
the distillation sees what the agents say and what the tools return. What it is for: chains to learn from, in minutes and without a server. What it is
not: a measure of anything, since it reads the solution. Its language is short and regular, so that a model of one million parameters can
learn it: an agent first restates what it has read, then says what it needs next, then acts. The same thing is always said in the same words: what is
left to chance in a chain is then what decides it, and the reward of RL is not spent on synonyms. With a given probability it errs once in an
episode, the way such a model errs: a hop skipped, a letter of a name lost in the query, the wrong page opened, a digit lost or a sign changed in a
program, an answer given before the last fact was read. The reflector or the verifier notices, the planner plans again, the episode ends well.
"""
import random
import re

from coa_format import PROFILES
from hf import InputError


COUNT = ["No", "One", "Two", "Three", "Four", "Five", "Six"]
DERIVED = {"max": "Larger", "min": "Smaller", "same": "Same"}


class Scripted:
    """chat(role, messages) for one episode of one task. It plays every role, but each only from what that role has been told, and looks
    at the live observations: whether a search found the fact is read from its output. team: {tag: (agent, field, job)}.
    mistakes, reflect: probability of one error, and of a reflection that nothing called for."""

    def __init__(self, task, team, seed=0, sample=0, mistakes=0.22, reflect=0.35):
        if "solution" not in task.meta:
            raise InputError(f"task {task.id}: field 'solution': the scripted teacher needs the solution graph; use --teacher URL or DIR")
        self.task, self.solution, self.steps = task, task.meta["solution"], task.meta["solution"]["steps"]
        self.items = [re.sub(r"^find (the )?", "", item) for item in self.solution["plan"]]
        self.planned_from = 0                              # number of the item with which the plan in force begins
        self.rng = random.Random(f"{seed}|{task.id}|{sample}")
        self.team, self.tag_of = team, {name: tag for tag, (name, _, _) in team.items()}
        self.at, self.fact = 0, ""                         # the step that is due; the last fact that was found and not yet said
        self.called, self.failed, self.slip = False, None, None        # a call is out; why the last one failed; the slip in a program
        self.suggested, self.confirmed = False, False
        free = PROFILES[task.agent].first != "plan"        # code and math reflect after every program anyway
        self.reflect_at = self.rng.randint(1, len(self.steps)) if free and self.rng.random() < reflect else None
        self.mistake = self.choose_mistake() if self.rng.random() < mistakes else (None, None)

    def choose_mistake(self):
        """(kind, index of the step) of the one error of this episode."""
        natural = [("natural", i) for i, step in enumerate(self.steps) if "failing_first" in step]
        if natural:
            return natural[0]
        kinds = {"wiki_search": "hop", "web_search": "hop", "crawl_page": "page", "code": "slip"}
        options = [(kinds[step["tool"]], i) for i, step in enumerate(self.steps) if kinds[step["tool"]] != "hop" or i + 1 < len(self.steps)] or [("letter", 0)]
        if "double_check" in PROFILES[self.task.agent].agents and self.steps[-1]["tool"] == "crawl_page":
            options += [("hasty", len(self.steps) - 1)] * len(options)
        return self.rng.choice(options)

    def __call__(self, role, messages):
        text, tag = messages[-1]["content"], self.tag_of[role]
        if self.called and "Observation:" in text:
            self.look(text.rsplit("Observation:", 1)[1])
        return {"plan": self.plan, "reflection": self.reflection, "double_check": self.double_check}.get(tag, self.work)(role, messages)

    def look(self, seen):
        """Did the call of the step that is due bring its fact? Then the next step is due."""
        step, self.called = self.steps[self.at], False
        if re.search(rf"(?<![\w.,]){re.escape(str(step['finds']))}(?!\w|[.,]\d)", seen):
            self.at, self.failed, self.slip = self.at + 1, None, None
            self.fact = step["fact"] if step["wants"] != "page" else ""
        else:
            self.failed = self.slip or f"no {step['wants']} of {step['about']}"

    # The roles

    def plan(self, role, messages):
        if self.failed or self.suggested:
            self.planned_from = min(self.at, len(self.items) - 1)
            thought, items = "A new plan.", self.items[self.planned_from:]
        else:
            items = self.items
            thought = f"{COUNT[len(items)]} {'steps' if len(items) > 1 else 'step'}."
        self.failed = None
        return f"Thought: {thought}\nPlan: {' '.join(f'{i}. {item}' for i, item in enumerate(items, 1))}\nTo: {self.agent_of(self.at)}"

    def work(self, role, messages):
        """A tool agent: say what was found, then call the tool, hand over, or answer."""
        if self.failed:
            return f"Thought: {'The code is wrong.' if self.slip else 'Not found.'}\nTo: reflector"
        if self.reflect_at is not None and self.at >= self.reflect_at:
            self.reflect_at = None
            return f"Thought: {self.say()}\nTo: reflector"
        if self.at == len(self.steps) or self.mistake == ("hasty", self.at) and self.at > 0:
            return self.answer(messages)
        if self.agent_of(self.at) != role:
            return f"Thought: {self.say()}\nTo: {self.agent_of(self.at)}"
        step, kind = self.steps[self.at], self.mistake[0] if self.mistake[1] == self.at else None
        argument, wants = self.argument(step, kind, messages)
        self.called = True
        return f"Thought: {self.say()} {self.need(step, wants)}\n{self.team[step['tool']][1]}: {argument}".replace("Thought:  ", "Thought: ")

    def reflection(self, role, messages):
        if not self.failed:
            return "Reflection: conflict: good; tools: good; progress: good"
        if self.slip:
            reason, self.slip = self.slip, None
            self.failed = None if PROFILES[self.task.agent].first == "plan" else reason        # code and math go on without a new plan
            return f"Reflection: conflict: poor, {reason}; tools: good; progress: fair"
        return f"Reflection: conflict: good; tools: poor, {self.failed}; progress: fair"

    def double_check(self, role, messages):
        self.suggested = True
        if self.at < len(self.steps):
            step, self.mistake = self.steps[self.at], (None, None)
            return f"Thought: The {step['wants']} of {step['about']} was not read.\nScore: score: 2"
        self.confirmed = True
        return "Thought: It was read.\nScore: score: 4"

    def answer(self, messages):
        """Suggest or give the answer; over-confident: something that the last search happened to show."""
        given, derive, said = self.task.answer, self.solution.get("derive"), self.say()
        given = given if isinstance(given, str) else given[0]
        if self.at < len(self.steps):
            shown = re.findall(r"(?:is|the|in|has) ([A-Z][a-z]+|\d+)", messages[-1]["content"].rsplit("Observation:", 1)[-1])
            alike = {word for word in shown if word.isdigit() == given.isdigit()} - {given}
            given = self.pick(*sorted(alike or {self.steps[self.at]["about"]}))
            said = f"{said} It must be {given}."
        elif self.confirmed:
            said = "Confirmed."
        elif derive:
            found = " ".join(f"{self.steps[i]['about']}: {self.steps[i]['finds']}." for i in derive["of"])
            said = f"{found} {DERIVED[derive['op']]}: {given}."
        elif given not in said:
            said = f"{said} So it is {given}.".strip()
        return f"Thought: {said}\nAnswer: {given}"

    # Their words

    def pick(self, *options):
        return self.rng.choice(options)

    def say(self):
        fact, self.fact = self.fact, ""
        return fact

    def agent_of(self, at):
        return self.team[self.steps[min(at, len(self.steps) - 1)]["tool"]][0]

    def need(self, step, wants):
        """The next step in the words of the plan."""
        if step["tool"] == "crawl_page":
            return "Open its page."
        item = min(self.at, len(self.items) - 1)
        number = item - self.planned_from + 1
        what = f"{wants} of {step['about']}" if wants != step["wants"] else self.items[item]
        return f"Step {number}: {what}."

    def argument(self, step, kind, messages):
        """(argument, relation that the thought names): the right ones, or plausible wrong ones when the mistake is due."""
        right, wants = str(step["argument"]), step["wants"]
        if kind is not None:
            self.mistake = (None, None)
        if kind == "natural":
            return step["failing_first"], wants
        if kind == "hop":
            wants = self.steps[-1]["wants"]                              # skips a hop: asks the first entity for the last relation
            return f"{step['about']} {wants}", wants
        if kind == "letter":
            return right.replace(step["about"], self.misspell(step["about"])), wants
        if kind == "page":
            found = [url for message in messages for url in re.findall(r"https?://[^\s)|]+", message["content"]) if url != right]
            return self.pick(*found) if found else right, wants
        if kind == "slip":
            right, self.slip = self.wrong_code(right)
        return f"```py\n{right}\n```" if step["tool"] == "code" else right, wants

    def misspell(self, name):
        """A letter lost, or two changed over."""
        places = [i for i in range(1, len(name) - 1) if name[i:i + 2].isalpha() and name[i] != name[i + 1]]
        if not places:
            return name[:-1]
        i = self.pick(*places)
        return self.pick(name[:i] + name[i + 1:], name[:i] + name[i + 1] + name[i] + name[i + 2:])

    def wrong_code(self, right):
        """(a program with one slip, the slip in words): a digit lost, or a wrong sign."""
        numbers = [m for m in re.finditer(r"\d+", right) if len(m[0]) > 1]
        signs = [m for m in re.finditer(r"(?<=[\d)])([+*/-])(?=[\d(])", right)]
        if signs and (not numbers or self.rng.random() < 0.4):
            place = self.pick(*signs)
            wrong = self.pick(*(sign for sign in "+-*/" if sign != place[0]))
        elif numbers:
            place = self.pick(*numbers)
            cut = self.rng.randrange(1, len(place[0]))
            wrong = place[0][:cut] + place[0][cut + 1:]
        else:
            return right, None
        return right[:place.start()] + wrong + right[place.end():], f"{wrong} should be {place[0]}"
