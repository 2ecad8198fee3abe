"""The Prefect flow, the command line and the services."""
