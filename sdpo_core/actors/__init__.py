"""Student and teacher workers on Ray actors: the only Ray imports of `sdpo_core`."""
