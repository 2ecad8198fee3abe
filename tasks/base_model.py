"""Task: base weights and their probes, as a Ray job."""

from pathlib import Path

from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed

from sdpo_core.errors import CellError
from sdpo_core.journal import Store, read_json
from tasks.follow import follow, job_command, job_environment
from tasks.ray_jobs import RayJobs


@task(name="base model", task_run_name="base {name}", cache_policy=NO_CACHE)
def base_model(name: str, *, fingerprint: str, home: Path, jobs: RayJobs, threads: int, gpus: int) -> State[None]:
    """Make the base whose `spec.json` is in the store, if it is not there, and its missing probes.

    `gpus`: of the job itself, 0 or 1.
    """
    folder = Store(home).bases / fingerprint
    try:
        record = follow(
            jobs,
            key=f"base-{fingerprint}",
            command=(*job_command("tasks.base_job", home=home, fingerprint=fingerprint), "--gpus", str(gpus)),
            env=job_environment(threads),
            cpus=threads,
            gpus=gpus,
            log=folder / "log.txt",
        )
    except CellError as error:
        return Failed(message=f"base {name}: {error}")
    if record.state == "succeeded":
        return Completed(message=f"base {name} is there")
    told = folder / "error.json"
    why = str(read_json(told)["error"]) if told.exists() else f"base {name}: job {record.state}: {record.message}"
    return Failed(message=f"{why} Log: {folder / 'log.txt'}")
