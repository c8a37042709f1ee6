"""A stand-in for the ray module: actors are objects of this process, and die on request."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """The base of Ray's errors."""


class ActorDied(RayError):
    """What Ray raises for a call to an actor whose process is gone."""


class TaskFailed(RayError):
    """What Ray wraps an error in that a method raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"remote: {cause}")
        self.cause = cause


class FakeRay:
    """The part of Ray that a dump needs.

    dies   (actor number, method, arguments) -> whether the call kills its actor
    slots  the number of actors that can be placed; calls to later ones are never answered
    slow   method -> how often a call of it is waited for in vain
    """

    exceptions = SimpleNamespace(RayActorError=ActorDied, RayTaskError=TaskFailed, RayError=RayError)

    def __init__(
        self,
        cpus: int,
        dies: Callable[[int, str, tuple[Any, ...]], bool],
        slots: int = 1000,
        slow: dict[str, int] | None = None,
    ) -> None:
        self.cpus, self.dies, self.slots, self.started, self.waits = cpus, dies, slots, 0, 0
        self.killed, self.slow = 0, dict(slow or {})

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} if self.cpus else {}

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda *args: self._start(kind, args)))

    def _start(self, kind: type, args: tuple[Any, ...]) -> Any:
        self.started += 1
        return _Actor(self, self.started, kind, args)

    def kill(self, actor: "_Actor") -> None:
        actor.dead = True
        self.killed += 1

    def get(self, call: "_Call") -> Any:
        return call.result()

    def wait(self, calls: list["_Call"], num_returns: int, timeout: float | None) -> tuple[list["_Call"], list["_Call"]]:
        """Not always the oldest: the order in which shards come back does not matter."""
        self.waits += 1
        if any(self.slow.get(call.method, 0) for call in calls):
            self.slow = {method: times - 1 for method, times in self.slow.items()}
            return [], calls
        placed = [call for call in calls if call.actor.number <= self.slots]
        assert placed, "nobody will ever answer"
        chosen = placed[self.waits % len(placed)]
        return [chosen], [call for call in calls if call is not chosen]


class _Actor:
    def __init__(self, ray: FakeRay, number: int, kind: type, args: tuple[Any, ...]) -> None:
        self.ray, self.number, self.make = ray, number, lambda: kind(*args)
        self.made: Any = None
        self.dead = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: _Call(self, method, args))


class _Call:
    def __init__(self, actor: _Actor, method: str, args: tuple[Any, ...]) -> None:
        self.actor, self.method, self.args = actor, method, args

    def result(self) -> Any:
        actor = self.actor
        actor.dead = actor.dead or actor.ray.dies(actor.number, self.method, self.args)
        if actor.dead:
            raise ActorDied(f"actor {actor.number} is gone")
        try:
            actor.made = actor.made or actor.make()
            return getattr(actor.made, self.method)(*self.args)
        except Exception as error:
            raise TaskFailed(error) from error
