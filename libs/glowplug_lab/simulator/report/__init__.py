"""Reports of runs: tables, and one self-contained HTML file."""
