"""From finished records to a results page."""
