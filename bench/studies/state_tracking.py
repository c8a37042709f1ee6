"""State tracking, at the query or along the way: attention knock-out and activation patching between the steps and the answer.

If the state is carried from step to step, the last step holds it: an answer that sees nothing earlier survives, and steps that
cannot see earlier ones break it. If it is computed at the query from all steps, it is the other way round. Edges are hidden in
all layers and heads; the first token stays visible everywhere, since many heads rest on it. Two placebos of a knock-out: as
many edges drawn at random, and a matched one. For boxes, the same rows lose as many tokens each, of the solved examples; coins
have none, so that the same tokens are hidden from as many rows right before, which the steps have none of. Placebo of a patch:
rows of the same prompt with other names, whose states are the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import replaylens as rl
from bench.studies.common import COLOURS, QUIET, Place, curve, digest, inputs, legend, paired, picture, share
from replaylens.tasks.coin import TRAIN_PEOPLE

PARTS = ("coin-plain", "coin-thinking", "smollm2", "gemma-3-270m", "qwen", "smollm2, patching", "qwen, patching")
FACES = (" heads", " tails")
PATTERN = "blocks.*.attn.hook_pattern"
APART = "steps do not see what is before them"


def run(quick: bool, part: str, place: Place) -> dict[str, Any]:
    engine = place.load(part.partition(",")[0])
    if part.endswith("patching"):
        return patched_boxes(engine, 6 if quick else 100)
    if part == "coin-plain":
        return coin_plain(engine, 12 if quick else 100)
    if part == "coin-thinking":
        return coin_thinking(engine, 4 if quick else 16)
    return pretrained(engine, 4 if quick else 100 if part == "qwen" else 16)


# ---- who sees whom -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spans:
    """The tokens of a prompt by what they tell. The first token is in none of them."""

    opening: list[int]
    steps: list[list[int]]
    question: list[int]

    @classmethod
    def of(cls, engine: rl.Engine, prompt: str, starts: Sequence[int], question: int) -> "Spans":
        """starts: the first character of each step; question: that of the question. A token belongs to its last character."""
        ends = np.cumsum([len(engine.text.token(token)) for token in engine.tokens_of(prompt)])
        ends -= ends[-1] - len(prompt)  # a <bos> is no part of the prompt
        part = np.searchsorted([*starts, question], ends, side="left")  # 0: opening, 1: first step, ...
        groups = [[p for p in np.flatnonzero(part == g).tolist() if p > 0] for g in range(len(starts) + 2)]
        return cls(groups[0], groups[1:-1], groups[-1])


Edges = dict[int, list[int]]
"""position -> the positions that it cannot see"""


def hidden(positions: Sequence[int], keys: Sequence[int]) -> Edges:
    return {p: [k for k in keys if k < p] for p in positions}


def knock_outs(spans: Spans) -> dict[str, Edges]:
    """Conditions by name."""
    *earlier, _ = spans.steps
    before_last = [*spans.opening, *(p for step in earlier for p in step)]
    told = [*spans.opening, *(p for step in spans.steps for p in step)]
    apart: Edges = {}
    for number, step in enumerate(spans.steps):
        apart |= hidden(step, [*spans.opening, *(p for other in spans.steps[:number] for p in other)])
    return {
        "intact": {},
        "question sees only the last step": hidden(spans.question, before_last),
        "its last token sees only the last step": hidden(spans.question[-1:], before_last),
        APART: apart,
        "nor does the question, but for its last token": apart | hidden(spans.question[:-1], told),
        "question sees no step": hidden(spans.question, told),
    }


def at_random(edges: Edges, length: int, random: np.random.Generator) -> Edges:
    """As many edges, drawn from all of the prompt's."""
    every = [(q, k) for q in range(2, length) for k in range(1, q)]
    drawn = random.choice(len(every), size=min(len(every), sum(map(len, edges.values()))), replace=False)
    found: Edges = {}
    for number in drawn:
        found.setdefault(every[number][0], []).append(every[number][1])
    return found


def matched(edges: Edges, among: Sequence[int], random: np.random.Generator) -> Edges:
    """The same rows, each losing as many tokens, drawn from some. Rows that lost the same tokens lose the same ones again."""
    drawn: dict[tuple[int, ...], list[int]] = {}
    for keys in map(tuple, edges.values()):
        if keys not in drawn:
            drawn[keys] = random.choice(among, size=min(len(keys), len(among)), replace=False).tolist()
    return {position: drawn[tuple(keys)] for position, keys in edges.items()}


def rows_before(edges: Edges) -> Edges:
    """The same tokens, hidden from as many rows right before these, as far as they see them."""
    return {p - len(edges): [k for k in keys if k < p - len(edges)] for p, keys in edges.items()}


def as_edits(edges: Edges, layers: Sequence[int] | None = None) -> list[rl.Edit]:
    """One edit for all positions that lose the same keys. None: in all layers."""
    sites = [PATTERN] if layers is None else [f"blocks.{layer}.attn.hook_pattern" for layer in layers]
    same: dict[tuple[int, ...], list[int]] = {}
    for position, keys in edges.items():
        if keys:
            same.setdefault(tuple(sorted(keys)), []).append(position)
    alike = [(sorted(positions), list(keys)) for keys, positions in same.items()]
    return [rl.Edit(site, "mask", positions=positions, keys=keys) for site in sites for positions, keys in alike]


def conditions(spans: Spans, length: int, seed: int, layers: int = 0) -> dict[str, list[rl.Edit]]:
    """Every knock-out with its placebos. With a number of layers: steps apart in the first block only, and after it only."""
    random, found = np.random.default_rng(seed), dict[str, list[rl.Edit]]()
    for name, edges in knock_outs(spans).items():
        twins = {"placebo": at_random(edges, length, random)}
        if edges and min(edges) >= spans.question[0]:
            twins["matched placebo"] = rows_before(edges)
        parts = {name: None, f"{name}, block 0": [0], f"{name}, later blocks": [*range(1, layers)]}
        for each, blocks in parts.items() if layers and name == APART else [(name, None)]:
            found[each] = as_edits(edges, blocks)
            if edges:
                found |= {f"{kind}: {each}": as_edits(twin, blocks) for kind, twin in twins.items()}
    return found


def coin_spans(engine: rl.Engine, example: Any) -> Spans:
    starts = [step.start for step in example.steps[: len(example.events)]]
    return Spans.of(engine, example.prompt, starts, example.prompt.index(" What's"))


def tally(right: dict[str, list[bool]], roots: Sequence[str]) -> dict[str, Any]:
    return {name: share(each, roots) for name, each in right.items()}


def knocked_out(right: dict[str, list[bool]], roots: Sequence[str]) -> dict[str, Any]:
    """Right answers under every condition, and how many more than under each of its placebos, prompt by prompt."""
    pairs = [(name, kind, f"{kind}: {name}") for name in right for kind in ("placebo", "matched placebo")]
    lines: dict[str, Any] = {}
    for name, kind, rival in pairs:
        if rival in right:
            lines.setdefault(name, {})[f"minus {kind}"] = paired(right[name], right[rival], roots)
    return {"knock_out": tally(right, roots), "paired": lines}


# ---- coin-plain ----------------------------------------------------------------------------------------------------------


def coin_plain(engine: rl.Engine, n: int) -> dict[str, Any]:
    examples = _different(rl.tasks.get("coin")(flips=5).examples(2 * n), n)
    right: dict[str, list[bool]] = {}
    for seed, example in enumerate(examples):
        path = engine.tokens_of(example.prompt)
        made = conditions(coin_spans(engine, example), len(path), seed, engine.config.num_layers)
        for name, (a, b) in zip(made, engine.logits_under(path, list(made.values()), tokens=FACES), strict=True):
            right.setdefault(name, []).append(FACES[int(b > a)] == example.answer)
    roots = [example.root for example in examples]
    found = {"inputs": inputs(engine, prompts=digest(e.prompt for e in examples)), **knocked_out(right, roots)}
    return found | {"patching": patched(engine, examples[: max(6, n // 2)])}


def _different(examples: Sequence[Any], n: int) -> list[Any]:
    return list({example.root: example for example in examples}.values())[:n]


def patched(engine: rl.Engine, examples: Sequence[Any]) -> dict[str, Any]:
    """Rows of the prompt that begins with the other face, copied in by place and layer: share of answers that turn.

    Placebo: rows of the prompt with other names.
    """
    turned: dict[tuple[str, str, int], list[bool]] = {}
    layers = range(engine.config.num_layers)
    sites = [f"blocks.{layer}.hook_in" for layer in layers]
    for example in examples:
        path, spans = engine.tokens_of(example.prompt), coin_spans(engine, example)
        places = {"start": spans.opening, **{f"step {t + 1}": step for t, step in enumerate(spans.steps)}}
        places["all steps"] = [p for step in spans.steps for p in step]
        places |= {"question": spans.question[:-1], "query": spans.question[-1:]}
        for kind, text in (("other face", _other_face(example.prompt)), ("other names", _other_names(example.prompt))):
            with engine.prompt(text, sites=sites) as source:
                rows = {layer: source.activations[site] for layer, site in enumerate(sites)}
            names = [(place, layer) for place in places for layer in layers]
            edits = [[rl.Edit(sites[at], "set", rows[at][places[place]], positions=places[place])] for place, at in names]
            (a, b), *others = engine.logits_under(path, [[], *edits], tokens=FACES)
            for (place, layer), (c, d) in zip(names, others, strict=True):
                turned.setdefault((kind, place, layer), []).append(bool((c > d) != (a > b)))
    roots = [example.root for example in examples]
    found: dict[str, Any] = {}
    for (kind, place, layer), each in turned.items():
        found.setdefault(kind, {}).setdefault(place, {})[f"S{layer}"] = share(each, roots)
    return found


def _other_face(prompt: str) -> str:
    return prompt.replace("heads", "#").replace("tails", "heads").replace("#", "tails")


def _other_names(prompt: str) -> str:
    """Every name moves on by one: as many tokens."""
    words = dict(zip(TRAIN_PEOPLE, (*TRAIN_PEOPLE[1:], TRAIN_PEOPLE[0]), strict=True))
    return " ".join(words.get(word, word) for word in prompt.split(" "))


# ---- coin-thinking -------------------------------------------------------------------------------------------------------


def coin_thinking(engine: Any, n: int) -> dict[str, Any]:
    """The same knock-outs while the model thinks, and its states exchanged for those of the other face."""
    examples = _different(rl.tasks.get("coin")(flips=5).examples(2 * n), n)
    right: dict[str, list[bool]] = {}
    exchanged: dict[str, list[bool]] = {}
    for seed, example in enumerate(examples):
        made = conditions(coin_spans(engine, example), len(engine.tokens_of(example.prompt)), seed)
        for name, edits in made.items():
            with engine.prompt(example.prompt, edits=edits) as branch:
                right.setdefault(name, []).append(_answer(engine, branch) == example.answer)
        for kind, text in (("other face", _other_face(example.prompt)), ("other names", _other_names(example.prompt))):
            for name, turns in _states_exchanged(engine, example.prompt, text).items():
                exchanged.setdefault(f"{kind}, {name}", []).append(turns)
    roots = [example.root for example in examples]
    found = {"inputs": inputs(engine, prompts=digest(e.prompt for e in examples)), **knocked_out(right, roots)}
    return found | {"states_exchanged": tally(exchanged, roots)}


def _answer(engine: Any, branch: Any) -> str:
    return str(engine.text.token(branch.generate(1).tokens[-1]))


def _states_exchanged(engine: Any, prompt: str, text: str) -> dict[str, bool]:
    """For the first, a middle and the last state: whether the answer turns if another prompt's state takes its place."""
    with engine.prompt(text, sites="S") as source, engine.prompt(prompt, sites="S") as branch:
        states, own = source.activations["thinking.state"], branch.activations["thinking.state"]
        given = [p for p in range(len(own)) if bool((own[p] != 0).any())]
        chunks = [given[i : i + 2] for i in range(0, len(given) - 1, 2)]
        plain, found = _answer(engine, branch.fork()[0]), {}
        for name, number in (("first state", 0), ("middle state", len(chunks) // 2), ("last state", len(chunks) - 1)):
            begin, end = chunks[number][0], chunks[number][-1] + 1
            edit = rl.Edit.interchange("thinking.state", states[begin:end], slice(begin, end))
            with engine.prompt(prompt, edits=[edit]) as changed:
                found[name] = _answer(engine, changed) != plain
    return found


# ---- pretrained models -----------------------------------------------------------------------------------------------------


def pretrained(engine: rl.Engine, n: int) -> dict[str, Any]:
    """Coins, at chance; boxes of which one thing is moved: which sentence must the question see?"""
    shots = "\n".join(e.text for e in rl.tasks.get("coin")(flips=(1, 3), names="held-out", seed=1).examples(4)) + "\n"
    coins = _different(rl.tasks.get("coin")(flips=(1, 3)).examples(2 * n), n)
    said = [engine.logits(shots + e.prompt, tokens=FACES) for e in coins]
    known = share([FACES[int(b > a)] == e.answer for (a, b), e in zip(said, coins, strict=True)], [e.root for e in coins])
    moved = [story for story in map(Moved.of, range(40 * n)) if story is not None][:n]
    right: dict[str, list[bool]] = {}
    roots: list[str] = []
    plain: list[bool] = []
    for seed, story in enumerate(moved):
        path = engine.tokens_of(SOLVED + story.prompt)
        spans = story.spans(engine)
        later = {p: [k for k in range(spans.told[0], p) if k not in own] for own in spans.sentences for p in own}
        made: dict[str, Edges] = {
            "intact": {},
            "question does not see the sentence that tells": hidden(spans.question, spans.sentences[story.tells]),
            "question does not see another sentence": hidden(spans.question, spans.sentences[story.other]),
            "sentences do not see each other": later,
            "question sees only the last sentence": hidden(spans.question, [p for s in spans.sentences[:-1] for p in s]),
        }
        made["placebo: sentences do not see each other"] = at_random(later, len(path), np.random.default_rng(seed))
        random, solved = np.random.default_rng([seed, 1]), range(1, spans.told[0])
        made |= {f"matched placebo: {n}": matched(e, solved, random) for n, e in made.items() if e and ":" not in n}
        things = [f" {thing}" for thing in story.things]
        wanted = [engine.text.encode(thing, special=False)[0] for thing in things]
        logits = engine.logits_under(path, [as_edits(edges) for edges in made.values()], tokens=wanted)
        answers = [things[int(each.argmax())] == f" {story.answer}" for each in logits]
        plain.append(answers[0])
        if answers[0]:  # a knock-out can only break what is right
            roots.append(str(seed))
            for name, each in zip(made, answers, strict=True):
                right.setdefault(name, []).append(each)
    prompts = digest([*(e.prompt for e in coins), *(story.prompt for story in moved)])
    chance = float(np.mean([1 / len(story.things) for story in moved]))
    boxes = {"right": share(plain, range(len(plain))), "chance": chance, **knocked_out(right, roots)}
    return {"inputs": inputs(engine, prompts=prompts), "coins": known, "boxes": boxes}


def patched_boxes(engine: rl.Engine, n: int) -> dict[str, Any]:
    """Rows of the prompt in which the answer and another thing have exchanged their names, copied in: which answers turn?

    Only prompts count that are answered rightly with both names. Placebo: rows of the prompt in which the other thing has a
    name that does not occur, and the answer stays.
    """
    layers = [round(at * (engine.config.num_layers - 1) / 4) for at in range(4)]
    sites = [f"blocks.{layer}.hook_in" for layer in layers]
    moved = [story for story in map(Moved.of, range(40 * n)) if story is not None][:n]
    turned: dict[tuple[str, str, int], list[bool]] = {}
    roots: list[str] = []
    for seed, story in enumerate(moved):
        other, new = next(thing for thing in story.things if thing != story.answer), min(_THINGS - {*story.things})
        texts = {"names exchanged": _renamed(story.prompt, {story.answer: other, other: story.answer})}
        texts["another name"] = _renamed(story.prompt, {other: new})
        paths = {kind: engine.tokens_of(SOLVED + text) for kind, text in texts.items()}
        path, pair = engine.tokens_of(SOLVED + story.prompt), [f" {story.answer}", f" {other}"]
        said = [engine.logits_under(each, [[]], tokens=pair)[0].argmax() for each in (path, paths["names exchanged"])]
        if {len(path)} != {*map(len, paths.values())} or [*map(int, said)] != [0, 1]:
            continue
        roots.append(str(seed))
        spans = story.spans(engine)
        places = {
            "opening": [p for each in spans.sentences[:3] for p in each],
            "sentence that tells": spans.sentences[story.tells],
        }
        places |= {"question": spans.question[:-1], "query": spans.question[-1:]}
        for kind, tokens in paths.items():
            with engine.prompt(tokens, sites=sites) as source:
                rows = [source.activations[site] for site in sites]
            names = [(place, at) for place in places for at in range(len(layers))]
            edits = [[rl.Edit(sites[at], "set", rows[at][places[place]], positions=places[place])] for place, at in names]
            for (place, at), each in zip(names, engine.logits_under(path, edits, tokens=pair), strict=True):
                turned.setdefault((kind, place, layers[at]), []).append(bool(each[1] > each[0]))
    found: dict[str, Any] = {}
    for (kind, place, layer), each in turned.items():
        found.setdefault(kind, {}).setdefault(place, {})[f"S{layer}"] = share(each, roots)
    made = inputs(engine, prompts=digest(story.prompt for story in moved))
    return {"inputs": made, "prompts": len(moved), "right with both names": len(roots), "patching": found}


def _renamed(prompt: str, names: dict[str, str]) -> str:
    return re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[0]], prompt)


SOLVED = (
    "Box 1 has the pencil. Box 2 has the glove. Box 3 is empty. Move the glove from box 2 to box 3. "
    "What is in box 3? A: glove.\n"
    "Box 1 is empty. Box 2 has the key. Box 3 has the spoon. Move the key from box 2 to box 1. What is in box 3? A: spoon.\n"
    "Box 1 has the rope. Box 2 is empty. Box 3 has the bell. Move the bell from box 3 to box 2. What is in box 2? A: bell.\n"
)


@dataclass(frozen=True)
class BoxSpans:
    told: list[int]
    sentences: list[list[int]]
    question: list[int]


@dataclass(frozen=True)
class Moved:
    """A prompt of the task boxes whose answer was moved, and is told by one sentence alone."""

    prompt: str
    answer: str
    things: list[str]
    tells: int
    """number of the sentence after which the asked box holds the answer"""
    other: int
    """number of a sentence that does not name the answer"""

    @classmethod
    def of(cls, index: int) -> "Moved | None":
        """None: the example's answer was not moved, or every sentence names it."""
        example = rl.tasks.get("boxes")(boxes=3, moves=2, seed=7).example(index)
        answer, sentences = example.answer.strip(), example.prompt.split(". ")[:-1]
        named = [number for number, sentence in enumerate(sentences) if answer in sentence]
        others = [number for number, sentence in enumerate(sentences) if answer not in sentence and "empty" not in sentence]
        things = sorted({word.strip(".") for sentence in sentences for word in sentence.split() if word.strip(".") in _THINGS})
        if answer == "nothing" or not named or named[-1] < 3 or not others or len(things) < 2:
            return None
        return cls(example.prompt, answer, things, named[-1], others[-1])

    def spans(self, engine: rl.Engine) -> BoxSpans:
        dots = [found.end() for found in re.finditer(r"\.", self.prompt)]  # a token " Box" begins with the space behind one
        starts = [len(SOLVED) + at for at in (0, *dots)]
        found = Spans.of(engine, SOLVED + self.prompt, starts[:-1], starts[-1])
        return BoxSpans([p for step in found.steps for p in step], found.steps, found.question)


def _things() -> frozenset[str]:
    from replaylens.tasks.boxes import THINGS

    return frozenset(THINGS)


_THINGS = _things()


# ---- figure ----------------------------------------------------------------------------------------------------------------


def draw(parts: dict[str, dict[str, Any]]) -> Figure:
    """Left: right answers under each knock-out, with its placebos. Right: answers that a patch turns, by layer."""
    tables = {name: part.get("knock_out") or part.get("boxes", {}).get("knock_out", {}) for name, part in parts.items()}
    made, axes = picture(2, len(tables), width=5.2, height=2.7)
    for line, (name, table) in zip(axes, tables.items(), strict=True):
        shown = [each for each in table if "placebo: " not in each]
        kinds = (("", COLOURS[0], 0.15), ("placebo: ", QUIET, -0.1), ("matched placebo: ", COLOURS[1], -0.3))
        for y, each in enumerate(reversed(shown)):
            for key, colour, shift in ((kind + each, colour, shift) for kind, colour, shift in kinds):
                if key in table:
                    found = table[key]
                    line[0].plot([found["low"], found["high"]], [y + shift] * 2, color=colour, linewidth=2)
                    line[0].plot([found["value"]], [y + shift], color=colour, marker="o", markersize=5)
        line[0].set(
            title=f"{name}: right answers (grey: random edges; orange: matched)", yticks=range(len(shown)), xlim=(-0.03, 1.03)
        )
        line[0].set_yticklabels(list(reversed(shown)), fontsize=7)
        if not table:
            line[0].set(title="")
            line[0].set_axis_off()
        kind, patches = next(iter(parts[name].get("patching", {}).items()), ("", {}))
        for number, (place, layers) in enumerate(patches.items()):
            cells = list(layers)
            x = [int(cell[1:]) for cell in cells]
            curve(line[1], x, [layers[c] for c in cells], COLOURS[number % 6], place, number > 5)
        states = parts[name].get("states_exchanged", {})
        for y, (each, found) in enumerate(states.items()):
            colour = QUIET if "names" in each else COLOURS[0]
            line[1].plot([found["low"], found["high"]], [y, y], color=colour, linewidth=2)
            line[1].plot([found["value"]], [y], color=colour, marker="o", markersize=5)
        if states:
            line[1].set(title="answers turned by another state", yticks=range(len(states)), xlim=(-0.03, 1.03))
            line[1].set_yticklabels(list(states), fontsize=7)
        elif line[1].get_legend_handles_labels()[0]:
            line[1].set(title=f"{name}: answers turned by rows, {kind}", xlabel="S of layer", ylim=(-0.03, 1.03))
            line[1].set_xticks(sorted({int(cell[1:]) for each in patches.values() for cell in each}))
            legend(line[1], ncols=2)
        else:
            line[1].set_axis_off()
    return made
