"""Reports of runs for people: tables, and one self-contained HTML file."""
