"""Runs of a task that is not registered work in sweeps, probes and questions; its dumps say how to register it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from replaylens import Dump, Engine, Run, Sampling, probes, tasks
from replaylens.dumps.verify import verify
from replaylens.engine.model.config import ModelConfig
from replaylens.probes.errors import ProbeError
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows
from replaylens.tasks.errors import BadTask, UnknownTask
from replaylens.training import trainer
from replaylens.training.recipe import Recipe, RecipePart, words_of
from tests.tasks.square import own_registry, square_module

HOW: dict[str, Any] = {"sites": "S", "layers": [2]}


@dataclass(frozen=True)
class Own:
    """A model of the task, and a run of it."""

    kind: Any
    engine: Engine
    run: Run


@pytest.fixture(scope="module")
def own() -> Own:
    """The task is registered for the training only. Sampled answers of a model that has only learned how texts go are right
    and wrong, and many drafts are rejected."""
    square = square_module().Square
    with own_registry():
        tasks.register(square)
        parts = (RecipePart("square", 1),)
        shape = dict(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_head=16, d_mlp=64, rotary_dim=16)
        config = ModelConfig(**shape, vocab_size=words_of(parts).vocab_size, max_positions=64)
        recipe = Recipe(config=config, parts=parts, longest=2, steps=100, batch=24, lr=4e-3, seed=0, warmup=10, pool=64)
        model, tokenizer = trainer.train(recipe), recipe.tokenizer()
    engine = Engine.load(model, tokenizer=tokenizer)
    examples = square(moves=(2, 4)).examples(80)
    return Own(square, engine, engine.replay(examples, sites="SZ", drafter="lens", sampling=Sampling(temperature=1.0)))


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    with own_registry():
        yield


def test_the_task_is_not_registered(own: Own) -> None:
    """The control: nothing below can go through the registry."""
    assert "square" not in tasks.names() and 0.02 < own.run.accuracy < 0.9
    assert ProbeRows.of(own.run).about.make_task() is own.run[0].example.maker


QUESTIONS: dict[str, Callable[[Own], Report]] = {
    "sweep": lambda own: probes.sweep(own.run, "state", positions="query", estimators="ridge", permutations=0, **HOW),
    "viable_branch": lambda own: probes.viable_branch(own.run, positions=["query"], estimator="ridge", **HOW),
    "transfer": lambda own: probes.transfer(own.run, "state", position="all", estimator="ridge", folds=3, **HOW),
    "judge": lambda own: probes.judge(own.run, draft_layer=1, **HOW),
    "steering_reach": lambda own: probes.steering_reach(
        own.engine, own.run, own.kind(moves=4, seed=9).examples(5), layers=[2], placebos=1
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_about_a_run(own: Own, question: str) -> None:
    report = QUESTIONS[question](own)
    assert report.lines and report.source["task"] == "square"
    assert question != "sweep" or any(line["known_zero"] for line in report.lines), "known zeros come from the task"


def test_a_probe_and_its_causal_test(own: Own) -> None:
    probe = probes.fit_probe(own.run, "state", layer=2, estimator="mass-mean")
    assert len(probe.classes) == 8 and probe.source["task"] == "square"
    report = probes.steer(own.engine, probe, own.kind(moves=4, seed=9).examples(8), placebos=1)
    assert report.lines


def test_outcomes_need_a_task_that_computes_them(own: Own) -> None:
    with pytest.raises(ProbeError, match="Task 'square' cannot compute outcome probabilities"):
        probes.outcome_at_fork(own.run, **HOW)


# Dumps


@pytest.fixture(scope="module")
def dumped(own: Own, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(own.run.save(tmp_path_factory.mktemp("square") / "dump").url)


def test_a_dump_is_written_and_read_without_the_task(own: Own, dumped: Path) -> None:
    dump = Dump.open(dumped)
    assert dump.manifest.plan.task == "square" and len(dump.to_pandas()) == dump.manifest.rows
    assert verify(dumped, own.engine, task=own.run[0].example.maker)


NEEDS_THE_TASK: dict[str, Callable[[Own, Path], Any]] = {
    "sweep": lambda own, path: QUESTIONS["sweep"](replace(own, run=Dump.open(path))),
    "fit_probe": lambda own, path: probes.fit_probe(Dump.open(path), "state", layer=2, estimator="mass-mean"),
    "verify": lambda own, path: verify(path, own.engine),
    "plan": lambda own, path: Dump.open(path).manifest.plan.make_task(),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", NEEDS_THE_TASK)
def test_what_needs_the_task_says_how_to_register_it(own: Own, dumped: Path, what: str) -> None:
    with pytest.raises(UnknownTask, match=r"Unknown task 'square'\. .* import the module with its @tasks\.register, install"):
        NEEDS_THE_TASK[what](own, dumped)
    tasks.register(own.kind)
    NEEDS_THE_TASK[what](own, dumped)


@pytest.mark.slow
def test_a_dump_and_its_run_give_one_report(own: Own, dumped: Path) -> None:
    tasks.register(own.kind)
    assert NEEDS_THE_TASK["sweep"](own, dumped).lines == QUESTIONS["sweep"](own).lines


def test_a_task_with_the_name_of_another_is_not_cited(own: Own, tmp_path: Path) -> None:
    """A dump of it would be read with the other task."""
    impostor = type("Impostor", (own.kind,), {"name": "coin"})
    run = own.engine.replay(impostor().examples(4), sites="S")
    for cite in (lambda: run.save(tmp_path / "dump"), lambda: ProbeRows.of(run)):
        with pytest.raises(BadTask, match=r"Task name 'coin' is taken: class .*Impostor has it, and so has class replay"):
            cite()
    assert not (tmp_path / "dump").exists()
