"""Workers on real Ray actors."""
