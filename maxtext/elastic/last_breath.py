"""Whether a process is on its way out, before the system has ended it.

A killed process runs none of its code any more, but can be waited for only once all of its threads have ended and its
memory has been given back: for a process with JAX in it that takes a tenth of a second or more. Linux tells at once, in
/proc/PID/stat (proc_pid_stat(5)), that it is exiting, and by which signal.
"""

from __future__ import annotations

_FLAGS, _EXIT_CODE = 6, 49  # fields after the name of the program, which may hold spaces
_EXITING = 0x4  # PF_EXITING of the kernel's sched.h


def killed_by(pid: int) -> int | None:
    """The signal that is ending the process; None while it lives, when it ends by itself, or where nothing tells."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        number = int(fields[_EXIT_CODE]) & 0x7F
        return number if int(fields[_FLAGS]) & _EXITING and number else None
    except (OSError, IndexError, ValueError):
        return None
