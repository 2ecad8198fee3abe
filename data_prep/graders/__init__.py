"""One file a task: reads a response and gives the verdict."""
