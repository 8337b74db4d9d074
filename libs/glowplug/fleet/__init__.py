"""The state of the fleet in one type, which every controller, the console and the command line read."""
