"""What people read of runs: tables, and one HTML file that needs nothing else."""
