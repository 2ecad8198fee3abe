"""Our losses beside another implementation's, on equal inputs."""
