"""One file a section of the results page."""
