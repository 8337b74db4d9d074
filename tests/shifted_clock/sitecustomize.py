"""With this folder on PYTHONPATH, a process' `time.time` is CLOCK_OFF_S seconds ahead."""

import os
import time

_off_s, _true = float(os.environ.get("CLOCK_OFF_S", "0")), (time.time, time.time_ns)
time.time = lambda: _true[0]() + _off_s
time.time_ns = lambda: _true[1]() + int(_off_s * 1e9)
