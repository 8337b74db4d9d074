"""What is seen from outside: metric and attribute names, metrics, traces, logs."""
