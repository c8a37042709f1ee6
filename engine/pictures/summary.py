"""What a notebook shows for a run, a branch and an engine: the facts in a few lines, then their trees."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from replaylens.engine.memory.tree import BranchStatus
from replaylens.engine.pictures import live, tree_html
from replaylens.engine.pictures import thoughts as thinking
from replaylens.engine.pictures.html import Markup, fragment, tag
from replaylens.engine.pictures.svg import cylinder
from replaylens.engine.pictures.thoughts import Thinking
from replaylens.engine.pictures.timeline import Fill
from replaylens.engine.pictures.tree import Tree

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine
    from replaylens.engine.run import Run
    from replaylens.engine.serving.branch import Branch
    from replaylens.engine.thinking.engine import ThinkingBranch

MOST_TREES = 12
"""unfolded on request in one output"""


def run_html(run: "Run") -> str:
    """Accuracy and acceptance, then the trees of the first examples, folded."""
    facts: dict[str, str | int | float] = {
        "examples": len(run),
        "right answers": f"{run.accuracy:.1%}" if len(run) else "none",
        "drafts accepted": f"{run.acceptance:.1%}" if run.acceptance == run.acceptance else "nothing drafted",
    }
    folded = [_folded(run.tree(i)) for i in range(min(len(run), MOST_TREES))]
    more = len(run) - len(folded)
    rest = [tag("p", f"and {more} more: run.tree(i) shows any of them", class_="rl-quiet")] if more > 0 else []
    return fragment(fact_list(facts), *folded, *rest)


def branch_html(branch: "Branch") -> str:
    """The branch's tree under its facts."""
    return fragment(_branch_facts(branch), tree_html.draw(live.tree_of(branch.engine, branch.id)))


def thinking_branch_html(branch: "ThinkingBranch") -> str:
    """The picture of its thoughts under the branch's facts."""
    return fragment(_branch_facts(branch), thinking.draw(branch.tree()))


def _branch_facts(branch: "Branch") -> Markup:
    facts = {
        "status": branch.status.value + (f" ({branch.finish_reason})" if branch.finish_reason else ""),
        "tokens": f"{branch.length}, of which {branch.root_length} are prompt",
        "certified": "yes" if branch.certified else "no: fast path or hook functions",
    }
    return fact_list(facts)


def engine_html(engine: "Engine") -> str:
    """Model, fingerprint, how full the cache is, and the trees of the branches that are still held."""
    config, pool = engine.config, engine.runner.pool
    used = pool.num_pages - pool.num_free
    facts = {
        "model": f"{config.num_layers} layers, width {config.d_model}, vocabulary {config.vocab_size}",
        "device": f"{engine.fingerprint.device}, {engine.fingerprint.dtype}",
        "certified": "yes" if engine.certificate.certified else "no",
        "fingerprint": tag("code", engine.fingerprint.digest),
        "KV pages": f"{used} of {pool.num_pages} in use, {pool.page_size} positions each",
    }
    held = [i for i in engine.tree.roots() if engine.tree.branch(i).status is not BranchStatus.RELEASED]
    folded = [_folded(live.tree_of(engine, root)) for root in held[-MOST_TREES:]]
    picture = tag("div", cylinder(Fill(used), pool.num_pages), class_="rl-picture")
    more = len(held) - len(folded)
    rest = [tag("p", f"and {more} older roots", class_="rl-quiet")] if more > 0 else []
    return fragment(tag("div", picture, fact_list(facts), class_="rl-head"), *folded, *rest)


def fact_list(facts: Mapping[str, str | int | float]) -> Markup:
    """Names with their values."""
    return tag(
        "dl", *(part for name, value in facts.items() for part in (tag("dt", name), tag("dd", value))), class_="rl-facts"
    )


def _folded(tree: Tree | Thinking) -> Markup:
    if isinstance(tree, Thinking):
        told = "".join(token for chunk in tree.chunks for token in chunk.tokens)
        what, drawn = f"{len(tree.rounds)} rounds", thinking.draw(tree)
    else:
        told = "".join(token.text for token in tree.trunk.tokens)
        what, drawn = f"{len(tree.paths) - 1} branches", tree_html.draw(tree)
    return tag("details", tag("summary", f"{tree.title}, {what}: …{told[-70:]}"), drawn)
