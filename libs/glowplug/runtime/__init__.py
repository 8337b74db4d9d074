"""The world around a controller: settings, the shell loop, REST, process life."""
