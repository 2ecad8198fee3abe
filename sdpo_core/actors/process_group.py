"""The processes of one worker, a Ray actor each: all get every call, and the answer of rank 0 counts."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import ray

from sdpo_core.actors.failure import Failure, Worth, failure_of, silence
from sdpo_core.actors.placement import Options
from sdpo_core.rendezvous import LOOPBACK_ENVIRONMENT, TIMEOUT, Meeting, hosted_meeting, join

# How long a failure waits for a better reason: ranks that lose one of them see a closed connection at once, and Ray's
# report of its death came 0.04 seconds later on a busy machine.
GRACE_SECONDS = 5.0

Worker = TypeVar("Worker")
Other = TypeVar("Other")
Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


class WorkerProcess:
    """One rank of a worker; a worker of one process joins nobody."""

    def __init__(self, make: Callable[[], Any], *, rank: int, device: str, meeting: Meeting | None) -> None:
        if meeting is not None:
            join(meeting, rank=rank, device=device)
        self._worker = make()

    def run(self, work: Callable[..., Any], is_answer: bool, *handed: Any) -> tuple[None, Any]:
        """Nothing, which can be waited for alone, and the answer where it is wanted."""
        answer = work(self._worker, *handed)
        return None, answer if is_answer else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A call under way on one rank. `done` holds nothing but its error; `answer` may stay where it is."""

    owner: "WorkerProcesses[Any]"
    rank: int
    done: Any
    answer: Any

    @property
    def where(self) -> str:
        size = len(self.owner.actors)
        return self.owner.name if size == 1 else f"{self.owner.name}, rank {self.rank} of {size}"


class WorkerProcesses(Generic[Worker]):
    """All ranks of a worker, as the driver sees them. What is to be done travels to them with all that it refers to.

    A call ends when all ranks are through, or soon after the first failure; then the processes end too, where there
    are several: some may wait for others that will not come. One that hangs is noticed when those that wait for it
    give up (`rendezvous.TIMEOUT`); one that nobody waits for is not noticed.
    """

    def __init__(self, name: str, actors: Sequence[Any]) -> None:
        self.name = name
        self.actors = tuple(actors)

    def call(self, work: Callable[[Worker], Answer]) -> Answer:
        """What rank 0 answers."""
        calls = self._start(work)
        _wait(calls)
        answer: Answer = ray.get(calls[0].answer)
        return answer

    def call_each(self, work: Callable[[Worker], Answer]) -> list[Answer]:
        """What every rank answers, in order."""
        calls = self._start(work, all_answer=True)
        _wait(calls)
        return [ray.get(call.answer) for call in calls]

    def hand_over(
        self, take: Callable[[Worker], Answer], *, to: "WorkerProcesses[Other]", give: Callable[[Other, Answer], None]
    ) -> None:
        """`give` what rank 0 answers to `take` to all ranks of another worker; it does not pass through the driver."""
        taken = self._start(take)
        _wait([*taken, *to._start(give, taken[0].answer)])

    def end_if_several(self) -> None:
        """Kill the processes, unless there is one alone: it waits for nobody, and may go on after an error."""
        if len(self.actors) > 1:
            for actor in self.actors:
                ray.kill(actor)

    def _start(self, work: Callable[..., Any], *handed: Any, all_answer: bool = False) -> list[_Call]:
        # Several ranks share one copy in the object store.
        shared = ray.put(work) if len(self.actors) > 1 else work
        calls = []
        for rank, actor in enumerate(self.actors):
            done, answer = actor.run.options(num_returns=2).remote(shared, all_answer or rank == 0, *handed)
            calls.append(_Call(owner=self, rank=rank, done=done, answer=answer))
        return calls


@contextmanager
def worker_processes(
    name: str,
    make: Callable[[], Worker],
    *,
    places: Sequence[Options],
    device: str,
    environment: Mapping[str, str],
    timeout: timedelta = TIMEOUT,
) -> Iterator[WorkerProcesses[Worker]]:
    """Start one process a place, with what `make` makes there, and end them with the block.

    They ask for no CPUs. `environment` is set before anything is imported in them.
    """
    # Ray leaves the machine's GPUs in sight of an actor that asks for none, and megatron-core allocates where it sees
    # one.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    variables = {"env_vars": {**environment, **LOOPBACK_ENVIRONMENT, **hidden}}
    actors: list[Any] = []
    with ExitStack() as stack:
        size = len(places)
        meeting = stack.enter_context(hosted_meeting(name, size=size, timeout=timeout)) if size > 1 else None
        try:
            for rank, place in enumerate(places):
                actor = ray.remote(WorkerProcess).options(num_cpus=0, runtime_env=variables, **place)
                actors.append(actor.remote(make, rank=rank, device=device, meeting=meeting))
            yield WorkerProcesses(name, actors)
        finally:
            for actor in actors:
                ray.kill(actor)


def _wait(calls: Sequence[_Call]) -> None:
    """Wait until all calls are through; if one fails, raise the best reason that is known after the grace."""
    waiting = {call.done: call for call in calls}
    failures: list[Failure] = []
    while waiting and not failures:
        done, _ = ray.wait(list(waiting))
        failures += _failures([waiting.pop(reference) for reference in done])
    if waiting and all(failure.worth > Worth.OWN for failure in failures):
        done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=GRACE_SECONDS)
        failures += _failures([waiting.pop(reference) for reference in done])
    if not failures:
        return
    for owner in {call.owner for call in calls}:
        owner.end_if_several()
    best = min(failures, key=lambda failure: failure.worth)
    if waiting and isinstance(best.error, ray.exceptions.RayTaskError):
        _log.error("%s", best.where, exc_info=best.error)
        raise silence(best.error, where=best.where, silent=[call.where for call in waiting.values()])
    raise best.error


def _failures(calls: Sequence[_Call]) -> list[Failure]:
    found = []
    for call in calls:
        failure = failure_of(call.done, where=call.where)
        if failure is not None:
            found.append(failure)
            # Ray logs errors that nobody has asked for.
            failure_of(call.answer, where=call.where)
    return found
