"""Uses a directory as its tier is going to, and says what is wrong with it: the process that
`tiers.device` starts.

It may wait for the device for ever. So it imports as little as possible (not even pathlib),
and holds nothing.
"""

import os
import sys
from contextlib import suppress


def problem_of(directory: str, mount: str) -> str:
    """What a person or a device has to change before a tier can be there; empty: nothing. Reads
    what a start reads."""
    if mount and not os.path.ismount(mount):
        return f"nothing is mounted at {mount}"
    place = directory
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return f"{place} is no directory"
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return f"the file system of {place} is read-only"
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.access(path, os.R_OK):
                with open(path, "rb", buffering=0) as file:
                    file.read(4096)
    return ""


def use(directory: str, lock_name: str) -> None:
    """Write what a start writes first, durably."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if os.stat(directory).st_uid not in (0, os.geteuid()):
        return
    path = os.path.join(directory, lock_name)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.utime(fd)
        os.fsync(fd)
    finally:
        os.close(fd)


def say(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode(errors="replace"))


def main(directory: str, mount: str, lock_name: str) -> None:
    say("began")
    try:
        problem = problem_of(directory, mount)
        if lock_name and not problem:
            with suppress(PermissionError):  # the daemon's own attempt says more
                use(directory, lock_name)
    except OSError as failed:
        problem = str(failed)
    say(problem.replace("\n", " "))


if __name__ == "__main__":
    main(*sys.argv[1:])
