"""One file a measure; each prints a table and a last line of JSON."""
