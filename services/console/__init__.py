"""The console: receive traces of the fleet, follow its facts, show both on one page, pass on actions of operators."""
