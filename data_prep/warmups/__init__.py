"""One file a task: supervised examples that teach a base model the task's format."""
