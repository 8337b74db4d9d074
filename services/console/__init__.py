"""The console: receives the fleet's traces, follows its facts, and shows both on one page. Read-only."""
