"""Dumps on a Ray cluster: one actor per device. Idle actors get the next shard; a dead actor's shard is written again.

Actors write their shards directly to the store, so all machines must have access to it. They receive plain JSON. The dump is
the same, bit for bit, on one worker or many, as long as all have the same fingerprint. `resample_on_cluster` does the same for
waves of rollouts.
"""

import json
import signal
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from tqdm.auto import tqdm

from replaylens import tasks
from replaylens.dumps.maker import PlanKeywords, ShardMaker, make_plan
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.dumps.store import Store
from replaylens.dumps.writer import DumpWriter
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, ClusterFailed, FingerprintMismatch, SlowCluster
from replaylens.engine.model.text import Prompt
from replaylens.engine.records import Fingerprint, build
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_int, as_processes, output_path, renamed, verb
from replaylens.engine.serving.branch import ResampleKeywords
from replaylens.engine.terminal import hidden
from replaylens.rollouts.drawing import chain_of, plan_rollouts, waves_of
from replaylens.rollouts.plan import Answer, ResamplePlan
from replaylens.rollouts.rollouts import Rollouts, WaveFolder

# ---- cluster ---------------------------------------------------------------------------------------------------------

ATTEMPTS = 3
"""how often a shard or wave is tried if its actors die, and the start of a cluster if it takes too long"""
SAY_SECONDS, START_SECONDS, LOAD_SECONDS = 30, 300, 3600
"""how long to wait in silence; for the process of a worker, which takes 8 s on a quiet machine; and for its engine"""
ANSWER_SECONDS = 5.0
"""how long an address may take to answer at all"""
KEPT = "What is finished stays, and can be resumed."
WITHOUT_RAY = "Without Ray, the result is the same."


class Worker:
    """The base class of actors: an engine that writes what it is given. Methods take and return JSON."""

    def __init__(self, model: str, engine_options: str) -> None:
        self._model, self._engine_options = model, engine_options

    @cached_property
    def engine(self) -> Engine:
        return Engine.load(self._model, **json.loads(self._engine_options))

    def started(self) -> None:
        """Returns once the cluster has placed this worker and its process runs."""

    def ready(self) -> None:
        """Returns once its engine is loaded."""
        self.engine  # noqa: B018 (loads it)


class ShardWorker(Worker):
    """The class of the actors that write shards."""

    def plan(self, task: str, examples: str, options: str) -> str:
        """The plan for these options on this engine, and the engine's fingerprint."""
        given = json.loads(options)
        made = tasks.get(task)(**given.pop("knobs"))
        given["sampling"] = Sampling.from_json(given["sampling"])
        given["edits"] = [Edit.from_json(edit) for edit in given["edits"]]
        plan = make_plan(self.engine, made, json.loads(examples), **given)
        return json.dumps({"plan": plan.to_json(), "fingerprint": self.engine.fingerprint.parts()})

    def write(self, path: str, head: str, number: int, batch: int) -> int:
        """Make and write one shard. Returns its number."""
        plan, fingerprint = _read_head(head)
        if differences := self.engine.fingerprint.differences(fingerprint):
            raise FingerprintMismatch(
                f"A worker's fingerprint differs, so it would compute other bits: {'; '.join(differences)}."
            )
        maker = ShardMaker(self.engine, plan, batch)
        content = maker.make(number)
        DumpWriter(path, plan, fingerprint).write_shard(number, content, maker.sites(content))
        return number


@renamed(dtype="stored_dtype")
@verb
def dump_on_cluster(
    model: str,
    path: str | Path,
    task: str,
    examples: int | list[int],
    *,
    address: str = "local",
    workers: int | None = None,
    batch: int = 32,
    resume: bool = False,
    progress: bool = False,
    engine_options: dict[str, Any] | None = None,
    knobs: dict[str, Any] | None = None,
    **options: Unpack[PlanKeywords],
) -> Dump | None:
    """Write a dump with the workers of a Ray cluster. Returns the finished dump.

    model     a name or folder that `Engine.load` takes, on every machine
    address   of a running cluster; "local" starts one on this machine, or uses the one that this process is part of
    workers   maximal number of actors; default: one per GPU if the engines use GPUs, else one per CPU. Actors that the
              cluster has no room for wait; the others do the work. With `ranks` or `devices` among the engine options, an
              actor takes as many GPUs or CPUs of one machine
    knobs     settings of the task
    others    those of `make_plan`; a function for positions, or a tuned lens, cannot be sent
    """
    how, edits = options.get("sampling") or Sampling(), [edit.to_json() for edit in options.get("edits", ())]
    sent = sendable({**options, "knobs": knobs or {}, "sampling": how.to_json(), "edits": edits})
    engine_options = engine_options or {}
    _require_workers(address, workers)
    Store(path).require_writable()
    with connected(address) as ray:
        with Pool(ray, ShardWorker, model, engine_options, workers) as pool:
            head = pool.call("plan", task, json.dumps(examples), sent)
            plan, fingerprint = _read_head(head)
            writer = DumpWriter(path, plan, fingerprint)
            with writer.writing((0, 1), resume) as missing, writer.progress_bar(missing, (0, 1), progress) as bar:
                url = writer.store.url
                for number in pool.write_all(
                    missing, lambda actor, number: actor.write.remote(url, head, number, batch), "Shard"
                ):
                    bar.update(len(plan.indices(number)))
        return writer.finish()


class Pool:
    """The actors and their current calls. After a `with` block all actors are gone, and their places in the cluster free."""

    def __init__(self, ray: Any, kind: type, model: str, engine_options: dict[str, Any], workers: int | None) -> None:
        self.ray, self._given = ray, (model, json.dumps(engine_options))
        self._actors: list[Any] = []
        self._starting = set[Any]()
        """calls that end once the process of an actor runs"""
        ranks = as_int("ranks", engine_options.get("ranks", 1), 1)
        each = max(len(engine_options.get("devices") or ()), ranks)  # all on one machine
        gpus = each if "cuda" in str([engine_options.get(name) for name in ("device", "devices")]) else 0
        self._actor = ray.remote(kind).options(num_cpus=each, num_gpus=gpus, max_restarts=0)
        self._kind, self._each = "GPU" if gpus else "CPU", each
        places = self._places()
        as_processes("ranks", each, on=places)
        known = places // each
        self.size = known if workers is None else as_processes("workers", workers, 0, on=places)
        if self.size < 1:
            raise BadRequest(
                f"Invalid workers={self.size}. Give at least 1; the cluster has {known} {'GPUs' if gpus else 'CPUs'}."
            )
        self._first = self._start()
        self._model, self._known = model, f"{known} {'GPUs' if gpus else 'CPUs'}"

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:  # one that is still loading its engine would otherwise outlive its handle
            with suppress(Exception):
                self.ray.kill(actor)

    def _places(self) -> int:
        """The CPUs or GPUs of the machines that the cluster has now."""
        return int(self.ray.cluster_resources().get(self._kind, 0))

    def _start(self) -> Any:
        self._actors.append(self._actor.remote(*self._given))
        return self._actors[-1]

    def call(self, method: str, *given: Any) -> Any:
        """Call a method of the first actor."""
        with _own_errors(self.ray):
            try:
                for step, what, seconds in (
                    ("started", f"the process of the first worker, on a cluster with {self._known}", START_SECONDS),
                    ("ready", f"the first worker to load {self._model}", LOAD_SECONDS),
                ):
                    self._await([call := getattr(self._first, step).remote()], what, seconds)
                    self.ray.get(call)
                return self.ray.get(getattr(self._first, method).remote(*given))
            except self.ray.exceptions.RayActorError as error:
                raise ClusterFailed(f"The first worker died before it could plan: {_headline(error)}") from error

    def write_all(self, numbers: list[int], write: Callable[[Any, int], Any], unit: str) -> Iterator[int]:
        """Have all shards or waves written, and yield each number when it is done. Order and assignment change no bit.

        write  starts the call of an actor that writes the one with this number
        unit   what is written, for errors

        An actor gets work only once it is ready, so nothing waits for an actor that the cluster has no room for.
        """
        waiting, idle, deaths = list(reversed(numbers)), [self._first], Counter[int | None]()
        calls: dict[Any, tuple[Any, int | None]] = {}
        """call -> its actor, and what it writes; None: it starts or gets ready"""
        for _ in range(min(self.size, len(numbers)) - 1):
            calls |= self._greet()
        while waiting or any(number is not None for _, number in calls.values()):
            while waiting and idle:
                actor, number = idle.pop(), waiting.pop()
                calls[write(actor, number)] = actor, number
            numbered = sorted(number for _, number in calls.values() if number is not None)
            what = f"{unit.lower()} {', '.join(map(str, numbered))}" if numbered else "other workers, after some have died,"
            done = self._await(list(calls), what, None if numbered else self._patience(list(calls)))
            actor, written = calls.pop(done)
            try:
                with _own_errors(self.ray):
                    self.ray.get(done)
            except self.ray.exceptions.RayActorError as error:
                deaths[written] += 1
                if deaths[written] >= ATTEMPTS:
                    whose = "A worker died before it was ready" if written is None else f"{unit} {written}: its worker died"
                    raise ClusterFailed(f"{whose}, {ATTEMPTS} times. The last error: {_headline(error)}") from error
                waiting += [] if written is None else [written]
                calls |= self._greet()
            else:
                if done in self._starting:
                    self._starting.remove(done)
                    calls[actor.ready.remote()] = actor, None
                    continue
                idle.append(actor)
                if written is not None:
                    yield written

    def _await(self, calls: list[Any], what: str, limit: float | None) -> Any:
        """The first call that is done. Says every SAY_SECONDS what it waits for; ClusterFailed after `limit` seconds."""
        waited = 0.0
        while limit is None or waited < limit:
            pause = SAY_SECONDS if limit is None else min(SAY_SECONDS, limit - waited)
            done, _ = self.ray.wait(calls, num_returns=1, timeout=pause)
            if done:
                return done[0]
            waited += pause
            self._require_places(what)
            _say(what, waited, limit)
        raise ClusterFailed(
            f"Waited {limit:.0f} s for {what}, and gave up. The machines may be too busy, or have no room. Give fewer workers, "
            f"or try again when they are quiet. {WITHOUT_RAY} {KEPT}"
        )

    def _require_places(self, what: str) -> None:
        """ClusterFailed if the machines that are left have no place for any worker: nothing would ever come."""
        try:
            left = self._places()
        except Exception as error:  # the cluster itself is gone; Ray has several errors for it
            raise ClusterFailed(
                f"The Ray cluster is gone, seen while waiting for {what.rstrip(',')}: {_headline(error)}. {KEPT}"
            ) from error
        if left < self._each:
            raise ClusterFailed(
                f"The machines of the Ray cluster have died, seen while waiting for {what.rstrip(',')}: {left} "
                f"{self._kind}s are left, and a worker takes {self._each}. Start them again, and repeat the command. {KEPT}"
            )

    def _patience(self, calls: list[Any]) -> float:
        """How long to wait if all workers are starting, or loading their engine."""
        return START_SECONDS if self._starting.issuperset(calls) else LOAD_SECONDS

    def _greet(self) -> dict[Any, tuple[Any, None]]:
        """Start an actor: its first call, and the actor."""
        actor = self._start()
        self._starting.add(call := actor.started.remote())
        return {call: (actor, None)}


def _require_workers(address: str, workers: int | None) -> None:
    """BadRequest if a cluster of this machine alone has no room for the workers; others are asked once they are connected."""
    if workers is not None and address == "local":
        as_processes("workers", workers)


def sendable(options: dict[str, Any]) -> str:
    """The options as JSON; BadRequest if one is not a plain value."""
    for name, value in options.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise BadRequest(f"{name} cannot be sent to workers ({error}). Give plain values, or write without Ray.") from error
    return json.dumps(options)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The ray module, connected; disconnected at the end unless it was connected before."""
    try:
        import ray
    except ImportError as error:
        raise ClusterFailed("Ray is not installed. Run pip install 'replaylens[cluster]'.") from error
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in ("local", "auto", here):
            raise ClusterFailed(f"This process is already connected to the cluster at {here}, not to {address}.")
        yield ray
        return
    _connect(ray, address)
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Join a cluster, or start one on this machine.

    A start that fails is tried again: a node ends itself if its agents, Python processes, have not reported within 15 s, which
    happens on a machine with more work than cores. Ray has no option for that limit.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    patient = {"worker_register_timeout_seconds": START_SECONDS}  # after 60 s, Ray would end processes and start them anew
    own: dict[str, Any] = {"include_dashboard": False, "_system_config": patient} if address == "local" else {}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            if address != "local":
                _require_answer(address)
            with _own_termination(), _saying("a Ray cluster to start" if own else f"the Ray cluster at {address}"):
                ray.init(address=address, **quiet, **own)
            return
        except Exception as error:
            with suppress(Exception):
                ray.shutdown()
            if address != "local":
                raise ClusterFailed(
                    f"The Ray cluster was not found at {address}: {type(error).__name__}: {_headline(error)}. Check the "
                    f"address, or start the cluster. {WITHOUT_RAY}"
                ) from error
            slow = type(error) is Exception  # what Ray raises for a node that did not start in time
            if not slow or attempt == ATTEMPTS:
                times = f" in {attempt} attempts" if attempt > 1 else ""
                advice = (
                    f" The machine may be too busy. Try again later, or give the address of a running cluster. {WITHOUT_RAY}"
                    if slow
                    else ""
                )
                raise ClusterFailed(
                    f"The Ray cluster could not be started on this machine{times}: {type(error).__name__}: {error}{advice}"
                ) from error
            warnings.warn(
                f"Attempt {attempt} of {ATTEMPTS} to start a Ray cluster on this machine failed ({error}). Trying again.",
                SlowCluster,
                stacklevel=2,
            )


def _require_answer(address: str) -> None:
    """OSError if nobody listens at host:port, for which Ray would wait a minute and more."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal() and int(port) < 1 << 16:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()


def _say(what: str, waited: float, limit: float | None = None) -> None:
    bound = "" if limit is None else f" of at most {limit:.0f}"
    warnings.warn(f"Waiting for {what}: {waited:.0f} s{bound} so far.", SlowCluster, stacklevel=3)


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Within the block, say every SAY_SECONDS what it waits for."""
    over, began = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(SAY_SECONDS):
            _say(what, time.monotonic() - began)

    thread = threading.Thread(target=say, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _own_termination() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which Ray replaces when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _own_errors(ray: Any) -> Iterator[None]:
    """Raise a worker's error as the worker raised it, and Ray's own errors as ClusterFailed. Callers handle dead actors."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise ClusterFailed(f"A worker failed: {_headline(error)}") from error
    except ray.exceptions.RayActorError:
        raise
    except ray.exceptions.RayError as error:
        raise ClusterFailed(f"The Ray cluster failed: {type(error).__name__}: {_headline(error)}") from error


def _headline(error: Exception) -> str:
    """The first line of Ray's report, which may have twenty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _read_head(head: str) -> tuple[DumpPlan, Fingerprint]:
    raw = json.loads(head)
    return DumpPlan.from_json(raw["plan"]), build(Fingerprint, raw["fingerprint"], "The fingerprint", BadRequest)


# ---- rollout cluster -------------------------------------------------------------------------------------------------
# Rollouts on a Ray cluster: idle actors get the next wave; a dead actor's wave is drawn again.
#
# Actors write their waves into a folder, so all machines must have access to it. The digest is the same on one worker or
# many, as long as all have the same fingerprint.


class WaveWorker(Worker):
    """The class of the actors that draw rollouts."""

    def plan(self, path: str, options: str) -> str:
        """The plan for these options on this engine, and the size of its waves."""
        given = json.loads(options)
        given["sampling"] = Sampling.from_json(given["sampling"])
        given["answer"] = None if given["answer"] is None else Answer.from_json(given["answer"])
        with chain_of(self.engine, **json.loads(path)) as branch:
            plan, wave = plan_rollouts(branch, **given)
        return json.dumps({"plan": plan.to_json(), "wave": wave, "made_by": self.engine.fingerprint.parts()})

    def write(self, folder: str, number: int) -> int:
        """Draw and write one wave of a folder. Returns its number."""
        files = WaveFolder.open(folder)
        if files.plan.fingerprint != self.engine.fingerprint.digest:
            raise FingerprintMismatch("A worker's fingerprint differs from that of the plan, so it would compute other bits.")
        with self.engine.prompt(files.plan.tokens[: files.plan.num_prompt]) as branch:
            if rest := files.plan.tokens[files.plan.num_prompt :]:
                branch.force(rest)
            files.write(number, waves_of(self.engine, branch, files.plan).draw(files.indices(number)))
        return number


@verb
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
    **options: Unpack[ResampleKeywords],
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
    sampling, answer = options.get("sampling"), options.get("answer")
    drawn = (Sampling(temperature=1.0) if sampling is None else sampling).to_json()
    sent = sendable({**options, "n": n, "sampling": drawn, "answer": None if answer is None else answer.to_json()})
    _require_workers(address, workers)
    output_path(folder, folder=True)
    with connected(address) as ray, Pool(ray, WaveWorker, model, engine_options or {}, workers) as pool:
        raw = json.loads(pool.call("plan", sendable({"prompt": prompt, "chain": chain}), sent))
        made_by = build(Fingerprint, raw["made_by"], "The fingerprint", BadRequest)
        files = WaveFolder.create(folder, ResamplePlan.from_json(raw["plan"]), raw["wave"], made_by)
        finished = files.finished()
        missing = [number for number in range(files.num_waves) if number not in finished]
        with tqdm(total=len(files.plan), unit="rollout", disable=hidden(progress)) as bar:
            bar.update(sum(len(files.indices(number)) for number in finished))
            for number in pool.write_all(missing, lambda actor, number: actor.write.remote(str(folder), number), "Wave"):
                bar.update(len(files.indices(number)))
    return Rollouts.load(folder)
