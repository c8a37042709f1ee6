"""Rollouts on a Ray cluster: idle actors get the next wave; a dead actor's wave is drawn again.

Actors write their waves into a folder, so all machines must have access to it. The digest is the same on one worker or many, as
long as all have the same fingerprint.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from replaylens.engine import cluster
from replaylens.engine.engine import Engine
from replaylens.engine.errors import OtherFingerprint
from replaylens.engine.model.text import Prompt
from replaylens.engine.progress import hidden
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.resampling.answers import Answer
from replaylens.engine.resampling.folder import WaveFolder
from replaylens.engine.resampling.plan import KeptPlaces, ResamplePlan
from replaylens.engine.resampling.rollouts import Rollouts
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.resampling import Replacement, waves_of


class WaveWorker(cluster.Worker):
    """The class of the actors that draw rollouts."""

    def plan(self, path: str, options: str) -> str:
        """The plan for these options on this engine, and the size of its waves."""
        given = json.loads(options)
        given["sampling"] = Sampling.from_json(given["sampling"])
        given["answer"] = None if given["answer"] is None else Answer.from_json(given["answer"])
        with chain_of(self.engine, **json.loads(path)) as branch:
            plan, wave = branch.plan_rollouts(**given)
        return json.dumps({"plan": plan.to_json(), "wave": wave})

    def write(self, folder: str, number: int) -> int:
        """Draw and write one wave of a folder. Returns its number."""
        files = WaveFolder.open(folder)
        if files.plan.fingerprint != self.engine.fingerprint.digest:
            raise OtherFingerprint("A worker's fingerprint differs from that of the plan, so it would compute other bits.")
        with self.engine.prompt(files.plan.tokens[: files.plan.num_prompt]) as branch:
            if rest := files.plan.tokens[files.plan.num_prompt :]:
                branch.force(rest)
            files.write(number, waves_of(self.engine, branch, files.plan).draw(files.indices(number)))
        return number


def chain_of(engine: Engine, prompt: Prompt, chain: str | Sequence[int] = "") -> Branch:
    """A branch with a prompt (text, token ids or a chat) and, after it, a chain to resample."""
    branch = engine.prompt(prompt)
    return branch.force(chain) if chain else branch


def resample_on_cluster(
    model: str,
    folder: str | Path,
    prompt: Prompt,
    n: int,
    *,
    chain: str | Sequence[int] = "",
    address: str = "local",
    workers: int | None = None,
    progress: bool = False,
    engine_options: dict[str, Any] | None = None,
    at: str | int | Sequence[int] | None = None,
    sampling: Sampling | None = None,
    max_new: int = 64,
    answer: Answer | None = None,
    sites: str | Sequence[str] | None = None,
    keep: KeptPlaces = "last",
    replace: Replacement = None,
    wave: int | None = None,
) -> Rollouts:
    """Draw rollouts with the workers of a Ray cluster, into a folder that all can reach. Goes on with an unfinished one.

    model    a name or folder that `Engine.load` takes, on every machine
    prompt   a text, token ids, or a chat
    chain    what follows the prompt: the text, or token ids, to resample
    address, workers
             as in `dump_on_cluster`
    others   those of `branch.resample`; a function, as position or answer, cannot be sent

    The digest is that of `branch.resample` in one process.
    """
    sent = cluster.sendable(
        {
            "n": n,
            "at": at,
            "sampling": (Sampling(temperature=1.0) if sampling is None else sampling).to_json(),
            "max_new": max_new,
            "answer": None if answer is None else answer.to_json(),
            "sites": sites,
            "keep": keep,
            "replace": replace,
            "wave": wave,
        }
    )
    with cluster.connected(address) as ray, cluster.Pool(ray, WaveWorker, model, engine_options or {}, workers) as pool:
        raw = json.loads(pool.call("plan", cluster.sendable({"prompt": prompt, "chain": chain}), sent))
        files = WaveFolder.create(folder, ResamplePlan.from_json(raw["plan"]), raw["wave"])
        missing = files.missing()
        with tqdm(total=len(files.plan), unit="rollout", disable=hidden(progress)) as bar:
            bar.update(sum(len(files.indices(i)) for i in range(files.num_waves) if i not in set(missing)))
            for number in pool.write_all(missing, lambda actor, number: actor.write.remote(str(folder), number), "Wave"):
                bar.update(len(files.indices(number)))
    return Rollouts.load(folder)
