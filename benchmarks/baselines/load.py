"""Mixed load: requests of which some ask for deterministic tokens, against the same requests without that promise.

All shares take turns in one run, over the same requests in the same order. Two kinds of arrival, both counted in steps of the
engine, so that every round has the same schedule: all at once, and spread over the first steps. Every share keeps the graphs of
its own passes, made in a round that does not count: if they shared one store of graphs, the shares with shapes in common would
drop those of the others, who would pay for making them again in every round.
"""

import statistics
from typing import Any

import torch

from benchmarks.baselines.subject import ENDLESS, Subject

ARMS: dict[str, tuple[float, dict[str, Any]]] = {
    "0 %": (0.0, {}),
    "10 %": (0.1, {}),
    "50 %": (0.5, {}),
    "100 %": (1.0, {}),
    "100 %, drafted and verified": (1.0, {"window": 8}),
}
"""the share of deterministic requests, and how they are served"""
WARM = 1


def mixed_load(subject: Subject) -> None:
    requests, graphs = _requests(subject), {arm: _graphs(subject) for arm in ARMS}
    before = subject.engine.runner.graphs
    for arrival in ("at once", "spread"):
        rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        rejected: dict[str, int] = {}
        texts: dict[str, dict[int, list[int]]] = {}
        for number in range(WARM + subject.sizes.rounds):
            for place in range(len(ARMS)):
                arm = list(ARMS)[(number + place) % len(ARMS)]
                subject.engine.runner.graphs = graphs[arm]
                rate, rejected[arm], texts[arm] = _serve(subject, requests, arm, arrival)
                if number >= WARM:
                    rates[arm].append(rate)
        for arm, found in texts.items():
            assert all(texts["100 %"][number] == tokens for number, tokens in found.items()), f"{arm}: company moved a token"
        _tell(subject, arrival, rates, rejected)
    subject.engine.runner.graphs = before
    subject.clear()


def _graphs(subject: Subject) -> Any:
    """An empty store of graphs, which makes one of every shape at once; None on a CPU."""
    engine = subject.engine
    if engine.loop.bursts is None:
        return None
    from replaylens.engine.passes.graphs import PassGraphs

    return PassGraphs(engine.model, engine.runner.cache, engine.loop.bursts.spare.pages[0], engine.runner.vectors, worth=1)


def _requests(subject: Subject) -> list[tuple[list[int], int, float]]:
    """(prompt, step of arrival, rank): a request is deterministic where its rank lies below the share."""
    sizes, random = subject.sizes, torch.Generator().manual_seed(1)
    count, (shortest, longest) = sizes.requests, sizes.request_lengths
    lengths = torch.randint(shortest, longest + 1, (count,), generator=random).tolist()
    due = torch.randint(0, sizes.arrivals, (count,), generator=random).sort().values.tolist()
    ranks = (torch.randperm(count, generator=random) / count).tolist()
    paths = [subject.prompts(1, length, seed=number)[0] for number, length in enumerate(lengths)]
    return list(zip(paths, due, ranks, strict=True))


def _serve(
    subject: Subject, requests: list[tuple[list[int], int, float]], arm: str, arrival: str
) -> tuple[float, int, dict[int, list[int]]]:
    """(generated tokens per second, drafts that were rejected, the deterministic requests' tokens by their number)."""
    engine, (share, how), tokens = subject.engine, ARMS[arm], subject.sizes.request_tokens
    waiting, served = list(requests), []

    def work() -> None:
        step = 0
        while waiting or any(not stream.job.done for _, stream in served):
            while waiting and (arrival == "at once" or waiting[0][1] <= step):
                path, _, rank = waiting.pop(0)
                branch = engine.handle(engine.forest.plant(path, None))  # its prompt is computed with its request
                exact = rank < share
                options = how if exact else {}
                served.append((branch, engine.stream(branch, tokens, sampling=ENDLESS, deterministic=exact, **options)))
            engine.loop.step()
            step += 1

    elapsed = subject.seconds(work)
    assert all(len(branch.generated) == tokens for branch, _ in served)
    found = {number: branch.tokens for number, (branch, stream) in enumerate(served) if stream.job.exact}
    rejected = sum(stream.job.statistics.rejected for _, stream in served)
    for branch, stream in served:
        stream.close()
        branch.release()
    engine.prefix.clear()
    return len(requests) * tokens / elapsed, rejected, found


def _tell(subject: Subject, arrival: str, rates: dict[str, list[float]], rejected: dict[str, int]) -> None:
    """Ratios to 0 %, round by round; their range says what the rounds themselves differ by."""
    for arm in ARMS:
        ratios = [mine / bare for mine, bare in zip(rates[arm], rates["0 %"], strict=True)]
        subject.table.add(
            f"mixed load, {arrival}, {arm} deterministic",
            ratio=statistics.median(ratios),
            lowest=min(ratios),
            highest=max(ratios),
            tokens_per_s=statistics.median(rates[arm]),
            rejected_drafts=rejected[arm],
            rounds=rates[arm],
        )
