"""Linear layers of other forms than a plain matrix: integers in groups, experts."""
