"""Stand-ins for engines: tiny programs, as commands."""

from __future__ import annotations

import sys

SERVES = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""

# What no program asked politely can do: a child in a session of its own, deaf to SIGTERM, whose
# parent is gone. Prints that child's pid.
LEAVES_AN_ORPHAN = """
import os, signal, time
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("orphan", os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""

HAS_A_CHILD = """
import os, time
if os.fork() == 0:
    print("grandchild", os.getpid(), flush=True)
time.sleep(600)
"""

HOLDS_SHARED_MEMORY = """
import time
from multiprocessing.shared_memory import SharedMemory
held = SharedMemory(create=True, size=4096)
print("shared", held.name, flush=True)
time.sleep(600)
"""

SLEEPS = "print('asleep', flush=True); import time; time.sleep(600)"


def python(program: str, *arguments: object) -> list[str]:
    """The command that runs a program."""
    return [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]
