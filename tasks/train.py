"""Task: one cell, as a Ray job that outlives its watcher."""

from pathlib import Path

from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed

from sdpo_core.errors import CellError
from sdpo_core.journal import Store, read_json
from tasks.follow import follow, job_command, job_environment
from tasks.ray_jobs import RayJobs


@task(name="train", task_run_name="train {label}", cache_policy=NO_CACHE)
def train(
    label: str, *, fingerprint: str, home: Path, jobs: RayJobs, threads: int, cpus: int, gpus: int
) -> State[None]:
    """Train the cell whose `spec.json` is in the store, or attach to the job that does; done cells are left alone."""
    journal = Store(home).journal(fingerprint)
    if journal.result_path.exists():
        return Completed(message=f"{label} was done before")
    try:
        record = follow(
            jobs,
            key=f"cell-{fingerprint}",
            command=(*job_command("tasks.cell_job", home=home, fingerprint=fingerprint), "--gpus", str(gpus)),
            env=job_environment(threads),
            cpus=cpus,
            log=journal.folder / "job.txt",
        )
    except CellError as error:
        return Failed(message=f"{label}: {error}")
    if journal.result_path.exists():
        return Completed(message=f"{label} is done")
    if journal.error_path.exists():
        return Failed(message=str(read_json(journal.error_path)["error"]))
    return Failed(message=f"{label}: job {record.state}: {record.message} Log: {journal.folder / 'job.txt'}")
