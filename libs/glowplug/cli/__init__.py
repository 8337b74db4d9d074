"""The `glowplug` command. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no fleet, 4 already running or port taken."""
