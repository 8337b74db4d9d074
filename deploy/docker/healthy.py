#!/opt/glowplug/bin/python -IS
"""Check the container's health: exit with 0 if /ready of its service answers 200. Imports next to nothing, since it
runs every few seconds beside the service.

    glowplug-healthy [PATH]     PATH defaults to /ready
"""

import os
import socket
import sys


def status(port: int, path: str) -> int:
    """The status of an HTTP answer on loopback; 0 if none comes within 3 s."""
    try:
        with socket.create_connection(("127.0.0.1", port), 3.0) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            line = connection.recv(64)
    except OSError:
        return 0
    words = line.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def main() -> int:
    found = status(int(os.environ.get("GLOWPLUG_PORT", "8080")), sys.argv[1] if len(sys.argv) > 1 else "/ready")
    if found != 200:
        print(f"answered {found}" if found else "no answer")
    return 0 if found == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
